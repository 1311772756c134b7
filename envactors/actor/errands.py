"""Threads for what may block: users' callbacks, and the passing on of output."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("envactors")
# How long a function may wait for the one before it until it gets a thread of its own, in seconds.
_PATIENCE = 0.1


class Errands:
    """Runs functions one after the other in a thread of its own.

    A function that blocks must not keep those behind it for ever, since it may be waiting for what one of them
    does: with ``elastic``, another thread goes on after a moment.

    Args:
        name: The threads' name.
        elastic: Whether there may be more than one thread.
        note_timer: Told when `next_timer` has become earlier.
    """

    def __init__(self, name: str, *, elastic: bool, note_timer: Callable[[float], None]) -> None:
        self._name = name
        self._elastic = elastic
        self._note_timer = note_timer
        self._jobs: deque[tuple[float, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._add_thread()

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a function."""
        with self._changed:
            now = time.monotonic()
            self._jobs.append((now, job))
            self._changed.notify()
            late = self._elastic and not self._idle
        if late:
            self._note_timer(now + _PATIENCE)

    def next_timer(self) -> float:
        """When the first function in the queue will have waited too long."""
        try:
            return self._jobs[0][0] + _PATIENCE if self._elastic and not self._idle else float("inf")
        except IndexError:
            return float("inf")

    def on_timer(self, now: float) -> None:
        """Gives the queue another thread if all others are busy."""
        with self._changed:
            if not self._stopping and self.next_timer() <= now:
                self._add_thread()

    def stop(self) -> None:
        """Makes the threads end after what is queued; returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds for the threads' end; not in one of them."""
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
                _log.exception("a callback or the passing on of a worker's output failed")
            del job
