"""How long steps and resets take: a histogram per env and method, in the memory that a worker shares with its parent.

The buckets grow with the durations, four of them while these double, so that counting takes no more than a few hundred
nanoseconds and nothing is sent. The parent reads whenever it likes: a count that is one behind does no harm.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# From 2**-20 s, about a microsecond, to 2**11 s; what is shorter or longer is in the first bucket or the last.
_SHORTEST, _LONGEST = -20, 11
_PER_DOUBLING = 4
_BUCKETS = _PER_DOUBLING * (_LONGEST - _SHORTEST)
# The first bits of the shortest duration: sign, exponent (1023 for 1 s), and the two bits that number the quarters.
_FIRST_BITS = (1023 + _SHORTEST) << 2
# Behind the buckets: the sum of all durations, and the longest one.
_TOTAL, _MOST = _BUCKETS, _BUCKETS + 1
_WORDS = _BUCKETS + 2
# Steps and resets.
_METHODS = 2


def room_for(envs: int) -> int:
    """Return the size of the histograms of so many envs, in bytes."""
    return 8 * _WORDS * _METHODS * envs


class Durations(NamedTuple):
    """How long the steps of one env have taken, or its resets, in seconds.

    Attributes:
        count: How many there were.
        total: How long they took together.
        p50: The median, to about a tenth.
        p99: What 99 of a hundred did not exceed, to about a tenth.
        max: The longest.
    """

    count: int = 0  # type: ignore[assignment] # a tuple's method of this name is of no use here
    total: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Histogram(NamedTuple):
    """How often something took how long: how many durations by bucket, their sum and the longest, in seconds."""

    counts: list[int] = [0] * _BUCKETS
    total: float = 0.0
    longest: float = 0.0

    def plus(self, other: Histogram) -> Histogram:
        """Return what both have counted."""
        counts = [one + another for one, another in zip(self.counts, other.counts, strict=True)]
        return Histogram(counts, self.total + other.total, max(self.longest, other.longest))

    def durations(self) -> Durations:
        """Return what follows from it."""
        return Durations(sum(self.counts), self.total, self._quantile(0.5), self._quantile(0.99), self.longest)

    def _quantile(self, share: float) -> float:
        wanted, seen = share * sum(self.counts), 0
        for bucket, count in enumerate(self.counts):
            if count and seen + count >= wanted:
                low, high = _edge(bucket), _edge(bucket + 1)
                return min(low + (high - low) * (wanted - seen) / count, self.longest)
            seen += count
        return 0.0


def _edge(bucket: int) -> float:
    """Return the shortest duration of a bucket."""
    doublings, part = divmod(bucket, _PER_DOUBLING)
    return math.ldexp(1 + part / _PER_DOUBLING, _SHORTEST + doublings)


class DurationCounters:
    """The histograms of one worker's envs, for its own half and the parent's.

    Args:
        counters: The memory, as integers of 64 bits.
        times: The same memory, as floats of 64 bits.
        first: Where the histograms begin in it, in words.
    """

    def __init__(self, counters: memoryview[int], times: memoryview[float], first: int) -> None:
        self._counters = counters
        self._times = times
        self._first = first
        # One number, as a float and as the bits that it consists of.
        number = memoryview(bytearray(8))
        self._float, self._bits = number.cast("d"), number.cast("q")

    def add(self, position: int, reset: bool, seconds: float) -> None:
        """Count a step or a reset of the env at this position of the actor."""
        self._float[0] = seconds
        # The exponent, and the two bits after it; logarithms take five times as long.
        bucket = (self._bits[0] >> 50) - _FIRST_BITS
        if not 0 <= bucket < _BUCKETS:
            bucket = 0 if bucket < 0 else _BUCKETS - 1
        start, times = self._first + (_METHODS * position + reset) * _WORDS, self._times
        self._counters[start + bucket] += 1
        times[start + _TOTAL] += seconds
        if seconds > times[start + _MOST]:
            times[start + _MOST] = seconds

    def snapshot(self) -> bytes:
        """Return all that was counted, for another copy of the memory."""
        return self._counters[self._first :].tobytes()

    def restore(self, counted: bytes) -> None:
        """Take over the `snapshot` of another copy, which may have room for more envs."""
        room = len(self._counters) - self._first
        self._counters[self._first :] = memoryview(counted).cast("q")[:room]

    def read(self, position: int, reset: bool) -> Histogram:
        """Return what was counted for the env at this position."""
        start = self._first + (_METHODS * position + reset) * _WORDS
        times, end = self._times, start + _BUCKETS
        return Histogram(self._counters[start:end].tolist(), times[start + _TOTAL], times[start + _MOST])


class StepTimes:
    """What the envs of an actor took in all its processes.

    Args:
        envs: How many envs there are.
    """

    def __init__(self, envs: int) -> None:
        # Of each env: its steps, its resets.
        self._histograms = [(Histogram(), Histogram())] * envs

    def add(self, counters: DurationCounters) -> None:
        """Count what a process has counted."""
        self._histograms = self._with(counters)

    def durations(self, present: DurationCounters | None) -> list[tuple[Durations, Durations]]:
        """Return the durations of each env's steps and resets, with what the present process has counted so far."""
        histograms = self._histograms if present is None else self._with(present)
        return [(steps.durations(), resets.durations()) for steps, resets in histograms]

    def _with(self, counters: DurationCounters) -> list[tuple[Histogram, Histogram]]:
        return [
            (steps.plus(counters.read(position, False)), resets.plus(counters.read(position, True)))
            for position, (steps, resets) in enumerate(self._histograms)
        ]
