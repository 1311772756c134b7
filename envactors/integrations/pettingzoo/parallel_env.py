"""`ActorParallelEnv`: many copies of a PettingZoo ``ParallelEnv`` in actors, with a batch per agent.

    actions by agent ──▶ AgentBatches.pack ──▶ facade ──▶ ParallelEnvAdapter in each worker ──▶ ParallelEnv
    results by agent ◀── AgentBatches.unpack ◀── arrays of all possible agents, in shared memory ◀──┘

Failures, autoresets, seeds, standbys and replays are those of `envactors.vector.facade.VectorEnv`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import batch_space

from envactors.actor.handle import ActorHandle
from envactors.errors import SpaceMismatchError, VectorStepError
from envactors.integrations.adapter import adapter_factories
from envactors.integrations.options import make_vector
from envactors.integrations.pettingzoo.adapter import Agents, ParallelEnvAdapter
from envactors.integrations.pettingzoo.batches import AgentBatches
from envactors.integrations.pettingzoo.copies import ActorParallelEnvCopy
from envactors.mailbox.factory import Factory
from envactors.vector.access import VectorAccess
from envactors.vector.facade import VectorEnv
from envactors.vector.inputs import check_env_ids
from envactors.vector.options import CommonOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ActorParallelEnv:
    """Steps many copies of a PettingZoo ``ParallelEnv`` as one, each in an actor, with a batch per possible agent.

    The values of agents that are gone are zeros; `masks` says who is alive. A copy's episode ends with its last agent.

    Args:
        env_fns: One callable per copy, which makes a ``ParallelEnv``, or ``"module:callable"``; called only in the
            workers. The copies have the same possible agents and spaces.
        copy: True to return copies of observations; False to return views of the shared memory, valid until the copy's
            next step.
        **options: See `envactors.VectorOptions`; a copy is an env. Under ``autoreset="same_step"`` the infos of the
            agents of an ending step have ``final_obs`` and ``final_info``. With ``on_failure="renew"`` every agent that
            was alive is truncated, with reward 0 and the exception as ``failure`` in its info and in that of the copy.
            With ``seed_episodes``, ``infos[i]["episode_seed"]`` is the seed.

    Attributes:
        num_envs: Number of copies.
        possible_agents: All agents that may appear, in order.
        agents: The same, since every batch has all of them; each copy's own are ``copies[i].agents``.
        copies: Each copy as a ``ParallelEnv`` of its own.
        actors: Handle of each process.
        vector: The vector behind this class, with handles of the copies (``vector[i]``) and ``stats()``.
        metadata: That of the first copy.
        render_mode: That of the first copy.

    Raises:
        ActorStartError: A copy could not be made, or is no ``ParallelEnv``.
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
                        f"{what} of copy {env_id} are {theirs}: expected those of copy 0, {ours}; the copies of one "
                        "vector have the same agents and spaces"
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
        """In which copies each agent is alive, as bools of shape (num_envs,) by agent.

        An agent that is alive takes an action in the next step. What that step returns for others is no experience.
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
        """Reset copies side by side; the results of a step that was interrupted are discarded.

        Args:
            seed: An int gives copy ``i`` the seed ``seed + i``; a sequence has one (or None) for each copy given.
            options: Passed to each copy's ``reset``; a list or tuple has one (or None) for each copy given.
            env_ids: Which copies, in this order; None for all.

        Returns:
            ``(observations, infos)``: by agent, each leaf of shape (n, ...); one dict per copy, by agent.

        Raises:
            VectorStepError: Some copies failed.
        """
        ids = self._ids(env_ids)
        if late := [env_id for env_id in self._access.busy() if env_id in ids]:
            with contextlib.suppress(VectorStepError):
                self._access.gather(late, None, "reset")
        with self._converted_failures():
            obs, infos = self.vector.reset(seed, options, ids)
        rewards = np.zeros((len(ids), len(self.agents)))
        results = self._batches.unpack(ids, obs, rewards, np.zeros(len(ids), np.bool_), infos)
        observations, *_, own_infos = self._batches.batched(results)
        return observations, own_infos

    def step(self, actions: Any, env_ids: Iterable[int] | None = None) -> tuple[Any, ...]:
        """Step copies side by side and wait for all of them.

        Args:
            actions: By agent, each leaf of shape (n, ...); or a list with a dict per copy, by agent. Those of agents
                that are gone are ignored, and may be left out.
            env_ids: Which copies, in the order of the actions; None for all.

        Returns:
            ``(observations, rewards, terminations, truncations, infos)``: by agent, observations with leaves of shape
            (n, ...), rewards float64 and flags bool of shape (n,); one dict per copy, by agent. Of agents for which a
            copy has returned nothing, they are zeros and False, and there is no info.

        Raises:
            VectorStepError: Some copies failed; the other results are in ``.batch``, an `AgentBatch`.
            VectorInputError: Wrong ids, or a copy that needs a reset first.
            SpaceMismatchError: Actions do not conform, or an agent that is alive has none.
        """
        ids = self._ids(env_ids)
        packed = self._batches.pack(actions, ids)
        with self._converted_failures():
            results = self.vector.step(packed, None if env_ids is None else ids)
        return self._unpack(ids, results)

    def step_async(self, actions: Any) -> None:
        """Start a full-batch step; `step_wait` returns its results. Arguments and errors as for `step`."""
        self.vector.step_async(self._batches.pack(actions, self._all_ids))

    def step_wait(self) -> tuple[Any, ...]:
        """Wait for the step that `step_async` has started, and return what `step` returns.

        Raises:
            NothingPendingError: No step was started.
            VectorStepError: Some copies failed; the other results are in ``.batch``.
        """
        with self._converted_failures():
            results = self.vector.step_wait()
        return self._unpack(self._all_ids, results)

    def _unpack(self, ids: list[int], results: tuple[Any, ...]) -> tuple[Any, ...]:
        obs, rewards, _, truncated, infos = results
        return self._batches.batched(self._batches.unpack(ids, obs, rewards, truncated, infos))

    @contextlib.contextmanager
    def _converted_failures(self) -> Iterator[None]:
        try:
            yield
        except VectorStepError as error:
            error.batch = self._batches.unpack_batch(error.batch)
            raise

    def _ids(self, env_ids: Iterable[int] | None) -> list[int]:
        return self._all_ids if env_ids is None else check_env_ids(env_ids, self.num_envs)

    # The rest --------------------------------------------------------------------------------------------

    def state(self) -> npt.NDArray[Any]:
        """Return the states of all copies, stacked: shape (num_envs, ...)."""
        return np.stack(self.call("state"))

    def render(self) -> list[Any]:
        """Return a frame per copy, as its ``render`` returns it."""
        return self.vector.render()

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of all copies side by side and return one value per copy."""
        return self.vector.call(method, *args, **kwargs)

    def get_attr(self, name: str) -> list[Any]:
        """Return an attribute per copy."""
        return self.vector.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of all copies; a list or tuple has one value per copy."""
        self.vector.set_attr(name, values)

    def close(self) -> None:
        """Close the copies and end their processes, within the close deadline; may be called again."""
        self.vector.close()

    def __enter__(self) -> ActorParallelEnv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ActorParallelEnv of {self.num_envs} copies and {self.num_agents} possible agents>"
