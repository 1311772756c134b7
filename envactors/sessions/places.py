"""Who waits for a session, and what each of the pool's actors is doing: the matching of the two, without a lock."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
from collections import deque
from collections.abc import Sequence
from typing import Any

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle
from envactors.actor.type_variables import T
from envactors.sessions.session import Session


class Phase(enum.Enum):
    """What a place of the pool is doing."""

    PREPARING = enum.auto()  # its process starts, or its env resets
    READY = enum.auto()
    LEASED = enum.auto()
    FAILED = enum.auto()  # its process could not be started; a session that needs it has it started again


@dataclasses.dataclass(eq=False)
class Place:
    """One of the pool's actors.

    Attributes:
        actor: The actor.
        phase: What it is doing.
        preparation: What ends while it is `Phase.PREPARING`.
        session: The session that has it while it is `Phase.LEASED`.
    """

    actor: ActorHandle[Any]
    phase: Phase = Phase.PREPARING
    preparation: concurrent.futures.Future[Any] | None = None
    session: Session[Any] | None = None


class Request(ActorFuture[T]):
    """The future of what the pool does in the reactor's thread. Only the pool cancels it."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        super().__init__(actor._supervisor, actor._lifeline)

    def cancel(self) -> bool:
        return False

    def resolve(self, value: T | None, error: BaseException | None = None) -> None:
        """Set the outcome, and wake the thread that waits for it."""
        self.settle(value, error, 0)
        self._owner.reactor.wake(self)

    def withdraw(self) -> None:
        """Cancel it, and wake the thread that waits for it."""
        self.mark_cancelled()
        self._owner.reactor.wake(self)


@dataclasses.dataclass(eq=False)
class Waiter:
    """Somebody who waits for a session.

    Attributes:
        name: The name of the session.
        request: Gets the `Session`, or why there is none.
        since: When it began to wait (`time.monotonic`).
    """

    name: Any
    request: Request[Session[Any]]
    since: float


class Places:
    """The places of a pool and those who wait for one; changed in the reactor's thread, under the pool's lock.

    Args:
        actors: The actors.
        size: How many of them sessions may have at a time.

    Attributes:
        all: The places.
        waiting: Those who wait, the one that has waited longest first.
    """

    def __init__(self, actors: Sequence[ActorHandle[Any]], size: int) -> None:
        self.all: list[Place] = [Place(actor) for actor in actors]
        self.waiting: deque[Waiter] = deque()
        self._size = size

    def match(self) -> tuple[Waiter | None, Place | None]:
        """Return who gets a place now, and which one, which counts as leased from then on; None for nobody."""
        ready = next((place for place in self.all if place.phase is Phase.READY), None)
        if ready is None or self.count(Phase.LEASED) >= self._size:
            return None, None
        waiter = self.next_waiter()
        if waiter is not None:
            ready.phase = Phase.LEASED
        return waiter, ready

    def take_back(self, session: Session[Any]) -> Place | None:
        """Return the place of a session, which is being prepared from then on; None if it was taken back before."""
        place = next((place for place in self.all if place.session is session), None)
        if place is not None:
            place.session = None
            place.phase = Phase.PREPARING
        return place

    def take_broken(self) -> list[Place]:
        """Return the places without a process that those who wait need; they are being prepared from then on."""
        for place in self.all:
            if place.phase is Phase.READY and not place.actor._supervisor.is_usable:
                place.phase = Phase.FAILED  # its process was lost while nobody used it
        broken = [place for place in self.all if place.phase is Phase.FAILED][: max(0, self.lacking())]
        for place in broken:
            place.phase = Phase.PREPARING
        return broken

    def next_waiter(self) -> Waiter | None:
        """Take out the one that has waited longest, None if nobody waits."""
        return self.waiting.popleft() if self.waiting else None

    def forget(self, request: Request[Session[Any]]) -> bool:
        """Remove the waiter with this request; return whether it still waited."""
        waiter = next((waiter for waiter in self.waiting if waiter.request is request), None)
        if waiter is not None:
            self.waiting.remove(waiter)
        return waiter is not None

    def lacking(self) -> int:
        """Return how many more wait than there are places that are ready or will be."""
        return len(self.waiting) - self.count(Phase.READY) - self.count(Phase.PREPARING)

    def count(self, phase: Phase) -> int:
        """Return how many places are in a phase."""
        return sum(place.phase is phase for place in self.all)
