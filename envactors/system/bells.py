"""What the doorbells of all systems have in common."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class BellPoller(Protocol):
    """What a doorbell needs of those that poll it."""

    def remove(self, fd: int) -> None: ...


_Poller = TypeVar("_Poller", bound=BellPoller)


class BaseDoorbell(ABC, Generic[_Poller]):
    """Wakes the threads that poll it; several rings count as one, and after `close` they do nothing.

    Args:
        hearing: The descriptor that is readable after a ring.
        ringing: The descriptor that rings are written to; it may be the same.
        ring_open: Rings.

    Attributes:
        ring_open: Rings without a lock; for a caller that knows that no thread closes the doorbell meanwhile.
    """

    def __init__(self, hearing: int, ringing: int, ring_open: Callable[[], None]) -> None:
        self._hearing, self._ringing = hearing, ringing
        self.ring_open = ring_open
        self._write = ring_open
        self._closed = False
        self._pollers: weakref.WeakSet[_Poller] = weakref.WeakSet()
        # A closed descriptor's number may soon be another's. Reentrant, since finalizers ring too.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """Return the descriptor that hears rings, for another process or a poller."""
        return self._hearing

    def ringer(self) -> int:
        """Return the descriptor that another process makes a doorbell of to ring this one."""
        return self._ringing

    def ring(self) -> None:
        with self._lock:
            if not self._closed:
                self._write()

    @abstractmethod
    def clear(self) -> None:
        """Stop being readable until the next ring; not for a doorbell that is registered somewhere."""

    def register(self, poller: _Poller) -> None:
        """Add it to a poller, which reports each ring until `unregister` or `close`, also if others poll it."""
        with self._lock:
            if not self._closed and poller not in self._pollers:
                self._add_to(poller)
                self._pollers.add(poller)

    @abstractmethod
    def _add_to(self, poller: _Poller) -> None: ...

    def unregister(self, poller: _Poller) -> None:
        """Remove it from a poller, if it is registered there."""
        with self._lock:
            if poller in self._pollers:
                self._pollers.discard(poller)
                poller.remove(self._hearing)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for poller in self._pollers:
                with contextlib.suppress(ValueError):  # itself closed meanwhile
                    poller.remove(self._hearing)
            for fd in {self._hearing, self._ringing}:
                os.close(fd)
