"""Waiting with epoll, and doorbells on eventfd."""

from __future__ import annotations

import contextlib
import functools
import os
import select
from collections.abc import Callable

from envactors.system.bells import BaseDoorbell

READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
WRITABLE = select.EPOLLOUT


class Poller:
    """Waits for many descriptors at once; another poller can wait for it.

    Attributes:
        poll: Waits at most this many seconds (None: no limit) and returns pairs (descriptor, READABLE | WRITABLE).
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.poll: Callable[[float | None], list[tuple[int, int]]] = self._epoll.poll

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, fd: int, events: int = select.EPOLLIN) -> None:
        """Watch a descriptor for reading."""
        try:
            self._epoll.register(fd, events)
        except FileExistsError:  # it was added before, but an exception kept the caller from recording that
            self._epoll.modify(fd, events)

    def add_bell(self, bell: BaseDoorbell) -> None:
        """Report each ring of a doorbell once."""
        self.add(bell.fileno(), select.EPOLLIN | select.EPOLLET)

    def watch(self, fd: int, *, readable: bool = True, writable: bool = False) -> None:
        """Change what a descriptor is watched for; with neither it is not reported."""
        self._epoll.modify(fd, (select.EPOLLIN if readable else 0) | (select.EPOLLOUT if writable else 0))

    def remove(self, fd: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # it was not watched
            self._epoll.unregister(fd)

    def close(self) -> None:
        self._epoll.close()


class Doorbell(BaseDoorbell):
    """A doorbell; see `BaseDoorbell`.

    Args:
        fd: The descriptor of a doorbell of another process; None to make a new one.
    """

    def __init__(self, fd: int | None = None) -> None:
        super().__init__(lambda: [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if fd is None else fd])
        self.ring_open: Callable[[], None] = functools.partial(os.eventfd_write, self._ringing, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._hearing)
