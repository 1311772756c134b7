"""Rows of a slab on their way between the caller's copy and a node's: requests there, results back.

Caller and node have a slab of the same layout each. A request is copied from the one into the other and run there as
any request through shared memory is; its result comes back the same way, numbers last.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.arrays.slab import Layout, Slab
from envactors.wire.info_codec import INLINE_INFO, RECORDED, InfoReader

_COUNT = struct.Struct("<Q")
_ALIGNMENT = 16


class RowWriter:
    """Writes arrays one after the other into one buffer.

    Args:
        rows: The indices of the rows.
    """

    def __init__(self, rows: npt.NDArray[np.int64]) -> None:
        self._rows = rows
        self._pieces: list[tuple[npt.NDArray[Any], int]] = []
        self._size = _COUNT.size + len(rows) * 8

    def add(self, array: npt.NDArray[Any]) -> None:
        """Add the rows of an array."""
        start = -(-self._size // _ALIGNMENT) * _ALIGNMENT
        self._pieces.append((array, start))
        self._size = start + len(self._rows) * (array.nbytes // len(array))

    def finish(self, tail: Sequence[memoryview] = ()) -> bytearray:
        """Return the buffer, with some bytes behind the arrays."""
        buffer = bytearray(self._size + sum(map(len, tail)))
        count = len(self._rows)
        _COUNT.pack_into(buffer, 0, count)
        np.frombuffer(buffer, np.int64, count, _COUNT.size)[:] = self._rows
        for array, start in self._pieces:
            out: npt.NDArray[Any] = np.ndarray((count, *array.shape[1:]), array.dtype, buffer, start)
            np.take(array, self._rows, axis=0, out=out, mode="clip")  # with "raise" it would make another copy
        end = self._size
        for part in tail:
            buffer[end : end + len(part)] = part
            end += len(part)
        return buffer


class RowsReader:
    """Reads what a `RowWriter` has written.

    Attributes:
        rows: int64: the indices of the rows.
    """

    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        self._buffer = memoryview(buffer)
        (self._count,) = _COUNT.unpack_from(self._buffer)
        self.rows: npt.NDArray[np.int64] = np.frombuffer(self._buffer, np.int64, self._count, _COUNT.size)
        self._at = _COUNT.size + self._count * 8

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
    writer = RowWriter(np.array(rows, np.int64))
    arrays: list[npt.NDArray[Any]] = [slab.requested, slab.ops, *slab.actions]
    for array in arrays:
        writer.add(array)
    return writer.finish()


def apply_requests(slab: Slab, payload: bytes | bytearray | memoryview) -> list[int]:
    """Ask the envs of a node what they were asked by the caller; return which."""
    reader = RowsReader(payload)
    rows, numbers, ops = reader.rows, reader.next(slab.requested), reader.next(slab.ops)
    for array in slab.actions:
        array[rows] = reader.next(array)
    slab.ops[rows] = ops
    slab.completed[rows] = numbers - 1  # a result that the caller has not had does not count any more
    slab.requested[rows] = numbers
    return [int(row) for row in rows]


def pack_results(slab: Slab, rows: Sequence[int]) -> bytearray:
    """Return the results of these envs, which are complete."""
    index = np.array(rows, np.int64)
    writer = RowWriter(index)
    numbers = slab.completed[index]
    for array in (slab.completed, slab.info_encoding, slab.inline_info_sizes, slab.terminated, slab.truncated):
        writer.add(array)
    writer.add(slab.rewards)
    halves = np.bitwise_and(numbers, 1)
    for stacked in (slab.checks, *slab.observations):
        if stacked is not None:
            same = halves.min() == halves.max()
            writer.add(stacked[halves[0]] if same else _mixed(stacked, index, slab.completed))
    codes = slab.info_encoding[index].tolist()
    infos = [slab.inline_info(row) for row, code in zip(rows, codes, strict=True) if code in (RECORDED, INLINE_INFO)]
    return writer.finish(infos)


def _mixed(stacked: npt.NDArray[Any], rows: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return an array in which each of the rows is that of its env's own half."""
    whole: npt.NDArray[Any] = stacked[0].copy()
    whole[rows] = stacked[np.bitwise_and(numbers[rows], 1), rows]
    return whole


def apply_results(slab: Slab, payload: bytes | bytearray | memoryview) -> None:
    """Take over results in the caller's slab; their numbers are written last."""
    reader = RowsReader(payload)
    rows = reader.rows
    numbers, encodings, sizes = (
        reader.next(array) for array in (slab.completed, slab.info_encoding, slab.inline_info_sizes)
    )
    for array in (slab.terminated, slab.truncated, slab.rewards):
        array[rows] = reader.next(array)
    halves = np.bitwise_and(numbers, 1)
    for stacked in (slab.checks, *slab.observations):
        if stacked is not None:
            stacked[halves, rows] = reader.next(stacked[0])
    slab.info_encoding[rows], slab.inline_info_sizes[rows] = encodings, sizes
    if encodings.any():
        rest = reader.rest()
        for row, code, size in zip(rows.tolist(), encodings.tolist(), sizes.tolist(), strict=True):
            if code in (RECORDED, INLINE_INFO):
                slab.inline_info_rooms[row][:size] = rest[:size]
                rest = rest[size:]
    slab.when[rows] = time.monotonic()
    slab.completed[rows] = numbers


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
