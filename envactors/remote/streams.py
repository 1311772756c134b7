"""Connections as streams of bytes, with or without TLS, for greetings and links.

A stream works on a blocking socket with a timeout, which a caller's greeting uses, and on a non-blocking one.
Encryption is separate from writing, so that each byte is encrypted once, however often its write is retried, and no
write raises SIGPIPE, as those of `ssl.SSLSocket` do.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Sequence

from envactors.system.sockets import SEND_FLAGS, prevent_sigpipe

# How many encrypted bytes are read at once; a record of TLS has at most 16 kB.
_ROOM = 1 << 17


class Stream:
    """A connected stream socket, without encryption.

    Args:
        sock: The socket, which the stream owns from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        prevent_sigpipe(sock)

    def fileno(self) -> int:
        return self._socket.fileno()

    def settimeout(self, seconds: float | None) -> None:
        """Limit how long each later operation blocks; with 0 it does not block."""
        self._socket.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket."""
        self._socket.setsockopt(level, option, value)

    def handshake(self) -> None:
        """Complete the handshake of TLS, if there is one.

        Raises:
            BlockingIOError: The socket does not block, and the peer's next message has not arrived. Call it again then.
            OSError: The connection is lost, or the peer is not accepted.
        """

    def seal(self, parts: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        """Return the bytes to `write` for these parts; call it once for each part, in order."""
        return parts

    def write(self, parts: Sequence[bytes | memoryview]) -> int:
        """Write as much of sealed parts as fits; return how many bytes were written.

        Raises:
            BlockingIOError: Nothing fits.
            OSError: The connection is lost.
        """
        return self._socket.sendmsg(parts, [], SEND_FLAGS)

    def sendall(self, data: bytes) -> None:
        """Write a small message as a whole."""
        for part in self.seal([data]):
            self._socket.sendall(part, SEND_FLAGS)

    def recv_into(self, space: memoryview, *, fresh: bool = True) -> int:
        """Read the available bytes; return their number, 0 at the end.

        Args:
            space: The buffer for them.
            fresh: Whether to read from the socket; otherwise only bytes that were read earlier are returned.

        Raises:
            BlockingIOError: No bytes are available.
            OSError: The connection is lost.
        """
        if not fresh:
            raise BlockingIOError
        return self._socket.recv_into(space)

    def recv(self, most: int) -> bytes:
        """Return at most this many bytes, none at the end; raises the same errors as `recv_into`."""
        buffer = bytearray(most)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def close(self) -> None:
        self._socket.close()


class TlsStream(Stream):
    """A connected stream socket with TLS.

    Args:
        sock: The socket.
        context: This side's certificates.
        server_side: Whether this side has accepted the connection.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        super().__init__(sock)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._room = memoryview(bytearray(_ROOM))

    def handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._send_outgoing()
                if not self._read_encrypted():
                    raise ConnectionError("the peer has closed the connection in the middle of the handshake")
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._send_outgoing()  # tells the peer the reason
                raise
            else:
                self._send_outgoing()
                return

    def _send_outgoing(self) -> None:
        if self._outgoing.pending:
            self._socket.sendall(self._outgoing.read(), SEND_FLAGS)

    def _read_encrypted(self) -> int:
        read = self._socket.recv_into(self._room)
        self._incoming.write(self._room[:read])
        return read

    def seal(self, parts: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        data = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
        while data:
            data = data[self._tls.write(data) :]
        return [self._outgoing.read()]

    def recv_into(self, space: memoryview, *, fresh: bool = True) -> int:
        while True:
            try:
                return int(self._tls.read(len(space), space))
            except ssl.SSLWantReadError:
                if not fresh:
                    raise BlockingIOError from None
                if not self._read_encrypted():
                    return 0


def make_stream(sock: socket.socket, context: ssl.SSLContext | None, *, server_side: bool) -> Stream:
    """Return the stream of a socket before the handshake, with TLS if there are certificates."""
    return Stream(sock) if context is None else TlsStream(sock, context, server_side=server_side)
