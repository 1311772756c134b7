"""A thread for what may block: users' callbacks and the passing on of output."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("envactors")


class Errands:
    """Runs functions one after the other in a thread of its own, which starts with the first."""

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a function; after `stop` it runs at once, in the caller's thread."""
        with self._changed:
            if not self._stopping:
                self._jobs.append(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="envactors-errands", daemon=True)
                    self._thread.start()
                self._changed.notify()
                return
        job()

    def stop(self) -> None:
        """Makes the thread end after what is queued; returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds for the thread's end; not in the thread itself."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stopping:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                _log.exception("a callback or the passing on of a worker's output failed")
            del job
