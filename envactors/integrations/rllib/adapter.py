"""The adapter around a ``MultiAgentEnv`` of RLlib in its worker. It turns a step's five dicts into one value.

`envactors.integrations.rllib.multi_agent` takes them apart in the env runner. This module imports nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from envactors.integrations.adapter import ANY, EnvAdapter

ALL = "__all__"


class Agents(NamedTuple):
    """The possible agents of an env, and their spaces."""

    possible_agents: list[Hashable]
    observation_spaces: dict[Any, Any]
    action_spaces: dict[Any, Any]


class AgentStep(NamedTuple):
    """The result of a step or reset, in five dicts by agent; the flags have the key ``"__all__"`` too."""

    observations: dict[Any, Any]
    rewards: dict[Any, Any]
    terminateds: dict[Any, bool]
    truncateds: dict[Any, bool]
    infos: dict[Any, Any]


class MultiAgentEnvAdapter(EnvAdapter):
    """An env with Gymnasium's methods whose observation is the complete `AgentStep`.

    Agents may come and go, so the observation has no fixed shape.

    Args:
        factory: Creates the env.

    Raises:
        TypeError: The env is not a ``MultiAgentEnv``.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        super().__init__(factory)
        env = getattr(self._env, "unwrapped", self._env)
        if not all(hasattr(env, name) for name in ("possible_agents", "get_observation_space", "get_action_space")):
            raise TypeError(f"the env creator returned {env!r}: expected a MultiAgentEnv of RLlib")
        # The spaces name all agents, too, and an env may have set only those.
        agents = list(env.possible_agents or getattr(env, "observation_spaces", None) or ())
        self._agents = Agents(
            agents,
            {agent: env.get_observation_space(agent) for agent in agents},
            {agent: env.get_action_space(agent) for agent in agents},
        )
        # Observations and actions are passed on as they are.
        self.observation_space: Any = ANY
        self.action_space: Any = ANY

    def envactors_agents(self) -> Agents:
        """Return the possible agents and their spaces."""
        return self._agents

    def reset(self, **kwargs: Any) -> tuple[AgentStep, dict[str, Any]]:
        observations, infos = self._env.reset(**kwargs)
        agents = self._agents.possible_agents
        flags = dict.fromkeys([*agents, ALL], False)
        return AgentStep(observations, dict.fromkeys(agents, 0.0), flags, dict(flags), infos), {}

    def step(self, action: Any) -> tuple[AgentStep, float, bool, bool, dict[str, Any]]:
        result = AgentStep(*self._env.step(action))
        if ALL not in result.terminateds:
            raise TypeError(
                f"step of {self._env} returned terminateds={result.terminateds!r}: expected the key {ALL!r}, which "
                "tells whether the episode is over"
            )
        return result, 0.0, bool(result.terminateds[ALL]), bool(result.truncateds.get(ALL, False)), {}
