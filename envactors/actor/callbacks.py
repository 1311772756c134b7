"""Running functions later and in order, in threads where they may block."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from envactors.actor.containment import log_failure

# How long a function may be queued behind others before another thread is added, in seconds.
_PATIENCE = 0.1


class CallbackExecutor:
    """Runs functions that may block one after the other in its own thread: users' callbacks, printing, launches.

    A blocked function may be waiting for a function queued behind it. With ``note_timer``, another thread is added once
    the queue has waited for a moment.

    Args:
        name: The name of the threads.
        note_timer: Called with the new time when `next_timer` has become earlier; None if one thread is all there is.
    """

    def __init__(self, name: str, note_timer: Callable[[float], None] | None = None) -> None:
        self._name = name
        self._note_timer = note_timer
        # (when it was queued by `time.monotonic`, the function)
        self._jobs: deque[tuple[float, Callable[[], object]]] = deque()
        # Guards the queue. Acquired by itself: an interrupt in `Condition.__enter__` could leave it taken.
        self._lock = threading.RLock()
        # Notified of each change of the queue.
        self._changed = threading.Condition(self._lock)
        self._stopping = False
        # How many threads wait for a function.
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._add_thread()

    def submit(self, job: Callable[[], object]) -> None:
        """Queue a function."""
        with self._lock:
            now = time.monotonic()
            self._jobs.append((now, job))
            self._changed.notify()
            all_busy = not self._idle
            if self._stopping:
                self._add_thread()  # the others may have ended
        if all_busy and self._note_timer is not None:
            self._note_timer(now + _PATIENCE)

    def next_timer(self) -> float:
        """Return the time at which the first function of the queue has waited too long, infinity if there is none."""
        try:
            return float("inf") if self._idle or self._note_timer is None else self._jobs[0][0] + _PATIENCE
        except IndexError:
            return float("inf")

    def on_timer(self, now: float) -> None:
        """Add a thread if all others are busy."""
        with self._lock:
            if not self._stopping and self.next_timer() <= now:
                self._add_thread()

    def stop(self) -> None:
        """Tell the threads to end after the queued functions; do not wait for them."""
        with self._lock:
            self._stopping = True
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the threads to end, except for the calling one."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def owns_current_thread(self) -> bool:
        """Return whether the calling thread is one of these."""
        return threading.current_thread() in self._threads

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                while not self._jobs and not self._stopping:
                    self._changed.wait()
                self._idle -= 1
                if not self._jobs:
                    return
                _, job = self._jobs.popleft()
            try:
                job()
            except BaseException as error:
                log_failure(f"a function failed in the thread {self._name}", error)
            del job
