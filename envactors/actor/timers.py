"""The timers of one actor, and the watch over its deadlines."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from envactors.actor.job import Activity
from envactors.loop import Loop, Timer
from envactors.mailbox.control_page import METHOD_NAMES, METHOD_POLICY
from envactors.options import Deadlines

# The timers of an actor:
#
# check      look at the running request
# start      the process must have started
# read       the exception of a factory or an env must have been read
# kill       the process must have ended by itself
# backoff    the next process starts
# close      the actor must have closed
TimerName: TypeAlias = Literal["check", "start", "read", "kill", "backoff", "close"]
# The shortest pause between two looks at a running request, in seconds. Limits may be shorter, or zero.
SHORTEST_PAUSE = 0.01


class Timers:
    """Named timers of an actor.

    Args:
        get_loop: Returns the loop that runs them.
        run_as_change: Runs a callback as a change of the actor.
    """

    def __init__(self, get_loop: Callable[[], Loop], run_as_change: Callable[..., None]) -> None:
        self._get_loop = get_loop
        self._run_as_change = run_as_change
        self._timers: dict[TimerName, Timer] = {}

    def set(self, name: TimerName, when: float, callback: Callable[[], object]) -> None:
        """Run a callback at a time of `time.monotonic`, in place of an earlier timer of this name."""
        timer: Timer | None = None

        def fire() -> None:
            # The timer may have been canceled while the loop waited for the lock, or was never stored, because of an
            # interrupt. Then another one may be stored, or none.
            if timer is not None and self._timers.get(name) is timer:
                del self._timers[name]
                callback()

        self.cancel(name)
        timer = self._timers[name] = self._get_loop().call_at(when, functools.partial(self._run_as_change, fire))

    def set_earliest(self, name: TimerName, when: float, callback: Callable[[], object]) -> None:
        """Set a timer, unless one of this name runs earlier."""
        timer = self._timers.get(name)
        if timer is None or when < timer.when:
            self.set(name, when, callback)

    def cancel(self, *names: TimerName) -> None:
        """Cancel the timers with these names, as far as they are set."""
        for name in names:
            if name in self._timers:
                self._timers.pop(name).cancel()


class DeadlineWatch:
    """Checks in time whether the worker is late or slow.

    There is one timer. It stays set when a step has ended, so that a loop of short steps sets no timers.

    Args:
        deadlines: The time limits of the actor.
        timers: The timers of the actor.
        check: Called when an activity may be late or slow. If it is not late, it then calls `check_again`.

    Attributes:
        shortest: The shortest deadline or slow threshold, in seconds; infinity if there is none.
        next_check_at: When the next check is due (`time.monotonic`); infinity if none is.
    """

    def __init__(self, deadlines: Deadlines, timers: Timers, check: Callable[[], object]) -> None:
        self._timers = timers
        self._check = check
        self._slow = math.inf if deadlines.slow is None else deadlines.slow
        limits = [deadline_by_code(method, deadlines) for method in METHOD_NAMES]
        self.shortest: float = min([self._slow, *(limit for limit in limits if limit is not None)])
        self.next_check_at: float = math.inf
        # When the activity began that was reported as slow last.
        self._reported = -math.inf

    def watch(self, started_at: float, deadline: float | None = None) -> None:
        """Schedule a check for an activity that starts now.

        Args:
            started_at: When it starts (`time.monotonic`).
            deadline: Its own deadline in seconds; None for those of `Deadlines`.
        """
        soonest = started_at + (self.shortest if deadline is None else min(deadline, self.shortest))
        if soonest < self.next_check_at:
            self._check_at(soonest)

    def stop(self) -> None:
        """Check nothing more of an ended process."""
        self.next_check_at = math.inf
        self._timers.cancel("check")

    def _check_at(self, when: float) -> None:
        self.next_check_at = when
        self._timers.set("check", when, self._on_time)

    def _on_time(self) -> None:
        self.next_check_at = math.inf
        self._check()

    def check_again(self, activity: Activity) -> bool:
        """Schedule the next check of an activity; return True the first time that it is slow."""
        now, begun = time.monotonic(), activity.started_at
        slow_at = begun + self._slow
        soonest = now + max(self.shortest, SHORTEST_PAUSE)
        check_at = min(soonest, activity.late_at, slow_at if slow_at > now else math.inf)
        if check_at < math.inf:
            self._check_at(check_at)

        # On a node, the start of an activity is an estimate that varies. So one that began within half of the threshold
        # after the reported one is the same activity.
        if slow_at > now or begun <= self._reported + self._slow / 2:
            return False
        self._reported = begun
        return True


def deadline_by_code(code: int, deadlines: Deadlines) -> float | None:
    """Return the deadline of what a worker runs by its control page, in seconds; None if it has none.

    Args:
        code: The method that it runs: a constant of `envactors.mailbox.control_page` that begins with METHOD.
        deadlines: The time limits of the actor.
    """
    return deadlines.policy if code == METHOD_POLICY else deadlines.of(METHOD_NAMES[code])
