"""The thread that starts workers."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable


class Launcher:
    """Starts workers one after the other, in a thread that lasts as long as any of them.

    The kernel ends a worker when the *thread* that started it ends, so this one outlives them all. It blocks
    Ctrl-C, and its children inherit that until they have a session of their own: none is interrupted half-way
    through its imports.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="envactors-launcher", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a function that starts a worker and handles its own errors."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Makes the thread end after what is queued; returns at once."""
        self._jobs.put(None)

    def join(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds for the thread's end; not in the thread itself."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while (job := self._jobs.get()) is not None:
            job()
            del job
