"""The adapter around a PettingZoo ``ParallelEnv`` in its worker. It turns dicts of agents into arrays of fixed shape.

`envactors.integrations.pettingzoo.batches` converts these arrays back in the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import numpy as np

from envactors.errors import SpaceMismatchError
from envactors.integrations.adapter import EnvAdapter
from envactors.integrations.pettingzoo.layout import FLAGS, LIVE, REPORTED, TERMINATED, TRUNCATED, AgentLayout, Record
from envactors.mailbox.specs import ArraySpec, Spec, conform, spec_of_space, zeros

_FIVE_DICTS = [dict] * 5


class Agents(NamedTuple):
    """The possible agents of a copy, in order, and their spaces."""

    names: list[Hashable]
    observation_spaces: dict[Hashable, Any]
    action_spaces: dict[Hashable, Any]


class MethodReadError(TypeError):
    """A method was read, not called. Its value would be the method of a copy of the env, in the caller."""


class ParallelEnvAdapter(EnvAdapter):
    """An env with Gymnasium's methods whose values cover all possible agents of a ``ParallelEnv``.

    An observation is a `Record` of all agents' observations and of flags; agents that are not alive have zeros. The
    reward is an array with one entry per agent. The episode ends when the last agent ends. The info contains all
    non-empty infos of agents, under ``"infos"``.

    Args:
        factory: Creates the env.

    Raises:
        TypeError: The env is not a ``ParallelEnv``, or has no ``possible_agents``.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        super().__init__(factory)
        self._agents = _read_agents(self._env)
        names, observation_spaces, action_spaces = self._agents
        self._index_of = {name: index for index, name in enumerate(names)}
        self._observations = AgentLayout([spec_of_space(observation_spaces[name]) for name in names])
        self._actions = AgentLayout([spec_of_space(action_spaces[name]) for name in names])
        record = Record(self._observations)
        self.observation_space: Spec = record.spec
        self.action_space: Spec = action_spec(self._actions)
        self.reward_space: ArraySpec = ArraySpec((len(names),), np.dtype(np.float64))
        self._labels = [f"the observation of agent {name!r}" for name in names]
        empty = *self._observations.make_empty(), np.zeros((FLAGS, len(names)), np.bool_)
        self._observation = empty if isinstance(record.spec, tuple) else zeros(record.spec)
        *self._arrays, self._flags = record.split(self._observation)
        self._writers = [(name, self._observations.writer(self._arrays, i)) for i, name in enumerate(names)]
        self._rows: list[list[bool]] = [[], [], [], []]  # flags of the last result
        self._all_live = False  # whether the last flags say that all agents are alive, and have observations
        self._rewards = np.zeros(len(names))
        self._numbers = self._rewards.data  # writing to a memoryview takes a third of the time

    def envactors_agents(self) -> Agents:
        """Return the possible agents and their spaces."""
        return self._agents

    def envactors_get(self, name: str) -> Any:
        """Read an attribute of the env.

        Raises:
            MethodReadError: The attribute is a method.
        """
        value = getattr(self._env, name)
        if isinstance(value, MethodType):
            raise MethodReadError(f"{name} is a method of the env: use call({name!r})")
        return value

    def envactors_set(self, name: str, value: Any) -> None:
        """Set an attribute of the env."""
        setattr(self._env, name, value)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, infos = self._checked("reset", self._env.reset(**kwargs), "(observations, infos)", 2)
        return self._observe(obs, {}, {}, {}), _pack_infos(infos)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        env = self._env
        was_usual = self._all_live and env.agents == self._agents.names
        if was_usual and self._actions.is_stack:
            actions = dict(zip(self._agents.names, action, strict=False))  # see `AgentBatches.by_agent`
        else:
            arrays = action if isinstance(action, tuple) else (action,)
            actions = {name: self._actions.get(arrays, self._index_of[name]) for name in env.agents}
        result = env.step(actions)
        # Of most steps this looks only at the types, and writes the values without a call for each kind.
        if (
            was_usual
            and type(result) is tuple
            and list(map(type, result)) == _FIVE_DICTS
            and self._write_usual(*result)
        ):
            return self._observation, self._rewards, False, False, _pack_infos(result[4])
        expected = "(observations, rewards, terminations, truncations, infos)"
        obs, rewards, terminations, truncations, infos = self._checked("step", result, expected, 5)
        observation = self._observe(obs, rewards, terminations, truncations)
        each = np.array([rewards.get(name, 0.0) for name in self._agents.names], np.float64)
        is_over = not any(self._rows[LIVE])
        was_cut = is_over and any(self._rows[TRUNCATED])
        return observation, each, is_over and not was_cut, was_cut, _pack_infos(infos)

    def _observe(self, obs: Any, rewards: Any, terminations: Any, truncations: Any) -> Any:
        """Return the observation. The next call overwrites it."""
        layout, arrays, live = self._observations, self._arrays, set(self._env.agents)
        if not live <= self._index_of.keys():
            raise SpaceMismatchError(
                f"the agents {sorted(live - self._index_of.keys(), key=repr)} are alive but missing in the env's "
                f"possible_agents, {self._agents.names}: expected possible_agents to name every agent that may appear"
            )
        rows: list[list[bool]] = [[], [], [], []]
        self._rows = rows
        for index, name in enumerate(self._agents.names):
            if name in obs:
                layout.put(arrays, index, conform(layout.specs[index], obs[name], self._labels[index]))
            else:
                layout.clear(arrays, index)
            terminated, truncated = bool(terminations.get(name)), bool(truncations.get(name))
            # Some envs leave agents that are done in `agents`. Without this check their episodes would never end.
            rows[LIVE].append(name in live and not terminated and not truncated)
            rows[REPORTED].append(name in obs or name in rewards)
            rows[TERMINATED].append(terminated)
            rows[TRUNCATED].append(truncated)
        self._flags[:] = rows
        self._all_live = all(rows[LIVE]) and all(rows[REPORTED])
        return self._observation

    def _write_usual(self, obs: Any, rewards: Any, terminations: Any, truncations: Any, _infos: Any) -> bool:
        """Write the values of a step in which all agents live on, as before; return False for any other step."""
        names = self._agents.names
        if self._env.agents != names or any(terminations.values()) or any(truncations.values()):
            return False
        if obs.keys() != self._index_of.keys() or False in [write(obs[name]) for name, write in self._writers]:
            return False
        numbers = self._numbers
        for index, name in enumerate(names):
            numbers[index] = rewards.get(name, 0.0)
        return True

    def _checked(self, method: str, result: Any, expected: str, size: int) -> Any:
        if isinstance(result, tuple) and len(result) == size and all(isinstance(part, Mapping) for part in result):
            return result
        given = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise TypeError(f"{method} of {self._env} returned {given}: expected {expected}, each a dict by agent")


def action_spec(layout: AgentLayout) -> Spec:
    """Return the spec of a copy's action: a tuple of the arrays of a layout, or the array if there is only one.

    A single array is faster than a tuple.
    """
    return layout.arrays[0] if len(layout.arrays) == 1 and layout.arrays[0].batchable else layout.arrays


def _read_agents(env: Any) -> Agents:
    if hasattr(env, "agent_iter"):
        raise TypeError(
            f"{env} is an AECEnv: expected a ParallelEnv. Convert it with "
            "pettingzoo.utils.conversions.aec_to_parallel or turn_based_aec_to_parallel"
        )
    names = getattr(env, "possible_agents", None)
    if not names or not callable(getattr(env, "observation_space", None)):
        raise TypeError(
            f"{env!r} has possible_agents={names!r}: expected a PettingZoo ParallelEnv whose possible_agents names "
            "every agent that may appear, since batches reserve space for each of them"
        )
    names = list(names)
    return Agents(
        names, {name: env.observation_space(name) for name in names}, {name: env.action_space(name) for name in names}
    )


def _pack_infos(infos: Mapping[Any, Any]) -> dict[str, Any]:
    return {"infos": {key: info for key, info in infos.items() if info}} if any(infos.values()) else {}
