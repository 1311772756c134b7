"""Ways to wait for workers, and which of them is the quickest at the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

# A pause between two calls, in seconds, that is short enough to look for the next one.
SHORT_PAUSE: Final = 200e-6
# From how long a call is, in seconds, a look is over long before its end; it keeps workers awake until the next call.
_LONG_CALL = 1e-3
# How long a way of waiting is tried, in calls and in seconds at least, and how many of the calls it takes to get going.
_TRIAL_CALLS, _TRIAL_SECONDS, _SETTLING = 12, 5e-3, 4
# How long the quickest is kept before the others are tried anew, in seconds: a shorter time at first, when much is only
# beginning. And in calls, so that trials of long ones do not last as long as what they are for.
_FIRST_PERIOD, _LONGEST_PERIOD, _KEPT_CALLS = 0.05, 1.0, 100
# How much of what a trial has shown is believed at once, after the first few.
_TRUST = 0.25


class Way(NamedTuple):
    """A way to wait.

    Attributes:
        workers_look: Whether a worker looks for its next call with open eyes before it sleeps.
        all_look: Whether the caller looks for the reply, too.
        apart: Whether workers wait on cores of their own, wherever the scheduler would have them.
    """

    workers_look: bool = False
    all_look: bool = False
    apart: bool = False


SLEEP, WORKERS_LOOK, ALL_LOOK, APART = Way(), Way(True), Way(True, True), Way(apart=True)
ALL_LOOK_APART = Way(True, True, True)


class Waiting:
    """Chooses the quickest way to wait for workers: which one that is gets measured, not guessed.

    Each is tried for a few calls, the quickest is kept, and about once a second the others are tried anew, at first
    more often: somebody else may have come to want the cores, or have gone. What counts is the mean over all calls,
    rare long ones included; what trials show is believed only gradually, since a few calls do not show what happens
    now and then.

    Args:
        may_look: Whether anybody may look at all.
        may_part: Whether workers may wait apart.

    Attributes:
        way: The way to wait for the next call.
    """

    def __init__(self, may_look: bool, may_part: bool = False) -> None:
        apart: Sequence[Way] = (ALL_LOOK_APART if may_look else APART,) if may_part else ()
        self._short: Sequence[Way] = (SLEEP, WORKERS_LOOK, ALL_LOOK, *apart) if may_look else (SLEEP,)
        self._long: Sequence[Way] = (SLEEP, *apart)
        self._ways: Sequence[Way] = self._short
        self._typical: dict[Way, float] = {}
        self._tried: Counter[Way] = Counter()
        self._trials: list[Way] = []
        self._sum, self._calls = 0.0, 0
        self._review, self._period, self._enough = 0.0, _FIRST_PERIOD, _TRIAL_CALLS
        self.way = self._short[-1]

    def note(self, seconds: float, now: float) -> None:
        """Takes in how long a call took, and what time it is (`time.monotonic`)."""
        self._calls += 1
        if self._calls <= _SETTLING:
            return
        self._sum += seconds
        if self._trials:
            if self._calls >= _TRIAL_CALLS and self._sum >= _TRIAL_SECONDS:
                self._finish_trial(now)
        elif now > self._review and self._calls >= self._enough:
            self._begin_trials(now)

    def _begin_trials(self, now: float) -> None:
        mean = self._sum / (self._calls - _SETTLING)
        ways = self._long if mean > _LONG_CALL else self._short
        if ways is not self._ways:
            self._ways = ways
            self._typical.clear()  # of calls of another kind
            self._tried.clear()
        self._typical[self.way] = mean
        self._trials = [way for way in ways if way is not self.way]
        self._go_on(now)

    def _finish_trial(self, now: float) -> None:
        mean = self._sum / (self._calls - _SETTLING)
        before = self._typical.get(self.way, 0.0)
        self._tried[self.way] += 1
        self._typical[self.way] = before + (mean - before) * max(_TRUST, 1 / self._tried[self.way])
        self._trials.remove(self.way)
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Tries the next way, or keeps the quickest."""
        self._sum, self._calls = 0.0, 0
        if self._trials:
            self.way = self._trials[-1]
            return
        self.way = min(self._ways, key=self._typical.__getitem__)
        self._review = now + self._period
        self._period = min(2 * self._period, _LONGEST_PERIOD)
        self._enough = min(2 * self._enough, _KEPT_CALLS)
