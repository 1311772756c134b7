"""Convert actions and results of many ``ParallelEnv`` copies between batches by agent and the facade's arrays.

`envactors.integrations.pettingzoo.layout` defines the arrays, and the adapter converts them in the worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from envactors.errors import SpaceMismatchError
from envactors.integrations.pettingzoo.adapter import Agents
from envactors.integrations.pettingzoo.layout import LIVE, REPORTED, TERMINATED, TRUNCATED, AgentLayout, Record
from envactors.mailbox.specs import conform, spec_of_space, split_batch
from envactors.vector.results import Batch

Flags: TypeAlias = npt.NDArray[np.bool_]


class Results(NamedTuple):
    """Results of some copies.

    Attributes:
        arrays: The observations of all agents, in the arrays of their `AgentLayout`.
        rewards: float64, shape (copies, agents).
        flags: bool, shape (copies, 4, agents).
        infos: One dict per copy, by agent.
    """

    arrays: list[Any]
    rewards: npt.NDArray[np.float64]
    flags: Flags
    infos: list[dict[Any, Any]]


class AgentBatch(NamedTuple):
    """Results of several copies; row ``k`` belongs to copy ``env_ids[k]``.

    Attributes:
        env_ids: int64, shape (n,).
        observations: By agent, each leaf of shape (n, ...).
        rewards: By agent, float64, shape (n,).
        terminations: By agent, bool, shape (n,).
        truncations: By agent, bool, shape (n,).
        infos: One dict per copy, by agent.
        incarnations: int64, shape (n,).
    """

    env_ids: npt.NDArray[np.int64]
    observations: dict[Any, Any]
    rewards: dict[Any, npt.NDArray[np.float64]]
    terminations: dict[Any, Flags]
    truncations: dict[Any, Flags]
    infos: list[dict[Any, Any]]
    incarnations: npt.NDArray[np.int64]


class AgentBatches:
    """Packs actions, unpacks results, and keeps track of which agents are alive.

    Args:
        agents: The possible agents and their spaces.
        num_envs: Number of copies.

    Attributes:
        names: The possible agents, in order.
        live: Whether each agent is alive in each copy: bool, shape (copies, agents).
    """

    def __init__(self, agents: Agents, num_envs: int) -> None:
        self.names: list[Hashable] = agents.names
        self.live: Flags = np.zeros((num_envs, len(self.names)), np.bool_)
        self._all_ids = list(range(num_envs))
        self._index_of = {name: index for index, name in enumerate(self.names)}
        self._observations = AgentLayout([spec_of_space(agents.observation_spaces[name]) for name in self.names])
        self._record = Record(self._observations)
        self._actions = AgentLayout([spec_of_space(agents.action_spaces[name]) for name in self.names])

    # Actions ---------------------------------------------------------------------------------------------

    def pack(self, actions: Any, env_ids: Sequence[int]) -> Any:
        """Return actions in the form that the facade takes; agents that are not alive get zeros.

        Args:
            actions: A mapping from agents to batches, or a sequence with a mapping from agents to actions per copy.
            env_ids: The copies.

        Raises:
            SpaceMismatchError: An action does not fit its space, an agent that is alive has none, or an agent is
                unknown.
        """
        is_by_agent = isinstance(actions, (dict, Mapping))  # `dict` is checked much faster
        if is_by_agent and (stacked := self._actions.stack(actions, self.names, len(env_ids))) is not None:
            return stacked.swapaxes(0, 1)
        arrays = self._actions.make_empty(len(env_ids))
        if is_by_agent:
            self._pack_batches(arrays, actions, env_ids)
        else:
            self._pack_copies(arrays, actions, env_ids)
        return arrays[0] if len(arrays) == 1 and self._actions.arrays[0].batchable else tuple(arrays)

    def _pack_batches(self, arrays: list[Any], actions: Mapping[Any, Any], env_ids: Sequence[int]) -> None:
        if actions.keys() != self._index_of.keys():
            self._check_agents(actions, np.any(self.live[list(env_ids)], axis=0), "actions")
        for name, batch in actions.items():
            index = self._index_of[name]
            values = split_batch(self._actions.specs[index], batch, len(env_ids), f"actions[{name!r}]")
            self._actions.put_batch(arrays, index, values)

    def _pack_copies(self, arrays: list[Any], actions: Any, env_ids: Sequence[int]) -> None:
        if not isinstance(actions, Sequence) or len(actions) != len(env_ids):
            given = f"{len(actions)} actions" if isinstance(actions, Sequence) else f"actions of {type(actions)}"
            raise SpaceMismatchError(
                f"{given} for {len(env_ids)} copies: expected a dict with a batch per agent, or a list with a dict of "
                "actions by agent for each copy"
            )
        for row, (env_id, each) in enumerate(zip(env_ids, actions, strict=True)):
            if not isinstance(each, Mapping):
                raise SpaceMismatchError(f"actions[{row}] is {each!r}: expected a dict of actions by agent")
            self._check_agents(each, self.live[env_id], f"the actions of copy {env_id}")
            one = [array[row] for array in arrays]
            for name, action in each.items():
                index = self._index_of[name]
                spec = self._actions.specs[index]
                self._actions.put(one, index, conform(spec, action, f"actions[{row}][{name!r}]", is_exact=True))

    def _check_agents(self, actions: Mapping[Any, Any], live: Flags, what: str) -> None:
        unknown = [name for name in actions if name not in self._index_of]
        missing = [name for name, lives in zip(self.names, live.tolist(), strict=True) if lives and name not in actions]
        if unknown or missing:
            problem = f"are for the unknown agents {unknown}" if unknown else f"lack the agents {missing}"
            raise SpaceMismatchError(f"{what} {problem}: expected the agents of {self.names} that are alive")

    # Results ---------------------------------------------------------------------------------------------

    def unpack(
        self, env_ids: Sequence[int], obs: Any, rewards: Any, truncated: Flags, infos: Sequence[dict[str, Any]]
    ) -> Results:
        """Convert the facade's results, and record which agents are alive."""
        *arrays, flags = self._record.split(obs)
        own: dict[int, dict[Any, Any]] = {}
        if any(infos):
            flags = flags.copy()  # the caller must not write to shared memory
            for row, info in enumerate(infos):
                if info:
                    own[row] = self._read_info(flags[row], info, was_cut=bool(truncated[row]))
        self.live[slice(None) if env_ids == self._all_ids else list(env_ids)] = flags[:, LIVE]
        return Results(arrays, rewards, flags, self._all_infos(flags, own))

    def _read_info(self, flags: Flags, info: dict[str, Any], *, was_cut: bool) -> dict[Any, Any]:
        """Return the infos of a copy, and correct its flags if its episode ended in the step or its env failed."""
        given = dict(info.get("infos", {}))
        final, failure = info.get("final_obs"), info.get("failure")
        *arrays, last_flags = [flags] if final is None else self._record.split(final)
        # The flags at the end of the episode, if it ended. For a copy that failed, these are the flags of its last
        # result.
        ended = last_flags.copy()
        if failure is not None and was_cut:
            were_live, ended = ended[LIVE], np.zeros_like(ended)
            ended[REPORTED] = ended[TRUNCATED] = were_live
            if final is None:
                flags[:] = ended
        if final is not None:
            flags[TERMINATED:] = ended[TERMINATED:]
            last = {} if failure is not None else info["final_info"].get("infos", {})
            for name in self._names(ended[REPORTED]):
                final_obs = self._observations.get(arrays, self._index_of[name])
                given[name] = {**given.get(name, {}), "final_obs": final_obs, "final_info": last.get(name, {})}
        if failure is not None:
            for name in self._names(ended[REPORTED]):
                given[name] = {**given.get(name, {}), "failure": failure}
            given["failure"] = failure
        if "episode_seed" in info:
            given["episode_seed"] = info["episode_seed"]
        return given

    def _names(self, chosen: Iterable[bool]) -> list[Hashable]:
        return list(itertools.compress(self.names, chosen))

    def _all_infos(self, flags: Flags, given: Mapping[int, dict[Any, Any]]) -> list[dict[Any, Any]]:
        """Return one dict per copy, with an empty info for each agent that has none."""
        infos: list[dict[Any, Any]] = []
        for reported in flags[:, REPORTED].tolist():
            each: dict[Any, Any] = {}
            for name in self._names(reported) if False in reported else self.names:
                each[name] = {}
            infos.append(each)
        for row, info in given.items():
            infos[row].update(info)
        return infos

    def by_agent(self, values: npt.NDArray[Any]) -> dict[Any, Any]:
        """Return the columns of an array of shape (copies, agents, ...)."""
        # With `strict`, `zip` reaches the end of the array, where NumPy raises an error; that doubles the time.
        return dict(zip(self.names, values.swapaxes(0, 1), strict=False))

    def batched(self, results: Results) -> tuple[Any, ...]:
        """Return (observations, rewards, terminations, truncations, infos): infos by copy, all others by agent."""
        layout, flags = self._observations, results.flags
        return (
            self.by_agent(results.arrays[0])
            if layout.is_stack
            else dict(zip(self.names, layout.get_batches(results.arrays), strict=True)),
            self.by_agent(results.rewards),
            self.by_agent(flags[:, TERMINATED]),
            self.by_agent(flags[:, TRUNCATED]),
            results.infos,
        )

    def of_one(self, results: Results) -> tuple[Any, ...]:
        """Convert the results of a single copy to the dicts by agent that a ``ParallelEnv`` returns."""
        arrays, flags = [array[0] for array in results.arrays], results.flags[0]
        indices = {name: self._index_of[name] for name in self._names(flags[REPORTED])}
        return (
            {name: self._observations.get(arrays, index) for name, index in indices.items()},
            {name: float(results.rewards[0, index]) for name, index in indices.items()},
            {name: bool(flags[TERMINATED, index]) for name, index in indices.items()},
            {name: bool(flags[TRUNCATED, index]) for name, index in indices.items()},
            results.infos[0],
        )

    def unpack_batch(self, batch: Batch) -> AgentBatch:
        """Convert the results of the copies that did not fail, for `VectorStepError`."""
        ids = batch.env_ids.tolist()
        results = self.unpack(ids, batch.obs, batch.rewards, batch.truncated, batch.infos)
        observations, rewards, terminations, truncations, infos = self.batched(results)
        return AgentBatch(batch.env_ids, observations, rewards, terminations, truncations, infos, batch.incarnations)
