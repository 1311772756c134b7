"""RLlib's multi-agent envs in actors: the vector env, and the env runner that makes it.

RLlib itself steps them one after another in the env runner's process, and its runner makes no other vector env.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv
from ray.tune.registry import ENV_CREATOR, _global_registry

from envactors.actor.future import BoundToProcess, results_of
from envactors.integrations.access import VectorAccess
from envactors.integrations.adapter import adapter_factories
from envactors.integrations.failures import or_first_failure
from envactors.integrations.options import make_vector, preloading
from envactors.integrations.rllib.adapter import ALL, Agents, AgentStep, MultiAgentEnvAdapter
from envactors.integrations.rllib.creator import REFUSED, EnvCreator
from envactors.mailbox.factory import Factory
from envactors.vector.options import CommonOptions
from envactors.vector_env import VectorEnv

Dicts: TypeAlias = list[dict[Any, Any]]

# Most of what the envs' base class imports, which takes seconds. PyArrow, the rest, leaves a thread running.
_PRELOAD = "ray", "torch"


class AgentSpaces(MultiAgentEnv):  # type: ignore[misc] # Ray is not checked
    """The agents and spaces of an env in an actor, where RLlib expects the env. It cannot be stepped."""

    def __init__(self, agents: Agents) -> None:
        self.possible_agents: list[Any] = agents.possible_agents
        self.observation_spaces: dict[Any, Any] = agents.observation_spaces
        self.action_spaces: dict[Any, Any] = agents.action_spaces
        self.agents: list[Any] = list(agents.possible_agents)
        super().__init__()


class ActorVectorMultiAgentEnv(BoundToProcess, VectorMultiAgentEnv):  # type: ignore[misc] # Ray is not checked
    """Multi-agent vector env of RLlib with each env in an actor, whose autoreset is in the next step.

    Args:
        factories: One per env, each of a ``MultiAgentEnv``.
        options: See `envactors.VectorOptions`.

    Attributes:
        vector: The vector behind this class, with handles of the envs (``vector[i]``) and ``stats()``.
        envs: The agents and spaces of each env.
        num_envs: Number of envs.
    """

    closed: bool = True  # for `__del__`, should the actors fail to start

    def __init__(self, factories: Sequence[Factory], options: CommonOptions) -> None:
        adapters = adapter_factories(MultiAgentEnvAdapter, factories)
        self.vector: VectorEnv = make_vector(
            VectorEnv, "on_actors", adapters, options, REFUSED, backend=preloading(*_PRELOAD)
        )
        self.closed = False
        self.num_envs: int = self.vector.num_envs
        self.metadata: dict[str, Any] = {**self.vector.metadata, "autoreset_mode": "next_step"}
        self.render_mode: str | None = self.vector.render_mode
        self.envs: list[AgentSpaces] = [AgentSpaces(agents) for agents in self.vector.call("envactors_agents")]
        self.single_observation_spaces: dict[str, Any] = self.envs[0].observation_spaces
        self.single_action_spaces: dict[str, Any] = self.envs[0].action_spaces
        self.single_observation_space: Any = gymnasium.spaces.Dict(self.single_observation_spaces)
        self.single_action_space: Any = gymnasium.spaces.Dict(self.single_action_spaces)
        self._access = VectorAccess(self.vector)
        # By env: the last observation of each agent that is not done.
        self._last: Dicts = [{} for _ in range(self.num_envs)]

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Dicts, Dicts]:
        """Reset all envs in parallel.

        Args:
            seed: An int gives env ``i`` the seed ``seed + i``; a sequence contains a seed or None for each env.
            options: Passed to the ``reset`` of each env.

        Returns:
            ``(observations, infos)``: one dict per env, by agent.
        """
        results, infos = or_first_failure(lambda: self.vector.reset(seed, options))
        steps = [self._after_reset(env_id, step, infos[env_id]) for env_id, step in enumerate(results)]
        return [step.observations for step in steps], [step.infos for step in steps]

    def step(self, actions: Sequence[dict[Any, Any]]) -> tuple[Dicts, Dicts, Dicts, Dicts, Dicts]:
        """Step all envs in parallel; those whose episode is over are reset, and their actions are ignored.

        Args:
            actions: One dict per env, by agent.

        Returns:
            ``(observations, rewards, terminateds, truncateds, infos)``: one dict per env, by agent.
        """
        resets = self._access.resets_next()
        results, _, _, truncated, infos = or_first_failure(lambda: self._access.step(actions))
        failed = np.flatnonzero(resets & truncated).tolist()
        if failed:
            again = or_first_failure(lambda: self._access.reset_again(failed))
            for env_id, step in zip(failed, again.obs, strict=True):
                results[env_id] = step
        steps = [
            self._after_reset(env_id, step, info) if resets[env_id] else self._after_step(env_id, step, info)
            for env_id, (step, info) in enumerate(zip(results, infos, strict=True))
        ]
        observations, rewards, terminateds, truncateds, infos = map(list, zip(*steps, strict=True))
        return observations, rewards, terminateds, truncateds, infos

    def _after_reset(self, env_id: int, step: AgentStep, info: dict[str, Any]) -> AgentStep:
        self._last[env_id] = dict(step.observations)
        return step._replace(infos=_with_failure(step.infos, step.observations, info))

    def _after_step(self, env_id: int, step: AgentStep, info: dict[str, Any]) -> AgentStep:
        last = self._last[env_id]
        if "failure" in info:
            # An agent that acted in an earlier step needs a last observation too. Were the flag of each agent set,
            # RLlib would regard the episode as terminated.
            zeros = dict.fromkeys(last, 0.0)
            return AgentStep(dict(last), zeros, {ALL: False}, {ALL: True}, _with_failure({}, last, info))
        last.update(step.observations)
        for flags in (step.terminateds, step.truncateds):
            for agent, is_done in flags.items():
                if is_done:
                    last.pop(agent, None)
        return step

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or read an attribute that is not a method; return one value per env."""
        return tuple(results_of(self._access.start_calls(name, args, kwargs)))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each env; methods are called, as by RLlib."""
        return self.call(name)

    def render(self) -> tuple[Any, ...]:
        """Return what the ``render`` of each env returns."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ARG002 # RLlib's signature
        """Close the envs and end their processes."""
        self.vector.close()


def _with_failure(infos: dict[Any, Any], agents: dict[Any, Any], info: dict[str, Any]) -> dict[Any, Any]:
    """Return infos in which each of these agents has the failure, if there is one."""
    if "failure" not in info:
        return infos
    return {**infos, **{agent: {**infos.get(agent, {}), "failure": info["failure"]} for agent in agents}}


class ActorMultiAgentEnvRunner(MultiAgentEnvRunner):  # type: ignore[misc] # Ray is not checked
    """RLlib's env runner for multi-agent envs, with each env in an actor.

    Pass it to ``config.env_runners(env_runner_cls=...)``. The env of the config must be one that is registered with
    `on_actors`, whose options apply.
    """

    env: Any
    num_envs: int

    def make_env(self) -> None:
        """Make the vector env, after closing the one before.

        Raises:
            TypeError: The env is not registered with `on_actors`.
        """
        if self.env is not None:
            self.env.close()
            self.env = None
        name = self.config.env
        is_registered = isinstance(name, str) and _global_registry.contains(ENV_CREATOR, name)
        creator = _global_registry.get(ENV_CREATOR, name) if is_registered else name
        if not isinstance(creator, EnvCreator):
            raise TypeError(
                f"ActorMultiAgentEnvRunner cannot make the env {name!r}: expected the name of an env that is "
                "registered with register_env(name, on_actors(...))"
            )
        factories = [creator.factory(self.config.env_config)] * self.config.num_envs_per_env_runner
        self.env = ActorVectorMultiAgentEnv(factories, creator.options)
        self.num_envs = self.env.num_envs
        self._needs_initial_reset = True
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=self.config.callbacks_on_environment_created,
            kwargs={
                "env_runner": self,
                "metrics_logger": self.metrics,
                "env": self.env,
                "env_context": self.config.env_config,
            },
        )
