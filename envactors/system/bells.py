"""The part of a doorbell that all systems share."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol


class BellPoller(Protocol):
    """The interface of pollers that a doorbell uses."""

    def add_bell(self, bell: Any) -> None: ...

    def remove(self, fd: int) -> None: ...


class BaseDoorbell(ABC):
    """Wakes the threads that poll it. Several rings count as one, and after `close` they do nothing.

    Args:
        open_ends: Returns the descriptor that is readable after a ring and the one that rings are written to, or a
            single one that is both.

    Attributes:
        ring_open: Rings without a lock, for a caller that knows that no thread closes the doorbell meanwhile.
    """

    ring_open: Callable[[], None]

    def __init__(self, open_ends: Callable[[], list[int]]) -> None:
        self._closed = False
        self._pollers: weakref.WeakSet[Any] = weakref.WeakSet()
        # Guards against writing to a closed descriptor, whose number may be reused. Reentrant: finalizers ring, too.
        self._lock = threading.RLock()
        self._open: list[int] = open_ends()  # the descriptors that `close` has not closed yet
        self._hearing, self._ringing = self._open[0], self._open[-1]

    def fileno(self) -> int:
        """Return the descriptor that hears rings, for another process or a poller."""
        return self._hearing

    def ringer(self) -> int:
        """Return the descriptor from which another process makes a doorbell to ring this one."""
        return self._ringing

    def ring(self) -> None:
        with self._lock:
            if not self._closed:
                self.ring_open()

    @abstractmethod
    def clear(self) -> None:
        """Stop being readable until the next ring; not for a doorbell that is registered with a poller."""

    def register(self, poller: BellPoller) -> None:
        """Have a poller report each ring until `unregister` or `close`, also if others poll it."""
        with self._lock:
            if not self._closed and poller not in self._pollers:
                poller.add_bell(self)
                self._pollers.add(poller)

    def unregister(self, poller: BellPoller) -> None:
        """Remove it from a poller, if it is registered there."""
        with self._lock:
            if poller in self._pollers:
                self._pollers.discard(poller)
                poller.remove(self._hearing)

    def close(self) -> None:
        """Close the descriptors, or those that an interrupted call has left open."""
        with self._lock:
            self._closed = True
            for poller in self._pollers:
                with contextlib.suppress(ValueError, OSError):  # the poller was closed meanwhile
                    poller.remove(self._hearing)
            self._pollers.clear()
            while self._open:
                os.close(self._open.pop())

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # an exception has interrupted its making
            self.close()
