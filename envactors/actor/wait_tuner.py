"""How caller and workers wait for each other, and which strategy is the fastest at the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

# A pause between two calls, in seconds, that is short enough for the worker to spin through.
SHORT_PAUSE: Final = 200e-6
# Calls longer than this (seconds) outlast the spin window, which then only keeps workers awake until the next call.
_LONG_CALL = 1e-3
# The length of a trial, in calls and in seconds at least, and how many of its first calls are not counted.
_TRIAL_CALLS, _TRIAL_SECONDS, _SETTLING = 12, 5e-3, 4
# How long the fastest strategy is kept before the others are tried again, in seconds, at first and at most; and in
# calls, so that trials of long calls do not take as long as what they are for.
_FIRST_PERIOD, _LONGEST_PERIOD, _KEPT_CALLS = 0.05, 1.0, 100
# The weight of a new trial against the earlier ones of its strategy.
_TRUST = 0.25


class WaitStrategy(NamedTuple):
    """How caller and workers wait for each other.

    Attributes:
        workers_spin: Whether a worker spins for its next request before it sleeps.
        both_spin: Whether the caller spins for the reply, too.
    """

    workers_spin: bool = False
    both_spin: bool = False


SLEEP, WORKERS_SPIN, BOTH_SPIN = WaitStrategy(), WaitStrategy(True), WaitStrategy(True, True)


class WaitTuner:
    """Chooses the fastest wait strategy by measurement.

    Each strategy is tried for a few calls, the fastest is kept, and about once per second (at first more often) the
    others are tried again, since other programs come and go. What counts is the mean over all calls, rare long ones
    included; a trial moves an estimate only gradually, since a few calls do not show what happens rarely.

    Args:
        may_spin: Whether anybody may spin at all.

    Attributes:
        strategy: The strategy for the next call.
        recorded: When the last recorded call ended (`time.monotonic`).
    """

    def __init__(self, may_spin: bool) -> None:
        # The strategies for short and for long calls.
        self._short: Sequence[WaitStrategy] = (SLEEP, WORKERS_SPIN, BOTH_SPIN) if may_spin else (SLEEP,)
        self._long: Sequence[WaitStrategy] = (SLEEP, WORKERS_SPIN) if may_spin else (SLEEP,)
        self._candidates: Sequence[WaitStrategy] = self._short
        # The estimated seconds per call of each strategy, and how many trials it has had.
        self._estimates: dict[WaitStrategy, float] = {}
        self._trial_counts: Counter[WaitStrategy] = Counter()
        # The strategies that are still to be tried, the present one last; empty while the fastest is kept.
        self._trials: list[WaitStrategy] = []
        # Of the present strategy: the seconds of its calls after the first ones, and the number of calls.
        self._sum, self._calls = 0.0, 0
        # When, and after how many calls, the next trials begin.
        self._next_trials, self._period, self._enough_calls = 0.0, _FIRST_PERIOD, _TRIAL_CALLS
        self.strategy: WaitStrategy = self._short[-1]
        self.recorded: float = 0.0

    def record(self, seconds: float, now: float) -> None:
        """Record how long a call took, and when it ended (`time.monotonic`)."""
        self.recorded = now
        self._calls += 1
        if self._calls <= _SETTLING:
            return
        self._sum += seconds
        if self._trials:
            if self._calls >= _TRIAL_CALLS and self._sum >= _TRIAL_SECONDS:
                self._finish_trial(now)
        elif now > self._next_trials and self._calls >= self._enough_calls:
            self._begin_trials(now)

    def _begin_trials(self, now: float) -> None:
        mean = self._sum / (self._calls - _SETTLING)
        candidates = self._long if mean > _LONG_CALL else self._short
        if candidates is not self._candidates:
            self._candidates = candidates
            self._estimates.clear()  # of calls of another length
            self._trial_counts.clear()
        self._estimates[self.strategy] = mean
        self._trials = [strategy for strategy in candidates if strategy is not self.strategy]
        self._choose_next(now)

    def _finish_trial(self, now: float) -> None:
        mean, tried = self._sum / (self._calls - _SETTLING), self.strategy
        before = self._estimates.get(tried, 0.0)
        self._trial_counts[tried] += 1
        self._estimates[tried] = before + (mean - before) * max(_TRUST, 1 / self._trial_counts[tried])
        if tried in self._trials:  # not if an interrupt has kept the next one from being chosen
            self._trials.remove(tried)
        self._choose_next(now)

    def _choose_next(self, now: float) -> None:
        """Try the next strategy, or keep the fastest."""
        self._sum, self._calls = 0.0, 0
        if self._trials:
            self.strategy = self._trials[-1]
            return
        self.strategy = min(self._candidates, key=self._estimates.__getitem__)
        self._next_trials = now + self._period
        self._period = min(2 * self._period, _LONGEST_PERIOD)
        self._enough_calls = min(2 * self._enough_calls, _KEPT_CALLS)
