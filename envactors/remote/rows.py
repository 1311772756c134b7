"""Rows of a slab on their way between the caller's copy and that of a node.

Caller and node each have a slab of the same layout. A request is copied from the caller's slab into the node's, and
runs there like any request in shared memory. Its result is copied back, numbers last.
"""

from __future__ import annotations

import itertools
import mmap
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from envactors.backends.base import RowMemory
from envactors.mailbox.info_codec import INLINE_INFO, Infos
from envactors.mailbox.slab import BUFFER, INLINE_INFO_ROOM, Layout, Slab
from envactors.remote import records
from envactors.system.memory import check_room, next_page

# The first row of a run, the number of rows, and the buffer with their observations.
_HEAD = struct.Struct("<III")
# How many runs are cached; an actor whose results arrive together has one.
_MOST_RUNS = 512


class Run(NamedTuple):
    """The memory of consecutive rows in all arrays.

    Attributes:
        request: Their requests, array by array.
        result: Their results, array by array, except for arrays with buffers.
        buffers: The arrays of their results that have buffers, for each buffer.
        numbers: The numbers of their results.
        when: When their results were completed.
    """

    request: list[memoryview]
    result: list[memoryview]
    buffers: tuple[list[memoryview], list[memoryview]]
    numbers: memoryview
    when: npt.NDArray[np.float64]


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


class MirroredRows:
    """The rows of one slab, which are sent as runs: the plain memory of each array.

    Args:
        slab: The slab.
    """

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self._posted_ids = slab.posted_ids.data
        self._written_ids = slab.written_ids.data
        self._ops = slab.ops.data
        self._encodings = slab.info_encoding.data
        self._sizes = slab.inline_info_sizes.data
        self._runs: dict[tuple[int, int], Run] = {}
        run = self._make_run(slice(0, 1))
        # The size of one env's request, and the largest size of its result, in bytes.
        self.request_size: int = _HEAD.size + sum(map(len, run.request))
        inline = len(slab.inline_info_rooms[0])
        self.result_size: int = _HEAD.size + sum(map(len, (run.numbers, *run.result, *run.buffers[0]))) + inline

    def _run(self, first: int, count: int) -> Run:
        run = self._runs.get((first, count))
        if run is None:
            if len(self._runs) >= _MOST_RUNS:
                self._runs.clear()
            run = self._runs[first, count] = self._make_run(slice(first, first + count))
        return run

    def _make_run(self, rows: slice) -> Run:
        slab = self.slab
        # Numbers come last: from then on a worker may run the row.
        request: list[npt.NDArray[Any]] = [slab.ops, slab.seeds, *slab.actions, slab.posted_ids]
        columns = (slab.checksums, slab.terminated, slab.truncated, slab.rewards, *slab.observations)
        stacked = [array for array in columns if array is not None]
        return Run(
            [_bytes_of(array[rows]) for array in request],
            [_bytes_of(array[rows]) for array in (slab.info_encoding, slab.inline_info_sizes)],
            ([_bytes_of(array[0, rows]) for array in stacked], [_bytes_of(array[1, rows]) for array in stacked]),
            _bytes_of(slab.written_ids[rows]),
            slab.when[rows],
        )

    def _split(self, rows: Sequence[int], buffers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (first row, count, buffer) for the runs of these rows with observations in the same buffer."""
        first = rows[0]
        buffer = buffers[0]
        count = 0
        for row, other in zip(rows, buffers, strict=True):
            if row != first + count or other != buffer:
                yield first, count, buffer
                first = row
                buffer = other
                count = 0
            count += 1
        yield first, count, buffer

    def pack_requests(self, rows: Sequence[int]) -> bytes:
        """Return the requests of these envs."""
        parts: list[bytes | memoryview] = []
        for first, count, _ in self._split(rows, [0] * len(rows)):
            parts.append(_HEAD.pack(first, count, 0))
            parts += self._run(first, count).request
        return b"".join(parts)

    def apply_requests(self, payload: bytes | bytearray | memoryview) -> list[int]:
        """Write requests into the node's slab; return the envs that they are for."""
        view = memoryview(payload)
        at = 0
        rows = list[int]()
        while at < len(view):
            first, count, _ = _HEAD.unpack_from(view, at)
            run = self._run(first, count)
            at = _read(view, at + _HEAD.size, run.request)
            rows += range(first, first + count)
        return rows

    def complete(self, rows: Sequence[int]) -> list[int]:
        """Return the envs among these whose results are complete."""
        posted_ids = self._posted_ids
        written_ids = self._written_ids
        return [row for row in rows if written_ids[row] == posted_ids[row]]

    def take_back(self, rows: Sequence[int]) -> None:
        """Withdraw the requests of these envs, whose worker has ended."""
        self.slab.written_ids[rows] = self.slab.posted_ids[rows]

    def split_results(self, rows: list[int]) -> list[list[int]]:
        """Divide envs into groups whose results fit into one record; at least one group, which may be empty."""
        most = max(1, records.LONGEST // self.result_size)
        return [rows] if len(rows) <= most else [rows[first : first + most] for first in range(0, len(rows), most)]

    def pack_results(self, rows: Sequence[int]) -> bytes:
        """Return the results of these envs, which must be complete."""
        parts: list[bytes | memoryview] = []
        ops = self._ops
        encodings = self._encodings
        for first, count, buffer in self._split(rows, [ops[row] & BUFFER for row in rows]):
            run = self._run(first, count)
            parts += (_HEAD.pack(first, count, buffer), run.numbers, *run.result, *run.buffers[buffer])
            for row in range(first, first + count):
                if encodings[row] == INLINE_INFO:
                    parts.append(self.slab.inline_info(row))
        return b"".join(parts)

    def apply_results(self, payload: bytes | bytearray | memoryview) -> None:
        """Write results into the caller's slab, numbers last."""
        view = memoryview(payload)
        at = 0
        encodings = self._encodings
        sizes = self._sizes
        rooms = self.slab.inline_info_rooms
        while at < len(view):
            first, count, buffer = _HEAD.unpack_from(view, at)
            run = self._run(first, count)
            numbers = view[at + _HEAD.size : at + _HEAD.size + 8 * count]
            at = _read(view, at + _HEAD.size + 8 * count, run.result)
            at = _read(view, at, run.buffers[buffer])
            for row in range(first, first + count):
                if encodings[row] == INLINE_INFO:
                    size = min(sizes[row], INLINE_INFO_ROOM)
                    rooms[row][:size] = view[at : at + size]
                    at += size
            run.when.fill(time.monotonic())
            run.numbers[:] = numbers


def _read(view: memoryview, at: int, targets: Sequence[memoryview]) -> int:
    """Fill these buffers from a place in the view; return the place after it."""
    for target in targets:
        end = at + len(target)
        target[:] = view[at:end]
        at = end
    return at


class MirroredMemory(RowMemory):
    """The caller's copy of the slab of a vector whose workers are on nodes; see `envactors.backends.base.RowMemory`.

    Args:
        memory_id: Its id, unique in the backend.
        announce: Called when its layout or content changes, and when it is closed.
        free: Called with the places of parts that nothing refers to any more.

    Attributes:
        layout: The layout; None until `create`.
        rows: The rows of the slab; None until `create`.
        published: The ids of the published contents by place. It is replaced, never changed.
        parts: The parts that the caller uses, by place.
    """

    def __init__(
        self,
        memory_id: int,
        announce: Callable[[MirroredMemory], None],
        free: Callable[[MirroredMemory, Sequence[tuple[int, int]]], None],
    ) -> None:
        self.memory_id = memory_id
        self.layout: Layout | None = None
        self.rows: MirroredRows | None = None
        self.is_closed: bool = False
        self._announce = announce
        self._free = free
        # The places of parts that were freed, which the nodes do not know yet. Finalizers add to it.
        self._freed: deque[tuple[int, int]] = deque()
        self._contents = itertools.count()
        self._end = 0
        self.parts: WeakValueDictionary[tuple[int, int], mmap.mmap] = WeakValueDictionary()
        self.published: dict[tuple[int, int], int] = {}

    def create(self, layout: Layout) -> tuple[Slab, Infos]:
        check_room(layout.size)
        slab = Slab(layout, mmap.mmap(-1, layout.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        rows = MirroredRows(slab)
        if max(rows.request_size * layout.envs, rows.result_size) > records.LONGEST:
            raise ValueError(
                f"a step of {layout.envs} envs sends {rows.request_size * layout.envs} bytes, and an env returns up to "
                f"{rows.result_size}: one record of a node's link has at most {records.LONGEST}"
            )
        self.layout = layout
        self.rows = rows
        self._announce(self)
        return slab, Infos(slab)

    def extend(self, size: int) -> tuple[tuple[int, int], Any]:
        assert self.layout is not None, "parts come behind the slab"
        check_room(size)
        start = next_page(max(self.layout.size, self._end))
        self._end = start + size
        part = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.parts[start, size] = part
        weakref.finalize(part, self._freed.append, (start, size)).atexit = False
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        if freed:
            self._free(self, freed)
        return (start, size), part

    def publish(self, place: tuple[int, int]) -> None:
        in_use = {other: content for other, content in self.published.items() if other in self.parts}
        self.published = {**in_use, place: next(self._contents)}
        self._announce(self)

    def close(self) -> None:
        """Have the nodes free their copies; slabs that are open stay usable."""
        self.is_closed = True
        self._announce(self)
