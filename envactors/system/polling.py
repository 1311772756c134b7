"""Waiting for many descriptors at once, waking a thread or process that does, and local sockets."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable

# The system's calls refuse much longer time-outs; a caller with a later deadline waits again. In seconds.
LONGEST_WAIT = 1e6

READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
WRITABLE = select.EPOLLOUT


def remaining(deadline: float | None) -> float | None:
    """Return the seconds left until a time of `time.monotonic`, from 0 to `LONGEST_WAIT`; None for no deadline."""
    return None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT)


class Poller:
    """Waits for many descriptors at once; another poller can wait for it.

    Attributes:
        poll: Waits up to so many seconds (None: for ever) and returns pairs (descriptor, READABLE | WRITABLE).
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.poll: Callable[[float | None], list[tuple[int, int]]] = self._epoll.poll

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, fd: int, *, edges: bool = False) -> None:
        """Watch a descriptor for reading; with ``edges``, report it once each time that something new comes."""
        self._epoll.register(fd, select.EPOLLIN | (select.EPOLLET if edges else 0))

    def watch(self, fd: int, *, readable: bool = True, writable: bool = False) -> None:
        """Change what a descriptor is watched for; with neither it is not reported."""
        self._epoll.modify(fd, (select.EPOLLIN if readable else 0) | (select.EPOLLOUT if writable else 0))

    def remove(self, fd: int) -> None:
        self._epoll.unregister(fd)

    def close(self) -> None:
        self._epoll.close()


class Doorbell:
    """Wakes the thread that polls it; several rings count as one, and after `close` they do nothing.

    Args:
        fd: The descriptor of a doorbell that another process made; None makes one.

    Attributes:
        ring_open: Rings without a lock; for a caller that knows that no thread closes the doorbell meanwhile.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if fd is None else fd
        self.ring_open: Callable[[], None] = functools.partial(os.eventfd_write, self._fd, 1)
        self._closed = False
        self._pollers: weakref.WeakSet[Poller] = weakref.WeakSet()
        # A closed descriptor's number may soon be another's. Reentrant, since finalizers ring too.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Stop being readable until the next ring."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def register(self, poller: Poller) -> None:
        """Add it to a poller, which reports each ring until the doorbell is closed; nobody has to `clear` it."""
        with self._lock:
            if not self._closed and poller not in self._pollers:
                poller.add(self._fd, edges=True)
                self._pollers.add(poller)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for poller in self._pollers:
                with contextlib.suppress(ValueError):  # itself closed meanwhile
                    poller.remove(self._fd)
            os.close(self._fd)


def wait_readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor is readable; return False if it is not within so many seconds."""
    poll = select.poll()  # `select.select` refuses descriptors from 1,024 on
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the bounds of messages and tell when the other end is closed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def is_disconnect(error: OSError) -> bool:
    """Return whether an error of a socket only says that the other end is gone."""
    return error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
