"""The calls of one actor: which one runs, which ones wait, in which order. No processes, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from envactors.actor.future import ActorFuture

if TYPE_CHECKING:
    from envactors.actor.turn import Turn


class Request:
    """One call on its way.

    Attributes:
        kind: The kind of its frame; None for a renewal, which sends none.
        payload: The pickled message.
        method: What is called, for errors.
        index: The index of the env that is called, for errors.
        timeout: Its deadline in seconds, None for none.
        bound: The only incarnation that may run it; None for any.
        retries: How many deaths and deadlines it still survives.
        future: Whoever waits for it.
        call_id: Its number, from when it was added.
        started: When it was last sent (`time.monotonic`), 0 when it never was.
    """

    __slots__ = (
        "bound",
        "call_id",
        "future",
        "index",
        "kind",
        "method",
        "payload",
        "retries",
        "started",
        "timeout",
    )

    def __init__(
        self,
        kind: int | None,
        payload: bytes | bytearray,
        method: str,
        index: int,
        timeout: float | None,
        retries: int,
        future: ActorFuture,
        bound: int | None = None,
    ) -> None:
        self.bound = bound
        self.kind = kind
        self.payload = payload
        self.method = method
        self.index = index
        self.timeout = timeout
        self.retries = retries
        self.future = future
        self.call_id = 0
        self.started = 0.0


class RequestTable:
    """At most one running request or turn, the others in order.

    Attributes:
        running: What runs.
        queue: What waits; to be looked at only.
    """

    def __init__(self) -> None:
        self.running: Request | Turn | None = None
        self.queue: deque[Request] = deque()
        self._last_id = 0

    def add(self, request: Request) -> None:
        """Queues a request and numbers it."""
        self._last_id += 1
        request.call_id = self._last_id
        self.queue.append(request)

    def start(self) -> Request | None:
        """Makes the first in the queue the running one; None when nothing waits or something runs."""
        if self.running is not None or not self.queue:
            return None
        # Marked first and unqueued second: an interrupt in between leaves it in both, never in none.
        request = self.running = self.queue[0]
        self.queue.popleft()
        return request

    def take(self, turn: Turn, now: float) -> bool:
        """Numbers a turn and makes it the running one; False when something runs or waits."""
        if self.running is not None or self.queue:
            return False
        self._last_id += 1
        turn.begin(self._last_id, now)
        self.running = turn
        return True

    def finish(self, call_id: int) -> Request | Turn | None:
        """Takes out what runs if it has this number; None says that the reply is stale."""
        request = self.running
        if request is None or request.call_id != call_id:
            return None
        self.running = None
        return request

    def interrupt(self) -> Request | Turn | None:
        """Takes out what runs, whatever it is."""
        request, self.running = self.running, None
        if request is not None and self.queue and self.queue[0] is request:
            self.queue.popleft()
        return request

    def put_back(self, request: Request) -> None:
        """Puts a request that shall run again before all others."""
        self.queue.appendleft(request)

    def add_first(self, request: Request) -> None:
        """Queues a request before all others, and numbers it."""
        self._last_id += 1
        request.call_id = self._last_id
        self.queue.appendleft(request)

    def restore(self, request: Request) -> None:
        """Puts a request that `drain` gave out back where it was."""
        self.queue.append(request)

    def withdraw(self, future: ActorFuture, *, retry: bool = False) -> Request | None:
        """Takes out a request that waits and never ran, or with ``retry`` one that waits to run again."""
        for request in self.queue:
            if request.future is future and (request.started > 0.0) is retry:
                self.queue.remove(request)
                return request
        return None

    def withdraw_all(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Takes out all of a kind that wait."""
        taken = [request for request in self.queue if unwanted(request)]
        for request in taken:
            self.queue.remove(request)
        return taken

    def drain(self) -> list[Request]:
        """Empties the queue and gives what was in it."""
        waiting = list(self.queue)
        self.queue.clear()
        return waiting
