"""Writing to sockets and pipes without SIGPIPE, whose default disposition ends the process.

Python ignores the signal; programs that set ``signal.signal(SIGPIPE, SIG_DFL)``, as many command-line tools do, would
end at the first write to a worker that has just crashed.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def sigpipe_blocked() -> Iterator[None]:
    """Keep SIGPIPE from this thread in the context.

    It is for writes that take no flag: those to pipes, and those by libraries such as OpenSSL.
    """
    only = {signal.SIGPIPE}
    if signal.SIGPIPE in signal.pthread_sigmask(signal.SIG_BLOCK, only):
        yield  # whoever has blocked it expects it to stay pending
        return
    try:
        yield
    finally:
        if signal.SIGPIPE in signal.sigpending():
            signal.sigwait(only)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, only)
