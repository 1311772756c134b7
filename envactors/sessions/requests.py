"""The requests for sessions, which wait for the actors of a pool as calls do.

`envactors.pools.shared_calls` decides which actor takes which request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from envactors.actor.calls import Call
from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle
from envactors.actor.type_variables import T
from envactors.errors import ActorStartError, copy_error
from envactors.mailbox.messages import Kind
from envactors.pools.shared_calls import CallQueue
from envactors.sessions.outcomes import failed
from envactors.sessions.session import Session
from envactors.sessions.statistics import SessionBooks


class Request(ActorFuture[T]):
    """The future of a session. Only the pool cancels it."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        super().__init__(actor._actor, actor._lifeline)

    def cancel(self) -> bool:
        return False


class Granter(Protocol):
    """The part of the pool that a request calls."""

    def grant(self, request: SessionRequest) -> None:
        """Begin a session on the actor that has taken the request. The lock must be held, within a change."""


class SessionRequest(Call):
    """A request for a session. The actor that takes it is leased until the session has ended.

    Args:
        pool: Begins the session.
        name: The name of the session.
        future: Receives the `Session`, or the error that prevented it.

    Attributes:
        name: As above.
        since: When the request was made (`time.monotonic`).
    """

    def __init__(self, pool: Granter, name: Any, future: Request[Session[Any]]) -> None:
        super().__init__("session", 0, Kind.CALL, future)
        self._pool = pool
        self.name = name
        self.since: float = time.monotonic()

    def start(self) -> None:
        """Begin the session. Nothing is sent, so nothing is left to run."""
        self._pool.grant(self)


class Requests(CallQueue[SessionRequest]):
    """The requests that wait for an actor, and the actors that wait for a request.

    A leased actor takes no requests.

    Args:
        actors: The actors.
        size: How many of them may be leased at a time.
        books: Count the requests that fail because a process cannot be started.
    """

    def __init__(self, actors: Sequence[Any], size: int, books: SessionBooks) -> None:
        super().__init__(actors)
        self._left = size  # how many more actors may be leased
        self._books = books
        for actor in actors:
            actor.jobs.shared_jobs = self
            actor.wake()

    def ready(self) -> list[Any]:
        """Return the actors that are ready for a session."""
        return [actor for actor in self._actors if actor.is_idle and actor.jobs.shared_jobs is self]

    def lease(self, actor: Any) -> None:
        """Let an actor take no more requests."""
        self._left -= 1
        actor.jobs.shared_jobs = None

    def release(self, actor: Any) -> None:
        """Let an actor take requests again, once it is idle."""
        self._left += 1
        actor.jobs.shared_jobs = self

    def add(self, request: SessionRequest) -> None:
        """Let a request wait until `serve` is called."""
        self._calls[request.future] = request

    def clear(self) -> list[SessionRequest]:
        """Remove and return all requests."""
        requests = list(self._calls.values())
        self._calls.clear()
        return requests

    def take(self) -> SessionRequest | None:
        """Remove and return the next request; None if there is none, or no more actors may be leased."""
        return super().take() if self._left > 0 else None

    def on_unusable(self, actor: Any) -> None:
        """Fail one request if the start of the actor has failed and the other actors are too few; start one again."""
        error = actor.stats().last_failure
        usable = sum(other.is_usable and other.jobs.shared_jobs is self for other in self._actors)
        if actor.is_asleep and isinstance(error, ActorStartError) and len(self._calls) > usable:
            _, request = self._calls.popitem(last=False)
            self._books.count(failed(request.name, "start", error, time.monotonic() - request.since))
            request.future.set_exception(copy_error(error))
        actor.runtime.loop.call_soon(self.serve)
