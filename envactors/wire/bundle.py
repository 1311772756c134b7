"""Bundles: numbered parts in one buffer, each aligned, such as a pickle and its arrays, or the items of a frame."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

# The first byte of a bundle; no pickle begins with it.
MARK = 0
# The mark and the number of parts.
_HEAD = struct.Struct("<B3xI")
# The number and the length of a part.
_ENTRY = struct.Struct("<IQ")
# In bytes; enough for the elements of any array.
_ALIGNMENT = 16


def pack(parts: Iterable[tuple[int, bytes | bytearray | memoryview]]) -> bytearray:
    """Return a bundle of numbered parts."""
    parts = list(parts)
    bundle = bytearray(_HEAD.pack(MARK, len(parts)))
    for index, part in parts:
        bundle += _ENTRY.pack(index, len(part))
    for _, part in parts:
        bundle += bytes(-len(bundle) % _ALIGNMENT)
        bundle += part
    return bundle


def unpack(bundle: bytes | bytearray | memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the numbered parts of a bundle, without copying them."""
    view = memoryview(bundle)
    _, count = _HEAD.unpack_from(view)
    start = _HEAD.size + count * _ENTRY.size
    for number in range(count):
        index, length = _ENTRY.unpack_from(view, _HEAD.size + number * _ENTRY.size)
        start += -start % _ALIGNMENT
        yield index, view[start : start + length]
        start += length
