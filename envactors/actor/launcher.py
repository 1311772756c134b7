"""The thread that starts workers."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Hashable


class Launcher:
    """Starts workers one after the other, in a thread that outlives all of them.

    A limited number of workers start at a time, from the launch until they are ready; the others are queued. If
    hundreds of interpreters imported side by side, all of them would miss their start deadlines.

    The kernel ends a worker when the *thread* that started it ends, so this thread must outlive all workers. It blocks
    Ctrl-C, and its children inherit that until they have a process group of their own: none is interrupted in the
    middle of its imports.
    """

    def __init__(self) -> None:
        # Guards the queue and is notified of each change.
        self._changed = threading.Condition()
        # (owner, job, limit) as submitted.
        self._waiting: deque[tuple[Hashable, Callable[[], None], int | None]] = deque()
        # The owners of the workers that were launched under a limit and are not ready yet.
        self._starting: set[Hashable] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="envactors-launcher", daemon=True)
        self._thread.start()

    def submit(self, owner: Hashable, job: Callable[[], None], limit: int | None) -> None:
        """Queue a function that starts a worker and handles its own errors.

        Args:
            owner: The worker's owner, for whom `finish` must be called later.
            job: The function.
            limit: How many workers may be starting, this one included; None if it does not count.
        """
        with self._changed:
            self._waiting.append((owner, job, limit))
            self._changed.notify()

    def waits(self, owner: Hashable) -> bool:
        """Return whether a job of an owner is still queued."""
        with self._changed:
            return any(waiting is owner for waiting, _, _ in self._waiting)

    def withdraw(self, owner: Hashable) -> bool:
        """Remove an owner's jobs from the queue; return False if none was queued."""
        with self._changed:
            kept = [entry for entry in self._waiting if entry[0] is not owner]
            withdrawn = len(kept) < len(self._waiting)
            self._waiting = deque(kept)
            self._changed.notify()
        return withdrawn

    def finish(self, owner: Hashable) -> None:
        """Report that the worker of an owner is ready, or will never be."""
        with self._changed:
            self._starting.discard(owner)
            self._changed.notify()

    def stop(self) -> None:
        """Tell the thread to end after the queued jobs; do not wait for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the thread to end, unless it is the calling one."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while (job := self._next()) is not None:
            job()
            del job

    def _next(self) -> Callable[[], None] | None:
        """Wait for a job that may start now, and return it; None once the thread must end."""
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
