"""Several pickles in one frame: what came besides the results of one turn, each to be read or to fail by itself."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

_HEAD = struct.Struct("<I")
_ENTRY = struct.Struct("<IQ")
# Large arrays behind a pickle stay aligned; see `envactors.wire.pickling`.
_ALIGNMENT = 16


def pack(parts: Iterable[tuple[int, bytes | bytearray]]) -> bytearray:
    """Puts numbered parts one behind the other."""
    parts = list(parts)
    bundle = bytearray(_HEAD.pack(len(parts)))
    for index, part in parts:
        bundle += _ENTRY.pack(index, len(part))
    for _, part in parts:
        bundle += bytes(-len(bundle) % _ALIGNMENT)
        bundle += part
    return bundle


def unpack(bundle: bytes | bytearray | memoryview) -> Iterator[tuple[int, memoryview]]:
    """Gives the parts again, without copying them."""
    view = memoryview(bundle)
    (count,) = _HEAD.unpack_from(view)
    start = _HEAD.size + count * _ENTRY.size
    for number in range(count):
        index, length = _ENTRY.unpack_from(view, _HEAD.size + number * _ENTRY.size)
        start += -start % _ALIGNMENT
        yield index, view[start : start + length]
        start += length
