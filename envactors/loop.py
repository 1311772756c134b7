"""The event loop: one thread that reads replies, notices exits, and runs timers for all actors of this process.

Callbacks are short, and never run code of users. If a callback raises, the loop reports the error and continues.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable

from envactors.system.polling import LONGEST_WAIT, Doorbell, Poller
from envactors.threads import LibraryThread

# A callback of a descriptor that raises this often in a row is removed: its event would be reported again at once.
_MOST_ERRORS = 2
# How long `Loop.wake_after_events` may put a callback off, in seconds. The poller rounds shorter times up to this.
_MOST_DELAY = 0.001


class Timer:
    """A callback that the loop runs once, unless it is canceled before.

    Attributes:
        when: When it runs, in seconds of `time.monotonic`.
    """

    __slots__ = ("_callback", "when")

    def __init__(self, when: float, callback: Callable[[], object]) -> None:
        self.when: float = when
        self._callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Make sure that the callback does not run any more."""
        self._callback = None

    def run(self) -> None:
        """Run the callback, unless the timer was canceled or has run."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


@dataclasses.dataclass(eq=False, slots=True)
class _Descriptor:
    """A watched descriptor and its events.

    Attributes:
        fd: The descriptor.
        callback: Called with the events.
        wants_write: Whether to report that it is writable, too.
        is_lent: Whether another thread may read it in place of the loop.
        is_watched: False once it was removed; an event that was polled before is then ignored.
        bell: The doorbell that it belongs to; None for other descriptors.
        errors: How often in a row the callback has raised.
    """

    fd: int
    callback: Callable[[int], object]
    bell: Doorbell | None = None
    wants_write: bool = False
    is_lent: bool = False
    is_watched: bool = True
    errors: int = 0


class Loop:
    """An event loop that runs in its own daemon thread.

    Every method may be called from any thread. `call_soon` takes no lock, so finalizers may call it.

    Args:
        on_error: Called with each exception that a callback raises.
    """

    def __init__(self, on_error: Callable[[BaseException], object]) -> None:
        self._on_error = on_error
        self._poller = Poller()
        self._wake = Doorbell()
        self._descriptors: dict[int, _Descriptor] = {}
        self._soon: deque[Callable[[], object]] = deque()
        # Callbacks of `wake_after_events`. They run once no events are left, or at this time even if more keep coming.
        self._deferred: list[Callable[[], object]] = []
        self._deferred_until = math.inf
        self._is_urgent = False  # whether any of them is urgent
        # Guards the descriptors and the timers. Reentrant, since a signal handler may interrupt a thread that holds it.
        self._lock = threading.RLock()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        # When the thread wakes up without an event.
        self._wakes_at = math.inf
        self._is_stopping = False
        self.watch(self._wake.fileno(), lambda _events: self._wake.clear())
        self._thread = LibraryThread(self._run, "envactors-loop", runs_user_code=False)
        self._thread.start()

    # Descriptors -----------------------------------------------------------------------------------------

    def watch(self, fd: int, callback: Callable[[int], object]) -> None:
        """Call ``callback(events)`` whenever a descriptor is readable."""
        with self._lock:
            self._descriptors[fd] = _Descriptor(fd, callback)
            self._poller.add(fd)

    def watch_bell(self, bell: Doorbell, callback: Callable[[], object]) -> None:
        """Call a function after each ring of a doorbell. Other threads may watch it, too."""
        with self._lock:
            self._descriptors[bell.fileno()] = _Descriptor(bell.fileno(), lambda _events: callback(), bell)
            bell.register(self._poller)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor, if it is watched. Call this before it is closed."""
        with self._lock:
            descriptor = self._descriptors.pop(fd, None)
            if descriptor is None:
                return
            descriptor.is_watched = False
            if descriptor.bell is None:
                self._poller.remove(fd)
            else:
                descriptor.bell.unregister(self._poller)

    def want_write(self, fd: int, wanted: bool) -> None:
        """Choose whether a watched descriptor is also reported when it is writable."""
        with self._lock:
            descriptor = self._descriptors.get(fd)
            if descriptor is not None:
                descriptor.wants_write = wanted
                self._poller.watch(fd, readable=not descriptor.is_lent, writable=wanted)

    def set_lent(self, fd: int, is_lent: bool) -> None:
        """Leave reading a watched descriptor to another thread, or read it again if it is lent."""
        with self._lock:
            descriptor = self._descriptors.get(fd)
            if descriptor is not None and (is_lent or descriptor.is_lent):
                descriptor.is_lent = True  # so that an interrupted change is made again when it is taken back
                self._poller.watch(fd, readable=not is_lent, writable=descriptor.wants_write)
                descriptor.is_lent = is_lent

    # Callbacks -------------------------------------------------------------------------------------------

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run a callback in the loop's thread as soon as possible."""
        self._soon.append(callback)
        self._wake.ring()

    def wake_after_events(self, wake: Callable[[], object], *, is_urgent: bool = True) -> None:
        """Wake a thread, once the loop has handled the events that are ready.

        A thread often waits for the results of several events, and waking it takes longer than handling one. So in the
        loop's thread, ``wake`` is called when no event is ready any more. In other threads it is called immediately.

        Args:
            wake: Wakes the thread.
            is_urgent: False if the loop may also wait for further events for a moment (`_MOST_DELAY`).
        """
        if not self.is_current_thread():
            wake()
            return
        if not self._deferred:
            self._deferred_until = time.monotonic() + _MOST_DELAY
        self._deferred.append(wake)
        self._is_urgent |= is_urgent

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Run a callback in the loop's thread at a time of `time.monotonic`."""
        timer = Timer(when, callback)
        with self._lock:
            heapq.heappush(self._timers, (when, next(self._order), timer))
            if when < self._wakes_at:
                self._wake.ring()
        return timer

    def is_current_thread(self) -> bool:
        """Return whether the calling thread is that of the loop."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Tell the thread to end; do not wait for it."""
        self._is_stopping = True
        self._wake.ring()

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended, unless it is the calling one."""
        if not self.is_current_thread():
            self._thread.join(timeout)

    # The thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            self._contain(self._run_once)
        self._run_deferred()
        self._wake.close()
        self._poller.close()
        # A reference to an ended loop must not keep the actors of its callbacks alive.
        self._soon.clear()
        self._timers.clear()
        self._descriptors.clear()

    def _run_once(self) -> None:
        """Run deferred wakeups, wait for events, and run the callbacks of descriptors, timers, and `call_soon`."""
        events = self._poller.poll(0.0 if self._is_urgent else _MOST_DELAY) if self._deferred else []
        if not events or time.monotonic() > self._deferred_until:
            self._run_deferred()
        if not events:
            events = self._poller.poll(self._timeout())
        self._wakes_at = -math.inf  # nobody has to wake a thread that is awake
        # Looked up first: a callback may close a descriptor, and another one may get its number.
        ready = [(self._descriptors.get(fd), mask) for fd, mask in events]
        for descriptor, mask in ready:
            if descriptor is not None and descriptor.is_watched:
                descriptor.errors = 0 if self._contain(descriptor.callback, mask) else descriptor.errors + 1
                if descriptor.errors == _MOST_ERRORS:
                    self.unwatch(descriptor.fd)
        for timer in self._due():
            self._contain(timer.run)
        for _ in range(len(self._soon)):
            self._contain(self._soon.popleft())

    def _run_deferred(self) -> None:
        put_off, self._deferred, self._deferred_until, self._is_urgent = self._deferred, [], math.inf, False
        for wake in put_off:
            self._contain(wake)

    def _timeout(self) -> float | None:
        """Return how many seconds to wait for events; None for no limit."""
        with self._lock:
            self._wakes_at = self._timers[0][0] if self._timers else math.inf
            if self._soon:
                return 0.0
            return min(max(0.0, self._wakes_at - time.monotonic()), LONGEST_WAIT) if self._timers else None

    def _due(self) -> list[Timer]:
        """Remove and return the timers whose time has come."""
        due = []
        with self._lock:
            while self._timers and self._timers[0][0] <= time.monotonic():
                due.append(heapq.heappop(self._timers)[2])
        return due

    def _contain(self, callback: Callable[..., object], *args: object) -> bool:
        """Run a callback and report its error; return whether it has succeeded."""
        try:
            callback(*args)
        except BaseException as error:  # an error about one actor must not end the loop of all
            self._on_error(error)
            return False
        return True
