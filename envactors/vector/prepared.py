"""Steps of sets of envs through shared memory, prepared once and started again and again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from envactors.actor.batch_step import StepRequest
from envactors.actor.shm_batch_step import SharedMemoryBatchStep, SharedMemorySteps
from envactors.actor.supervisor import Supervisor
from envactors.actor.wait_set import WaitSet
from envactors.arrays.slab import Slab
from envactors.vector.env_state import EnvState, check_steppable
from envactors.vector.episodes import Episodes
from envactors.wire.control_page import ControlPage
from envactors.wire.info_codec import InfoReader

# Prepared steps are kept for so many different sets of envs.
_MOST_PREPARED = 256


class ActorEnvs:
    """The envs of one actor.

    Attributes:
        supervisor: The actor.
        envs: Their indices, ascending.
        page: The control page whose doorbell the vector waits for; None before the first step.
    """

    def __init__(self, supervisor: Supervisor, envs: list[EnvState]) -> None:
        self.supervisor = supervisor
        self.envs = [env.env_id for env in envs]
        self.page: ControlPage | None = None


class PreparedStep:
    """A step of one set of envs, prepared once and started again and again.

    Attributes:
        env_ids: The envs, in the user's order.
        index: What selects their rows: a slice for all envs.
        parts: The batch step of each actor, and the actor's number.
        unreachable: The envs whose process cannot step them this way now: they are asked in frames.
        version: The version of the vector that it was prepared for.
        asked_in_frames: Whether the last start had to ask some envs in frames.
        resets: bool, which of all envs are reset; None for none, and for a step of some envs.
    """

    def __init__(self, env_ids: list[int], count: int, version: int) -> None:
        self.env_ids = env_ids
        self.is_all = env_ids == list(range(count))
        self.index: slice | npt.NDArray[np.int64] = slice(None) if self.is_all else np.array(env_ids, np.int64)
        self.parts: list[tuple[SharedMemorySteps, SharedMemoryBatchStep, int]] = []
        self.unreachable: list[int] = []
        self.version = version
        self.asked_in_frames = False
        self.resets: npt.NDArray[np.bool_] | None = None

    def is_over(self) -> bool:
        """Return whether none of its batch steps stands among the requests of an actor, so that it may start again.

        All results may have been delivered before: a row is complete before its worker ends the batch step.
        """
        return all(step.over for _, step, _ in self.parts)


class PreparedSteps:
    """The prepared steps of a vector.

    Args:
        rows: The rows of all envs.
        infos: Reads what comes beside the arrays.
        envs: All envs.
        episodes: Counts what prepared steps have to look at.
        waiter: What actors give to `Reactor.wake`.
        reissue: Returns the request that stands for an env whose step was lost; held weakly, since a batch step that
            outlives the vector must not keep it.

    Attributes:
        actors: The actors and their envs.
        wait_set: What the vector's thread sleeps in.
        full_batch: The full-batch step with the envs in order; None before the first.
    """

    def __init__(
        self,
        rows: Slab,
        infos: InfoReader,
        envs: Sequence[EnvState],
        episodes: Episodes,
        waiter: object,
        reissue: Callable[[int], StepRequest],
    ) -> None:
        self._rows = rows
        self._infos = infos
        self._envs = envs
        self._episodes = episodes
        self._waiter = waiter
        self._reissue_weakly = weakref.WeakMethod(reissue)
        by_actor: dict[Supervisor, list[EnvState]] = {}
        for env in envs:
            by_actor.setdefault(env.supervisor, []).append(env)
        self.actors = [ActorEnvs(supervisor, members) for supervisor, members in by_actor.items()]
        self.wait_set: WaitSet = self.actors[0].supervisor.reactor.make_wait_set()
        self.full_batch: PreparedStep | None = None
        self._prepared: dict[tuple[tuple[int, ...], bool], PreparedStep] = {}

    def find(self, env_ids: list[int], stream: bool) -> PreparedStep:
        """Return the step that was prepared for a set of envs, or a new one."""
        found = self._prepared.get((tuple(env_ids), stream))
        return self.prepare(env_ids, stream) if found is None else found

    def prepare(self, env_ids: list[int], stream: bool) -> PreparedStep:
        """Make the batch steps of a set of envs.

        Raises:
            VectorInputError: One of them needs a reset.
        """
        check_steppable(self._envs[env_id] for env_id in env_ids)
        prepared = PreparedStep(env_ids, len(self._envs), self._episodes.changes)
        wanted = set(env_ids)
        for number, actor in enumerate(self.actors):
            envs = [env_id for env_id in actor.envs if env_id in wanted]
            if envs and (step := self._make_step(actor, envs, stream)) is not None:
                prepared.parts.append((actor.supervisor.calls.steps, step, number))
            else:
                prepared.unreachable += envs
        if len(self._prepared) >= _MOST_PREPARED:
            self._prepared.clear()
        self._prepared[tuple(env_ids), stream] = prepared
        if prepared.is_all and not stream:
            self.full_batch = prepared
        return prepared

    def _make_step(self, actor: ActorEnvs, env_ids: list[int], stream: bool) -> SharedMemoryBatchStep | None:
        """Make a batch step; return None if the actor's process does not hold the episodes of all these envs."""
        actor.supervisor.warn_of_deadline(actor.supervisor.config.deadlines.of("step"))
        core = actor.supervisor.core
        # In this order: a process that takes the other's place in between has another number.
        process, incarnation = core.process, core.incarnation
        envs = [self._envs[env_id] for env_id in env_ids]
        if process is None or any(env.retiring or env.incarnation != incarnation for env in envs):
            return None
        page = process.page
        if page is not actor.page:
            actor.page = page
            self.wait_set.watch_doorbell(page.to_parent)
        first, reissue = actor.envs[0], self._reissue_weakly
        return SharedMemoryBatchStep(
            self._rows,
            self._infos,
            page,
            env_ids,
            first,
            incarnation,
            self._waiter,
            lambda env_id: None if (bound := reissue()) is None else bound(env_id),
            stream=stream,
        )
