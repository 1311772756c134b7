"""The encoding of infos, object leaves of observations, and failures beside the rows of a step.

    PLAIN        ── an empty info, as most are: one comparison suffices for a whole batch
    RECORDED     ── a record in the env's room: a dict of NumPy's numbers and small arrays, in a fifth of the time
                    that pickling takes
    INLINE_INFO  ── pickled, in the same room
    OVERFLOW     ── pickled, larger than the room: follows in a `Kind.OVERFLOW` frame
    FAILED       ── no result: a `Failure` follows in such a frame

A record is (length of the layout, layout, numbers, arrays). The layout is pickled and contains the keys, the types and
the shapes. It is the same bytes in every step, so that both sides recognize it without unpickling it.

If caller and worker are in one process, copies of the objects pass through a list instead, and nothing overflows.
"""

from __future__ import annotations

import functools
import operator
import pickle
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from envactors.arrays.slab import Slab
from envactors.wire.copying import copy_value
from envactors.wire.messages import Failure
from envactors.wire.pickling import dumps, loads

# The values of `Slab.info_encoding`.
PLAIN: Final = 0
RECORDED: Final = 1
INLINE_INFO: Final = 2
OVERFLOW: Final = 3
FAILED: Final = 4

# The types of the numbers in records, with their formats in `struct`.
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
# The same types by the names that stand for them in a layout, such as "float32numpy".
_TYPES = {kind.__name__ + kind.__module__: kind for kind in _FORMATS}
_ARRAY_KINDS = "?bhilqBHILQfd"
_LENGTH = struct.Struct("<I")
# The most layouts to remember: infos whose keys change all the time are pickled instead.
_MOST_LAYOUTS = 64


class InfoWriter(Protocol):
    """The worker's side of a codec, for all envs that share a slab."""

    def encode(self, index: int, info: Any, object_leaves: list[Any]) -> bytes | bytearray | None:
        """Write the info and the object leaves of an env's result.

        Args:
            index: The env's index in the vector.
            info: Its info.
            object_leaves: The leaves of its observation that are not in the slab.

        Returns:
            The part to send as overflow; None if everything fits into the env's room.

        Raises:
            Exception: They do not pickle, or cannot be copied.
        """

    def plain_marker(self, index: int) -> Callable[[], object]:
        """Return a function that does the same as `encode` of an empty info without leaves, in C code."""

    def fail(self, index: int, failure: Failure) -> bytes | bytearray | None:
        """Write that an env has failed; return what `encode` returns."""


class InfoReader(Protocol):
    """The parent's side of a codec."""

    def all_plain(self) -> bool:
        """Return whether all envs have empty infos, no object leaves and no failures."""

    def needs_overflow(self, index: int) -> bool:
        """Return whether a part of an env's result was sent as overflow."""

    def failed(self, index: int) -> bool:
        """Return whether an env has failed."""

    def mark_failed(self, index: int) -> None:
        """Record an env's result as a failure, because it could not be read."""

    def decode(self, index: int, overflow: bytes | memoryview | None) -> tuple[Any, list[Any]]:
        """Return an env's (info, object leaves).

        Args:
            index: The env's index in the vector.
            overflow: The part that was sent as overflow, None if there is none.

        Raises:
            BaseException: Whatever unpickling raises.
        """

    def failure(self, index: int, overflow: bytes | memoryview | None) -> Failure:
        """Return the failure of an env; the arguments are those of `decode`."""


class InfoEncoder:
    """The worker's side between processes; see `InfoWriter`."""

    def __init__(self, slab: Slab) -> None:
        self._rooms = slab.inline_info_rooms
        # Writing a number through a memoryview takes a third of the time that an array takes.
        self._encodings, self._sizes = slab.info_encoding.data, slab.inline_info_sizes.data
        self._records = RecordWriter()

    def plain_marker(self, index: int) -> Callable[[], object]:
        return functools.partial(operator.setitem, self._encodings, index, PLAIN)

    def encode(self, index: int, info: Any, object_leaves: list[Any]) -> bytes | bytearray | None:
        if not object_leaves and type(info) is dict:
            if not info:
                self._encodings[index] = PLAIN
                return None
            size = self._records.write(info, self._rooms[index])
            if size is not None:
                self._sizes[index] = size
                self._encodings[index] = RECORDED
                return None
        pickled = dumps((info, object_leaves))
        if len(pickled) > len(self._rooms[index]):
            self._encodings[index] = OVERFLOW
            return pickled
        self._rooms[index][: len(pickled)] = pickled
        self._sizes[index] = len(pickled)
        self._encodings[index] = INLINE_INFO
        return None

    def fail(self, index: int, failure: Failure) -> bytes | bytearray | None:
        self._encodings[index] = FAILED
        return dumps(tuple(failure))


class InfoDecoder:
    """The parent's side between processes; see `InfoReader`."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._encodings = slab.info_encoding.data
        self._all_plain = bytes(len(self._encodings))
        self._records = RecordReader()

    def all_plain(self) -> bool:
        return self._encodings.tobytes() == self._all_plain

    def needs_overflow(self, index: int) -> bool:
        return self._encodings[index] >= OVERFLOW

    def failed(self, index: int) -> bool:
        return self._encodings[index] == FAILED

    def mark_failed(self, index: int) -> None:
        self._encodings[index] = FAILED

    def decode(self, index: int, overflow: bytes | memoryview | None) -> tuple[Any, list[Any]]:
        encoding = self._encodings[index]
        if encoding == PLAIN:
            return {}, []
        if encoding == RECORDED:
            return self._records.read(self._slab.inline_info(index)), []
        if encoding == INLINE_INFO:
            overflow = self._slab.inline_info(index)
        assert overflow is not None, "a result is complete only once its overflow has come"
        info, object_leaves = loads(overflow)
        return info, object_leaves

    def failure(self, index: int, overflow: bytes | memoryview | None) -> Failure:
        del index
        assert overflow is not None, "a result is complete only once its overflow has come"
        return Failure(*loads(overflow))


class LocalInfoEncoder:
    """The worker's side within one process; see `InfoWriter`.

    Args:
        slab: The rows.
        contents: A list with one entry per env: the (info, object leaves) of its result, or its failure.
    """

    def __init__(self, slab: Slab, contents: list[Any]) -> None:
        self._encodings = slab.info_encoding.data
        self._contents = contents

    def plain_marker(self, index: int) -> Callable[[], object]:
        return functools.partial(operator.setitem, self._encodings, index, PLAIN)

    def encode(self, index: int, info: Any, object_leaves: list[Any]) -> None:
        if not info and not object_leaves and type(info) is dict:
            self._encodings[index] = PLAIN
        else:
            self._contents[index] = copy_value(info), copy_value(object_leaves)
            self._encodings[index] = INLINE_INFO

    def fail(self, index: int, failure: Failure) -> None:
        self._contents[index] = failure
        self._encodings[index] = FAILED


class LocalInfoDecoder(InfoDecoder):
    """The parent's side within one process; see `InfoReader`. The values it returns are copies already."""

    def __init__(self, slab: Slab, contents: list[Any]) -> None:
        super().__init__(slab)
        self._contents = contents

    def needs_overflow(self, index: int) -> bool:
        del index
        return False

    def decode(self, index: int, overflow: bytes | memoryview | None) -> tuple[Any, list[Any]]:
        del overflow
        if self._encodings[index] == PLAIN:
            return {}, []
        info, object_leaves = self._contents[index]
        return info, object_leaves

    def failure(self, index: int, overflow: bytes | memoryview | None) -> Failure:
        del overflow
        failure: Failure = self._contents[index]
        return failure


# Records -------------------------------------------------------------------------------------------------


class _Array(NamedTuple):
    """The place of an array in a record.

    Attributes:
        position: Its position among the values.
        start: Where its bytes begin in the record.
        end: Where they end.
        dtype: Its dtype.
        shape: Its shape.
    """

    position: int
    start: int
    end: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class _Layout:
    """The layout of a record: where each of its values is.

    Args:
        head: The bytes at the beginning of each record with this layout.
        parts: For each value its key and its type, or its dtype and shape if it is an array.

    Attributes:
        keys: The keys of all values.
        types: The types of the numbers.
        numbers: Packs and unpacks the numbers.
        arrays: The places of the arrays.
        size: The size of a record, in bytes.
        pick: Returns the numbers of a list of all values.
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
        # `itemgetter` returns the value itself for one position, and cannot be made for none.
        self.pick: Callable[[list[Any]], Any] = (
            operator.itemgetter(*numbers) if len(numbers) > 1 else lambda values: [values[i] for i in numbers]
        )


class RecordWriter:
    """Writes records, and remembers their layouts."""

    def __init__(self) -> None:
        # By the keys and types of a dict, in order; None for dicts that cannot be written as records.
        self._layouts: dict[tuple[Any, ...], _Layout | None] = {}

    def write(self, content: dict[Any, Any], room: memoryview) -> int | None:
        """Write a dict.

        Args:
            content: The dict.
            room: The bytes to write to.

        Returns:
            How many bytes were written; None if the dict contains other values than numbers and arrays, or the room is
            too small. Also None if it has no NumPy values at all: pickling Python's numbers takes less time.
        """
        values = list(content.values())
        kinds = (*content, *map(type, values))
        try:
            layout = self._layouts[kinds]
        except (KeyError, TypeError):  # a metaclass may make a type unhashable
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
            pickled = pickle.dumps(parts, 5)
            layout = _Layout(_LENGTH.pack(len(pickled)) + pickled, parts)
        self._layouts[kinds] = layout
        return layout


class RecordReader:
    """Reads records, and remembers their layouts."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, _Layout] = {}

    def read(self, record: memoryview) -> dict[str, Any]:
        """Return the dict that `RecordWriter.write` has written; the arrays are copies."""
        head_size = _LENGTH.size + _LENGTH.unpack_from(record)[0]
        head = bytes(record[:head_size])
        layout = self._layouts.get(head)
        if layout is None:
            layout = self._layouts[head] = _Layout(head, pickle.loads(head[_LENGTH.size :]))
        numbers = layout.numbers.unpack_from(record, head_size)
        values = [make(number) for make, number in zip(layout.types, numbers, strict=True)]
        for position, start, _, dtype, shape in layout.arrays:
            array: npt.NDArray[Any] = np.ndarray(shape, dtype, record, start)
            values.insert(position, array.copy())
        return dict(zip(layout.keys, values, strict=True))


def _kind_of(value: Any) -> str | tuple[str, tuple[int, ...]] | None:
    """Return the entry of a value in a record's layout; None if records cannot contain it."""
    kind = type(value)
    if kind in _FORMATS:
        return kind.__name__ + kind.__module__
    if kind is np.ndarray and value.dtype.char in _ARRAY_KINDS and value.dtype.isnative:
        return value.dtype.char, value.shape
    return None
