"""Match the users who wait for a session with the actors of the pool.

This module only keeps the books: the pool holds the lock, and calls the actors.
"""

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
    """The state of a place."""

    PREPARING = enum.auto()  # the process is starting, or the env is resetting
    READY = enum.auto()
    LEASED = enum.auto()
    FAILED = enum.auto()  # the process did not start; it is started again once a session needs it


@dataclasses.dataclass(eq=False)
class Place:
    """One of the pool's actors.

    Attributes:
        actor: The actor.
        phase: The state of the place.
        preparation: The future of the start or reset while the place is `Phase.PREPARING`, else None.
        session: The session that uses the actor while the place is `Phase.LEASED`, else None.
    """

    actor: ActorHandle[Any]
    phase: Phase = Phase.PREPARING
    preparation: concurrent.futures.Future[Any] | None = None
    session: Session[Any] | None = None


class Request(ActorFuture[T]):
    """The future of a session. Only the pool cancels it."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        super().__init__(actor._actor, actor._lifeline)

    def cancel(self) -> bool:
        return False


@dataclasses.dataclass(eq=False)
class Waiter:
    """A request for a session that has not been granted yet.

    Attributes:
        name: The name of the session.
        request: Receives the `Session`, or the error that prevented it.
        since: When the request was made (`time.monotonic`).
    """

    name: Any
    request: Request[Session[Any]]
    since: float


class Places:
    """The places of a pool and the requests for them; read and changed under the pool's lock.

    Args:
        actors: The actors.
        size: How many sessions may run at a time.

    Attributes:
        all: The places.
        waiting: The requests, oldest first.
    """

    def __init__(self, actors: Sequence[ActorHandle[Any]], size: int) -> None:
        self.all: list[Place] = [Place(actor) for actor in actors]
        self.waiting: deque[Waiter] = deque()
        self._size = size

    def match(self) -> tuple[Waiter | None, Place | None]:
        """Assign a ready place to the oldest request and mark it as leased; the waiter is None if nothing matches."""
        ready = next((place for place in self.all if place.phase is Phase.READY), None)
        if ready is None or self.count(Phase.LEASED) >= self._size:
            return None, None
        waiter = self.next_waiter()
        if waiter is not None:
            ready.phase = Phase.LEASED
        return waiter, ready

    def take_back(self, session: Session[Any]) -> Place | None:
        """Return the place of a session, marked as `Phase.PREPARING`; None if it was already taken back."""
        place = next((place for place in self.all if place.session is session), None)
        if place is not None:
            place.session = None
            place.phase = Phase.PREPARING
        return place

    def take_broken(self) -> list[Place]:
        """Return as many places without a process as the requests need, marked as `Phase.PREPARING`."""
        for place in self.all:
            if place.phase is Phase.READY and not place.actor._actor.is_usable:
                place.phase = Phase.FAILED  # the process crashed while the actor was idle
        broken = [place for place in self.all if place.phase is Phase.FAILED][: max(0, self.lacking())]
        for place in broken:
            place.phase = Phase.PREPARING
        return broken

    def sessions(self) -> list[Session[Any]]:
        """Return the sessions whose actors were not taken back yet."""
        return [place.session for place in self.all if place.session is not None]

    def take_waiting(self) -> list[Waiter]:
        """Remove and return all requests."""
        waiting = list(self.waiting)
        self.waiting.clear()
        return waiting

    def next_waiter(self) -> Waiter | None:
        """Remove and return the oldest request; None if there is none."""
        return self.waiting.popleft() if self.waiting else None

    def forget(self, request: Request[Session[Any]]) -> None:
        """Remove a request, if it is still waiting."""
        waiter = next((waiter for waiter in self.waiting if waiter.request is request), None)
        if waiter is not None:
            self.waiting.remove(waiter)

    def lacking(self) -> int:
        """Return how many requests exceed the places that are ready or being prepared."""
        return len(self.waiting) - self.count(Phase.READY) - self.count(Phase.PREPARING)

    def count(self, phase: Phase) -> int:
        """Return how many places are in a phase."""
        return sum(place.phase is phase for place in self.all)
