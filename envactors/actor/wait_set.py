"""What one thread sleeps in: doorbells of workers, replies, and a way to wake it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable
from typing import Protocol

from envactors.system.polling import Doorbell, Poller, remaining


class Gate(Protocol):
    """What a thread sleeps at."""

    def release(self) -> None:
        """Wake the thread."""


class WaitSet:
    """The doorbells that one thread waits for beside the replies; rings reach it whichever thread reads those.

    Args:
        replies: The descriptor that is readable while there are replies.
        parked: The threads that `Reactor.wake` wakes, by key; a sleeping thread enters itself.
    """

    def __init__(self, replies: int, parked: dict[Hashable, list[Gate]]) -> None:
        with contextlib.ExitStack() as undo:
            self._rings = undo.enter_context(contextlib.closing(Poller()))
            self._rings_and_replies = undo.enter_context(contextlib.closing(Poller()))
            self._nudge = undo.enter_context(contextlib.closing(Doorbell()))
            self._descriptors = undo.pop_all()
        self._replies = replies
        self._parked = parked
        self._nudge_fd = self._nudge.fileno()
        self._rings.add(self._nudge_fd)
        self._rings_and_replies.add(replies)

    def watch_doorbell(self, bell: Doorbell) -> None:
        """Add a doorbell, until it is closed."""
        bell.register(self._rings)
        bell.register(self._rings_and_replies)

    def release(self) -> None:
        """Wake the thread that sleeps here."""
        self._nudge.ring()

    def sleep(self, timeout: float | None) -> None:
        """Sleep until a bell rings or `release` is called, at most ``timeout`` seconds."""
        for fd, _ in self._rings.poll(timeout):
            if fd == self._nudge_fd:
                self._nudge.clear()

    def sleep_with_replies(self, timeout: float | None) -> tuple[bool, bool]:
        """Sleep until a bell rings or a reply comes; return whether anything did, and whether a reply did."""
        events = self._rings_and_replies.poll(timeout)
        return bool(events), any(fd == self._replies for fd, _ in events)

    def wait_rings(self, done: Callable[[], bool], key: Hashable, deadline: float | None) -> bool:
        """Wait until ``done()`` or the deadline, for what rings announce; leave replies to other threads.

        Args:
            done: What is waited for.
            key: What a thread that makes it true without a ring gives to `Reactor.wake`.
            deadline: A time of `time.monotonic`, None for none.

        Returns:
            Whether ``done()``.
        """
        while not done():
            gates = self._parked.setdefault(key, [])
            gates.append(self)
            try:
                if not done():
                    self.sleep(None if deadline is None else remaining(deadline))
            finally:
                if self in gates:
                    gates.remove(self)
            if deadline is not None and time.monotonic() >= deadline:
                return done()
        return True

    def __del__(self) -> None:
        self._descriptors.close()  # not before: a thread may be asleep in them
