"""One rollout in flight: its parts, its memory, and its futures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from envactors.actor.future import ActorFuture
from envactors.actor.reactor import Reactor
from envactors.actor.supervisor import Supervisor
from envactors.rollout.assembly import Views, make_views
from envactors.rollout.buffers import TrajectoryBuffer
from envactors.rollout.part import ActorPart
from envactors.rollout.results import Rollout


class Run:
    """A rollout in flight, which its futures belong to: nothing but closing the vector ends it.

    Args:
        supervisors: Actors of the vector.
        buffer: Memory of its trajectory.
        copy: Whether the result stays valid for as long as the user keeps it.
        count: Number of futures.
        prepare: Called by a thread that is about to wait, while the workers run.

    Attributes:
        reactor: Reads the replies of the actors when no other thread does.
        parts: The part of each actor.
        buffer: Memory of its trajectory.
        copy: Whether the result stays valid for as long as the user keeps it.
        futures: One future for all actors, or one for each.
        left: Parts that have not ended.
        unsettled: Futures that have no result yet.
        prepared: Views of the memory of the buffer beside them, for the result; None without any.
    """

    def __init__(
        self,
        supervisors: Sequence[Supervisor],
        buffer: TrajectoryBuffer,
        *,
        copy: bool,
        count: int,
        prepare: Callable[[Run], None],
    ) -> None:
        self.reactor: Reactor = supervisors[0].reactor
        self.buffer = buffer
        self.copy = copy
        self.parts: list[ActorPart] = []
        self.futures: list[ActorFuture[Rollout]] = [ActorFuture(self, None) for _ in range(count)]
        for future in self.futures:
            future.mark_running()
        self.left: set[ActorPart] = set()
        self.unsettled: set[ActorFuture[Rollout]] = set(self.futures)
        self.prepared: tuple[TrajectoryBuffer, Views] | None = None
        self._supervisors = supervisors
        self._prepare = prepare

    @property
    def has_views(self) -> bool:
        """Whether there are views of the buffer that it has now."""
        return self.prepared is not None and self.prepared[0] is self.buffer

    def cancel(self, future: ActorFuture[Any]) -> bool:
        del future
        return False

    abort = cancel

    def wait(self, future: ActorFuture[Any], done: Callable[[], bool], deadline: float | None) -> None:
        self._prepare(self)
        for supervisor in self._supervisors:
            supervisor.calls.resume()
        self.reactor.wait(done, future, deadline)

    def view(self, parts: Sequence[ActorPart], hand_out: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Views:
        """Return views of the columns of some parts; see `envactors.rollout.assembly.make_views`."""
        return make_views(self.buffer.trajectory, parts[0].first, parts[-1].stop, hand_out)
