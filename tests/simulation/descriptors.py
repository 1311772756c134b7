"""Doorbells, pollers, and inboxes that a `simulation.schedule` controls, and which have descriptors."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

from envactors.system.polling import READABLE
from simulation.schedule import Run


class Readable:
    """Has a descriptor that a `ControlledPoller` can watch.

    Args:
        run: The schedule.
    """

    _numbers = itertools.count(1_000_000)

    def __init__(self, run: Run) -> None:
        self._run = run
        self._fd = next(self._numbers)
        run.descriptors[self._fd] = self

    def fileno(self) -> int:
        return self._fd

    @property
    def is_readable(self) -> bool:
        """Whether a poller reports it now."""
        raise NotImplementedError


class Inbox(Readable):
    """Messages that a thread reads once a poller has reported them."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._messages: deque[Any] = deque()
        self.is_closed = False

    @property
    def is_readable(self) -> bool:
        return bool(self._messages) or self.is_closed

    def put(self, message: Any) -> None:
        """Send a message."""
        self._run.enter()
        self._messages.append(message)

    def close(self) -> None:
        """Have it reported as readable from now on, as a channel is whose other end is closed."""
        self._run.enter()
        self.is_closed = True

    def take(self) -> list[Any]:
        """Return the messages that have come."""
        self._run.enter()
        messages = list(self._messages)
        self._messages.clear()
        return messages


class ControlledDoorbell(Readable):
    """Replaces `envactors.system.polling.Doorbell`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._has_rung = False
        self._pollers: list[ControlledPoller] = []

    @property
    def is_readable(self) -> bool:
        return self._has_rung

    def ringer(self) -> int:
        return self._fd

    def ring(self) -> None:
        self._run.enter()
        self._has_rung = True
        for poller in self._pollers:
            poller.edges.add(self._fd)

    ring_open = ring

    def clear(self) -> None:
        self._run.enter()
        self._has_rung = False

    def register(self, poller: ControlledPoller) -> None:
        if poller not in self._pollers:
            poller.add(self._fd, edges=True)
            self._pollers.append(poller)

    def unregister(self, poller: ControlledPoller) -> None:
        if poller in self._pollers:
            self._pollers.remove(poller)
            poller.remove(self._fd)

    def close(self) -> None:
        """Do nothing: nobody else gets its descriptor."""


class ControlledPoller(Readable):
    """Replaces `envactors.system.polling.Poller`.

    Attributes:
        edges: The descriptors with something new, of those that are reported once for each ring.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        # Whether each descriptor is reported at present, in the order in which they were added.
        self._watched: dict[int, bool] = {}
        self._reported_once: set[int] = set()
        self.edges: set[int] = set()

    @property
    def is_readable(self) -> bool:
        return bool(self._ready())

    def _ready(self) -> list[tuple[int, int]]:
        return [(fd, READABLE) for fd, is_reported in self._watched.items() if is_reported and self._has_news(fd)]

    def _has_news(self, fd: int) -> bool:
        if fd in self._reported_once:
            return fd in self.edges
        return bool(self._run.descriptors[fd].is_readable)

    def add(self, fd: int, *, edges: bool = False) -> None:
        self._run.enter()
        self._watched[fd] = True
        if edges:
            self._reported_once.add(fd)
            if self._run.descriptors[fd].is_readable:
                self.edges.add(fd)

    def watch(self, fd: int, *, readable: bool = True, writable: bool = False) -> None:
        del writable  # everything is sent at once
        self._run.enter()
        self._watched[fd] = readable

    def remove(self, fd: int) -> None:
        self._run.enter()
        del self._watched[fd]
        self._reported_once.discard(fd)
        self.edges.discard(fd)

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        if self._run.enter() is None:
            return []
        if timeout != 0 and not self._ready():
            deadline = None if timeout is None else self._run.now + timeout
            while not self._ready() and self._run.block(lambda: self.is_readable, deadline, "descriptors"):
                pass
        ready = self._ready()
        self.edges.difference_update(fd for fd, _ in ready)
        return ready

    def close(self) -> None:
        """Do nothing: nobody else gets its descriptor."""
