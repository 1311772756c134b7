"""Histograms of how long steps and resets take.

Four buckets cover each doubling of the duration. What is measured, and when, is up to `envactors.mailbox.spans`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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
# The histogram of one env's steps or resets. Histograms of some envs are an array of shape (envs, 2) of these.
HISTOGRAM: Final = np.dtype([("counts", "i8", _BUCKETS), ("last", "f8"), ("total", "f8"), ("longest", "f8")])
_CELLS = HISTOGRAM.itemsize // 8

Histograms = npt.NDArray[np.void]


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


def count(counts: memoryview[int], times: memoryview[float], env: int, method: int, seconds: float) -> None:
    """Count a duration, if it can be true.

    Writing one number through a memoryview takes a third of an array's time.

    Args:
        counts: The memory of the histograms as integers of 64 bits.
        times: The same memory as floats.
        env: The position of the env.
        method: `METHOD_STEP` or `METHOD_RESET`.
        seconds: The duration.
    """
    if 0.0 <= seconds < LONGEST:
        begin = _CELLS * (2 * env + (method == METHOD_RESET))
        last = begin + _BUCKETS
        times[last] = seconds
        # The exponent of a float and the first bits of its fraction: four values for each doubling.
        bucket = (counts[last] >> _FRACTION_BITS) - _FIRST
        counts[begin + (bucket if 0 <= bucket < _BUCKETS else 0 if bucket < 0 else _BUCKETS - 1)] += 1
        times[last + 1] += seconds
        if seconds > times[last + 2]:  # noqa: PLR1730 # `max` would be a call
            times[last + 2] = seconds


def merge(histograms: Histograms, others: Histograms) -> None:
    """Count what others have counted, too."""
    for name in ("counts", "total"):
        histograms[name] += others[name]
    np.maximum(histograms["longest"], others["longest"], out=histograms["longest"])


def summarize(histograms: Histograms) -> list[tuple[Durations, Durations]]:
    """Return the durations of the steps and the resets of each env."""
    cells = histograms.reshape(-1)
    ends = cells["counts"].cumsum(axis=1)
    quantiles = [_quantiles(cells, ends, share).tolist() for share in (0.5, 0.99)]
    columns = ends[:, -1].tolist(), cells["total"].tolist(), *quantiles, cells["longest"].tolist()
    durations = [Durations(*cell) for cell in zip(*columns, strict=True)]
    return list(zip(durations[::2], durations[1::2], strict=True))


def _quantiles(cells: Histograms, ends: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.float64]:
    each, wanted = np.arange(len(cells)), share * ends[:, -1]
    buckets = np.minimum((ends < wanted[:, np.newaxis]).sum(axis=1), _BUCKETS - 1)
    low, high = _EDGES[buckets], _EDGES[buckets + 1]
    inside = np.maximum(cells["counts"][each, buckets], 1)
    quantiles: npt.NDArray[np.float64] = low + (high - low) * (1 - (ends[each, buckets] - wanted) / inside)
    np.minimum(quantiles, cells["longest"], out=quantiles)
    return quantiles
