"""Waiting for many descriptors at once, waking a thread or process that does, and local sockets."""

from __future__ import annotations

import errno
import select
import socket
import time
from typing import TYPE_CHECKING

from envactors.system.choice import PORTABLE

if TYPE_CHECKING or not PORTABLE:
    from envactors.system.linux.polling import *
else:
    from envactors.system.portable.polling import *

# The system's calls refuse much longer time-outs; a caller with a later deadline waits again. In seconds.
LONGEST_WAIT = 1e6


def remaining(deadline: float | None) -> float | None:
    """Return the seconds left until a time of `time.monotonic`, from 0 to `LONGEST_WAIT`; None for no deadline."""
    return None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT)


def wait_readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor is readable; return False if it is not within so many seconds."""
    poll = select.poll()  # `select.select` refuses descriptors from 1,024 on
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the bounds of messages and tell when the other end is closed.

    Only Linux has them: what uses them, the fork server, has no place elsewhere.
    """
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def is_disconnect(error: OSError) -> bool:
    """Return whether an error of a socket only says that the other end is gone."""
    return error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
