"""Threads for functions that may block: users' callbacks, and printing the output of workers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("envactors")
# How long a function may be queued behind others before another thread is added, in seconds.
_PATIENCE = 0.1


class CallbackExecutor:
    """Runs functions one after the other in its own thread.

    A function that blocks must not delay those behind it for ever, since it may be waiting for one of them: with
    ``elastic``, another thread is added after a moment.

    Args:
        name: The name of the threads.
        elastic: Whether there may be more than one thread.
        note_timer: Called with the new time when `next_timer` has become earlier.
    """

    def __init__(self, name: str, *, elastic: bool, note_timer: Callable[[float], None]) -> None:
        self._name = name
        self._elastic = elastic
        self._note_timer = note_timer
        # (when it was queued by `time.monotonic`, the function)
        self._jobs: deque[tuple[float, Callable[[], None]]] = deque()
        # Guards the queue and is notified of each change.
        self._changed = threading.Condition()
        self._stopping = False
        # How many threads wait for a function.
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._add_thread()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a function."""
        with self._changed:
            now = time.monotonic()
            self._jobs.append((now, job))
            self._changed.notify()
            late = self._elastic and not self._idle
        if late:
            self._note_timer(now + _PATIENCE)

    def next_timer(self) -> float:
        """Return the time at which the first function of the queue has waited too long, infinity if there is none."""
        try:
            return self._jobs[0][0] + _PATIENCE if self._elastic and not self._idle else float("inf")
        except IndexError:
            return float("inf")

    def on_timer(self, now: float) -> None:
        """Add a thread if all others are busy."""
        with self._changed:
            if not self._stopping and self.next_timer() <= now:
                self._add_thread()

    def stop(self) -> None:
        """Tell the threads to end after the queued functions; do not wait for them."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the threads to end, except for the calling one."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._jobs and not self._stopping:
                    self._changed.wait()
                self._idle -= 1
                if not self._jobs:
                    return
                _, job = self._jobs.popleft()
            try:
                job()
            except BaseException:
                _log.exception("a callback failed, or printing the output of a worker")
            del job
