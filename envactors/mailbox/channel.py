"""The connection between an actor and its worker: frames over a local stream socket.

What the frames mean is in `envactors.mailbox.messages`. Steps and resets go through shared memory instead.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from envactors.mailbox.messages import Frame
from envactors.system.sockets import SEND_FLAGS, prevent_sigpipe

if TYPE_CHECKING:
    import socket

# Magic number, length of the payload, kind, incarnation, call id; padded so that large arrays behind it stay aligned.
_HEADER = struct.Struct("<HQBIQ9x")
_MAGIC = 0xEA70
_HEADER_SIZE = _HEADER.size
_EMPTY = memoryview(b"")
# How much is read at once, in bytes. A longer frame is read into a buffer of its size.
_CHUNK = 1 << 16
# In bytes, far above any real message. If a frame claims to be longer, other code has written into the channel.
_LONGEST = 1 << 40


class ChannelCorruptError(Exception):
    """The received bytes do not form a frame."""


class Channel:
    """One end of a channel over a connected stream socket.

    The parent's end does not block and keeps what does not fit until `flush`. The worker's end blocks. One thread at a
    time may write, and one may read.

    Args:
        sock: The socket.

    Attributes:
        backlog: What is still to be written.
    """

    def __init__(self, sock: socket.socket) -> None:
        prevent_sigpipe(sock)
        self.socket = sock
        self.backlog: deque[memoryview] = deque()
        # What has come of an incomplete frame: a buffer, and how many bytes of it are filled; empty without one.
        self._buffer = _EMPTY
        self._filled = 0

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, frame: Frame) -> None:
        """Write a frame, or as much of it as fits.

        Raises:
            OSError: The other end is closed.
        """
        kind, incarnation, call_id, payload = frame
        header = _HEADER.pack(_MAGIC, len(payload), kind, incarnation, call_id)
        if self.backlog or len(payload) >= _CHUNK:
            self.backlog += map(memoryview, (header, payload))
            self.flush()
            return
        # Copying a small payload takes less time than a second system call.
        whole = header + payload
        try:
            sent = self.socket.send(whole, SEND_FLAGS)
        except BlockingIOError:
            sent = 0
        if sent != len(whole):  # also of an end that blocks, if a signal has interrupted it
            self.backlog.append(memoryview(whole)[sent:])
            self.flush()

    def flush(self) -> None:
        """Write as much of the backlog as fits.

        Raises:
            OSError: The other end is closed.
        """
        backlog = self.backlog
        while backlog:
            part = backlog[0]
            try:
                sent = self.socket.send(part, SEND_FLAGS)
            except BlockingIOError:
                return
            if sent == len(part):
                backlog.popleft()
            else:
                backlog[0] = part[sent:]

    def receive(self) -> list[Frame] | None:
        """Read once and return the frames that are complete now; None if the other end is closed.

        Raises:
            BlockingIOError: There is nothing to read (only on an end that does not block).
            ConnectionResetError: The other end was closed before it had read everything that was sent to it.
            ChannelCorruptError: The received bytes do not form a frame.
        """
        content: bytes | memoryview
        if self._filled == 0:
            content = self.socket.recv(_CHUNK)
            end = len(content)
        else:
            content = self._buffer
            end = self._filled + self.socket.recv_into(content[self._filled :])
        if end == self._filled:
            return None
        frames = []
        start, wanted = 0, _CHUNK
        while end - start >= _HEADER_SIZE:
            magic, length, kind, incarnation, call_id = _HEADER.unpack_from(content, start)
            if magic != _MAGIC or length > _LONGEST:
                raise ChannelCorruptError(f"a frame cannot begin with {bytes(content[start : start + _HEADER_SIZE])!r}")
            stop = start + _HEADER_SIZE + length
            if stop > end:
                wanted = max(_CHUNK, stop - start)
                break
            payload = content[start + _HEADER_SIZE : stop]
            frames.append(Frame(kind, incarnation, call_id, payload if length >= _CHUNK else bytes(payload)))
            start = stop
        if start == end:
            self._buffer = _EMPTY
        elif start > 0 or wanted > len(self._buffer):
            # Not a bytearray, since other threads would wait while it is filled with zeros.
            self._buffer = np.empty(wanted, np.uint8).data
            self._buffer[: end - start] = content[start:end]
        self._filled = end - start
        return frames

    def close(self) -> None:
        self.backlog.clear()
        self.socket.close()
