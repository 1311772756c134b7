"""What follows from a change of an actor's state for those who wait: told in order, and not under the actor's lock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Outcomes:
    """Runs functions one after the other, each as often as it takes: they must bear being run again.

    Args:
        again: Has a function run soon, in a thread that nothing interrupts.
    """

    def __init__(self, again: Callable[[Callable[[], None]], None]) -> None:
        self._again = again
        self._waiting: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        self._running = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, outcome: Callable[[], None]) -> None:
        """Queues a function; `deliver` is to follow."""
        self._waiting.append(outcome)

    def deliver(self) -> None:
        """Runs what waits."""
        try:
            with self._lock:
                if self._running:
                    return  # settling a future asked for something new: the loop further out goes on to it
                self._running = True
                while self._waiting:
                    # Taken out last: after an interrupt it is done once more, and then finds its future settled.
                    self._waiting[0]()
                    self._waiting.popleft()
                self._running = False
        except BaseException:
            self._running = False
            self._again(self.deliver)
            raise
