"""What is in flight: the one place that knows.

IDLE ──asked──▶ IN_FLIGHT ──outcome──▶ READY ──delivered──▶ IDLE
IDLE ──submitted──▶ SUBMITTED ──outcome goes to its future──▶ IDLE
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from envactors.actor.future import ActorFuture
from envactors.errors import AlreadyPendingError, EnvActorsError
from envactors.vector.results import EnvStep

IDLE: Final = 0
IN_FLIGHT: Final = 1  # the result goes to `step`, `reset` or `recv`
READY: Final = 2
SUBMITTED: Final = 3  # the result goes to a future of `submit`


class ReadyResult(NamedTuple):
    """A result that waits to be delivered.

    Attributes:
        env_id: The env.
        when: When it was complete (`time.monotonic`).
        step: The result; None if it stands in the rows of shared memory.
        error: What stands in place of a result, None if there is one.
    """

    env_id: int
    when: float
    step: EnvStep | None = None
    error: BaseException | None = None

    @property
    def is_in_rows(self) -> bool:
        """Whether the result stands in the rows of shared memory."""
        return self.step is None and self.error is None


class AskedRequest(Protocol):
    """What an env was asked in a frame; see `envactors.vector.transitions.EnvRequest`."""

    method: str
    call_id: int
    is_open: bool
    has_arrived: bool

    @property
    def future(self) -> ActorFuture | None:
        """Its future, if any."""


class Settler(Protocol):
    """What sorts out what is left; see `envactors.vector.interrupts.Interrupts`."""

    def settle(self) -> None:
        """Do so."""


class Pending:
    """The state of each env's result; also what actors give to `Reactor.wake` when one is there.

    Args:
        count: How many envs there are.

    Attributes:
        states: One of the states above per env.
        ready: The results that wait to be delivered, by env.
        requests: What each env was last asked in a frame, unless it was withdrawn.
        interrupts: Sorts out what is left of requests that were interrupted.
        is_disturbed: Whether it has to.
        was_disturbed: Whether results may be pending of a request that was interrupted.
        inboxes: What has arrived and is to be read, by the id of the thread that waits and reads it.
    """

    def __init__(self, count: int) -> None:
        self.states = bytearray(count)
        self.ready: dict[int, ReadyResult] = {}
        self.requests: dict[int, AskedRequest] = {}
        # Weakly: it refers to this.
        self.interrupts: weakref.ref[Settler] | None = None
        self.is_disturbed = self.was_disturbed = False
        self.inboxes: dict[int, deque[Callable[[], None]]] = {}
        # A full-batch step changes all states by assigning one of these.
        self.all_in_flight = bytes([IN_FLIGHT]) * count
        self.all_idle = bytes(count)

    def check_idle(self, env_ids: Iterable[int]) -> None:
        """Refuse to ask an env whose result has not been delivered.

        Raises:
            AlreadyPendingError: There is such an env.
        """
        states = self.states
        busy = [env_id for env_id in env_ids if states[env_id] != IDLE]
        if busy:
            raise AlreadyPendingError(
                f"the envs {busy} have results pending: receive them with recv (or from "
                "their futures) before the next request"
            )

    def mark(self, env_ids: Iterable[int], state: int) -> None:
        """Set the state of envs."""
        states = self.states
        for env_id in env_ids:
            states[env_id] = state

    def complete(self, result: ReadyResult) -> None:
        """Note that a result is there; one that nobody waits for is dropped."""
        if self.states[result.env_id] == IN_FLIGHT:
            self.ready[result.env_id] = result
            self.states[result.env_id] = READY

    def settle(self) -> None:
        """Sort out what a request that was interrupted has left."""
        if self.is_disturbed and self.interrupts is not None and (settler := self.interrupts()) is not None:
            settler.settle()
        if self.was_disturbed:
            self.was_disturbed = any(self.states)

    def note_failure(self, error: BaseException, before: bytes | None = None) -> None:
        """Note that a request was interrupted, unless the error is one of the library's own.

        Args:
            error: What was raised.
            before: The states before the request; None if it asked nothing of the envs.
        """
        if not isinstance(error, EnvActorsError):
            self.is_disturbed = True
            if before is not None and self.states != before:
                self.was_disturbed = True

    def read_inbox(self, inbox: deque[Callable[[], None]]) -> None:
        """Read what has arrived."""
        while inbox:
            inbox[0]()  # taken out last: after an interrupt it is read once more
            inbox.popleft()

    def look_at(self, env_ids: Sequence[int]) -> list[ReadyResult]:
        """Return results that are to be delivered; `take` takes them out once nothing can go wrong any more."""
        return [self.ready[env_id] for env_id in env_ids]

    def take(self, env_ids: Sequence[int]) -> list[ReadyResult]:
        """Take results out, to be delivered."""
        results = [self.ready.pop(env_id) for env_id in env_ids]
        self.mark(env_ids, IDLE)
        return results

    def in_flight(self, env_ids: Iterable[int]) -> list[int]:
        """Return those of the envs whose results are not there yet."""
        return [env_id for env_id in env_ids if self.states[env_id] == IN_FLIGHT]

    @property
    def receivable(self) -> int:
        """How many results `recv` may wait for."""
        return len(self.ready) + self.states.count(IN_FLIGHT)
