"""One connection between the caller and a node: records of all its actors, over TCP, encrypted or not."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import deque

from envactors.remote.records import Record, RecordReader, RecordWriter
from envactors.system.sockets import SEND_FLAGS, prevent_sigpipe, sigpipe_blocked

# How many buffers one write takes at most; the system's limit is 1,024.
_BUFFERS = 512
# Small payloads are copied behind their header, so that fewer buffers are passed to the system.
_SMALL = 1 << 12
# How long what was sent may stay unacknowledged before the system gives the connection up, in milliseconds.
_UNACKNOWLEDGED = 20_000
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Link:
    """A connection on which records travel. Any thread may send; one at a time may receive.

    Args:
        sock: A connected stream socket, which it owns from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        prevent_sigpipe(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED)
        self._socket = sock
        self._lock = threading.Lock()
        # OpenSSL allows no thread to read from a connection while another one writes.
        self._read_lock = self._lock if isinstance(sock, ssl.SSLSocket) else contextlib.nullcontext()
        # OpenSSL writes without a flag against SIGPIPE, sometimes also while it reads.
        self._guarded = sigpipe_blocked if isinstance(sock, ssl.SSLSocket) else contextlib.nullcontext
        self._writer = RecordWriter()
        self._reader = RecordReader()
        # What is still to be written, and how many bytes that is.
        self._outbox: deque[memoryview] = deque()
        self.backlog = 0
        # Whether the system takes no more at the moment.
        self.is_full = False
        # How many threads are collecting records for one write.
        self._corks = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, record: Record) -> None:
        """Write a record, or as much of it as fits, or nothing yet where records are being collected.

        Raises:
            OSError: The connection is lost.
        """
        with self._lock:
            head, payload = self._writer.head(record), record.payload
            if len(payload) < _SMALL:
                self._outbox.append(memoryview(head + payload))
            else:
                self._outbox.append(memoryview(head))
                self._outbox.append(memoryview(payload).cast("B"))
            self.backlog += len(head) + len(payload)
            if not self._corks:
                self._flush()

    def cork(self) -> None:
        """Collect what any thread sends, until as many calls of `uncork`."""
        with self._lock:
            self._corks += 1

    def uncork(self) -> None:
        """Write what was collected, at once.

        Raises:
            OSError: The connection is lost.
        """
        with self._lock:
            self._corks -= 1
            if not self._corks:
                self._flush()

    def flush(self) -> None:
        """Write as much of the backlog as fits.

        Raises:
            OSError: The connection is lost.
        """
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        self.is_full, outbox = False, self._outbox
        while outbox:
            parts = [outbox[i] for i in range(min(_BUFFERS, len(outbox)))]
            try:
                # TLS has no way to write several buffers.
                if isinstance(self._socket, ssl.SSLSocket):
                    with self._guarded():
                        sent = self._socket.send(parts[0] if len(parts) == 1 else b"".join(parts))
                else:
                    sent = self._socket.sendmsg(parts, (), SEND_FLAGS)
            except _WOULD_BLOCK:
                self.is_full = True
                return
            self.backlog -= sent
            while sent:
                if sent < len(outbox[0]):
                    outbox[0] = outbox[0][sent:]
                    break
                sent -= len(outbox.popleft())

    def receive(self) -> list[Record] | None:
        """Read what is there, and return the records that are complete now; None if the other end is closed.

        Raises:
            OSError: The connection is lost.
            LinkCorruptError: What came is not what was sent.
        """
        records: list[Record] = []
        while True:
            space = self._reader.space
            try:
                with self._read_lock, self._guarded():
                    read = self._socket.recv_into(space)
            except _WOULD_BLOCK:
                return records
            if read == 0:
                return records or None
            records += self._reader.advance(read)
            if read < len(space) and not isinstance(self._socket, ssl.SSLSocket):
                return records

    def close(self) -> None:
        """Close the connection; what was not written yet is lost."""
        with self._lock:
            self._outbox.clear()
            self.backlog = 0
            self._socket.close()
