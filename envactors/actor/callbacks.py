"""Running functions later and in order: once an actor's lock is released, or in threads where they may block."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from envactors.actor.containment import log_failure

# How long a function may be queued behind others before another thread is added, in seconds.
_PATIENCE = 0.1


class SafeThread(Protocol):
    """A thread that no signal and no asynchronous exception interrupts."""

    def post(self, job: Callable[[], None]) -> None:
        """Run a function in it soon."""

    def is_current_thread(self) -> bool:
        """Return whether the calling thread is the one."""


class DeferredCalls:
    """Runs functions one after the other, each until it has returned once: they must bear being run again.

    A function that raises may have been interrupted, so it runs once more in a thread that nothing interrupts. If it
    raises there too, it is broken: the error is logged, and the remaining functions run.

    Args:
        safe: The thread that runs what was interrupted.
        report: Logs an error, without waiting for that.

    Attributes:
        waiting: What is still to be run, in order; after an addition `run` is to follow.
    """

    def __init__(self, safe: SafeThread, report: Callable[[BaseException], None]) -> None:
        self._safe = safe
        self._report = report
        self.waiting: deque[Callable[[], None]] = deque()
        # The thread that runs functions adds an entry, and takes it out. No lock: two threads that each run what one
        # actor has left, and come to the other's, must not wait for each other. A dict's setdefault is atomic.
        self._runner: dict[None, object] = {}

    def run(self) -> None:
        """Run the waiting functions, unless another thread or an outer call in this one is already doing so."""
        me, waiting = object(), self.waiting
        try:
            while waiting and self._runner.setdefault(None, me) is me:
                while waiting:
                    try:
                        waiting[0]()
                    except BaseException as error:
                        if not self._safe.is_current_thread():
                            raise
                        self._report(error)
                    # Taken out last: after an interrupt it runs once more, and finds its future settled.
                    waiting.popleft()
                self._runner.clear()
        except BaseException:
            if self._runner.get(None) is me:
                self._runner.clear()
            self._safe.post(self.run)
            raise


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
