"""Encode infos, object leaves of observations, and failures: what comes with a row and has no fixed size.

    PLAIN        an empty info, as most are: one comparison finds that in a whole batch
    INLINE_INFO  written into the env's room, as a record or pickled
    OVERFLOW     pickled, too large for the room, and sent in a `Kind.OVERFLOW` frame
    FAILED       a `Failure` in place of a result, sent in such a frame

The memory of rooms and encodings belongs to `envactors.mailbox.slab`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from envactors.mailbox.messages import Failure, Fault
from envactors.mailbox.pickling import dumps, load_plain, loads, try_to_read

# The values of `Slab.info_encoding`.
PLAIN: Final = 0
INLINE_INFO: Final = 1
OVERFLOW: Final = 2
FAILED: Final = 3


class InfoRooms(Protocol):
    """Memory with a row per info: a `Slab`, or a trajectory."""

    info_encoding: npt.NDArray[np.uint8]
    inline_infos: npt.NDArray[np.uint8]
    inline_info_sizes: npt.NDArray[np.uint32]

    def inline_info(self, env: int, /) -> memoryview: ...


class Infos:
    """The infos, object leaves, and failures of all envs that share a slab, as both sides write and read them.

    Args:
        slab: The rows.

    Attributes:
        encodings: `Slab.info_encoding`; `PLAIN` for an empty info without object leaves.
        all_plain: Returns whether all envs have empty infos, no object leaves and no failures. C code, as every step
            calls it.
    """

    def __init__(self, slab: InfoRooms) -> None:
        self._slab = slab
        self._room = slab.inline_infos.shape[1]
        self._memory = slab.inline_infos.reshape(-1).data
        # Writing a number through a memoryview takes a third of the time that an array takes.
        self.encodings: memoryview[int] = slab.info_encoding.data
        self._sizes = slab.inline_info_sizes.data
        all_plain = bytes([PLAIN]) * len(self.encodings)
        self.all_plain: Callable[[], bool] = functools.partial(operator.eq, self.encodings, all_plain)
        # The layout of the last info, if it was a record: most infos of one worker have the same layout.
        self._layout: _Layout | None = None

    # The worker ------------------------------------------------------------------------------------------

    def pack(self, info: Any, object_leaves: list[Any]) -> bytes | bytearray:
        """Return an info and object leaves as bytes, as `put` takes them.

        Raises:
            Exception: They do not pickle.
        """
        layout = self._layout
        if layout is not None and type(info) is dict and not object_leaves:
            values = list(info.values())
            if layout.types == list(map(type, (*info, *values))) and layout.keys == tuple(info):
                try:
                    return layout.pack(layout.head, *values)
                except struct.error:  # an integer has more than 64 bits
                    pass
        content = encode(info, object_leaves)
        self._layout = _layout_in(content)
        return content

    def put(self, index: int, content: bytes | bytearray) -> bytes | bytearray | None:
        """Write the info and the object leaves of an env's result; if there are none, the marker is faster.

        Args:
            index: The env's index in the vector.
            content: What `pack` has returned for them.

        Returns:
            The part to send as overflow; None if everything fits into the env's room.
        """
        self.encodings[index] = INLINE_INFO
        start, size = index * self._room, len(content)
        if size > self._room:
            self.encodings[index] = OVERFLOW
            return content
        self._memory[start : start + size] = content
        self._sizes[index] = size
        return None

    def fail(self, index: int, failure: Failure) -> bytes | bytearray:
        """Mark an env's result as failed; return the failure to send as overflow."""
        self.encodings[index] = FAILED
        return dumps(tuple(failure))

    # The parent ------------------------------------------------------------------------------------------

    def failed(self, index: int) -> bool:
        """Return whether an env has failed."""
        return self.encodings[index] == FAILED

    def decode(self, index: int, overflow: bytes | memoryview | None) -> tuple[Any, list[Any]]:
        """Return an env's (info, object leaves).

        Args:
            index: The env's index in the vector.
            overflow: The part that was sent as overflow, None if there is none.

        Raises:
            BaseException: Whatever unpickling raises.
        """
        encoding = self.encodings[index]
        if encoding == PLAIN:
            return {}, []
        content = self._slab.inline_info(index) if encoding == INLINE_INFO else overflow
        assert content is not None, "a result is complete only once its overflow has come"
        return decode(content)

    def failure(self, overflow: bytes | memoryview | None) -> Failure:
        """Return the failure of an env, given what was sent as overflow of its result. Runs no code of users."""
        # Env code may have overwritten it, or written `FAILED` over the encoding of a result without any overflow.
        failure, error = try_to_read(lambda: Failure(*load_plain(overflow or b"")))
        return failure or Failure(Fault.RESULT, None, f"its description cannot be read: {type(error).__name__}", "")


# Records -------------------------------------------------------------------------------------------------

# Pickling a number of NumPy takes 5 us, and the infos of MuJoCo's envs have ten of them. So a dict of numbers and small
# arrays is written as a record: its layout, and a struct. The layout, which has the keys and the kinds of the values,
# is the same in every step, so both sides remember it. What is written otherwise begins with another byte.
_RECORD = 1
_HEAD = struct.Struct("<BI")
# Types of numbers, by name, and the format of each in a struct.
_TYPES: dict[Any, Any] = {
    **{name: np.dtype(name).type for name in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")},
    "bool": bool,
    "int": int,
    "float": float,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}
_FORMATS = dict(zip(_NAMES, "?bhiqBHIQfd?qd", strict=True))
# Arrays of these types (`numpy.dtype.char`) and of at most this many bytes are written as bytes.
_SIMPLE = "?bhilqBHILQfd"
_SMALL_ARRAY = 1 << 10
# How many layouts each side remembers.
_MOST_LAYOUTS = 256


class _Layout:
    """The layout of infos that are dicts of numbers and small arrays.

    Args:
        pickled: The pickled keys, and the kinds of the values: names of types, or (type, shape) of arrays.

    Attributes:
        keys: The keys.
        types: Their types, and the kinds of the values.
        head: The layout as bytes.
        pack: Returns the head and the values as a record: `struct.Struct.pack`.
        size: The size of a record, in bytes.
    """

    def __init__(self, pickled: bytes) -> None:
        keys, names = pickle.loads(pickled)
        kinds = [_TYPES.get(name, name) for name in names]
        self.keys: tuple[str, ...] = keys
        self.types: list[Any] = [*[str] * len(keys), *kinds]
        self._array_places = [place for place, kind in enumerate(kinds) if type(kind) is tuple]
        formats = "".join(map(_format_of, kinds))
        self._struct = struct.Struct(f"<{formats}")
        # A display of known keys takes half of the time of ``dict(zip(keys, values))``, and a rollout may have a
        # thousand infos.
        makers = {f"make_{place}": _maker_of(kind) for place, kind in enumerate(kinds)}
        places = range(len(keys))
        values = [f"value_{i}" if makers[f"make_{i}"] is None else f"make_{i}(value_{i})" for i in places]
        pairs = ", ".join(f"{key!r}: {value}" for key, value in zip(keys, values, strict=True))
        source = f"lambda structs: [{{{pairs}}} for [{', '.join(f'value_{i}' for i in places)}] in structs]"
        self._make: Callable[[Iterable[Any]], list[dict[str, Any]]] = eval(source, makers)  # noqa: S307 # no user's code
        self.head: bytes = _HEAD.pack(_RECORD, len(pickled)) + pickled
        self.pack: Callable[..., bytes] = struct.Struct(f"<{len(self.head)}s{formats}").pack
        self.size: int = len(self.head) + self._struct.size

    def encode(self, info: dict[str, Any]) -> bytes:
        """Return an info of this layout as a record.

        Raises:
            struct.error: An integer has more than 64 bits.
        """
        values = list(info.values())
        for place in self._array_places:
            values[place] = values[place].tobytes()
        return self.pack(self.head, *values)

    def decode(self, structs: bytes | memoryview) -> list[dict[str, Any]]:
        """Return the infos whose structs follow one another."""
        return self._make(self._struct.iter_unpack(structs))


def _format_of(kind: Any) -> str:
    """Return the format of a value in a struct."""
    return f"{np.dtype(kind[0]).itemsize * math.prod(kind[1])}s" if type(kind) is tuple else _FORMATS[kind]


def _maker_of(kind: Any) -> Callable[[Any], Any] | None:
    """Return a function that makes a value from what was unpacked; None if it is the value."""
    if type(kind) is tuple:
        char, shape = kind
        return lambda data: np.ndarray(shape, char, bytearray(data))  # a bytearray, so that the array is writable
    return kind if issubclass(kind, np.generic) else None


def _kind_of(value: Any) -> Any:
    """Return the kind of a value."""
    if type(value) is not np.ndarray:
        return type(value)
    is_simple = value.dtype.char in _SIMPLE and value.dtype.isnative and value.flags.c_contiguous
    fits = is_simple and value.ndim and 0 < value.nbytes <= _SMALL_ARRAY
    return (value.dtype.char, value.shape) if fits else np.ndarray


@functools.lru_cache(_MOST_LAYOUTS, typed=True)
def _layout_of(*keys_and_kinds: Any) -> _Layout | None:
    """Return the layout of a dict with these keys and kinds of values; None if it is pickled."""
    count = len(keys_and_kinds) // 2
    keys, kinds = keys_and_kinds[:count], keys_and_kinds[count:]
    is_record = count and all(type(kind) is tuple or kind in _NAMES for kind in kinds)
    names = [_NAMES.get(kind, kind) for kind in kinds]
    return _Layout(pickle.dumps((keys, names))) if is_record and all(type(key) is str for key in keys) else None


_read_layout = functools.lru_cache(_MOST_LAYOUTS)(_Layout)


def encode(info: Any, object_leaves: list[Any]) -> bytes | bytearray:
    """Return an info and object leaves as bytes.

    Raises:
        Exception: They do not pickle.
    """
    if type(info) is dict and not object_leaves:
        kinds = list(map(type, info.values()))
        layout = _layout_of(*info, *(map(_kind_of, info.values()) if np.ndarray in kinds else kinds))
        if layout is not None:
            with contextlib.suppress(struct.error):  # an integer has more than 64 bits
                return layout.encode(info)
    return dumps((info, object_leaves))


def decode(content: bytes | memoryview) -> tuple[Any, list[Any]]:
    """Return what `encode` was given.

    Raises:
        BaseException: Whatever unpickling raises.
    """
    layout = _layout_in(content)
    if layout is None:
        info, object_leaves = loads(content)
        return info, object_leaves
    return layout.decode(content[len(layout.head) :])[0], []


class _Joined(tuple[Any, ...]):
    def __reduce__(self) -> tuple[Any, ...]:
        return _decode_joined, tuple(self)


def join(first: bytes | memoryview | None, last: bytes | memoryview, *, takes_reward: bool) -> bytes:
    """Return a content with both infos and the leaves of the first, without running code of users.

    Args:
        first: The first content; None if there is none.
        last: The content whose info has priority.
        takes_reward: Whether the last leaf, which is the reward, is that of ``last``.
    """
    return bytes(dumps(_Joined((None if first is None else bytes(first), bytes(last), takes_reward))))


def _decode_joined(first: bytes | None, last: bytes, takes_reward: bool) -> tuple[Any, list[Any]]:
    (info, leaves), (last_info, last_leaves) = ({}, []) if first is None else decode(first), decode(last)
    joined = {**(info if isinstance(info, Mapping) else {"info": info}), **last_info}
    return joined, [*leaves[:-1], last_leaves[-1]] if takes_reward else leaves


def decode_alike(contents: npt.NDArray[np.uint8]) -> list[dict[str, Any]] | None:
    """Return the infos that `encode` was given for each row of an array, in a third of the time that `decode` takes.

    Returns:
        None if they are not records of one layout.
    """
    layout = _layout_in(contents[0].data)
    if layout is None or contents.shape[1] != layout.size:
        return None
    start = len(layout.head)
    if (contents[:, :start] != contents[0, :start]).any():
        return None
    return layout.decode(contents[:, start:].tobytes())


def _layout_in(content: bytes | bytearray | memoryview) -> _Layout | None:
    """Return the layout of a record; None for what is pickled."""
    if content[0] != _RECORD:
        return None
    _, size = _HEAD.unpack_from(content)
    return _read_layout(bytes(content[_HEAD.size : _HEAD.size + size]))
