"""Rows of a slab on their way between the caller's copy and a node's: requests there, results back.

Caller and node have a slab of the same layout each. A request is copied from the one into the other and run there as
any request through shared memory is; its result comes back the same way, numbers last.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from envactors.arrays.slab import Layout, Slab
from envactors.wire.info_codec import INLINE_INFO, RECORDED, InfoReader

_HEAD = struct.Struct("<QQ")
_ALIGNMENT = 16
# What selects rows: the envs of an actor stand in a row, and a slice is copied in a third of the time.
_Index: TypeAlias = "slice | npt.NDArray[np.int64]"


def _select(rows: Sequence[int]) -> _Index:
    first, count = rows[0], len(rows)
    if rows[-1] - first == count - 1 and all(row == first + i for i, row in enumerate(rows)):
        return slice(first, first + count)
    return np.array(rows, np.int64)


class RowWriter:
    """Writes rows of arrays into one buffer.

    Args:
        rows: The indices of the rows.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.index = _select(rows)
        self._rows = rows
        self._pieces: list[tuple[npt.NDArray[Any], int]] = []
        # A slice is said in the head alone.
        self._size = _HEAD.size + (0 if isinstance(self.index, slice) else 8 * len(rows))

    def add(self, array: npt.NDArray[Any]) -> None:
        """Add the rows of an array."""
        start = -(-self._size // _ALIGNMENT) * _ALIGNMENT
        self._pieces.append((array, start))
        self._size = start + len(self._rows) * (array.nbytes // len(array))

    def finish(self, tail: Sequence[memoryview] = ()) -> bytearray:
        """Return the buffer, with some bytes behind the arrays."""
        buffer = bytearray(self._size + sum(map(len, tail)))
        count, index = len(self._rows), self.index
        if isinstance(index, slice):
            _HEAD.pack_into(buffer, 0, count, 1 + self._rows[0])
        else:
            _HEAD.pack_into(buffer, 0, count, 0)
            np.frombuffer(buffer, np.int64, count, _HEAD.size)[:] = index
        for array, start in self._pieces:
            out: npt.NDArray[Any] = np.ndarray((count, *array.shape[1:]), array.dtype, buffer, start)
            out[...] = array[index]
        end = self._size
        for part in tail:
            buffer[end : end + len(part)] = part
            end += len(part)
        return buffer


class RowsReader:
    """Reads what a `RowWriter` has written.

    Attributes:
        rows: The indices of the rows.
        index: What selects them.
    """

    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        self._buffer = memoryview(buffer)
        self._count, first = _HEAD.unpack_from(self._buffer)
        self._at = _HEAD.size
        self.index: _Index
        if first:
            self.rows = list(range(first - 1, first - 1 + self._count))
            self.index = slice(first - 1, first - 1 + self._count)
        else:
            self.index = np.frombuffer(self._buffer, np.int64, self._count, self._at)
            self.rows = [int(row) for row in self.index]
            self._at += 8 * self._count

    def next(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the rows of the next array, which has the dtype and row shape of this one."""
        start = -(-self._at // _ALIGNMENT) * _ALIGNMENT
        self._at = start + self._count * (array.nbytes // len(array))
        rows: npt.NDArray[Any] = np.ndarray((self._count, *array.shape[1:]), array.dtype, self._buffer, start)
        return rows

    def rest(self) -> memoryview:
        """Return the bytes behind the arrays."""
        return self._buffer[self._at :]


def pack_requests(slab: Slab, rows: Sequence[int]) -> bytearray:
    """Return what these envs are asked."""
    writer = RowWriter(rows)
    arrays: list[npt.NDArray[Any]] = [slab.requested, slab.ops, *slab.actions]
    for array in arrays:
        writer.add(array)
    return writer.finish()


def apply_requests(slab: Slab, payload: bytes | bytearray | memoryview) -> list[int]:
    """Ask the envs of a node what they were asked by the caller; return which."""
    reader = RowsReader(payload)
    index, numbers, ops = reader.index, reader.next(slab.requested), reader.next(slab.ops)
    for array in slab.actions:
        array[index] = reader.next(array)
    slab.ops[index] = ops
    slab.completed[index] = numbers - 1  # a result that the caller has not had does not count any more
    slab.requested[index] = numbers
    return reader.rows


def pack_results(slab: Slab, rows: Sequence[int]) -> bytearray:
    """Return the results of these envs, which are complete."""
    writer = RowWriter(rows)
    for array in (slab.completed, slab.info_encoding, slab.inline_info_sizes, slab.terminated, slab.truncated):
        writer.add(array)
    writer.add(slab.rewards)
    completed = slab.completed.data
    half = completed[rows[0]] & 1
    same = all(completed[row] & 1 == half for row in rows)
    for stacked in (slab.checks, *slab.observations):
        if stacked is not None:
            writer.add(stacked[half] if same else _mixed(stacked, rows, slab.completed))
    encodings = slab.info_encoding.data
    infos = [slab.inline_info(row) for row in rows if encodings[row] in (RECORDED, INLINE_INFO)]
    return writer.finish(infos)


def _mixed(stacked: npt.NDArray[Any], rows: Sequence[int], numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return an array in which each of the rows is that of its env's own half."""
    index, whole = np.array(rows, np.int64), stacked[0].copy()
    whole[index] = stacked[np.bitwise_and(numbers[index], 1), index]
    return whole  # type: ignore[no-any-return] # an array, like the other


def apply_results(slab: Slab, payload: bytes | bytearray | memoryview) -> None:
    """Take over results in the caller's slab; their numbers are written last."""
    reader = RowsReader(payload)
    index, rows = reader.index, reader.rows
    numbers, encodings, sizes = (
        reader.next(array) for array in (slab.completed, slab.info_encoding, slab.inline_info_sizes)
    )
    for array in (slab.terminated, slab.truncated, slab.rewards):
        array[index] = reader.next(array)
    halves = [number & 1 for number in numbers.tolist()]
    same = halves.count(halves[0]) == len(halves)
    for stacked in (slab.checks, *slab.observations):
        if stacked is not None:
            stacked[(halves[0], index) if same else (halves, rows)] = reader.next(stacked[0])
    slab.info_encoding[index] = encodings
    if encodings.any():
        slab.inline_info_sizes[index] = sizes
        rest = reader.rest()
        for row, code, size in zip(rows, encodings.tolist(), sizes.tolist(), strict=True):
            if code in (RECORDED, INLINE_INFO):
                slab.inline_info_rooms[row][:size] = rest[:size]
                rest = rest[size:]
    slab.when[index] = time.monotonic()
    slab.completed[index] = numbers


class MirroredMemory:
    """The caller's copy of the slab of a vector whose workers are on nodes; see `envactors.backends.base.RowMemory`.

    Args:
        number: Its number, which no other memory of the backend has.
        announce: Called once it is known what it looks like, and when it is not used any more.

    Attributes:
        layout: What it looks like; None until it is known.
        slab: The slab; None until the layout is known.
    """

    def __init__(self, number: int, announce: Callable[[MirroredMemory], None]) -> None:
        self.number = number
        self.layout: Layout | None = None
        self.slab: Slab | None = None
        self.is_closed = False
        self._announce = announce

    def create(self, layout: Layout) -> tuple[Slab, InfoReader]:
        self.layout = layout
        self.slab = slab = Slab(layout, mmap.mmap(-1, layout.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._announce(self)
        return slab, InfoReader(slab)

    def close(self) -> None:
        """Have the nodes forget it; slabs that are open stay usable."""
        self.is_closed = True
        self._announce(self)
