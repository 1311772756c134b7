"""Waiting with `selectors`, and doorbells on socket pairs."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from envactors.system.bells import BaseDoorbell

READABLE = selectors.EVENT_READ
WRITABLE = selectors.EVENT_WRITE


class Poller:
    """Waits for many descriptors at once; another poller can wait for it.

    The system only reports that the socket of a doorbell is readable, and the first poller that reads it takes the ring
    from the others. So a poller that hears a doorbell empties its socket, and announces the ring to the other pollers
    of that doorbell. Each poller reports every ring at least once; reporting one twice does no harm.

    Raises:
        OSError: The platform has none of epoll, kqueue, and /dev/poll, which can be nested.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        if not hasattr(self._selector, "fileno"):
            raise OSError(f"{type(self._selector).__name__} cannot be polled itself: expected epoll or kqueue")
        self._fileno: int = self._selector.fileno()
        self._bells: dict[int, Doorbell] = {}
        # The doorbells that other pollers have heard, and the pair of sockets that wakes this one then.
        self._announced: set[int] = set()
        self._wakes, self._waker = _bell_pair()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._closed = False
        self._lock = threading.RLock()

    def fileno(self) -> int:
        return self._fileno

    def poll(self, seconds: float | None) -> list[tuple[int, int]]:
        """Wait at most this many seconds (None: no limit) and return pairs (descriptor, READABLE | WRITABLE)."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            events = self._select(0 if self._announced else seconds)
            announced = self._announced
            while announced:
                with contextlib.suppress(KeyError):  # another thread was faster
                    events.append((announced.pop(), READABLE))
            if events or seconds == 0:
                return events
            if deadline is not None:
                seconds = max(0.0, deadline - time.monotonic())

    def _select(self, seconds: float | None) -> list[tuple[int, int]]:
        events = []
        for key, mask in self._selector.select(seconds):
            fd = key.fd
            if fd == self._wakes:
                _empty(fd)
                continue
            bell = self._bells.get(fd)
            if bell is not None:
                bell.answer(self)
            events.append((fd, mask))
        return events

    def add(self, fd: int) -> None:
        """Watch a descriptor for reading."""
        with contextlib.suppress(KeyError):  # it was added before, but an exception kept the caller from recording that
            self._selector.register(fd, selectors.EVENT_READ)

    def add_bell(self, bell: Doorbell) -> None:
        """Report each ring of a doorbell."""
        self._bells[bell.fileno()] = bell
        self.add(bell.fileno())

    def announce(self, fd: int) -> None:
        """Report a doorbell that another poller has heard."""
        with self._lock:
            if fd in self._bells and fd not in self._announced and not self._closed:
                self._announced.add(fd)
                _ring(self._waker)

    def watch(self, fd: int, *, readable: bool = True, writable: bool = False) -> None:
        """Change what a descriptor is watched for; with neither it is not reported."""
        mask = (selectors.EVENT_READ if readable else 0) | (selectors.EVENT_WRITE if writable else 0)
        with self._lock:
            self._unregister(fd)
            if mask:  # selectors refuse an empty one
                self._selector.register(fd, mask)

    def remove(self, fd: int) -> None:
        with self._lock:
            self._bells.pop(fd, None)
            self._announced.discard(fd)
            if not self._closed:
                self._unregister(fd)

    def _unregister(self, fd: int) -> None:
        with contextlib.suppress(KeyError):  # it was not watched
            self._selector.unregister(fd)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._selector.close()
                os.close(self._wakes)
                os.close(self._waker)


class Doorbell(BaseDoorbell):
    """A doorbell; see `BaseDoorbell`.

    Args:
        fd: A descriptor from another process, which can either be rung or heard; None to make a new doorbell.
    """

    def __init__(self, fd: int | None = None) -> None:
        super().__init__(lambda: [*_bell_pair()] if fd is None else [fd])
        self.ring_open: Callable[[], None] = functools.partial(_ring, self._ringing)

    def clear(self) -> None:
        _empty(self._hearing)

    def answer(self, hearer: Poller) -> None:
        """Clear the doorbell for the poller that heard it, and announce the ring to the others."""
        with self._lock:
            if self._closed:
                return  # another file may have the descriptor's number by now
            _empty(self._hearing)
            for poller in self._pollers:
                if poller is not hearer:
                    poller.announce(self._hearing)


def _bell_pair() -> tuple[int, int]:
    hearing, ringing = socket.socketpair()
    for end in (hearing, ringing):
        end.setblocking(False)
    return hearing.detach(), ringing.detach()


def _ring(fd: int) -> None:
    with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it is full of rings, or nothing hears it
        os.write(fd, b"!")


def _empty(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 1 << 12)
