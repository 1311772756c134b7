"""A ring of the last steps and resets of a worker, with their times, in the memory that it shares with its parent.

The worker writes a span in a few hundred nanoseconds and sends nothing; the parent reads when it wants to. Before a
span is overwritten, the worker counts it in the histograms that follow the ring. There are two copies of these, written
in turn, so that one is always consistent, even if the worker is killed. Who switches this on is
`envactors.mailbox.control_page`.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envactors.mailbox.durations import METHOD_RESET, METHOD_STEP, SIZE_PER_ENV, Histograms

# One step or reset: when it began and ended (`time.monotonic`), its call id, the position of its env in the actor, and
# `envactors.mailbox.durations.METHOD_STEP` or ``METHOD_RESET``.
SPAN: Final = np.dtype([("begin", "f8"), ("end", "f8"), ("call_id", "i8"), ("position", "i4"), ("method", "i4")])
_pack = struct.Struct("ddqii").pack_into
# How many spans are counted at a time.
_FOLD = 1 << 10
# How many spans the ring has room for.
SPANS_KEPT: Final = 4 * _FOLD
# In seconds. A longer span cannot be true.
_LONGEST = 1e9
# How many times to read histograms that keep changing.
_MOST_READS = 100
# Two counters come before the ring: how many spans were ever written, and how many of them were counted.
_HEADER = SPAN.itemsize
RING_SIZE: Final = _HEADER + SPANS_KEPT * SPAN.itemsize

Spans = npt.NDArray[np.void]


def measured_size(envs: int) -> int:
    """Return the size of the ring and of the histograms of ``envs`` envs, in bytes."""
    return RING_SIZE + 2 * SIZE_PER_ENV * envs


class SpanRing:
    """The ring and the histograms of one worker, as the worker and its parent use them.

    Args:
        memory: At least the bytes that `measured_size` returns for the worker's envs.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._header = memory[:_HEADER].cast("q")
        self._envs = (len(memory) - RING_SIZE) // (2 * SIZE_PER_ENV)
        # The worker's own copies of the two counters.
        self._written = 0
        self._folded = 0

    # The worker ------------------------------------------------------------------------------------------

    def add(self, begin: float, end: float, call_id: int, position: int, method: int) -> None:
        """Write a span over the oldest one."""
        written = self._written
        _pack(self._memory, _HEADER + _HEADER * (written % SPANS_KEPT), begin, end, call_id, position, method)
        self._written = self._header[0] = written + 1
        if written + 1 - self._folded >= _FOLD:
            self._fold()

    def _fold(self) -> None:
        """Count the next spans in the copy of the histograms that is not in use, and switch to it."""
        following = self._copy(self._folded + _FOLD)
        following.assign(self._copy(self._folded))
        start = self._folded % SPANS_KEPT
        _count(following, self._all_rows()[start : start + _FOLD])
        self._folded += _FOLD
        self._header[1] = self._folded

    # The parent ------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything, before the worker writes for the first time."""
        self._memory[:_HEADER] = bytes(_HEADER)
        self._memory[RING_SIZE:] = bytes(len(self._memory) - RING_SIZE)

    @property
    def written(self) -> int:
        """How many spans were ever written."""
        return int(self._header[0])

    def read(self, seen: int) -> tuple[Spans, int]:
        """Return the spans after the first ``seen`` ones, and how many were ever written."""
        written = self._header[0]
        first = max(seen, written - SPANS_KEPT)
        rows = self._all_rows()[np.arange(first, written) % SPANS_KEPT]
        # The worker may be writing the span after the last one that it has counted.
        overwritten = self._header[0] + 1 - SPANS_KEPT - first
        rows = rows[max(0, overwritten) :]
        return rows[_can_be_true(rows, self._envs)], written

    def histograms(self, envs: int) -> Histograms:
        """Return the histograms of the first ``envs`` envs, all spans included."""
        for _ in range(_MOST_READS):  # until the worker did not switch to the other copy meanwhile
            folded = self._header[1]
            counted = self._copy(folded).copy()
            start = folded % SPANS_KEPT
            _count(counted, self._all_rows()[start : start + self._header[0] - folded])
            if self._header[1] == folded:
                break
        found = Histograms(envs)
        found.add(counted)
        return found

    def extend(self, spans: Spans) -> None:
        """Write the spans of another ring."""
        written = self._header[0]
        places: Any = np.arange(written, written + len(spans))[-SPANS_KEPT:]
        self._all_rows()[places % SPANS_KEPT] = spans[-SPANS_KEPT:]
        self._header[0] = written + len(spans)

    def _all_rows(self) -> Spans:
        return np.frombuffer(self._memory, SPAN, SPANS_KEPT, _HEADER)

    def _copy(self, folded: int) -> Histograms:
        """Return the copy of the histograms in which ``folded`` spans are counted."""
        start = RING_SIZE + folded // _FOLD % 2 * SIZE_PER_ENV * self._envs
        return Histograms(self._envs, self._memory[start:])


def _can_be_true(spans: Spans, envs: int) -> npt.NDArray[np.bool_]:
    """Return which spans can be true: env code may overwrite the ring."""
    position = spans["position"]
    method = spans["method"]
    with np.errstate(all="ignore"):
        seconds = spans["end"] - spans["begin"]
        found: npt.NDArray[np.bool_] = (spans["begin"] >= 0) & (seconds >= 0) & (seconds < _LONGEST)
    found &= (position >= 0) & (position < envs)
    found &= (method == METHOD_STEP) | (method == METHOD_RESET)
    return found


def _count(histograms: Histograms, spans: Spans) -> None:
    spans = spans[_can_be_true(spans, len(histograms))]
    histograms.count(spans["position"], spans["method"], spans["end"] - spans["begin"])
