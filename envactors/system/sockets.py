"""Local sockets: packets, what the peer has not read, and errors that only say that it is gone."""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import termios


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the bounds of messages and tell when the other end is closed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def unread_by_peer(sock: socket.socket) -> bool:
    """Return whether something that was sent through a local socket still waits to be read at its other end."""
    unread = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, unread)
    except OSError:
        return False
    return unread[0] > 0


def is_disconnect(error: OSError) -> bool:
    """Return whether an error only says that the other end is gone."""
    return error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
