"""The connection between the caller and a node: carries the records of all its actors over TCP, with or without TLS."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections import deque
from collections.abc import Sequence

from envactors.remote.records import Record, RecordReader, RecordWriter
from envactors.remote.streams import Stream, TlsStream

# How many bytes are prepared for one write. An urgent record waits for prepared bytes, and for those that the system
# has taken but not sent, whose limit is the second value.
_BATCH = 1 << 17
_UNSENT = 1 << 17
# The most buffers in one write; the system's limit is 1,024.
_BUFFERS = 512
# How many bytes are received before other handlers get a turn, since a heartbeat may be due.
_TURN = 1 << 22
# The size of the system's send buffer, in bytes, where unsent bytes have no separate limit.
_BUFFERED = 1 << 18
# How long sent bytes may stay unacknowledged before the system closes the connection, in milliseconds.
_UNACKNOWLEDGED = 20_000


class LinkLostError(ConnectionError):
    """The connection is lost."""


class Link:
    """A connection on which records travel. Any thread may send; one at a time may receive.

    Args:
        connection: A connected stream socket, or a stream after its handshake; the link owns it from now on.
    """

    def __init__(self, connection: socket.socket | Stream) -> None:
        self._stream = stream = Stream(connection) if isinstance(connection, socket.socket) else connection
        stream.settimeout(0)
        _set_options(stream)
        self._lock = threading.Lock()
        # OpenSSL allows no thread to read from a connection while another one writes.
        self._read_lock = self._lock if isinstance(stream, TlsStream) else contextlib.nullcontext()
        # The records that `add` has left, and those that are being written.
        self._added: deque[Record] = deque()
        self._writer = RecordWriter()
        self._reader = RecordReader()
        # The prepared bytes, encrypted if the connection is, and their size.
        self._outbox: deque[memoryview] = deque()
        self._ready = 0
        # Whether the system currently accepts no more bytes.
        self.is_full: bool = False
        # How many threads are collecting records for one write.
        self._corks = 0

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def backlog(self) -> int:
        """How many bytes are waiting to be written."""
        return self._writer.size + self._ready

    def add(self, record: Record) -> None:
        """Leave a record to the next `flush`. Takes no lock, so signal handlers and finalizers may call it."""
        self._added.append(record)

    def send(self, record: Record) -> None:
        """Write as much of a record as fits, or nothing yet while records are being collected.

        Raises:
            LinkLostError: The connection is lost.
        """
        with self._lock:
            self._writer.add(record)
            if not self._corks:
                self._flush()

    def cork(self) -> None:
        """Collect what any thread sends until `uncork` was called as often."""
        with self._lock:
            self._corks += 1

    def uncork(self) -> None:
        """Write the collected records at once.

        Raises:
            LinkLostError: The connection is lost.
        """
        with self._lock:
            self._corks -= 1
            if not self._corks:
                self._flush()

    def flush(self) -> None:
        """Write as much of the backlog as fits.

        Raises:
            LinkLostError: The connection is lost.
        """
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        self.is_full = False
        while self._added:
            self._writer.add(self._added.popleft())
        outbox = self._outbox
        while True:
            if not outbox:
                # Not earlier: later urgent records have to wait for prepared bytes.
                parts = self._writer.take(_BATCH)
                if not parts:
                    return
                outbox.extend(map(memoryview, self._seal(parts)))
                self._ready = sum(map(len, outbox))
            try:
                sent = self._stream.write(tuple(itertools.islice(outbox, _BUFFERS)))
            except BlockingIOError:
                self.is_full = True
                return
            except OSError as error:
                raise LinkLostError(str(error)) from error
            self._ready -= sent
            while sent:
                if sent < len(outbox[0]):
                    outbox[0] = outbox[0][sent:]
                    break
                sent -= len(outbox.popleft())

    def _seal(self, parts: list[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        try:
            return self._stream.seal(parts)
        except (OSError, MemoryError) as error:  # these frames are lost, and their numbers used
            raise LinkLostError(str(error)) from error

    def receive(self) -> list[Record] | None:
        """Read the available bytes, and return the records that are complete; None if the peer has closed.

        Raises:
            LinkLostError: The connection is lost.
            LinkCorruptError: The bytes were changed on the way.
        """
        records: list[Record] = []
        total = 0
        while True:
            space = self._reader.space
            try:
                with self._read_lock:
                    read = self._stream.recv_into(space, fresh=total < _TURN)
            except BlockingIOError:
                return records
            except OSError as error:
                raise LinkLostError(str(error)) from error
            if read == 0:
                return records or None
            total += read
            records += self._reader.advance(read)
            if read < len(space) and not isinstance(self._stream, TlsStream):
                return records

    def close(self) -> None:
        """Close the connection, and drop what was not written yet."""
        with self._lock:
            self._added.clear()
            self._outbox.clear()
            self._writer.clear()
            self._ready = 0
            self._stream.close()


def _set_options(stream: Stream) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
    else:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFERED)
