"""How long steps and resets take: histograms whose buckets grow with the durations, four while these double."""

from __future__ import annotations

from collections.abc import Sequence
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
# The shortest duration of each bucket, and what is longer than the last one.
_EDGES = np.ldexp(
    1 + np.arange(_BUCKETS + 1) % _PER_DOUBLING / _PER_DOUBLING, _SHORTEST + np.arange(_BUCKETS + 1) // _PER_DOUBLING
)
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

    @classmethod
    def joined(cls, parts: Sequence[Histograms]) -> Histograms:
        """Return the histograms of the envs of all parts, one after the other."""
        found, first = cls(sum(map(len, parts))), 0
        for part in parts:
            found.assign(part, first)
            first += len(part)
        return found

    def __len__(self) -> int:
        return self._envs

    def copy(self) -> Histograms:
        """Return a copy with memory of its own."""
        return Histograms(self._envs, memoryview(bytearray(self._memory)))

    def assign(self, other: Histograms, first: int = 0) -> None:
        """Take over what another one has counted, whose first env has this number here."""
        cells = slice(2 * first, 2 * (first + len(other)))
        self._counts[cells], self._totals[cells], self._longest[cells] = other._counts, other._totals, other._longest

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
        """Return all of it, as the memory for as many envs in another process."""
        return self._memory.tobytes()
