"""What is in flight: the one place that knows.

IDLE ──asked──▶ IN_FLIGHT ──outcome──▶ READY ──delivered──▶ IDLE
IDLE ──submitted──▶ SUBMITTED ──outcome goes to its future──▶ IDLE
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from envactors.errors import AlreadyPendingError
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


class Pending:
    """The state of each env's result; also what actors give to `Reactor.wake` when one is there.

    Args:
        count: How many envs there are.

    Attributes:
        states: One of the states above per env.
        ready: The results that wait to be delivered, by env.
        inboxes: What has arrived and is to be read, by the id of the thread that waits and reads it.
    """

    def __init__(self, count: int) -> None:
        self.states = bytearray(count)
        self.ready: dict[int, ReadyResult] = {}
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

    def read_inbox(self, inbox: deque[Callable[[], None]]) -> None:
        """Read what has arrived."""
        while inbox:
            inbox[0]()  # taken out last: after an interrupt it is read once more
            inbox.popleft()

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
