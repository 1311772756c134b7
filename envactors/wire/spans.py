"""When steps and resets ran: a ring of the last of them, in the memory that a worker shares with its parent.

The worker writes and the parent reads, whenever it likes; what was overwritten meanwhile is left out. Nothing is sent.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

# One step or reset: when it began and ended (`time.monotonic`), its call id, the position of its env in the actor, and
# 1 for a reset.
SPAN: Final = np.dtype([("begin", "f8"), ("end", "f8"), ("call_id", "i8"), ("position", "i4"), ("reset", "i4")])
_WORDS = SPAN.itemsize // 8
# The first row of the ring only has the number of spans that were ever written; whole pages altogether.
RING_SIZE: Final = 1 << 17
_ROWS = RING_SIZE // SPAN.itemsize - 1

Spans = npt.NDArray[np.void]


class SpanRing:
    """The ring of one worker, for its own half and the parent's.

    Args:
        memory: As many bytes as `RING_SIZE` says.
    """

    def __init__(self, memory: memoryview) -> None:
        self._counters = memory.cast("q")
        self._times = memory.cast("d")
        self._memory = memory

    def add(self, position: int, reset: bool, call_id: int, begin: float, end: float) -> None:
        """Write a span; the oldest one is overwritten."""
        counters, times = self._counters, self._times
        count = counters[0]
        at = _WORDS * (1 + count % _ROWS)
        times[at] = begin
        times[at + 1] = end
        counters[at + 2] = call_id
        counters[at + 3] = position | reset << 32
        counters[0] = count + 1

    def read(self, seen: int) -> tuple[Spans, int]:
        """Return the spans that were written after the first ``seen`` ones, and how many there are now in all."""
        count: int = self._counters[0]
        numbers: Any = np.arange(max(seen, count - _ROWS), count)
        rows = np.frombuffer(self._memory, SPAN)[1 + numbers % _ROWS]
        # The worker may be at the row after the last one that it has counted.
        overwritten = self._counters[0] + 1 - _ROWS
        return rows[numbers >= overwritten], count

    def clear(self) -> None:
        """Forget all spans."""
        self._counters[0] = 0

    def snapshot(self) -> bytes:
        """Return all of it, for another copy of the memory."""
        return self._memory.tobytes()

    def restore(self, written: bytes) -> None:
        """Take over the `snapshot` of another copy."""
        self._memory[:] = written
