"""Histograms of how long steps and resets take.

Four buckets cover each doubling of the duration. What is measured, and when, is up to `envactors.mailbox.spans`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

# Powers of 2, in seconds: from a microsecond to half an hour. Other durations count in the first or last bucket.
_SHORTEST = -20
_LONGEST = 11
_PER_DOUBLING = 4
_BUCKETS = _PER_DOUBLING * (_LONGEST - _SHORTEST)
# In seconds. A longer duration cannot be true.
LONGEST: Final = 1e9
METHOD_STEP: Final = 1
METHOD_RESET: Final = 2
# The shortest duration of each bucket, and of what is longer than the last one.
_EDGES = np.ldexp(
    1 + np.arange(_BUCKETS + 1) % _PER_DOUBLING / _PER_DOUBLING, _SHORTEST + np.arange(_BUCKETS + 1) // _PER_DOUBLING
)
# How many of a float's 52 bits of fraction do not tell buckets apart, and the other bits of the shortest duration.
_FRACTION_BITS = 50
_FIRST = _PER_DOUBLING * (1023 + _SHORTEST)
# A cell, of one env and method: the buckets, the total and the longest duration, 8 bytes each.
_CELL = _BUCKETS + 2
# What the histograms of one env take, in bytes.
SIZE_PER_ENV: Final = 2 * 8 * _CELL


class Durations(NamedTuple):
    """Durations of the steps or resets of one env, in seconds.

    Attributes:
        count: Number of steps or resets.
        total: Sum of the durations.
        p50: The median, to within about 10 %.
        p99: The 99th percentile, to within about 10 %.
        max: The longest duration.
    """

    count: int = 0  # type: ignore[assignment] # a tuple's method of this name is of no use here
    total: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Histograms:
    """The histograms of some envs, one for steps and one for resets of each.

    Args:
        envs: How many envs there are.
        memory: At least `SIZE_PER_ENV` bytes per env; None to allocate them, as zeros.

    Attributes:
        cells: One row for the steps and one for the resets of each env.
    """

    def __init__(self, envs: int, memory: memoryview | None = None) -> None:
        if memory is None:
            memory = memoryview(bytearray(SIZE_PER_ENV * envs))
        self.cells: npt.NDArray[np.float64] = np.frombuffer(memory, np.float64, 2 * envs * _CELL).reshape(
            2 * envs, _CELL
        )
        self._counts: npt.NDArray[np.int64] = self.cells[:, :_BUCKETS].view(np.int64)
        self._totals = self.cells[:, _BUCKETS]
        self._longest = self.cells[:, _BUCKETS + 1]
        # All cells one after the other; writing one number through a memoryview takes a third of an array's time.
        self._seconds: Any = self.cells.reshape(-1).data
        self._numbers: Any = self.cells.view(np.int64).reshape(-1).data
        # The last duration, and its bits.
        self._last: Any = memoryview(bytearray(8)).cast("d")
        self._last_bits: Any = self._last.cast("B").cast("q")

    @classmethod
    def joined(cls, groups: Sequence[Histograms]) -> Histograms:
        """Return the histograms of the envs of all groups, one after the other."""
        found = cls(sum(map(len, groups)))
        found.cells[:] = np.concatenate([group.cells for group in groups])
        return found

    def __len__(self) -> int:
        return len(self.cells) // 2

    def copy(self) -> Histograms:
        """Return a copy."""
        return self.joined([self])

    def add(self, other: Histograms) -> None:
        """Count what another one has counted, of as many envs or more."""
        count = len(self.cells)
        self._counts += other._counts[:count]
        self._totals += other._totals[:count]
        np.maximum(self._longest, other._longest[:count], out=self._longest)

    def count(self, env: int, method: int, seconds: float) -> None:
        """Count a duration, if it can be true.

        Args:
            env: The position of the env.
            method: `METHOD_STEP` or `METHOD_RESET`.
            seconds: The duration.
        """
        if 0.0 <= seconds < LONGEST:
            cell = _CELL * (2 * env + (method == METHOD_RESET))
            self._last[0] = seconds
            # The exponent of a float and the first bits of its fraction: four values for each doubling.
            bucket = (self._last_bits[0] >> _FRACTION_BITS) - _FIRST
            self._numbers[cell + (bucket if 0 <= bucket < _BUCKETS else 0 if bucket < 0 else _BUCKETS - 1)] += 1
            total = cell + _BUCKETS
            self._seconds[total] += seconds
            if seconds > self._seconds[total + 1]:  # noqa: PLR1730 # `max` would be a call
                self._seconds[total + 1] = seconds

    def durations(self) -> list[tuple[Durations, Durations]]:
        """Summarize the steps and the resets of each env."""
        ends = self._counts.cumsum(axis=1)
        quantiles = [self._quantiles(ends, share).tolist() for share in (0.5, 0.99)]
        columns = ends[:, -1].tolist(), self._totals.tolist(), *quantiles, self._longest.tolist()
        cells = [Durations(*cell) for cell in zip(*columns, strict=True)]
        return list(zip(cells[::2], cells[1::2], strict=True))

    def _quantiles(self, ends: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.float64]:
        cells, wanted = np.arange(len(ends)), share * ends[:, -1]
        buckets = np.minimum((ends < wanted[:, np.newaxis]).sum(axis=1), _BUCKETS - 1)
        low, high = _EDGES[buckets], _EDGES[buckets + 1]
        inside = np.maximum(self._counts[cells, buckets], 1)
        quantiles: npt.NDArray[np.float64] = low + (high - low) * (1 - (ends[cells, buckets] - wanted) / inside)
        return np.minimum(quantiles, self._longest)

    def tobytes(self) -> bytes:
        """Return the content as bytes, which can be the memory of histograms for as many envs in another process."""
        return self.cells.tobytes()
