"""Has one thread sleep until a doorbell of a worker, a reply, or another thread wakes it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable

from envactors.system.polling import Doorbell, Poller, remaining


class LockGate:
    """A gate for one sleep of one thread."""

    def __init__(self) -> None:
        # A bare lock, not a condition: an interrupt of its acquire leaves nothing inconsistent.
        self._lock = threading.Lock()
        self._lock.acquire()

    def sleep(self, timeout: float | None) -> None:
        """Sleep until `release` is called, at most ``timeout`` seconds."""
        self._lock.acquire(timeout=-1 if timeout is None else timeout)

    def release(self) -> None:
        """Wake the thread, also if it is only about to sleep."""
        with contextlib.suppress(RuntimeError):  # another thread has released it
            self._lock.release()


class Parking:
    """The threads that sleep until another one wakes them.

    `wake` takes no lock, since it is called under the locks of actors, by signal handlers, and by finalizers. Threads
    enter and leave under a lock, which is reentrant because a signal handler or a finalizer may wait, too.

    Attributes:
        gates: Where threads sleep, by what they wait for; empty most of the time.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # The tuples are replaced as a whole: `wake` may be going through one.
        self.gates: dict[Hashable, tuple[LockGate | WaitSet, ...]] = {}

    def sleep(self, done: Callable[[], bool], key: Hashable, gate: LockGate | WaitSet, deadline: float | None) -> None:
        """Sleep until ``wake(key)`` or the deadline (`time.monotonic`), unless ``done()``."""
        try:
            with self._lock:
                self.gates[key] = (*self.gates.get(key, ()), gate)
            if not done():  # from here on, the thread that makes it true finds the gate
                gate.sleep(remaining(deadline))
        finally:
            with self._lock:
                gates = list(self.gates.get(key, ()))
                if gate in gates:
                    gates.remove(gate)
                if gates:
                    self.gates[key] = tuple(gates)
                else:
                    self.gates.pop(key, None)

    def wake(self, key: Hashable) -> None:
        """Wake the threads that sleep for ``key``."""
        for gate in self.gates.get(key, ()):
            gate.release()


class WaitSet:
    """The doorbells that one thread waits for beside the replies; rings reach it whichever thread reads those.

    Args:
        replies: The descriptor that is readable while there are replies.
    """

    def __init__(self, replies: int) -> None:
        with contextlib.ExitStack() as undo:
            self._rings = undo.enter_context(contextlib.closing(Poller()))
            self._rings_and_replies = undo.enter_context(contextlib.closing(Poller()))
            self._nudge = undo.enter_context(contextlib.closing(Doorbell()))
            self._descriptors = undo.pop_all()
        self._replies = replies
        self._nudge_fd = self._nudge.fileno()
        self._rings.add(self._nudge_fd)
        self._rings_and_replies.add(replies)

    def watch_doorbell(self, bell: Doorbell) -> None:
        """Add a doorbell, until it is closed."""
        bell.register(self._rings)
        bell.register(self._rings_and_replies)

    def release(self) -> None:
        """Wake the thread that sleeps here."""
        self._nudge.ring()

    def sleep(self, timeout: float | None) -> None:
        """Sleep until a bell rings or `release` is called, at most ``timeout`` seconds."""
        for fd, _ in self._rings.poll(timeout):
            if fd == self._nudge_fd:
                self._nudge.clear()

    def sleep_with_replies(self, timeout: float | None) -> tuple[bool, bool]:
        """Sleep until a bell rings or a reply comes; return whether anything did, and whether a reply did."""
        events = self._rings_and_replies.poll(timeout)
        return bool(events), any(fd == self._replies for fd, _ in events)

    def __del__(self) -> None:
        self._descriptors.close()  # not before: a thread may be asleep in them
