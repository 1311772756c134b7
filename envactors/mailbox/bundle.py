"""Bundles: numbered parts in one buffer, each aligned, such as a pickle and its arrays, or the items of a frame."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

# The first byte of a bundle; no pickle begins with it.
MARK = 0
# The mark and the number of parts.
_HEAD = struct.Struct("<B7xQ")
# The number and the length of a part.
_ENTRY = struct.Struct("<QQ")
# In bytes; enough for the elements of any array, and what the lengths of head and entries are multiples of.
_ALIGNMENT = 16


def pack(parts: Iterable[tuple[int, bytes | bytearray | memoryview]]) -> bytearray:
    """Return a bundle of numbered parts."""
    parts = list(parts)
    pieces: list[bytes | bytearray | memoryview] = [_HEAD.pack(MARK, len(parts))]
    pieces += [_ENTRY.pack(number, len(part)) for number, part in parts]
    padding = 0
    for _, part in parts:
        if padding:
            pieces.append(bytes(padding))
        pieces.append(part)
        padding = -len(part) % _ALIGNMENT
    return bytearray().join(pieces)


def unpack(bundle: bytes | bytearray | memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the numbered parts of a bundle, without copying them."""
    view = memoryview(bundle)
    _, count = _HEAD.unpack_from(view)
    start = _HEAD.size + count * _ENTRY.size
    for number, length in _ENTRY.iter_unpack(view[_HEAD.size : start]):
        yield number, view[start : start + length]
        start += length + -length % _ALIGNMENT
