"""Writing to connections whose other end may be closed, without SIGPIPE.

Python ignores the signal, but programs with ``signal.signal(SIGPIPE, SIG_DFL)``, as many command-line tools are, would
end at the first write to a worker that has just crashed. The write's error says all there is to say.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Final

# The flag of sends on a socket; where the system has none, `prevent_sigpipe` sets an option of the socket instead.
NO_SIGPIPE: Final[int] = getattr(socket, "MSG_NOSIGNAL", 0)
_SO_NOSIGPIPE = 0x1022  # of macOS; Python has no name for it


def prevent_sigpipe(sock: socket.socket) -> None:
    """Have no send on a socket raise SIGPIPE, where that is an option of the socket."""
    if sys.platform == "darwin":
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
