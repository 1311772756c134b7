"""`ActorParallelEnv`: many copies of a PettingZoo ``ParallelEnv`` in actors, with one batch per agent.

    actions by agent ──▶ AgentBatches.pack ──▶ facade ──▶ ParallelEnvAdapter in each worker ──▶ ParallelEnv
    results by agent ◀── AgentBatches.unpack ◀── arrays of all possible agents, in shared memory ◀──┘

`envactors.vector_env.VectorEnv` handles failures, autoreset, seeds, standbys, and replays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import batch_space

from envactors.actor.future import BoundToProcess
from envactors.actor.handle import ActorHandle
from envactors.errors import SpaceMismatchError, VectorStepError
from envactors.integrations.access import VectorAccess
from envactors.integrations.adapter import adapter_factories
from envactors.integrations.options import make_vector
from envactors.integrations.pettingzoo.adapter import Agents, ParallelEnvAdapter
from envactors.integrations.pettingzoo.batches import AgentBatches
from envactors.integrations.pettingzoo.copies import ActorParallelEnvCopy
from envactors.mailbox.factory import Factory
from envactors.vector.inputs import check_env_ids
from envactors.vector.options import CommonOptions
from envactors.vector_env import VectorEnv

if TYPE_CHECKING:
    from typing_extensions import Unpack

_T = TypeVar("_T")


class ActorParallelEnv(BoundToProcess):
    """Steps many copies of a PettingZoo ``ParallelEnv`` in actors, with one batch per possible agent.

    Agents that are not alive have zeros in all batches; `masks` tells which agents are alive. The episode of a copy
    ends when its last agent ends.

    Args:
        env_fns: One callable per copy that creates a ``ParallelEnv``, or a string ``"module:callable"``; called only in
            the workers. All copies must have the same possible agents and spaces.
        copy: True to return copies of observations; False to return views of the shared memory, valid until the next
            step of the env.
        **options: See `envactors.VectorOptions`, where each copy counts as an env. With ``autoreset="same_step"`` the
            infos of agents contain ``final_obs`` and ``final_info`` when the episode ends. With ``on_failure="renew"``
            every agent that was alive is truncated with reward 0, and its info and that of the copy contain the
            exception as ``failure``. With ``seed_episodes``, ``infos[i]["episode_seed"]`` is the seed.

    Attributes:
        num_envs: Number of copies.
        possible_agents: All agents that may appear, in order.
        agents: Equal to ``possible_agents``, since batches cover all of them; ``copies[i].agents`` are those alive.
        copies: Each copy as a separate ``ParallelEnv``.
        actors: The handle of each process.
        vector: The vector behind this class, with handles of the copies (``vector[i]``) and ``stats()``.
        metadata: The metadata of the first copy.
        render_mode: The render mode of the first copy.

    Raises:
        ActorStartError: A copy could not be created, or is not a ``ParallelEnv``.
        SpaceMismatchError: The copies' agents or spaces differ.
    """

    def __init__(
        self,
        env_fns: Iterable[Factory],
        copy: bool = True,
        **options: Unpack[CommonOptions],
    ) -> None:
        factories = adapter_factories(ParallelEnvAdapter, env_fns)
        self.vector: VectorEnv = make_vector(VectorEnv, "ActorParallelEnv", factories, options, {}, copy=copy)
        self.actors: list[ActorHandle[Any]] = self.vector.actors
        try:
            self._take_agents([Agents(*agents) for agents in self.vector.call("envactors_agents")])
        except BaseException:
            self.vector.close(0)
            raise

    def _take_agents(self, each: list[Agents]) -> None:
        first = each[0]
        for env_id, agents in enumerate(each):
            for what, ours, theirs in zip(Agents._fields, first, agents, strict=True):
                if ours != theirs:
                    raise SpaceMismatchError(
                        f"{what} of copy {env_id} are {theirs}: expected those of copy 0, {ours}. All copies must have "
                        "the same agents and spaces"
                    )
        self.num_envs: int = len(each)
        self.possible_agents: list[Hashable] = list(first.names)
        self.agents: list[Hashable] = list(first.names)
        self.metadata: dict[str, Any] = self.vector.metadata
        self.render_mode: str | None = self.vector.render_mode
        self._access = VectorAccess(self.vector)
        self._batches = AgentBatches(first, self.num_envs)
        self._all_ids = list(range(self.num_envs))
        self.copies: list[ActorParallelEnvCopy] = [
            ActorParallelEnvCopy(self.vector, self._batches, env_id, agents) for env_id, agents in enumerate(each)
        ]

    # Agents and spaces -----------------------------------------------------------------------------------

    @property
    def num_agents(self) -> int:
        """Number of possible agents."""
        return len(self.agents)

    @property
    def masks(self) -> dict[Any, npt.NDArray[np.bool_]]:
        """Whether each agent is alive in each copy, as bool arrays of shape (num_envs,) by agent.

        Only an agent that is alive acts in the next step. Do not train on what that step returns for other agents.
        """
        return self._batches.by_agent(self._batches.live.copy())

    def single_observation_space(self, agent: Hashable) -> Any:
        """Return the observation space of an agent in one copy."""
        return self.copies[0].observation_spaces[agent]

    def single_action_space(self, agent: Hashable) -> Any:
        """Return the action space of an agent in one copy."""
        return self.copies[0].action_spaces[agent]

    def observation_space(self, agent: Hashable) -> Any:
        """Return the batched observation space of an agent, the same object each time."""
        return self._observation_spaces[agent]

    def action_space(self, agent: Hashable) -> Any:
        """Return the batched action space of an agent, the same object each time."""
        return self._action_spaces[agent]

    @functools.cached_property
    def _observation_spaces(self) -> dict[Any, Any]:
        return {name: batch_space(self.single_observation_space(name), self.num_envs) for name in self.agents}

    @functools.cached_property
    def _action_spaces(self) -> dict[Any, Any]:
        return {name: batch_space(self.single_action_space(name), self.num_envs) for name in self.agents}

    # Stepping --------------------------------------------------------------------------------------------

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        env_ids: Iterable[int] | None = None,
    ) -> tuple[dict[Any, Any], list[dict[Any, Any]]]:
        """Reset copies in parallel, and discard the results of pending steps.

        Args:
            seed: An int gives copy ``i`` the seed ``seed + i``; a sequence contains a seed or None for each copy.
            options: Passed to the ``reset`` of each copy; a list or tuple contains options or None for each copy.
            env_ids: Which copies to reset, in this order; None for all.

        Returns:
            ``(observations, infos)``: by agent, each leaf of shape (n, ...); one dict per copy, by agent.

        Raises:
            VectorStepError: Some copies failed.
        """
        ids = self._ids(env_ids)
        obs, infos = self._converting_failures(lambda: self.vector.reset(seed, options, ids))
        rewards = np.zeros((len(ids), len(self.agents)))
        results = self._batches.unpack(ids, obs, rewards, np.zeros(len(ids), np.bool_), infos)
        observations, *_, own_infos = self._batches.batched(results)
        return observations, own_infos

    def step(self, actions: Any, env_ids: Iterable[int] | None = None) -> tuple[Any, ...]:
        """Step copies in parallel and wait for all of them.

        Args:
            actions: By agent, each leaf of shape (n, ...); or a list with one dict per copy, by agent. Actions of
                agents that are not alive are ignored, and may be omitted.
            env_ids: Which copies to step, in the order of the actions; None for all.

        Returns:
            ``(observations, rewards, terminations, truncations, infos)``. All but the infos are dicts by agent, with
            observations of shape (n, ...), rewards of shape (n,) and dtype float64, and flags of shape (n,) and dtype
            bool. The infos are one dict per copy, by agent. An agent for which a copy returned nothing has zeros,
            False, and no info.

        Raises:
            VectorStepError: Some copies failed; the other results are in ``.batch``, an `AgentBatch`.
            VectorInputError: An id is invalid, or a copy needs a reset first.
            SpaceMismatchError: An action does not fit its space, or an agent that is alive has none.
        """
        ids = self._ids(env_ids)
        packed = self._batches.pack(actions, ids)
        chosen = None if env_ids is None else ids
        return self._unpack(ids, self._converting_failures(lambda: self._access.step(packed, chosen)))

    def step_async(self, actions: Any) -> None:
        """Start a step of all copies; `step_wait` returns its results. Arguments and errors are those of `step`."""
        self._access.start_steps(None, self._batches.pack(actions, self._all_ids))

    def step_wait(self) -> tuple[Any, ...]:
        """Wait for the step that `step_async` started, and return its results in the form of `step`.

        Raises:
            NothingPendingError: No step was started.
            VectorStepError: Some copies failed; the other results are in ``.batch``.
        """
        return self._unpack(self._all_ids, self._converting_failures(self._access.finish_step))

    def _unpack(self, ids: list[int], results: tuple[Any, ...]) -> tuple[Any, ...]:
        obs, rewards, _, truncated, infos = results
        return self._batches.batched(self._batches.unpack(ids, obs, rewards, truncated, infos))

    def _converting_failures(self, request: Callable[[], _T]) -> _T:
        try:
            return request()
        except VectorStepError as error:
            error.batch = self._batches.unpack_batch(error.batch)
            raise

    def _ids(self, env_ids: Iterable[int] | None) -> list[int]:
        return self._all_ids if env_ids is None else check_env_ids(env_ids, self.num_envs)

    # Attributes and methods of the copies ----------------------------------------------------------------

    def state(self) -> npt.NDArray[Any]:
        """Return the stacked states of all copies, of shape (num_envs, ...)."""
        return np.stack(self.call("state"))

    def render(self) -> list[Any]:
        """Return what the ``render`` of each copy returns."""
        return self.vector.render()

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of all copies in parallel and return one value per copy."""
        return self.vector.call(method, *args, **kwargs)

    def get_attr(self, name: str) -> list[Any]:
        """Return an attribute of each copy."""
        return self.vector.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of all copies; a list or tuple contains one value per copy."""
        self.vector.set_attr(name, values)

    def close(self) -> None:
        """Close the copies and end their processes, within the close deadline; calling it again does nothing."""
        self.vector.close()

    def __enter__(self) -> ActorParallelEnv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ActorParallelEnv of {self.num_envs} copies and {self.num_agents} possible agents>"
