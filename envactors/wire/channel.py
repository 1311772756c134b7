"""One actor's connection to its worker: frames over a local stream socket."""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING

from envactors.system import unread_by_peer
from envactors.wire.messages import Frame

if TYPE_CHECKING:
    import socket

# Its length keeps large arrays behind it aligned.
_HEADER = struct.Struct("<HQBIQI5x")
_MAGIC = 0xEA70
_CHUNK = 1 << 16
# Far above any real message. A longer one, or no magic number, means that somebody else wrote into the channel.
_LONGEST = 1 << 40


class ChannelCorruptError(Exception):
    """The bytes that came are no frame."""


class Channel:
    """Frames over a connected stream socket.

    The parent's end does not block: what does not fit is kept and goes out with `flush`. The worker's end
    blocks. Writing is for one thread at a time, and so is reading.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._outbox: deque[memoryview] = deque()
        self._parts = bytearray()
        self._large: bytearray | None = None
        self._filled = 0

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def backlog(self) -> bool:
        """Whether something still waits to be written."""
        return bool(self._outbox)

    def unread(self) -> bool:
        """Whether the other end has left something unread that was sent to it."""
        return self.backlog or unread_by_peer(self.socket)

    def send(self, frame: Frame) -> None:
        """Writes a frame, or as much of it as fits.

        Raises:
            OSError: The other end is gone.
        """
        kind, incarnation, call_id, payload, check = frame
        header = _HEADER.pack(_MAGIC, len(payload), kind, incarnation, call_id, check)
        if len(payload) < _CHUNK:
            self._outbox.append(memoryview(header + payload))
        else:
            self._outbox.append(memoryview(header))
            self._outbox.append(memoryview(payload))
        self.flush()

    def flush(self) -> None:
        """Writes what is left.

        Raises:
            OSError: The other end is gone.
        """
        outbox = self._outbox
        while outbox:
            part = outbox[0]
            try:
                sent = self.socket.send(part)
            except BlockingIOError:
                return
            if sent == len(part):
                outbox.popleft()
            else:
                outbox[0] = part[sent:]

    def receive(self) -> list[Frame] | None:
        """Reads once and gives the frames that are complete now; None when the other end is gone.

        Raises:
            BlockingIOError: Nothing is there (only on an end that does not block).
            ConnectionResetError: The other end went without reading everything that was sent to it.
            ChannelCorruptError: What came is no frame.
        """
        if self._large is not None:
            return self._receive_large(self._large)
        data = self.socket.recv(_CHUNK)
        if not data:
            return None
        if self._parts:
            self._parts += data
            data = bytes(self._parts)
            self._parts.clear()
        return self._split(data)

    def _split(self, data: bytes) -> list[Frame]:
        frames = []
        start, end = 0, len(data)
        while end - start >= _HEADER.size:
            magic, length, kind, incarnation, call_id, check = _HEADER.unpack_from(data, start)
            if magic != _MAGIC or length > _LONGEST:
                raise ChannelCorruptError(f"no frame begins with {bytes(data[start : start + _HEADER.size])!r}")
            body = start + _HEADER.size
            if end - body >= length:
                frames.append(Frame(kind, incarnation, call_id, data[body : body + length], check))
                start = body + length
            elif length > _CHUNK:
                # A large frame is read straight into its own buffer rather than chunk by chunk.
                self._large = bytearray(_HEADER.size + length)
                self._filled = end - start
                self._large[: self._filled] = data[start:]
                return frames
            else:
                break
        self._parts += data[start:]
        return frames

    def _receive_large(self, large: bytearray) -> list[Frame] | None:
        with memoryview(large) as view, view[self._filled :] as rest:
            read = self.socket.recv_into(rest)
        if read == 0:
            return None
        self._filled += read
        if self._filled < len(large):
            return []
        self._large = None
        _, _, kind, incarnation, call_id, check = _HEADER.unpack_from(large)
        return [Frame(kind, incarnation, call_id, memoryview(large)[_HEADER.size :], check)]

    def close(self) -> None:
        self._outbox.clear()
        self.socket.close()
