"""What ML-Agents' package ``mlagents`` says of env managers, for where only ``mlagents_envs`` is installed.

The same names, fields and methods as in ``mlagents.trainers.env_manager`` and ``mlagents.trainers.action_info`` 0.28,
so that programs work with either; imports no framework.
"""

from __future__ import annotations

import logging
import queue
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class ActionInfo(NamedTuple):
    """What a policy chose for the agents of one behavior.

    Attributes:
        action: The policy's own output.
        env_action: What the env is given, for ``BaseEnv.set_actions``.
        outputs: Whatever else the policy computed.
        agent_ids: The agents that it is for, in the order of the actions.
    """

    action: Any
    env_action: Any
    outputs: dict[str, Any]
    agent_ids: Any

    @staticmethod
    def empty() -> ActionInfo:
        """That of no agents."""
        return ActionInfo([], [], {}, [])


class EnvironmentStep(NamedTuple):
    """One step, or the reset, of one env.

    Attributes:
        current_all_step_result: ``(DecisionSteps, TerminalSteps)`` by behavior name.
        worker_id: Which env.
        brain_name_to_action_info: What the policies chose, which led to this step.
        environment_stats: What the env sent through its stats channel since the step before.
    """

    current_all_step_result: Mapping[str, tuple[Any, Any]]
    worker_id: int
    brain_name_to_action_info: dict[str, Any]
    environment_stats: Mapping[str, list[tuple[float, Any]]]

    @property
    def name_behavior_ids(self) -> Iterable[str]:
        """The behaviors in it."""
        return self.current_all_step_result.keys()

    @staticmethod
    def empty(worker_id: int) -> EnvironmentStep:
        """That of an env of which nothing is known."""
        return EnvironmentStep({}, worker_id, {}, {})


class EnvManager(ABC):
    """Passes steps from envs to agent managers, and actions from policies to envs.

    An agent manager is any object with ``end_episode()``, ``add_experiences(decision_steps, terminal_steps, worker_id,
    action_info)``, ``record_environment_stats(stats, worker_id)`` and a ``policy_queue``, a `queue.Queue` of policies.

    Attributes:
        policies: By behavior name; each has ``get_action(decision_steps, worker_id)``, which gives an `ActionInfo`.
        agent_managers: By behavior name.
        first_step_infos: The steps of the last reset, until they were passed on.
    """

    def __init__(self) -> None:
        self.policies: dict[str, Any] = {}
        self.agent_managers: dict[str, Any] = {}
        self.first_step_infos: list[EnvironmentStep] = []

    def set_policy(self, brain_name: str, policy: Any) -> None:
        """Has a policy choose a behavior's actions."""
        self.policies[brain_name] = policy
        if brain_name in self.agent_managers:
            self.agent_managers[brain_name].policy = policy

    def set_agent_manager(self, brain_name: str, manager: Any) -> None:
        """Has an agent manager get a behavior's experiences."""
        self.agent_managers[brain_name] = manager

    def reset(self, config: Mapping[str, Any] | None = None) -> int:
        """Ends all episodes and resets all envs.

        Args:
            config: Parameters of the envs.

        Returns:
            How many envs there are.
        """
        for manager in self.agent_managers.values():
            manager.end_episode()
        self.first_step_infos = self._reset_env(config)
        return len(self.first_step_infos)

    def get_steps(self) -> list[EnvironmentStep]:
        """Takes new policies over and steps the envs.

        Returns:
            The steps that are done, for `process_steps`.
        """
        if self.first_step_infos:
            self._process_step_infos(self.first_step_infos)
            self.first_step_infos = []
        for name, manager in self.agent_managers.items():
            policy = _newest(manager.policy_queue)
            if policy is not None:
                self.set_policy(name, policy)
        return self._step()

    def process_steps(self, new_step_infos: list[EnvironmentStep]) -> int:
        """Passes steps on to the agent managers; gives their number."""
        return self._process_step_infos(new_step_infos)

    def _process_step_infos(self, step_infos: list[EnvironmentStep]) -> int:
        for step in step_infos:
            for name, (decisions, terminals) in step.current_all_step_result.items():
                manager = self.agent_managers.get(name)
                if manager is None:
                    logger.warning("no agent manager was set for the behavior %s: its steps are dropped", name)
                    continue
                action_info = step.brain_name_to_action_info.get(name, ActionInfo.empty())
                manager.add_experiences(decisions, terminals, step.worker_id, action_info)
                manager.record_environment_stats(step.environment_stats, step.worker_id)
        return len(step_infos)

    def on_training_started(self, behavior_name: str, trainer_settings: Any) -> None:  # noqa: B027 # is not needed
        """Is told when a behavior begins to be trained."""

    @abstractmethod
    def _step(self) -> list[EnvironmentStep]: ...

    @abstractmethod
    def _reset_env(self, config: Mapping[str, Any] | None = None) -> list[EnvironmentStep]: ...

    @abstractmethod
    def set_env_parameters(self, config: Mapping[str, Any] | None = None) -> None:
        """Sends parameters to the envs."""

    @property
    @abstractmethod
    def training_behaviors(self) -> dict[str, Any]:
        """The envs' ``BehaviorSpec``, by behavior name."""

    @abstractmethod
    def close(self) -> None:
        """Closes the envs."""


def _newest(policies: queue.Queue[Any]) -> Any:
    """The last one of a queue, which is empty then; None where there was none."""
    newest = None
    while True:
        try:
            newest = policies.get_nowait()
        except queue.Empty:
            return newest
