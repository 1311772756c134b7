"""Replacements for the env manager classes of the package ``mlagents``, for when only ``mlagents_envs`` is installed.

They have the names, fields, and methods of ``mlagents.trainers.env_manager`` and ``mlagents.trainers.action_info``
0.28, so that programs work with either. This module imports no framework.
"""

from __future__ import annotations

import logging
import queue
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

logger: logging.Logger = logging.getLogger(__name__)


class ActionInfo(NamedTuple):
    """Actions of a policy for the agents of one behavior.

    Attributes:
        action: Output of the policy.
        env_action: Actions for ``BaseEnv.set_actions``.
        outputs: Other outputs of the policy.
        agent_ids: Ids of the agents, in the order of the actions.
    """

    action: Any
    env_action: Any
    outputs: dict[str, Any]
    agent_ids: Any

    @staticmethod
    def empty() -> ActionInfo:
        """Return an action info without agents."""
        return ActionInfo([], [], {}, [])


class EnvironmentStep(NamedTuple):
    """One step, or the reset, of one env.

    Attributes:
        current_all_step_result: ``(DecisionSteps, TerminalSteps)`` by behavior name.
        worker_id: Index of the env's worker.
        brain_name_to_action_info: Actions that led to this step, by behavior name.
        environment_stats: Stats that the env sent since the previous step.
    """

    current_all_step_result: Mapping[str, tuple[Any, Any]]
    worker_id: int
    brain_name_to_action_info: dict[str, Any]
    environment_stats: Mapping[str, list[tuple[float, Any]]]

    @property
    def name_behavior_ids(self) -> Iterable[str]:
        """Names of the behaviors."""
        return self.current_all_step_result.keys()

    @staticmethod
    def empty(worker_id: int) -> EnvironmentStep:
        """Return a step without behaviors."""
        return EnvironmentStep({}, worker_id, {}, {})


class EnvManager(ABC):
    """Passes steps from envs to agent managers, and actions from policies to envs.

    An agent manager is any object with ``end_episode()``, ``add_experiences(decision_steps, terminal_steps, worker_id,
    action_info)``, ``record_environment_stats(stats, worker_id)`` and a ``policy_queue``, a `queue.Queue` of policies.

    Attributes:
        policies: Policies by behavior name; each has ``get_action(decision_steps, worker_id) -> ActionInfo``.
        agent_managers: Agent managers by behavior name.
        first_step_infos: Steps of the last reset, until they are passed on.
    """

    def __init__(self) -> None:
        self.policies: dict[str, Any] = {}
        self.agent_managers: dict[str, Any] = {}
        self.first_step_infos: list[EnvironmentStep] = []

    def set_policy(self, brain_name: str, policy: Any) -> None:
        """Set the policy of a behavior."""
        self.policies[brain_name] = policy
        if brain_name in self.agent_managers:
            self.agent_managers[brain_name].policy = policy

    def set_agent_manager(self, brain_name: str, manager: Any) -> None:
        """Set the agent manager of a behavior."""
        self.agent_managers[brain_name] = manager

    def reset(self, config: Mapping[str, Any] | None = None) -> int:
        """End all episodes and reset all envs.

        Args:
            config: Parameters of the envs.

        Returns:
            The number of envs.
        """
        for manager in self.agent_managers.values():
            manager.end_episode()
        self.first_step_infos = self._reset_env(config)
        return len(self.first_step_infos)

    def get_steps(self) -> list[EnvironmentStep]:
        """Adopt new policies and step the envs.

        Returns:
            The finished steps, for `process_steps`.
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
        """Pass steps to the agent managers and return their number."""
        return self._process_step_infos(new_step_infos)

    def _process_step_infos(self, step_infos: list[EnvironmentStep]) -> int:
        for step in step_infos:
            for name, (decisions, terminals) in step.current_all_step_result.items():
                manager = self.agent_managers.get(name)
                if manager is None:
                    logger.warning(
                        "dropping the steps of behavior %s, which has no agent manager: call set_agent_manager()", name
                    )
                    continue
                action_info = step.brain_name_to_action_info.get(name, ActionInfo.empty())
                manager.add_experiences(decisions, terminals, step.worker_id, action_info)
                manager.record_environment_stats(step.environment_stats, step.worker_id)
        return len(step_infos)

    def on_training_started(self, behavior_name: str, trainer_settings: Any) -> None:  # noqa: B027 # optional
        """Handle the start of a behavior's training. The default does nothing."""

    @abstractmethod
    def _step(self) -> list[EnvironmentStep]: ...

    @abstractmethod
    def _reset_env(self, config: Mapping[str, Any] | None = None) -> list[EnvironmentStep]: ...

    @abstractmethod
    def set_env_parameters(self, config: Mapping[str, Any] | None = None) -> None:
        """Send parameters to the envs."""

    @property
    @abstractmethod
    def training_behaviors(self) -> dict[str, Any]:
        """The envs' ``BehaviorSpec``, by behavior name."""

    @abstractmethod
    def close(self) -> None:
        """Close the envs."""


def _newest(policies: queue.Queue[Any]) -> Any:
    """Empty a queue and return its last item, or None if the queue was empty."""
    newest = None
    while True:
        try:
            newest = policies.get_nowait()
        except queue.Empty:
            return newest
