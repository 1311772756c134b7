"""Steps of any set of envs through shared memory, put together from batch steps that are used again and again."""

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
from envactors.vector.results import Content
from envactors.wire.control_page import ControlPage
from envactors.wire.info_codec import InfoReader

# The most batch steps to keep: those of subsets that never come again would fill the memory.
_MOST_STEPS = 1024


class ActorEnvs:
    """The envs of one actor.

    Attributes:
        supervisor: The actor.
        number: Its number in the vector.
        envs: Their indices, ascending.
        page: The control page whose doorbell the vector waits for; None before the first step.
    """

    def __init__(self, supervisor: Supervisor, number: int) -> None:
        self.supervisor = supervisor
        self.number = number
        self.envs: list[int] = []
        self.page: ControlPage | None = None


class PreparedStep:
    """A step of some envs that is ready to start.

    Attributes:
        env_ids: The envs, in the user's order.
        is_all: Whether they are all envs in order.
        index: What selects their rows: a slice for all envs.
        parts: The batch step of each actor, and the actor's number.
        pairs: The same without the numbers, to be listed as running.
        unreachable: The envs whose process cannot step them this way now: they are asked in frames.
        version: The version of the vector that it was prepared for.
        asked_in_frames: Whether the last start had to ask some envs in frames.
        decoded: The (info, object leaves) of results that were decoded already, by env.
        resets: bool, which of all envs are reset; None for none, and for a step of some envs.
    """

    def __init__(self, env_ids: list[int], version: int, *, is_all: bool) -> None:
        self.env_ids = env_ids
        self.is_all = is_all
        self.index: slice | npt.NDArray[np.int64] = slice(None) if is_all else np.array(env_ids, np.int64)
        self.parts: list[tuple[SharedMemorySteps, SharedMemoryBatchStep, int]] = []
        self.pairs: list[tuple[SharedMemorySteps, SharedMemoryBatchStep]] = []
        self.unreachable: list[int] = []
        self.version = version
        self.asked_in_frames = False
        self.decoded: dict[int, Content] = {}
        self.resets: npt.NDArray[np.bool_] | None = None

    def is_over(self) -> bool:
        """Return whether none of its batch steps stands among the requests of an actor, so that it may start again.

        All results may have been delivered before: a row is complete before its worker ends the batch step.
        """
        return all(step.over for _, step, _ in self.parts)


class PreparedSteps:
    """The batch steps of a vector, made once for each set of envs of an actor and started again and again.

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
        full_batch: The last full-batch step that was not streamed, with the envs in order; None before the first.
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
        self._all_ids = [env.env_id for env in envs]
        self._episodes = episodes
        self._waiter = waiter
        self._reissue_weakly = weakref.WeakMethod(reissue)
        by_supervisor: dict[Supervisor, ActorEnvs] = {}
        # The actor of each env.
        self._actor_of: list[ActorEnvs] = []
        for env in envs:
            actor = by_supervisor.setdefault(env.supervisor, ActorEnvs(env.supervisor, len(by_supervisor)))
            actor.envs.append(env.env_id)
            self._actor_of.append(actor)
        self.actors = list(by_supervisor.values())
        self.wait_set: WaitSet = self.actors[0].supervisor.reactor.make_wait_set()
        self.full_batch: PreparedStep | None = None
        # The batch steps by (whether results are streamed, *envs), and the version of the vector they were made for.
        self._steps: dict[tuple[int, ...], SharedMemoryBatchStep] = {}
        self._version = episodes.changes

    def prepare(self, env_ids: list[int], stream: bool) -> PreparedStep:
        """Put a step of some envs together, of batch steps that are not under way; called with signals deferred.

        Raises:
            VectorInputError: One of them needs a reset.
        """
        if self._version != self._episodes.changes:
            self._steps.clear()
            self._version = self._episodes.changes
        prepared = PreparedStep(env_ids, self._version, is_all=env_ids == self._all_ids)
        by_actor: dict[ActorEnvs, list[int]] = {}
        for env_id in env_ids:
            by_actor.setdefault(self._actor_of[env_id], []).append(env_id)
        for actor, envs in by_actor.items():
            step = self._find_step(actor, sorted(envs), stream)
            if step is None:
                prepared.unreachable += envs
            else:
                prepared.parts.append((actor.supervisor.calls.steps, step, actor.number))
        prepared.pairs = [(steps, step) for steps, step, _ in prepared.parts]
        if prepared.is_all and not stream:
            self.full_batch = prepared
        return prepared

    def _find_step(self, actor: ActorEnvs, env_ids: list[int], stream: bool) -> SharedMemoryBatchStep | None:
        key = (stream, *env_ids)
        step = self._steps.get(key)
        if step is None or not actor.supervisor.calls.steps.finish(step):
            check_steppable(self._envs[env_id] for env_id in env_ids)
            step = self._make_step(actor, env_ids, stream)
            if len(self._steps) >= _MOST_STEPS:
                self._steps.clear()
            if step is not None:
                self._steps[key] = step
        return step

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
