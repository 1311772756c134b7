"""What waits to be delivered; also what actors give to `Reactor.wake` when an outcome is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from envactors.actor.slots import IDLE, READY, ROLLING, Slots
from envactors.errors import AlreadyPendingError, EnvActorsError
from envactors.vector.results import EnvStep


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
    """The results that wait to be delivered.

    Args:
        slots: All envs.

    Attributes:
        ready: The results of envs that are `READY`.
        is_disturbed: Whether an exception has fallen into a request, and envs may count as asked that nobody posts.
        was_disturbed: Whether results may be pending of a request that was interrupted.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.ready: dict[int, ReadyResult] = {}
        self.is_disturbed: bool = False
        self.was_disturbed: bool = False

    def check_idle(self, env_ids: Iterable[int]) -> None:
        """Refuse to ask an env whose result has not been delivered.

        Raises:
            AlreadyPendingError: There is such an env.
        """
        states = self.slots.states
        busy = [env_id for env_id in env_ids if states[env_id] != IDLE]
        if busy:
            raise AlreadyPendingError(
                f"the envs {busy} have results pending: receive them with recv (or from "
                "their futures) before the next request"
            )

    def note_failure(self, error: BaseException, before: bytes | None = None) -> None:
        """Note that a request was interrupted, unless the error is one of the library's own.

        Args:
            error: What was raised.
            before: The states before the request; None if it asked nothing of the envs.
        """
        if not isinstance(error, EnvActorsError):
            self.is_disturbed = True
            if before is not None and self.slots.states != before:
                self.was_disturbed = True

    def add(self, result: ReadyResult) -> None:
        """Note that a result is there."""
        self.ready[result.env_id] = result
        self.slots.states[result.env_id] = READY

    def look_at(self, env_ids: Sequence[int]) -> list[ReadyResult]:
        """Return results that are to be delivered; `take` takes them out once nothing can go wrong any more."""
        return [self.ready[env_id] for env_id in env_ids]

    def take(self, env_ids: Sequence[int]) -> None:
        """Take results out, which were delivered."""
        for env_id in env_ids:
            self.slots.states[env_id] = IDLE
            self.ready.pop(env_id, None)

    def forget_taken(self) -> None:
        """Forget what an interrupted `take` has left: results of envs that are idle again."""
        for env_id in [env_id for env_id in self.ready if self.slots.states[env_id] == IDLE]:
            del self.ready[env_id]

    def in_flight(self, env_ids: Iterable[int]) -> list[int]:
        """Return those of the envs whose results are not ready, and that were asked."""
        return [env_id for env_id in env_ids if self.slots.states[env_id] not in (IDLE, READY)]

    @property
    def receivable(self) -> int:
        """How many results `recv` may wait for: those of all envs that were asked, without futures."""
        slots = self.slots
        owned = sum(slot.op is not None and slot.op.future is not None for slot in slots.of)
        return len(slots.states) - slots.states.count(IDLE) - slots.states.count(ROLLING) - owned
