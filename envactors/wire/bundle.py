"""Numbered parts one behind the other, each aligned: a pickle and its arrays, or what came besides a turn's results."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

# The first byte of a pickle is another.
MARK = 0
_HEAD = struct.Struct("<B3xI")
_ENTRY = struct.Struct("<IQ")
# Enough for the elements of any array.
_ALIGNMENT = 16


def pack(parts: Iterable[tuple[int, bytes | bytearray | memoryview]]) -> bytearray:
    """Puts numbered parts one behind the other."""
    parts = list(parts)
    bundle = bytearray(_HEAD.pack(MARK, len(parts)))
    for index, part in parts:
        bundle += _ENTRY.pack(index, len(part))
    for _, part in parts:
        bundle += bytes(-len(bundle) % _ALIGNMENT)
        bundle += part
    return bundle


def unpack(bundle: bytes | bytearray | memoryview) -> Iterator[tuple[int, memoryview]]:
    """Gives the parts again, without copying them."""
    view = memoryview(bundle)
    _, count = _HEAD.unpack_from(view)
    start = _HEAD.size + count * _ENTRY.size
    for number in range(count):
        index, length = _ENTRY.unpack_from(view, _HEAD.size + number * _ENTRY.size)
        start += -start % _ALIGNMENT
        yield index, view[start : start + length]
        start += length
