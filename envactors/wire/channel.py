"""The connection between an actor and its worker: frames over a local stream socket."""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING

from envactors.wire.messages import Frame

if TYPE_CHECKING:
    import socket

# Magic number, length of the payload, kind, incarnation, call id; padded so that large arrays behind it stay aligned.
_HEADER = struct.Struct("<HQBIQ9x")
_MAGIC = 0xEA70
# The most to read at once, in bytes. Longer payloads get a buffer of their own.
_CHUNK = 1 << 16
# In bytes, far above any real message. A longer one, or no magic number, means that other code wrote into the channel.
_LONGEST = 1 << 40


class ChannelCorruptError(Exception):
    """The received bytes are no frame."""


class Channel:
    """One end of a channel, over a connected stream socket.

    The parent's end does not block: what does not fit is buffered until `flush`. The worker's end blocks. One thread at
    a time may write, and one may read.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        # The bytes that are still to be written.
        self._outbox: deque[memoryview] = deque()
        # The beginning of an incomplete frame.
        self._parts = bytearray()
        # An incomplete frame of more than a chunk, and how many bytes of it have come.
        self._large: bytearray | None = None
        self._filled = 0

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def backlog(self) -> bool:
        """Whether parts of frames are still to be written."""
        return bool(self._outbox)

    def send(self, frame: Frame) -> None:
        """Write a frame, or as much of it as fits.

        Raises:
            OSError: The other end is closed.
        """
        kind, incarnation, call_id, payload = frame
        header = _HEADER.pack(_MAGIC, len(payload), kind, incarnation, call_id)
        if len(payload) < _CHUNK:
            self._outbox.append(memoryview(header + payload))
        else:
            self._outbox.append(memoryview(header))
            self._outbox.append(memoryview(payload))
        self.flush()

    def flush(self) -> None:
        """Write as much of the backlog as fits.

        Raises:
            OSError: The other end is closed.
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
        """Read once and return the frames that are complete now; None if the other end is closed.

        Raises:
            BlockingIOError: There is nothing to read (only on an end that does not block).
            ConnectionResetError: The other end was closed before it had read everything that was sent to it.
            ChannelCorruptError: The received bytes are no frame.
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
            magic, length, kind, incarnation, call_id = _HEADER.unpack_from(data, start)
            if magic != _MAGIC or length > _LONGEST:
                raise ChannelCorruptError(f"no frame begins with {bytes(data[start : start + _HEADER.size])!r}")
            body = start + _HEADER.size
            if end - body >= length:
                frames.append(Frame(kind, incarnation, call_id, data[body : body + length]))
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
        _, _, kind, incarnation, call_id = _HEADER.unpack_from(large)
        return [Frame(kind, incarnation, call_id, memoryview(large)[_HEADER.size :])]

    def close(self) -> None:
        self._outbox.clear()
        self.socket.close()
