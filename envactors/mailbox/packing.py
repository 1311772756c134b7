"""Several buffers packed into one, each with a key and aligned, such as a pickle and its arrays.

What the keys mean is up to who packs: the positions or indices of envs, for example.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from envactors.mailbox.channel import ChannelCorruptError

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


def unpack(packed: bytes | bytearray | memoryview) -> list[tuple[int, memoryview]]:
    """Return the (key, part) pairs of a packed buffer, without copying the parts.

    Raises:
        ChannelCorruptError: It is none, since env code has written into the channel.
    """
    view, parts = memoryview(packed), []
    try:
        mark, count = _HEAD.unpack_from(view)
        start = end = _HEAD.size + count * _ENTRY.size
        for key, length in _ENTRY.iter_unpack(view[_HEAD.size : start]):
            end = start + length
            parts.append((key, view[start:end]))
            start = end + -length % _ALIGNMENT
    except struct.error:
        mark = None
    if mark != MARK or end > len(view):
        raise ChannelCorruptError(f"packed parts cannot begin with {bytes(view[: _HEAD.size])!r}")
    return parts
