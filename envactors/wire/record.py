"""Dicts of NumPy's numbers and small arrays as bytes, in a fifth of the time that pickling takes: infos often are such.

    length of the layout ── layout, pickled ── numbers ── arrays

The layout says the keys, the types and the shapes, and is the same bytes step after step, so that both sides know it
again without reading it.
"""

from __future__ import annotations

import operator
import pickle
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# What becomes one number, with its format in `struct`.
_FORMATS: dict[type, str] = {
    float: "d",
    int: "q",
    bool: "?",
    np.bool_: "?",
    np.float32: "f",
    np.float64: "d",
    **dict(zip((np.int8, np.int16, np.int32, np.int64), "bhiq", strict=True)),
    **dict(zip((np.uint8, np.uint16, np.uint32, np.uint64), "BHIQ", strict=True)),
}
_TYPES = {kind.__name__ + kind.__module__: kind for kind in _FORMATS}
_ARRAY_KINDS = "?bhilqBHILQfd"
_LENGTH = struct.Struct("<I")
# Infos whose keys change all the time are not worth learning by heart.
_MOST_LAYOUTS = 64


class _Array(NamedTuple):
    """An array's place in a record."""

    position: int
    start: int
    end: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class _Layout:
    """Where what stands.

    Args:
        head: What a record with this layout begins with.
        parts: The key and the type of each value, or the dtype and the shape of an array.
    """

    def __init__(self, head: bytes, parts: list[tuple[str, Any]]) -> None:
        self.head = head
        self.keys = [key for key, _ in parts]
        numbers = [i for i, (_, what) in enumerate(parts) if isinstance(what, str)]
        self.types: list[Callable[[Any], Any]] = [_TYPES[parts[i][1]] for i in numbers]
        self.numbers = struct.Struct("<" + "".join(_FORMATS[_TYPES[parts[i][1]]] for i in numbers))
        self.arrays: list[_Array] = []
        end = len(head) + self.numbers.size
        for i, (_, what) in enumerate(parts):
            if not isinstance(what, str):
                dtype, shape = np.dtype(what[0]), what[1]
                start, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                self.arrays.append(_Array(i, start, end, dtype, shape))
        self.size = end
        # Of one position `itemgetter` gives the value itself, and of none nothing.
        self.pick: Callable[[list[Any]], Any] = (
            operator.itemgetter(*numbers) if len(numbers) > 1 else lambda values: [values[i] for i in numbers]
        )


class Writer:
    """Writes records; knows the layouts that it has met."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[Any, ...], _Layout | None] = {}

    def write(self, content: dict[Any, Any], room: memoryview) -> int | None:
        """Writes a dict.

        Args:
            content: The dict.
            room: Bytes to write to.

        Returns:
            How many bytes it took; None where the dict has something else in it, or the room is too small. Also where
            nothing of it is NumPy's: Python's own numbers are pickled in less time.
        """
        values = list(content.values())
        kinds = (*content, *map(type, values))
        try:
            layout = self._layouts[kinds]
        except (KeyError, TypeError):  # what a metaclass makes of it may not be hashable
            layout = self._learn(content, kinds)
        if layout is None or layout.size > len(room):
            return None
        head = layout.head
        try:
            layout.numbers.pack_into(room, len(head), *layout.pick(values))
        except struct.error:  # an int of more than 64 bits
            return None
        for position, start, end, dtype, shape in layout.arrays:
            array = values[position]
            if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
                return None
            room[start:end] = array.tobytes()
        room[: len(head)] = head
        return layout.size

    def _learn(self, content: dict[Any, Any], kinds: tuple[Any, ...]) -> _Layout | None:
        if len(self._layouts) >= _MOST_LAYOUTS:
            return None
        layout: _Layout | None = None
        parts = [(key, _kind_of(value)) for key, value in content.items()]
        fits = all(type(key) is str and kind is not None for key, kind in parts)
        if fits and any(isinstance(value, (np.generic, np.ndarray)) for value in content.values()):
            told = pickle.dumps(parts, 5)
            layout = _Layout(_LENGTH.pack(len(told)) + told, parts)
        self._layouts[kinds] = layout
        return layout


class Reader:
    """Reads records; knows the layouts that it has met."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, _Layout] = {}

    def read(self, record: memoryview) -> dict[str, Any]:
        """Reads what `Writer.write` has written; the arrays are copies."""
        told = _LENGTH.size + _LENGTH.unpack_from(record)[0]
        head = bytes(record[:told])
        layout = self._layouts.get(head)
        if layout is None:
            layout = self._layouts[head] = _Layout(head, pickle.loads(head[_LENGTH.size :]))
        numbers = layout.numbers.unpack_from(record, told)
        values = [make(number) for make, number in zip(layout.types, numbers, strict=True)]
        for position, start, _, dtype, shape in layout.arrays:
            array: npt.NDArray[Any] = np.ndarray(shape, dtype, record, start)
            values.insert(position, array.copy())
        return dict(zip(layout.keys, values, strict=True))


def _kind_of(value: Any) -> str | tuple[str, tuple[int, ...]] | None:
    """How a value stands in a record's layout; None where it does not fit into one."""
    kind = type(value)
    if kind in _FORMATS:
        return kind.__name__ + kind.__module__
    if kind is np.ndarray and value.dtype.char in _ARRAY_KINDS and value.dtype.isnative:
        return value.dtype.char, value.shape
    return None
