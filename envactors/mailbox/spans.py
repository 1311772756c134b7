"""When steps and resets ran: a ring of the last of them, in the memory that a worker shares with its parent.

The worker writes, which takes a few hundred nanoseconds per step, and nothing is sent. The parent reads whenever it
likes. Before a span is overwritten, the worker has counted it in histograms that follow the ring. Of these there are
two copies, written in turn, so that one is whole wherever the worker is killed.
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
# Spans are counted so many at a time, and the ring has room for so many.
_FOLD = 1 << 10
# What takes longer, in seconds, was never measured.
_LONGEST = 1e9
# How often to read histograms that change all the time.
_MOST_READS = 100
SPANS_KEPT: Final = 4 * _FOLD
# Two counters come before the ring: of the spans that were ever written, and of those that were counted.
_HEADER = SPAN.itemsize
RING_SIZE: Final = _HEADER + SPANS_KEPT * SPAN.itemsize

Spans = npt.NDArray[np.void]


def measured_size(envs: int) -> int:
    """Return the size of the ring and of the histograms of so many envs, in bytes."""
    return RING_SIZE + 2 * SIZE_PER_ENV * envs


class SpanRing:
    """The ring of one worker and its histograms, for its own half and the parent's.

    Args:
        memory: As many bytes as `measured_size` says for the worker's envs, or more.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._header = memory[:_HEADER].cast("q")
        self._envs = (len(memory) - RING_SIZE) // (2 * SIZE_PER_ENV)
        # In the worker: the two counters.
        self._written = self._folded = 0

    # The worker ------------------------------------------------------------------------------------------

    def add(self, begin: float, end: float, call_id: int, position: int, method: int) -> None:
        """Write a span; the oldest one is overwritten."""
        written = self._written
        _pack(self._memory, 32 + 32 * (written % SPANS_KEPT), begin, end, call_id, position, method)
        self._written = self._header[0] = written + 1
        if written + 1 - self._folded >= _FOLD:
            self._fold()

    def _fold(self) -> None:
        """Count the next spans in the other copy of the histograms, which counts from then on."""
        counted, following = self._copy(self._folded), self._copy(self._folded + _FOLD)
        following.assign(counted)
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
        """Return the spans that were written after the first ``seen`` ones, and how many there are now in all."""
        written = self._header[0]
        first = max(seen, written - SPANS_KEPT)
        rows = self._rows(first, written)
        # The worker may be at the row after the last one that it has counted.
        overwritten = self._header[0] + 1 - SPANS_KEPT - first
        rows = rows[max(0, overwritten) :]
        return rows[_can_be_true(rows, self._envs)], written

    def histograms(self, envs: int) -> Histograms:
        """Return how long all steps and resets of so many envs have taken."""
        for _ in range(_MOST_READS):  # until the worker has not gone on to the copy that is read here
            folded = self._header[1]
            counted, start = self._copy(folded).copy(), folded % SPANS_KEPT
            _count(counted, self._all_rows()[start : start + self._header[0] - folded])
            if self._header[1] == folded:
                break
        found = Histograms(envs)
        found.add(counted)
        return found

    def extend(self, spans: Spans) -> None:
        """Write the spans of another ring."""
        count = self._header[0]
        numbers: Any = np.arange(count, count + len(spans))[-SPANS_KEPT:]
        self._all_rows()[numbers % SPANS_KEPT] = spans[-SPANS_KEPT:]
        self._header[0] = count + len(spans)

    def _rows(self, first: int, end: int) -> Spans:
        """Return a copy of the spans of these numbers."""
        return self._all_rows()[np.arange(first, end) % SPANS_KEPT]

    def _all_rows(self) -> Spans:
        return np.frombuffer(self._memory, SPAN, SPANS_KEPT, _HEADER)

    def _copy(self, folded: int) -> Histograms:
        """Return the copy of the histograms that has so many spans."""
        start = RING_SIZE + folded // _FOLD % 2 * SIZE_PER_ENV * self._envs
        return Histograms(self._envs, self._memory[start:])


def _can_be_true(spans: Spans, envs: int) -> npt.NDArray[np.bool_]:
    """Return which spans can be true: env code may overwrite the ring."""
    position, method = spans["position"], spans["method"]
    with np.errstate(all="ignore"):
        seconds = spans["end"] - spans["begin"]
        in_time = (spans["begin"] >= 0) & (seconds >= 0) & (seconds < _LONGEST)
    found: npt.NDArray[np.bool_] = in_time & (position >= 0) & (position < envs)
    found &= (method == METHOD_STEP) | (method == METHOD_RESET)
    return found


def _count(histograms: Histograms, spans: Spans) -> None:
    spans = spans[_can_be_true(spans, len(histograms))]
    histograms.count(spans["position"], spans["method"], spans["end"] - spans["begin"])
