"""A single copy of an `ActorParallelEnv`, with the interface of a ``ParallelEnv``. The vector runs its env."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from pettingzoo import ParallelEnv

from envactors.actor.future import BoundToProcess
from envactors.errors import VectorInputError
from envactors.integrations.access import VectorAccess
from envactors.integrations.failures import or_first_failure
from envactors.integrations.pettingzoo.adapter import Agents, MethodReadError
from envactors.integrations.pettingzoo.batches import AgentBatches
from envactors.vector_env import VectorEnv


class ActorParallelEnvCopy(BoundToProcess, ParallelEnv):  # type: ignore[misc] # mypy skips its module
    """A ``ParallelEnv`` whose env runs in an actor. Its agents, spaces, and results are those of the env itself.

    The vector steps the same env, so calls of either change the state of both. Other public attributes and methods are
    those of the env. The caller receives an exception from the env unchanged.

    Args:
        envs: The facade.
        batches: Packs actions and unpacks results.
        env_id: The index of the copy.
        agents: The possible agents of the copy, and their spaces.
    """

    def __init__(self, envs: VectorEnv, batches: AgentBatches, env_id: int, agents: Agents) -> None:
        self._envs = envs
        self._batches = batches
        self._env_id = env_id
        self._autoreset = VectorAccess(envs).autoreset
        self.possible_agents: list[Hashable] = list(agents.names)
        self.observation_spaces: dict[Hashable, Any] = agents.observation_spaces
        self.action_spaces: dict[Hashable, Any] = agents.action_spaces
        self.metadata: dict[str, Any] = envs.metadata
        self.render_mode: str | None = envs.render_mode

    @property
    def agents(self) -> list[Hashable]:
        """The agents that are alive; none before the first reset."""
        live = self._batches.live[self._env_id].tolist()
        return [name for name, lives in zip(self.possible_agents, live, strict=True) if lives]

    def observation_space(self, agent: Hashable) -> Any:
        """Return the observation space of an agent, the same object each time."""
        return self.observation_spaces[agent]

    def action_space(self, agent: Hashable) -> Any:
        """Return the action space of an agent, the same object each time."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Reset the copy.

        Returns:
            ``(observations, infos)`` by agent.
        """
        ids = [self._env_id]
        seeds = None if seed is None else [seed]
        obs, infos = or_first_failure(lambda: self._envs.reset(seeds, options, ids))
        rewards = np.zeros((1, len(self.possible_agents)))
        results = self._batches.unpack(ids, obs, rewards, np.zeros(1, np.bool_), infos)
        observations, *_, own_infos = self._batches.of_one(results)
        return observations, own_infos

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, ...]:
        """Step all agents that are alive.

        Args:
            actions: An action for each agent that is alive; actions of other agents are ignored.

        Returns:
            ``(observations, rewards, terminations, truncations, infos)`` by agent.

        Raises:
            VectorInputError: No agent is alive, or the vector resets copies within their last step.
            SpaceMismatchError: An agent that is alive has no action, or an action does not fit its space.
        """
        ids = [self._env_id]
        if self._autoreset == "same_step":
            raise VectorInputError(
                f"cannot step copy {self._env_id} alone with autoreset='same_step': the observations of the next "
                "episode would replace the last ones of this episode. Use autoreset='next_step' or 'disabled'"
            )
        if not self._batches.live[self._env_id].any():
            raise VectorInputError(f"cannot step copy {self._env_id}: none of its agents is alive. Call reset() first")
        packed = self._batches.pack([actions], ids)
        obs, rewards, _, truncated, infos = or_first_failure(lambda: VectorAccess(self._envs).step(packed, ids))
        return self._batches.of_one(self._batches.unpack(ids, obs, rewards, truncated, infos))

    def state(self) -> npt.NDArray[Any]:
        """Return the env's state."""
        state: npt.NDArray[Any] = self._envs[self._env_id].call("state").result()
        return state

    def render(self) -> Any:
        """Return a frame, as the env's ``render`` does."""
        return self._envs[self._env_id].call("render").result()

    def close(self) -> None:
        """Do nothing: closing the vector closes all copies."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"cannot read {name!r}: attributes that begin with an underscore stay in the worker")
        handle = self._envs[self._env_id]
        try:
            return handle.get(name).result()
        except MethodReadError:
            return lambda *args, **kwargs: handle.call(name, *args, **kwargs).result()
