"""One rollout in flight: its parts, its memory, and its futures."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from envactors.actor.future import ActorFuture
from envactors.actor.reactor import Reactor
from envactors.actor.supervisor import Supervisor
from envactors.rollout.assembly import Contents
from envactors.rollout.buffers import TrajectoryBuffer, Views
from envactors.rollout.part import ActorPart
from envactors.rollout.results import Rollout


class Run:
    """A rollout in flight, which its futures belong to: nothing but closing the vector ends it.

    Args:
        supervisors: Actors of the vector.
        buffer: Memory of its trajectory.
        copy: Whether the result stays valid for as long as the user keeps it.
        count: Number of futures.
        prepare: Prepares the result as far as that is possible; called by a thread that waits.
        read: Reads what a part has left; called by a thread that waits for the others.

    Attributes:
        reactor: Reads the replies of the actors when no other thread does.
        parts: The part of each actor.
        buffer: Memory of its trajectory.
        copy: Whether the result stays valid for as long as the user keeps it.
        futures: One future for all actors, or one for each.
        left: Parts that have not ended.
        unsettled: Futures that have no result yet.
        ended: Parts that have ended while others run, and are to be read.
        contents: What the steps of parts that were read have besides arrays.
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
        read: Callable[[Run, ActorPart], None],
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
        self.ended: deque[ActorPart] = deque()
        self.contents: dict[ActorPart, Contents] = {}
        self.prepared: tuple[TrajectoryBuffer, Views] | None = None
        self._supervisors = supervisors
        self._prepare = prepare
        self._read = read

    @property
    def has_views(self) -> bool:
        """Whether there are views of the buffer that it has now."""
        return self.prepared is not None and self.prepared[0] is self.buffer

    def cancel(self, future: ActorFuture[Any]) -> bool:
        del future
        return False

    abort = cancel

    def wait(self, future: ActorFuture[Any], done: Callable[[], bool], deadline: float | None) -> None:
        for supervisor in self._supervisors:
            supervisor.calls.resume()
        if deadline is not None:  # reading may take long, and runs code of users
            self.reactor.wait(done, future, deadline)
            return
        self._prepare(self)
        self.reactor.wait(lambda: bool(self.ended) or done(), future, None)
        with contextlib.suppress(IndexError):  # another thread waits, too
            while self.ended and not done():
                self._read(self, self.ended.popleft())
        left = tuple(self.left)
        if len(left) == 1 < len(self.parts):
            left[0].supervisor.calls.spin()  # on the core of a worker that has ended its part
