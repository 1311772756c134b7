"""The encoding of infos, object leaves of observations, and failures beside the rows of a step.

    PLAIN        ── an empty info, as most are: one comparison suffices for a whole batch
    RECORDED     ── a record in the env's room: a dict of NumPy's numbers and small arrays, in a fifth of the time
                    that pickling takes
    INLINE_INFO  ── pickled, in the same room
    OVERFLOW     ── pickled, larger than the room: follows in a `Kind.OVERFLOW` frame
    FAILED       ── no result: a `Failure` follows in such a frame

A record is (length of the layout, layout, values). The layout is pickled and contains the keys, the types
and the shapes. It is the same bytes in every step, so that both sides recognize it without unpickling it.

If caller and worker are in one process, copies of the objects pass through a list instead, and nothing overflows.
"""

from __future__ import annotations

import functools
import operator
import pickle
import struct
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from envactors.mailbox.messages import Failure
from envactors.mailbox.pickling import dumps, loads

# The values of `Slab.info_encoding`.
PLAIN: Final = 0
RECORDED: Final = 1
INLINE_INFO: Final = 2
OVERFLOW: Final = 3
FAILED: Final = 4

# How Python's numbers are stored in records, and how NumPy's numbers and arrays may be (`numpy.dtype.char`).
_CODES = {float: "d", int: "q", bool: "?"}
_NUMPY_CODES = "?bhilqBHILQfd"
_LENGTH = struct.Struct("<I")
# The most layouts to remember: infos whose keys change all the time are pickled instead.
_MOST_LAYOUTS = 64


class InfoRooms(Protocol):
    """What has a row per info: a `Slab`, or a trajectory."""

    info_encoding: npt.NDArray[np.uint8]
    inline_info_sizes: npt.NDArray[np.uint32]

    @property
    def inline_info_rooms(self) -> Any: ...

    def inline_info(self, env: int, /) -> memoryview: ...


class InfoWriter:
    """The worker's side, for all envs that share a slab.

    Args:
        slab: The rows.
        contents: If caller and worker are in one process, a list with one entry per env: the (info, object leaves) of
            its result, or its failure.

    Attributes:
        passes_objects: Whether they are objects, which have to be copies.
    """

    def __init__(self, slab: InfoRooms, contents: list[Any] | None = None) -> None:
        self.passes_objects = contents is not None
        self._rooms = slab.inline_info_rooms
        # Writing a number through a memoryview takes a third of the time that an array takes.
        self._encodings, self._sizes = slab.info_encoding.data, slab.inline_info_sizes.data
        self._records = RecordWriter()
        self._contents = contents

    def plain_marker(self, index: int) -> Callable[[], object]:
        """Return a function that writes, in C code, that an env's info is an empty dict without object leaves."""
        return functools.partial(operator.setitem, self._encodings, index, PLAIN)

    def encode(self, index: int, info: Any, object_leaves: list[Any]) -> bytes | bytearray | None:
        """Write the info and the object leaves of an env's result; if there are none, the marker is faster.

        Args:
            index: The env's index in the vector.
            info: Its info.
            object_leaves: The leaves of its observation that are not in the slab.

        Returns:
            The part to send as overflow; None if everything fits into the env's room.

        Raises:
            Exception: They do not pickle.
        """
        if self._contents is not None:
            self._contents[index] = info, object_leaves
            self._encodings[index] = INLINE_INFO
            return None
        room, encoding = self._rooms[index], RECORDED
        size = None if object_leaves or type(info) is not dict else self._records.write(info, room)
        if size is None:
            pickled = dumps((info, object_leaves))
            size, encoding = len(pickled), INLINE_INFO
            if size > len(room):
                self._encodings[index] = OVERFLOW
                return pickled
            room[:size] = pickled
        self._sizes[index] = size
        self._encodings[index] = encoding
        return None

    def fail(self, index: int, failure: Failure) -> bytes | bytearray | None:
        """Write that an env has failed; return what `encode` returns."""
        self._encodings[index] = FAILED
        if self._contents is None:
            return dumps(tuple(failure))
        self._contents[index] = failure
        return None


class InfoReader:
    """The parent's side; the arguments are those of `InfoWriter`.

    Attributes:
        contents: As above.
        all_plain: Returns whether all envs have empty infos, no object leaves and no failures. C code, as every step
            calls it.
    """

    def __init__(self, slab: InfoRooms, contents: list[Any] | None = None) -> None:
        self._slab = slab
        self.contents = contents
        self._encodings = slab.info_encoding.data
        all_plain = bytes([PLAIN]) * len(self._encodings)
        self.all_plain: Callable[[], bool] = functools.partial(operator.eq, self._encodings, all_plain)

    def needs_overflow(self, index: int) -> bool:
        """Return whether a part of an env's result was sent as overflow."""
        return self._encodings[index] >= OVERFLOW and self.contents is None

    def is_plain(self, index: int) -> bool:
        """Return whether an env has an empty info and no object leaves."""
        return self._encodings[index] == PLAIN

    def failed(self, index: int) -> bool:
        """Return whether an env has failed."""
        return self._encodings[index] == FAILED

    def any_failed(self, first: int, stop: int) -> bool:
        """Return whether any of these envs has failed."""
        return FAILED in self._encodings[first:stop].tobytes()

    def decode(self, index: int, overflow: bytes | memoryview | None) -> tuple[Any, list[Any]]:
        """Return an env's (info, object leaves).

        Args:
            index: The env's index in the vector.
            overflow: The part that was sent as overflow, None if there is none.

        Raises:
            BaseException: Whatever unpickling raises.
        """
        encoding = self._encodings[index]
        if encoding == PLAIN:
            return {}, []
        if encoding == RECORDED:
            return read_record(self._slab.inline_info(index)), []
        if self.contents is None and encoding == INLINE_INFO:
            overflow = self._slab.inline_info(index)
        info, object_leaves = self._content(index, overflow)
        return info, object_leaves

    def failure(self, index: int, overflow: bytes | memoryview | None) -> Failure:
        """Return the failure of an env; the arguments are those of `decode`."""
        return Failure(*self._content(index, overflow))

    def _content(self, index: int, pickled: bytes | memoryview | None) -> Any:
        if self.contents is not None:
            return self.contents[index]  # a copy already
        assert pickled is not None, "a result is complete only once its overflow has come"
        return loads(pickled)


# Records -------------------------------------------------------------------------------------------------

# Of each value of a record its key, its type, the code of its dtype, and its shape.
_Part: TypeAlias = "tuple[str, type, str, tuple[int, ...]]"


class _Layout:
    """The layout of a record.

    Args:
        parts: What is known of each value before it is read.

    Attributes:
        head: The bytes at the beginning of each record with this layout.
        keys: The keys of all values.
        values: The dtype of all values as one.
        arrays: The positions of the arrays among the values, with their dtypes and shapes.
        makers: Functions that return the values of a record as what they were.
        size: The size of a record, in bytes.
    """

    def __init__(self, parts: list[_Part]) -> None:
        pickled = pickle.dumps(parts, 5)
        self.head = _LENGTH.pack(len(pickled)) + pickled
        self.keys, kinds, codes, shapes = zip(*parts, strict=True)
        self.values = np.dtype([(str(i), code, shape) for i, (_, _, code, shape) in enumerate(parts)])
        self.arrays = [(i, np.dtype(codes[i]), shapes[i]) for i, kind in enumerate(kinds) if kind is np.ndarray]
        self.makers: list[Callable[[Any], Any]] = [
            functools.partial(np.array, dtype=code) if kind is np.ndarray else kind
            for kind, code in zip(kinds, codes, strict=True)
        ]
        self.size = len(self.head) + self.values.itemsize


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
        values = tuple(content.values())
        kinds = (*content, *map(type, values))
        try:
            layout = self._layouts[kinds]
        except KeyError:
            if len(self._layouts) >= _MOST_LAYOUTS:
                return None
            layout = self._layouts[kinds] = _layout_for(content)
        except TypeError:  # a metaclass may make a type unhashable
            return None
        if layout is None or layout.size > len(room):
            return None
        for position, dtype, shape in layout.arrays:
            array = values[position]
            if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
                return None
        head = layout.head
        try:
            np.ndarray((), layout.values, room, len(head))[()] = values
        except OverflowError:  # an int of more than 64 bits
            return None
        room[: len(head)] = head
        return layout.size


def _layout_for(content: dict[Any, Any]) -> _Layout | None:
    parts: list[_Part] = []
    for key, value in content.items():
        kind, code = type(value), _CODES.get(type(value))
        if kind is np.ndarray or (isinstance(value, np.generic) and kind is value.dtype.type):
            code = value.dtype.char if value.dtype.char in _NUMPY_CODES and value.dtype.isnative else None
        if code is None or type(key) is not str:
            return None
        parts.append((key, kind, code, np.shape(value)))
    return _Layout(parts) if any(kind not in _CODES for _, kind, _, _ in parts) else None


def read_record(record: memoryview) -> dict[str, Any]:
    """Return the dict that a `RecordWriter` has written; the arrays are copies."""
    head_size = _LENGTH.size + _LENGTH.unpack_from(record)[0]
    layout = _layout_of(bytes(record[:head_size]))
    values = np.ndarray((), layout.values, record, head_size).item()
    made = [make(value) for make, value in zip(layout.makers, values, strict=True)]
    return dict(zip(layout.keys, made, strict=True))


@functools.lru_cache(16 * _MOST_LAYOUTS)
def _layout_of(head: bytes) -> _Layout:
    return _Layout(pickle.loads(head[_LENGTH.size :]))
