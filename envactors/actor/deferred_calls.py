"""Callbacks that run in FIFO order after the actor's lock is released."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class DeferredCalls:
    """Runs functions one after the other, each until it has returned once: they must bear being run again.

    Args:
        run_soon: Runs a function soon, in a thread that no signal interrupts.
    """

    def __init__(self, run_soon: Callable[[Callable[[], None]], None]) -> None:
        self._run_soon = run_soon
        self._waiting: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        # Whether a thread is in `run`: a function that leads to another call of `run` leaves its successors to it.
        self._running = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, function: Callable[[], None]) -> None:
        """Queue a function; `run` is to follow."""
        self._waiting.append(function)

    def run(self) -> None:
        """Run what waits."""
        try:
            with self._lock:
                if self._running:
                    return
                self._running = True
                while self._waiting:
                    # Taken out last: after an interrupt it runs once more, and finds its future settled.
                    self._waiting[0]()
                    self._waiting.popleft()
                self._running = False
        except BaseException:
            self._running = False
            self._run_soon(self.run)
            raise
