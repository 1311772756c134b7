"""How long steps and resets take: histograms whose buckets grow with the durations, four while these double."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

# From 2**-20 s, about a microsecond, to 2**11 s; what is shorter or longer is in the first bucket or the last.
_SHORTEST, _LONGEST = -20, 11
_PER_DOUBLING = 4
_BUCKETS = _PER_DOUBLING * (_LONGEST - _SHORTEST)
# The first bits of the shortest duration: sign, exponent (1023 for 1 s), and the two bits that number the quarters.
_FIRST_BITS = (1023 + _SHORTEST) << 2
METHOD_STEP: Final = 1
METHOD_RESET: Final = 2
# What the histograms of one env take, in bytes: for each method the buckets, the sum and the longest.
SIZE_PER_ENV: Final = 2 * 8 * (_BUCKETS + 2)


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


class Histograms:
    """How often the steps and resets of some envs took how long.

    Args:
        envs: How many envs there are.
        memory: Where to keep it, `SIZE_PER_ENV` bytes per env; None for memory of its own, zeros.
    """

    def __init__(self, envs: int, memory: memoryview | None = None) -> None:
        if memory is None:
            memory = memoryview(bytearray(SIZE_PER_ENV * envs))
        cells = 2 * envs
        self._envs = envs
        self._memory = memory[: SIZE_PER_ENV * envs]
        # By env and method: the buckets, the sum, the longest.
        self._counts: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64, cells * _BUCKETS).reshape(cells, _BUCKETS)
        sums = np.frombuffer(memory, np.float64, 2 * cells, 8 * cells * _BUCKETS)
        self._totals, self._longest = sums[:cells], sums[cells:]

    def copy(self) -> Histograms:
        """Return a copy with memory of its own."""
        return Histograms(self._envs, memoryview(bytearray(self._memory)))

    def assign(self, other: Histograms) -> None:
        """Take over what another one of the same size has counted."""
        self._memory[:] = other._memory

    def add(self, other: Histograms) -> None:
        """Count what another one has counted, of as many or of more envs."""
        cells = 2 * self._envs
        self._counts += other._counts[:cells]
        self._totals += other._totals[:cells]
        np.maximum(self._longest, other._longest[:cells], out=self._longest)

    def count(
        self, envs: npt.NDArray[np.int32], methods: npt.NDArray[np.int32], seconds: npt.NDArray[np.float64]
    ) -> None:
        """Count durations.

        Args:
            envs: Of which env each is.
            methods: `METHOD_STEP` or `METHOD_RESET` for each.
            seconds: Each in seconds.
        """
        cells = 2 * envs + methods - METHOD_STEP
        buckets = (seconds.view(np.int64) >> 50) - _FIRST_BITS  # the exponent, and the two bits after it
        np.add.at(self._counts, (cells, np.clip(buckets, 0, _BUCKETS - 1)), 1)
        np.add.at(self._totals, cells, seconds)
        np.maximum.at(self._longest, cells, seconds)

    def durations(self) -> list[tuple[Durations, Durations]]:
        """Return what follows from it for the steps and the resets of each env."""
        return [(self._durations(2 * env), self._durations(2 * env + 1)) for env in range(self._envs)]

    def _durations(self, cell: int) -> Durations:
        ends = self._counts[cell].cumsum()
        count, longest = int(ends[-1]), float(self._longest[cell])
        if not count:
            return Durations()
        p50, p99 = (min(self._quantile(cell, ends, share), longest) for share in (0.5, 0.99))
        return Durations(count, float(self._totals[cell]), p50, p99, longest)

    def _quantile(self, cell: int, ends: npt.NDArray[np.int64], share: float) -> float:
        wanted = share * float(ends[-1])
        bucket = int(np.searchsorted(ends, wanted))
        low, high, inside = _edge(bucket), _edge(bucket + 1), int(self._counts[cell, bucket])
        return low + (high - low) * (1 - (float(ends[bucket]) - wanted) / inside)

    def tobytes(self) -> bytes:
        """Return all of it, as the memory for as many envs in another process."""
        return self._memory.tobytes()


def _edge(bucket: int) -> float:
    """Return the shortest duration of a bucket."""
    doublings, part = divmod(bucket, _PER_DOUBLING)
    return math.ldexp(1 + part / _PER_DOUBLING, _SHORTEST + doublings)
