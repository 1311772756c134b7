"""The deadlines of one actor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

# What happens when a timer is due.
# start: the worker is ended, since its start takes too long. call: what the worker runs is looked at, since it may take
# too long. kill: the worker is killed. close: likewise, since `close` takes too long. backoff: the next process starts.
Timer = Literal["start", "call", "kill", "close", "backoff"]


class Timers:
    """Up to one deadline of each kind.

    Args:
        notify: Called with each deadline that is set, so that the reactor does not sleep past it.

    Attributes:
        when: The deadlines that are set (`time.monotonic`).
    """

    def __init__(self, notify: Callable[[float], None]) -> None:
        self._notify = notify
        self.when: dict[Timer, float] = {}

    def set(self, timer: Timer, when: float) -> None:
        """Set a deadline (`time.monotonic`), in place of one of the same kind."""
        self.when[timer] = when
        if when != math.inf:
            self._notify(when)

    def set_earlier(self, timer: Timer, when: float) -> None:
        """Set a deadline unless an earlier one is set."""
        if when < self.when.get(timer, math.inf):
            self.set(timer, when)

    def cancel(self, *timers: Timer) -> None:
        """Forget deadlines."""
        for timer in timers:
            self.when.pop(timer, None)

    def next(self) -> float:
        """Return the next deadline, infinity for none; called from any thread, without the actor's lock."""
        return min(self.when.copy().values(), default=math.inf)

    def is_due(self, timer: Timer, now: float) -> bool:
        """Return whether a deadline has passed and was not acted upon yet."""
        return self.when.get(timer, math.inf) <= now

    def pop_due(self, now: float) -> list[Timer]:
        """Return the kinds whose deadline has passed, and forget these."""
        due = [timer for timer, when in self.when.items() if when <= now]
        self.cancel(*due)
        return due
