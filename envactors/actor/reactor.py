"""The one place that waits: for replies, output, deaths and the next deadline together.

Two pollers, one inside the other:

    replies ── every actor's channel, and a bell to wake whoever polls it
    outer ──── replies, sentinels, outputs, and a bell for new deadlines and posted jobs

The reactor's thread sleeps in ``outer``. A thread that waits for a result takes ``replies`` over for as long
as it waits (`Reactor.pump`): it masks ``replies`` in ``outer`` and reads there itself, which saves the switch
to the reactor's thread and back. Deaths and deadlines always stay with the reactor's thread.

A loop of calls and results pumps thousands of times a second, and between two pumps the reactor's thread would
wake for replies that the caller is about to read. So after many pumps in a short time ``replies`` stays masked
between them, and the reactor's thread looks every few milliseconds whether the loop still goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from envactors.actor.errands import Errands
from envactors.actor.interrupts import SHIELD
from envactors.system import Doorbell, Poller, remaining

_log = logging.getLogger("envactors")
_NEVER = float("inf")
# What counts as a loop: so many waits in so many seconds; and how often to look whether it goes on.
_LOOP_WAITS = 16
_LOOP_SECONDS = 0.05
_LOOP_BEAT = 0.002


class Timed(Protocol):
    """Something with deadlines."""

    def next_timer(self) -> float:
        """The time (`time.monotonic`) of its next deadline, infinity for none."""

    def on_timer(self, now: float) -> None:
        """Acts on the deadlines that have passed."""


class _Gate(Protocol):
    """What a thread sleeps at."""

    def release(self) -> None:
        """Wakes it."""


class Bells:
    """The doorbells that one thread waits for beside the replies; it hears them whoever reads those.

    Args:
        reactor: What else it waits for.
    """

    def __init__(self, reactor: Reactor) -> None:
        with contextlib.ExitStack() as undo:
            self._alone = undo.enter_context(contextlib.closing(Poller()))
            self._with_replies = undo.enter_context(contextlib.closing(Poller()))
            self._nudge = undo.enter_context(contextlib.closing(Doorbell()))
            self._descriptors = undo.pop_all()
        self._replies = reactor._replies.fileno()
        self._alone.add(self._nudge.fileno())
        self._with_replies.add(self._replies)

    def listen(self, bell: Doorbell) -> None:
        """Adds a bell; it is forgotten when it is closed."""
        bell.tell(self._alone)
        bell.tell(self._with_replies)

    def release(self) -> None:
        """Wakes the thread that sleeps here."""
        self._nudge.ring()

    def sleep(self, timeout: float | None) -> None:
        """Sleeps until a bell rings or `release` is called, at most ``timeout`` seconds."""
        self._alone.poll(timeout)
        self._nudge.clear()

    def sleep_with_replies(self, timeout: float | None) -> tuple[bool, bool]:
        """Sleeps until a bell rings or a reply comes; says whether anything did, and whether a reply did."""
        events = self._with_replies.poll(timeout)
        return bool(events), any(fd == self._replies for fd, _ in events)

    def __del__(self) -> None:
        self._descriptors.close()  # not before: a thread may be asleep in them


class Reactor:
    """Waits, in a thread of its own or in that of a caller who waits.

    Args:
        timed: Those whose deadlines it watches; read anew each time.

    Attributes:
        callbacks: Where the callbacks of futures run.
        printing: Where what workers print is passed on.
    """

    def __init__(self, timed: Callable[[], Iterable[Timed]]) -> None:
        self._timed = timed
        with contextlib.ExitStack() as undo:
            self._outer = undo.enter_context(contextlib.closing(Poller()))
            self._replies = undo.enter_context(contextlib.closing(Poller()))
            self._bell = undo.enter_context(contextlib.closing(Doorbell()))
            self._nudge = undo.enter_context(contextlib.closing(Doorbell()))
            self._descriptors = undo.pop_all()
        # Two tables: a reply that was announced just before its channel's end must not be taken for the death of
        # the process that has got the descriptor's number since.
        self._handlers: dict[int, Callable[[int], None]] = {
            self._bell.fileno(): lambda _mask: self._bell.clear(),
            self._replies.fileno(): self._on_replies,
        }
        self._reply_handlers: dict[int, Callable[[int], None]] = {
            self._nudge.fileno(): lambda _mask: self._nudge.clear(),
        }
        self._generation = 0
        self._ring_nudge = self._nudge.ring
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake_at = _NEVER
        self._pump_lock = threading.Lock()
        self._pumping: int | None = None
        self._parked: dict[object, list[_Gate]] = {}
        self._knocking: set[int] = set()
        self._masked = False
        self._looping = False
        self._waits = 0
        self._waits_seen = 0
        self._loop_begun = 0.0
        self._stopping = False
        self._closed = False
        self._outer.add(self._replies.fileno())
        self._outer.add(self._bell.fileno())
        self._replies.add(self._nudge.fileno())
        self.callbacks = Errands("envactors-callbacks", elastic=True, note_timer=self.note_timer)
        self.printing = Errands("envactors-printing", elastic=False, note_timer=self.note_timer)
        self._thread = threading.Thread(target=self._run, name="envactors-reactor", daemon=True)
        self._thread.start()

    # Descriptors -----------------------------------------------------------------------------------------

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        """Calls ``handler(mask)`` in the reactor's thread when ``fd`` becomes readable."""
        self._handlers[fd] = handler
        self._outer.add(fd)

    def unwatch(self, fd: int) -> None:
        """Forgets a descriptor of `watch`."""
        if self._handlers.pop(fd, None) is not None:
            self._generation += 1
            self._outer.remove(fd)

    def watch_channel(self, fd: int, handler: Callable[[int], None]) -> None:
        """Calls ``handler(mask)`` in whichever thread reads replies; it must bear being called for nothing."""
        self._reply_handlers[fd] = handler
        self._replies.add(fd)

    def unwatch_channel(self, fd: int) -> None:
        """Forgets a descriptor of `watch_channel`."""
        if self._reply_handlers.pop(fd, None) is not None:
            self._replies.remove(fd)

    def want_write(self, fd: int, wanted: bool) -> None:
        """Says whether a channel also waits for room to write."""
        self._replies.watch(fd, writable=wanted)

    # From other threads ----------------------------------------------------------------------------------

    def note_timer(self, when: float) -> None:
        """Says that a deadline was set; wakes the reactor only if it would sleep past it."""
        if when < self._wake_at:
            self._bell.ring()

    def post(self, job: Callable[[], None]) -> None:
        """Runs a function in the reactor's thread soon; takes no lock, so that finalizers may call it."""
        self._jobs.append(job)
        self._bell.ring()

    def wake(self, key: object) -> None:
        """Makes the threads that wait for ``key`` look again at what they wait for."""
        pumping = self._pumping
        if pumping is not None and pumping != threading.get_ident():
            self._nudge.ring()
        for gate in self._parked.pop(key, ()):
            gate.release()

    def pump(self, done: Callable[[], bool], deadline: float | None, bells: Bells | None = None) -> bool:
        """Reads replies in this thread until ``done()``, the deadline (`time.monotonic`) or an interrupt.

        Returns:
            False when another thread reads already, or nobody does any more; then wait in another way.
        """
        me = threading.get_ident()
        if self._pumping == me:
            # A signal handler or a finalizer waits for a result while this thread waits for another.
            self._pump(done, deadline, bells)
            return True
        # `with` rather than a trial `acquire`: no interrupt falls between the taking and the giving back. Who
        # finds the lock taken does not wait for it; who takes it while another knocks gives it back at once.
        self._knocking.add(me)
        if self._pump_lock.locked():
            self._knocking.discard(me)
            return False
        with self._pump_lock:
            self._knocking.discard(me)
            if self._closed:
                return False
            try:
                self._pumping = me
                if not self._masked:
                    self._mask(True)
                self._pump(done, deadline, bells)
                self._stop_pumping()
            except BaseException:
                self._stop_pumping()
                raise
        return True

    def _pump(self, done: Callable[[], bool], deadline: float | None, bells: Bells | None) -> None:
        while not done() and not SHIELD.interrupted and not self._knocking:
            if bells is None:
                events = self._replies.poll(remaining(deadline))
                if not events:
                    return
            else:
                anything, replies = bells.sleep_with_replies(remaining(deadline))
                if not anything:
                    return
                events = self._replies.poll(0) if replies else []
            self._handle_replies(events)

    def _stop_pumping(self) -> None:
        # In this order, and `_watch_loop` in the opposite one: at least one of the two sees what the other did.
        self._pumping = None
        if not self._looping:
            self._mask(False)

    def _mask(self, masked: bool) -> None:
        self._masked = masked
        self._outer.watch(self._replies.fileno(), readable=not masked)

    def count_wait(self) -> None:
        """Takes note of a wait, also of one that ended without sleeping: many in a short time are a loop."""
        self._waits += 1
        if self._waits % _LOOP_WAITS == 0:
            now = time.monotonic()
            if now - self._loop_begun < _LOOP_SECONDS and not self._looping:
                self._begin_loop()
            self._loop_begun = now

    def _begin_loop(self) -> None:
        with SHIELD:
            self._looping = True
            if self._pumping is None and self._pump_lock.acquire(blocking=False):
                try:
                    self._mask(True)
                finally:
                    self._pump_lock.release()
            self._bell.ring()

    def _watch_loop(self) -> None:
        """Ends a loop that has made no wait since the last look."""
        if self._waits == self._waits_seen:
            self._looping = False
            if self._pumping is None and self._pump_lock.acquire(blocking=False):
                try:
                    self._mask(False)
                finally:
                    self._pump_lock.release()
        self._waits_seen = self._waits

    def wait(self, done: Callable[[], bool], key: object, deadline: float | None, bells: Bells | None = None) -> bool:
        """Waits until ``done()`` or the deadline, reading replies if no other thread does.

        Args:
            done: What is waited for; becomes true in a thread that then calls `wake`.
            key: What that thread gives to `wake`.
            deadline: A time of `time.monotonic`, None for none.
            bells: What else makes it look again.

        Returns:
            Whether ``done()``.
        """
        self.count_wait()
        while not done():
            with SHIELD:
                SHIELD.wake = self._ring_nudge
                pumped = self.pump(done, deadline, bells)
            # Out of the shield an interrupt that was held back is raised.
            if not pumped:
                self._park(done, key, deadline, bells)
            if deadline is not None and time.monotonic() >= deadline:
                break
        return done()

    def listen(self, done: Callable[[], bool], key: object, deadline: float | None, bells: Bells) -> bool:
        """Waits like `wait` for what rings tell of, and leaves replies to others."""
        while not done():
            # Written out, not `_parked_as`: this is on the way of every step.
            gates = self._parked.setdefault(key, [])
            gates.append(bells)
            try:
                if not done():
                    bells.sleep(remaining(deadline))
            finally:
                if bells in gates:
                    gates.remove(bells)
            if deadline is not None and time.monotonic() >= deadline:
                break
        return done()

    def _park(self, done: Callable[[], bool], key: object, deadline: float | None, bells: Bells | None) -> None:
        if bells is not None:
            with self._parked_as(bells, key):
                if not done():
                    bells.sleep(remaining(deadline))
            return
        # A bare lock, not a condition: an interrupt ends its acquire and breaks nothing.
        gate = threading.Lock()
        gate.acquire()
        with self._parked_as(gate, key):
            if not done():
                patience = remaining(deadline)
                gate.acquire(timeout=-1 if patience is None else patience)

    @contextlib.contextmanager
    def _parked_as(self, gate: _Gate, key: object) -> Iterator[None]:
        gates = self._parked.setdefault(key, [])
        gates.append(gate)
        try:
            yield
        finally:
            if gate in gates:
                gates.remove(gate)

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Makes the threads end after what is queued; returns at once."""
        self._stopping = True
        self._bell.ring()
        self.callbacks.stop()
        self.printing.stop()

    def join(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds for each thread's end; not in the thread itself."""
        if not self.is_current_thread():
            self._thread.join(timeout)
        self.callbacks.join(timeout)
        self.printing.join(timeout)

    # The reactor's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except BaseException:
                _log.exception("envactors' reactor goes on after an error in one of its handlers")
        with self._pump_lock:
            self._closed = True
            self._descriptors.close()

    def _turn(self) -> None:
        self._wake_at = _NEVER  # while awake every new deadline rings, so that none falls between two looks
        timed = [self.callbacks, *self._timed()]
        wake_at = min((one.next_timer() for one in timed), default=_NEVER)
        if self._looping:
            wake_at = min(wake_at, time.monotonic() + _LOOP_BEAT)
        self._wake_at = wake_at
        generation = self._generation
        events = [] if self._jobs else self._outer.poll(None if wake_at == _NEVER else remaining(wake_at))
        self._wake_at = _NEVER
        self._handle(events, generation)
        if self._looping and not events:
            self._watch_loop()
        while self._jobs:
            self._jobs.popleft()()
        now = time.monotonic()
        for one in timed:
            if one.next_timer() <= now:
                one.on_timer(now)

    def _handle(self, events: list[tuple[int, int]], generation: int) -> None:
        for fd, mask in events:
            if generation != self._generation:
                # A descriptor was forgotten meanwhile and its number may be another's; the rest will be told again.
                return
            if (handler := self._handlers.get(fd)) is not None:
                handler(mask)

    def _handle_replies(self, events: list[tuple[int, int]]) -> None:
        for fd, mask in events:
            if (handler := self._reply_handlers.get(fd)) is not None:
                handler(mask)

    def _on_replies(self, _mask: int) -> None:
        if self._pump_lock.acquire(blocking=False):
            try:
                self._handle_replies(self._replies.poll(0))
            finally:
                self._pump_lock.release()
