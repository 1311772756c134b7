"""Encode infos, object leaves of observations, and failures: what comes with a row and has no fixed size.

    PLAIN        an empty info, as most are: one comparison finds that in a whole batch
    INLINE_INFO  pickled into the env's room
    OVERFLOW     pickled, too large for the room, and sent in a `Kind.OVERFLOW` frame
    FAILED       a `Failure` in place of a result, sent in such a frame

If caller and worker are in one process, copies of the objects pass through a list instead, and nothing overflows. The
memory of rooms and encodings belongs to `envactors.mailbox.slab`.
"""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from envactors.mailbox.messages import Failure
from envactors.mailbox.pickling import dumps, loads

# The values of `Slab.info_encoding`.
PLAIN: Final = 0
INLINE_INFO: Final = 1
OVERFLOW: Final = 2
FAILED: Final = 3

# In bytes. Larger arrays are pickled as they are.
_SMALL_ARRAY = 1 << 10


class InfoRooms(Protocol):
    """What has a row per info: a `Slab`, or a trajectory."""

    info_encoding: npt.NDArray[np.uint8]
    inline_info_sizes: npt.NDArray[np.uint32]

    @property
    def inline_info_rooms(self) -> Any: ...

    def inline_info(self, env: int, /) -> memoryview: ...


class InfoWriter:
    """Writes the infos and failures of all envs that share a slab.

    Args:
        slab: The rows.
        contents: If caller and worker are in one process, a list with one entry per env: the (info, object leaves) of
            its result, or its failure.

    Attributes:
        passes_objects: Whether they are objects, which have to be copies.
    """

    def __init__(self, slab: InfoRooms, contents: list[Any] | None = None) -> None:
        self.passes_objects: bool = contents is not None
        self._rooms = slab.inline_info_rooms
        # Writing a number through a memoryview takes a third of the time that an array takes.
        self._encodings, self._sizes = slab.info_encoding.data, slab.inline_info_sizes.data
        self._contents = contents

    def plain_marker(self, index: int) -> Callable[[], object]:
        """Return a function that marks an env's info as empty and its result as without object leaves, in C code."""
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
        pickled = dumps((*_simplify(info), object_leaves))
        size = len(pickled)
        room = self._rooms[index]
        if size > len(room):
            self._encodings[index] = OVERFLOW
            return pickled
        room[:size] = pickled
        self._sizes[index] = size
        self._encodings[index] = INLINE_INFO
        return None

    def fail(self, index: int, failure: Failure) -> bytes | bytearray | None:
        """Mark an env's result as failed; return what `encode` returns."""
        self._encodings[index] = FAILED
        if self._contents is None:
            return dumps(tuple(failure))
        self._contents[index] = failure
        return None


class InfoReader:
    """Reads what an `InfoWriter` has written; the arguments are the same.

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
        if self.contents is not None:
            info, object_leaves = self.contents[index]  # a copy already
            return info, object_leaves
        pickled = self._slab.inline_info(index) if encoding == INLINE_INFO else overflow
        assert pickled is not None, "a result is complete only once its overflow has come"
        layout, content, object_leaves = loads(pickled)
        return _restore(layout, content), object_leaves

    def failure(self, index: int, overflow: bytes | memoryview | None) -> Failure:
        """Return the failure of an env; the arguments are those of `decode`."""
        if self.contents is not None:
            return Failure(*self.contents[index])
        assert overflow is not None, "a failure always overflows"
        return Failure(*loads(overflow))


# Numbers of NumPy ----------------------------------------------------------------------------------------

# Pickling a number of NumPy takes 5 us, and the infos of MuJoCo's envs have ten of them. So among the values of a dict
# numbers travel as Python's, and small arrays as bytes. The layout says what they were: the keys, and a code per value.
# Both sides remember layouts, which are the same in every step.
_NUMBERS = "?bhilqBHILQfd"  # `numpy.dtype.char`
_ARRAY = "A"
_OTHER = "-"
_KINDS: dict[str, Any] = {code: np.dtype(code).type for code in _NUMBERS}
_CODES: dict[type, str] = {**{kind: code for code, kind in _KINDS.items()}, np.ndarray: _ARRAY}
# `numpy.generic.item` takes ten times as long.
_BUILTINS: dict[str, Any] = dict.fromkeys(_NUMBERS, int) | {"?": bool, "f": float, "d": float}
# How many layouts each side remembers.
_MOST_LAYOUTS = 256


def _simplify(info: Any) -> tuple[bytes, Any]:
    """Return the layout of an info, empty if it has none, and what travels of the info."""
    if type(info) is not dict:
        return b"", info
    values = info.values()
    layout, converters = _layout(*info, *map(type, values))
    if not layout:
        return layout, info
    pairs = zip(converters, values, strict=True)
    return layout, [value if convert is None else convert(value) for convert, value in pairs]


def _restore(layout: bytes, content: Any) -> Any:
    """Return the info that `_simplify` was given."""
    if not layout:
        return content
    keys, converters = _read_layout(layout)
    pairs = zip(converters, content, strict=True)
    return dict(zip(keys, [value if convert is None else convert(value) for convert, value in pairs], strict=True))


@functools.lru_cache(_MOST_LAYOUTS, typed=True)
def _layout(*keys_and_kinds: Any) -> tuple[bytes, list[Callable[[Any], Any] | None]]:
    """Return the layout of a dict with these keys and types of values, and how the values are made to travel."""
    count = len(keys_and_kinds) // 2
    keys = keys_and_kinds[:count]
    codes = "".join([_CODES.get(kind, _OTHER) for kind in keys_and_kinds[count:]])
    layout = pickle.dumps((keys, codes)) if all(type(key) is str for key in keys) else b""
    return layout, [_array_to_bytes if code == _ARRAY else _BUILTINS.get(code) for code in codes]


@functools.lru_cache(_MOST_LAYOUTS)
def _read_layout(layout: bytes) -> tuple[tuple[str, ...], list[Callable[[Any], Any] | None]]:
    """Return the keys that a layout has, and how the values are made what they were."""
    keys, codes = pickle.loads(layout)
    return keys, [_array_of_bytes if code == _ARRAY else _KINDS.get(code) for code in codes]


def _array_to_bytes(array: npt.NDArray[Any]) -> Any:
    is_simple = array.dtype.char in _NUMBERS and array.dtype.isnative and array.flags.c_contiguous
    return (array.dtype.char, array.shape, array.tobytes()) if is_simple and array.nbytes <= _SMALL_ARRAY else array


def _array_of_bytes(content: Any) -> Any:
    if isinstance(content, np.ndarray):
        return content
    code, shape, data = content
    return np.ndarray(shape, code, bytearray(data))  # a bytearray, so that the array is writable
