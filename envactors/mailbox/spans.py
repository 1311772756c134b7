"""A ring of the last steps and resets of a worker, with their times, in the memory that it shares with its parent.

The worker writes a span in about a microsecond and sends nothing; the parent reads when it wants to. The worker also
counts each span in the histograms that follow the ring. Who switches this on is `envactors.mailbox.control_page`.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envactors.mailbox.durations import HISTOGRAM, LONGEST, METHOD_RESET, METHOD_STEP, Histograms, count

# One step or reset: when it began and ended (`time.monotonic`), its call id, the position of its env in the actor, and
# `envactors.mailbox.durations.METHOD_STEP` or ``METHOD_RESET``.
SPAN: Final = np.dtype([("begin", "f8"), ("end", "f8"), ("call_id", "i8"), ("position", "i4"), ("method", "i4")])
_pack = struct.Struct("ddqii").pack_into
# How many spans the ring has room for.
SPANS_KEPT: Final = 1 << 12
# A counter comes before the ring: how many spans were ever written.
_HEADER = SPAN.itemsize
RING_SIZE: Final = _HEADER + SPANS_KEPT * SPAN.itemsize

Spans = npt.NDArray[np.void]


def measured_size(envs: int) -> int:
    """Return the size of the ring and of the histograms of ``envs`` envs, in bytes."""
    return RING_SIZE + 2 * HISTOGRAM.itemsize * envs


class SpanRing:
    """The ring and the histograms of one worker, as the worker and its parent use them.

    Args:
        memory: The bytes that `measured_size` returns for the worker's envs.

    Attributes:
        histograms: The histograms.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._header = memory[:_HEADER].cast("q")
        rest = memory[RING_SIZE:]
        self.histograms: Histograms = np.frombuffer(rest, HISTOGRAM).reshape(-1, 2)
        self._counts: memoryview[int] = rest.cast("q")
        self._times: memoryview[float] = rest.cast("d")
        # The worker's own copy of the counter.
        self._written = 0

    # The worker ------------------------------------------------------------------------------------------

    def add(self, begin: float, end: float, call_id: int, position: int, method: int) -> None:
        """Write a span over the oldest one, and count it."""
        written = self._written
        _pack(self._memory, _HEADER + _HEADER * (written % SPANS_KEPT), begin, end, call_id, position, method)
        self._written = self._header[0] = written + 1
        count(self._counts, self._times, position, method, end - begin)

    # The parent ------------------------------------------------------------------------------------------

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
        return rows[_can_be_true(rows, len(self.histograms))], written

    def extend(self, spans: Spans) -> None:
        """Write the spans of another ring."""
        written = self._header[0]
        places: Any = np.arange(written, written + len(spans))[-SPANS_KEPT:]
        self._all_rows()[places % SPANS_KEPT] = spans[-SPANS_KEPT:]
        self._header[0] = written + len(spans)

    def _all_rows(self) -> Spans:
        return np.frombuffer(self._memory, SPAN, SPANS_KEPT, _HEADER)


def _can_be_true(spans: Spans, envs: int) -> npt.NDArray[np.bool_]:
    """Return which spans can be true: env code may overwrite the ring."""
    position = spans["position"]
    method = spans["method"]
    with np.errstate(all="ignore"):
        seconds = spans["end"] - spans["begin"]
        found: npt.NDArray[np.bool_] = (spans["begin"] >= 0) & (seconds >= 0) & (seconds < LONGEST)
    found &= (position >= 0) & (position < envs)
    found &= (method == METHOD_STEP) | (method == METHOD_RESET)
    return found
