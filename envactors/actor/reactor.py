"""The event loop: waits for replies, output, the end of processes and the next deadline together.

Two pollers, one inside the other:

    replies ── every actor's channel, and a bell to wake the thread that polls it
    outer ──── replies, sentinels, outputs, and a bell for new deadlines and posted jobs

The reactor's thread sleeps in ``outer``. A thread that waits for a result polls ``replies`` itself while it waits
(`Reactor.pump`), and masks it in ``outer``: this saves the switch to the reactor's thread and back. The ends of
processes and the deadlines are always handled in the reactor's thread.

A loop of calls and results reads replies thousands of times per second. If the last time was a moment ago, ``replies``
stays masked after a wait: otherwise the reactor's thread would wake for replies that the caller is about to read. It
unmasks ``replies`` once no thread has read any for that long.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

from envactors.actor.callbacks import CallbackExecutor
from envactors.actor.containment import Logs
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.wait_set import LockGate, Parking, WaitSet
from envactors.backends.base import Timed
from envactors.system.polling import Doorbell, Poller, remaining

_NEVER = float("inf")
# How long replies stay masked after a thread has read some itself, in seconds.
_MOMENT = 0.002


class Reactor:
    """An event loop that runs in its own thread, and in the thread of a caller that waits for a result.

    Attributes:
        is_spinning: Whether a thread is about to read a reply that it spins for; only a hint.
        read_at: When a thread has last read replies itself, or given up (`time.monotonic`).
        callbacks: Runs the callbacks of futures.
        printing: Prints the output of workers, and logs.
        logs: Has log records handled, and contains errors.
    """

    _stopping = False
    # Whether the thread that pumps handles replies: afterwards it checks its condition.
    _handling = False

    def __init__(self) -> None:
        # What has deadlines.
        self._timed: dict[Timed, None] = {}
        with contextlib.ExitStack() as undo:
            self._outer = undo.enter_context(contextlib.closing(Poller()))
            self._replies = undo.enter_context(contextlib.closing(Poller()))
            self._bell = undo.enter_context(contextlib.closing(Doorbell()))
            self._nudge = undo.enter_context(contextlib.closing(Doorbell()))
            self._descriptors = undo.pop_all()
        # Handlers by descriptor. Two tables: a reply that was announced just before its channel was closed must not be
        # mistaken for the exit of the process whose sentinel has the descriptor's number now.
        self._handlers: dict[int, Callable[[int], None]] = {
            self._bell.fileno(): lambda _mask: self._bell.clear(),
            self._replies.fileno(): self._on_replies,
        }
        self._reply_handlers: dict[int, Callable[[int], None]] = {
            self._nudge.fileno(): lambda _mask: self._nudge.clear(),
        }
        # What is called when a doorbell rings, and the lock that guards changes.
        self._bells: dict[Doorbell, Callable[[], None]] = {}
        self._watch_lock = threading.RLock()
        # Raised by `unwatch`: the descriptor's number may be reused, so that events polled before are stale.
        self._generation = 0
        self._ring_nudge = self._nudge.ring  # bound once: it is assigned in every wait
        self._jobs: deque[Callable[[], None]] = deque()
        # When the reactor's thread wakes by itself (`time.monotonic`).
        self._wake_at = _NEVER
        # Held by the thread that polls `_replies`.
        self._pump_lock = threading.Lock()
        # The id of the thread that pumps, None if none does.
        self._pumping: int | None = None
        # The threads that wait without pumping.
        self._parking = Parking()
        # The ids of the threads that are about to acquire `_pump_lock`; the thread that pumps then releases it.
        self._contending: set[int] = set()
        # Whether `_replies` is masked in `_outer`; changed under `_pump_lock`.
        self._masked = False
        self.read_at: float = 0.0
        self.is_spinning: bool = False
        # Whether the descriptors are closed; under `_pump_lock`.
        self._closed = False
        self._outer.add(self._replies.fileno())
        self._outer.add(self._bell.fileno())
        self._replies.add(self._nudge.fileno())
        self.callbacks: CallbackExecutor = CallbackExecutor("envactors-callbacks", self.note_timer)
        self._timed[self.callbacks] = None
        self.printing: CallbackExecutor = CallbackExecutor("envactors-printing")
        self.logs: Logs = Logs(self.printing.submit)
        self._thread = threading.Thread(target=self._run, name="envactors-reactor", daemon=True)
        self._thread.start()

    # Descriptors -----------------------------------------------------------------------------------------

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call ``handler(mask)`` in the reactor's thread when ``fd`` becomes readable."""
        self._handlers[fd] = handler
        self._outer.add(fd)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor of `watch`."""
        if self._handlers.pop(fd, None) is not None:
            self._generation += 1
            self._outer.remove(fd)

    def watch_channel(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call ``handler(mask)`` in the thread that reads replies; the handler must tolerate spurious calls."""
        self._reply_handlers[fd] = handler
        self._replies.add(fd)

    def unwatch_channel(self, fd: int) -> None:
        """Stop watching a descriptor of `watch_channel`."""
        if self._reply_handlers.pop(fd, None) is not None:
            self._replies.remove(fd)

    def watch_bell(self, bell: Doorbell, on_ring: Callable[[], None]) -> None:
        """Call ``on_ring()`` in the thread that reads replies when a doorbell rings, which others may watch, too."""
        with self._watch_lock:
            self._bells[bell] = on_ring
            self._reply_handlers[bell.fileno()] = lambda _mask: on_ring()
            bell.register(self._replies)

    def unwatch_bell(self, bell: Doorbell) -> None:
        """Stop watching a doorbell of `watch_bell`, if it is watched."""
        with self._watch_lock:
            if self._bells.pop(bell, None) is not None:
                self._reply_handlers.pop(bell.fileno(), None)
                bell.unregister(self._replies)

    def _hear_all(self) -> None:
        """Act as if all doorbells had rung: an interrupt may have come between a ring, told once, and its handler."""
        for on_ring in self._bells.copy().values():
            self.logs.run(on_ring)

    def want_write(self, fd: int, wanted: bool) -> None:
        """Set whether a channel is also watched for room to write."""
        self._replies.watch(fd, writable=wanted)

    def make_wait_set(self) -> WaitSet:
        """Return a `WaitSet`, in which a thread waits for replies and doorbells together."""
        return WaitSet(self._replies.fileno())

    # From other threads ----------------------------------------------------------------------------------

    def watch_timers(self, timed: Timed) -> None:
        """Watch the deadlines of one more object."""
        self._timed[timed] = None
        self._bell.ring()

    def unwatch_timers(self, timed: Timed) -> None:
        """Stop what `watch_timers` has begun."""
        self._timed.pop(timed, None)

    def note_timer(self, when: float) -> None:
        """Announce a new deadline; wake the reactor only if it would sleep past it."""
        if when < self._wake_at:
            self._bell.ring()

    def post(self, job: Callable[[], None]) -> None:
        """Run a function in the reactor's thread soon; no lock is acquired, so that finalizers may call this."""
        self._jobs.append(job)
        self._bell.ring()

    def wake(self, key: Hashable) -> None:
        """Wake the threads that wait for ``key``, so that they check their condition again."""
        pumping = self._pumping
        # A signal handler of the thread that pumps may have to wake that thread itself.
        if pumping is not None and (pumping != threading.get_ident() or not self._handling):
            self._nudge.ring()
        if self._parking.gates:
            self._parking.wake(key)

    def pump(self, done: Callable[[], bool], deadline: float | None, wait_set: WaitSet | None = None) -> bool | None:
        """Read replies in this thread until ``done()``, the deadline (`time.monotonic`) or an interrupt.

        Returns:
            Whether ``done()``; None if another thread reads them already, or the reactor has stopped: then wait in
            another way.
        """
        me = threading.get_ident()
        if self._pumping == me and self._pump_lock.locked():  # else an interrupt has left it set
            # A signal handler or a finalizer waits for a result while this thread waits for another.
            try:
                return self._pump(done, deadline, wait_set, is_nested=True)
            finally:
                self._nudge.ring()  # what the outer wait waits for may have come in this one
        # `with` rather than `acquire(blocking=False)`: no interrupt can fall between acquire and release. A thread that
        # finds the lock held does not wait for it; a thread that acquires it while another contends releases it at
        # once.
        try:
            self._contending.add(me)
            if self._pump_lock.locked():
                return None
            with self._pump_lock:
                self._contending.discard(me)
                if self._closed:
                    return None
                try:
                    self._pumping = me
                    if not self._masked:
                        self._mask(True)
                    return self._pump(done, deadline, wait_set)
                finally:
                    self._pumping = None
                    last, self.read_at = self.read_at, time.monotonic()
                    if self.read_at - last > _MOMENT:
                        self._mask(False)
                    elif self.read_at + _MOMENT < self._wake_at:
                        self._bell.ring()
        finally:
            self._contending.discard(me)

    def _pump(
        self, done: Callable[[], bool], deadline: float | None, wait_set: WaitSet | None, *, is_nested: bool = False
    ) -> bool:
        try:
            while not done():
                if (self._contending or (defer_signals.pending and defer_signals.interrupted)) and not is_nested:
                    return False
                if wait_set is None:
                    events = self._replies.poll(None if deadline is None else remaining(deadline))
                    if not events:
                        return done()
                else:
                    anything, replies = wait_set.sleep_with_replies(remaining(deadline))
                    if not anything:
                        return done()
                    events = self._replies.poll(0) if replies else []
                self._handling = True
                try:
                    for fd, mask in events:
                        if (handler := self._reply_handlers.get(fd)) is not None:
                            handler(mask)
                finally:
                    self._handling = False
                if deadline is not None and time.monotonic() >= deadline:  # also if something comes all the time
                    return done()
        except BaseException:
            self.post(self._hear_all)
            raise
        return True

    def wait(
        self,
        done: Callable[[], bool],
        key: Hashable,
        deadline: float | None,
        wait_set: WaitSet | None = None,
        *,
        reads_replies: bool = True,
    ) -> bool:
        """Wait until ``done()`` or the deadline, and read replies if no other thread does.

        Args:
            done: The condition. The thread that makes it true then calls `wake`.
            key: The argument of that call.
            deadline: A time of `time.monotonic`, None for no limit.
            wait_set: Its doorbells make this thread check the condition too.
            reads_replies: False if rings announce what is waited for; then replies are left to other threads.

        Returns:
            Whether ``done()``.
        """
        while True:
            is_done = None
            if reads_replies:
                with defer_signals:
                    defer_signals.wake = self._ring_nudge
                    is_done = self.pump(done, deadline, wait_set)
            # The `with` has ended: an interrupt that was deferred is raised by now.
            if is_done is None:
                self._parking.sleep(done, key, wait_set or LockGate(), deadline)
                is_done = done()
            if is_done or (deadline is not None and time.monotonic() >= deadline):
                return is_done

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def owns_current_thread(self) -> bool:
        """Return whether the calling thread is the library's own, which no signal or exception of users interrupts."""
        return self.is_current_thread() or self.callbacks.owns_current_thread()

    def stop(self) -> None:
        """Tell the threads to end after the queued jobs; do not wait for them."""
        self._stopping = True
        self._bell.ring()
        self.callbacks.stop()
        self.printing.stop()

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for each thread to end, except for the calling one."""
        if not self.is_current_thread():
            self._thread.join(timeout)
        self.callbacks.join(timeout)
        self.printing.join(timeout)

    # The reactor's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self.logs.run(self._run_once)
        with self._pump_lock:
            self._closed = True
            self._descriptors.close()

    def _run_once(self) -> None:
        self._wake_at = _NEVER  # while awake, every new deadline rings, so that none is missed before the next poll
        timed = list(self._timed.copy())
        wake_at = min(map(self.logs.next_timer, timed))
        due = self.read_at + _MOMENT
        if self._masked and (self._pumping is None or due > time.monotonic()):  # a long wait unmasks them at its end
            wake_at = min(wake_at, due)
        self._wake_at = wake_at
        generation = self._generation
        events = [] if self._jobs else self._outer.poll(None if wake_at == _NEVER else remaining(wake_at))
        self._wake_at = _NEVER
        self._handle(events, generation)
        if self._masked and time.monotonic() >= self.read_at + _MOMENT:
            self._unmask()
        while self._jobs:
            self.logs.run(self._jobs.popleft())
        self.logs.run_timers(timed)

    def _handle(self, events: list[tuple[int, int]], generation: int) -> None:
        for fd, mask in events:
            if generation != self._generation:
                # A descriptor was unwatched meanwhile and its number may be reused; the next poll reports the rest.
                return
            if (handler := self._handlers.get(fd)) is not None:
                self.logs.run(functools.partial(handler, mask))

    def _on_replies(self, _mask: int) -> None:
        if not self._pump_lock.acquire(blocking=False):
            return  # the thread that holds it masks and reads them
        try:
            if self.is_spinning:
                self._mask(True)
                return
            for fd, mask in self._replies.poll(0):
                if (handler := self._reply_handlers.get(fd)) is not None:
                    handler(mask)
        except BaseException:
            self.post(self._hear_all)
            raise
        finally:
            self._pump_lock.release()

    def _unmask(self) -> None:
        """Unmask replies, unless a thread reads them; what is there then wakes this thread at once."""
        if self._pump_lock.acquire(blocking=False):
            self.is_spinning = False  # an interrupt may have left it set
            try:
                self._mask(False)
            finally:
                self._pump_lock.release()

    def _mask(self, masked: bool) -> None:
        self._masked = True  # in case an interrupt falls between this and the end: then it is unmasked once more
        self._outer.watch(self._replies.fileno(), readable=not masked)
        self._masked = masked
