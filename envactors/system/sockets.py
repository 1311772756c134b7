"""Pairs of sockets, and writing to sockets and pipes without SIGPIPE.

The default disposition of that signal ends the process. Python ignores it, but many command-line tools set
``signal.signal(SIGPIPE, SIG_DFL)``, and would end at the first write to a worker that has just crashed.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

# Pass these flags to each `send`, `sendall`, or `sendmsg`, so that a closed peer raises BrokenPipeError, not a signal.
SEND_FLAGS: Final[int] = getattr(socket, "MSG_NOSIGNAL", 0)
# macOS lacks the flag. It has this option of a socket instead, which has no name in Python.
_SO_NOSIGPIPE = 0x1022


def open_pair(ours: ExitStack, theirs: ExitStack, kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, int]:
    """Return a socket that the first stack closes, and the descriptor of its peer, which the other stack closes."""
    sock, peer = socket.socketpair(socket.AF_UNIX, kind)
    ours.enter_context(sock)
    return sock, theirs.enter_context(peer).fileno()


def prevent_sigpipe(sock: socket.socket) -> None:
    """Prepare a socket once for writes with `SEND_FLAGS`, where the flags alone do not prevent SIGPIPE."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):  # the peer has closed it already
            sock.setsockopt(socket.SOL_SOCKET, _SO_NOSIGPIPE, 1)


@contextlib.contextmanager
def sigpipe_blocked() -> Iterator[None]:
    """Block SIGPIPE in this thread, and discard it at the end of the context.

    For writes that take no flags: to pipes, and by libraries such as OpenSSL.
    """
    only = {signal.SIGPIPE}
    if signal.SIGPIPE in signal.pthread_sigmask(signal.SIG_BLOCK, only):
        yield  # it was blocked before, and stays pending for whatever blocked it
        return
    try:
        yield
    finally:
        if signal.SIGPIPE in signal.sigpending():
            signal.sigwait(only)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, only)
