"""The deadlines of one actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

# What has taken too long: call, what the worker is at, or its start; kill, the end of a worker, which is then killed;
# close, `close` as a whole; backoff: the wait before the next start is over.
Timer = Literal["call", "kill", "close", "backoff"]


class Timers:
    """Up to one deadline of each kind.

    Args:
        notify: Called with each deadline that is set, so that the reactor does not sleep past it.
    """

    def __init__(self, notify: Callable[[float], None]) -> None:
        self._notify = notify
        self._when: dict[Timer, float] = {}

    def set(self, timer: Timer, when: float) -> None:
        """Set a deadline (`time.monotonic`), in place of one of the same kind."""
        self._when[timer] = when
        if when != float("inf"):
            self._notify(when)

    def set_earlier(self, timer: Timer, when: float) -> None:
        """Set a deadline unless an earlier one is set."""
        self.set(timer, min(when, self._when.get(timer, when)))

    def cancel(self, *timers: Timer) -> None:
        """Forget deadlines."""
        for timer in timers:
            self._when.pop(timer, None)

    def next(self) -> float:
        """Return the next deadline, infinity for none; called from any thread, without the actor's lock."""
        return min(self._when.copy().values(), default=float("inf"))

    def pop_due(self, now: float) -> list[Timer]:
        """Return the kinds whose deadline has passed, and forget these."""
        due = [timer for timer, when in self._when.items() if when <= now]
        self.cancel(*due)
        return due
