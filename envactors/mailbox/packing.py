"""Several buffers packed into one, each with a key and aligned, such as a pickle and its arrays.

What the keys mean is up to who packs: the positions or indices of envs, for example.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

# The first byte of packed buffers; no pickle begins with it.
MARK = 0
# The mark and the count of parts.
_HEAD = struct.Struct("<B7xQ")
# The key and the length of a part.
_ENTRY = struct.Struct("<QQ")
# In bytes. It suits the elements of any array; the lengths of head and entries are multiples of it.
_ALIGNMENT = 16


def pack(parts: Iterable[tuple[int, bytes | bytearray | memoryview]]) -> bytearray:
    """Pack (key, part) pairs into one buffer."""
    parts = list(parts)
    pieces: list[bytes | bytearray | memoryview] = [_HEAD.pack(MARK, len(parts))]
    pieces += [_ENTRY.pack(key, len(part)) for key, part in parts]
    padding = 0
    for _, part in parts:
        if padding:
            pieces.append(bytes(padding))
        pieces.append(part)
        padding = -len(part) % _ALIGNMENT
    return bytearray().join(pieces)


def unpack(packed: bytes | bytearray | memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the (key, part) pairs of a packed buffer, without copying the parts.

    Raises:
        struct.error: The buffer is not packed, or too short.
    """
    view = memoryview(packed)
    _, count = _HEAD.unpack_from(view)
    start = _HEAD.size + count * _ENTRY.size
    for key, length in _ENTRY.iter_unpack(view[_HEAD.size : start]):
        if start + length > len(view):
            raise struct.error(f"a part has {length} bytes, and there are {len(view) - start}")
        yield key, view[start : start + length]
        start += length + -length % _ALIGNMENT
