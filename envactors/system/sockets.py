"""Writing to sockets without SIGPIPE, whose default disposition ends the process."""

from __future__ import annotations

import contextlib
import socket
import sys
from typing import Final

# Pass these flags to each `send`, `sendall` or `sendmsg`, so that a closed peer is a BrokenPipeError and no signal.
SEND_FLAGS: Final[int] = getattr(socket, "MSG_NOSIGNAL", 0)
# macOS lacks the flag and has this option of a socket instead, which Python does not name.
_SO_NOSIGPIPE = 0x1022


def prevent_sigpipe(sock: socket.socket) -> None:
    """Prepare a socket once for writes with `SEND_FLAGS`, where the flags alone do not prevent SIGPIPE."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):  # the peer has closed it already
            sock.setsockopt(socket.SOL_SOCKET, _SO_NOSIGPIPE, 1)
