"""The thread that starts workers."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Hashable


class Launcher:
    """Starts workers one after the other, in a thread that lasts as long as any of them.

    Only so many may be on their way at a time, from the launch until they are ready; the others wait for their turn.
    Hundreds of interpreters that import side by side would all be late.

    The kernel ends a worker when the *thread* that started it ends, so this one outlives them all. It blocks
    Ctrl-C, and its children inherit that until they have a group of their own: none is interrupted half-way
    through its imports.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Hashable, Callable[[], None], int | None]] = deque()
        self._starting: set[Hashable] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="envactors-launcher", daemon=True)
        self._thread.start()

    def submit(self, owner: Hashable, job: Callable[[], None], limit: int | None) -> None:
        """Queues a function that starts a worker and handles its own errors.

        Args:
            owner: Whose worker it is; `finish` is to be called for it.
            job: The function.
            limit: How many workers may be on their way, this one included; None if it does not count.
        """
        with self._changed:
            self._waiting.append((owner, job, limit))
            self._changed.notify()

    def waits(self, owner: Hashable) -> bool:
        """Whether the turn of an owner has not come yet."""
        with self._changed:
            return any(waiting is owner for waiting, _, _ in self._waiting)

    def withdraw(self, owner: Hashable) -> bool:
        """Takes out what waits for its turn; False where it has come, or nothing waits."""
        with self._changed:
            kept = [entry for entry in self._waiting if entry[0] is not owner]
            withdrawn = len(kept) < len(self._waiting)
            self._waiting = deque(kept)
            self._changed.notify()
        return withdrawn

    def finish(self, owner: Hashable) -> None:
        """Says that the worker of an owner is ready, or will never be."""
        with self._changed:
            self._starting.discard(owner)
            self._changed.notify()

    def stop(self) -> None:
        """Makes the thread end after what is queued; returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds for the thread's end; not in the thread itself."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while (job := self._next()) is not None:
            job()
            del job

    def _next(self) -> Callable[[], None] | None:
        """Waits for a turn to come."""
        with self._changed:
            while True:
                if self._waiting:
                    owner, job, limit = self._waiting[0]
                    if limit is None or len(self._starting) < limit:
                        self._waiting.popleft()
                        if limit is not None:
                            self._starting.add(owner)
                        return job
                elif self._stopping:
                    return None
                self._changed.wait()
