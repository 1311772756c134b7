"""A latch: an event that threads wait for, and that an interrupt cannot leave locked."""

from __future__ import annotations

import contextlib
from _thread import LockType, allocate_lock
from collections.abc import Sequence


class Latch:
    """Is set once; then all threads that wait for it continue.

    Unlike those of `threading.Event`, its methods enter no lock in Python code, where an exception from a signal
    handler could leave it held. Every waiting thread sleeps on its own lock.

    Attributes:
        is_set: Whether it is set, so that nobody waits any more.
    """

    is_set: bool = False
    _gates: Sequence[LockType] = ()

    def mark_set(self) -> bool:
        """Have no more threads wait; return whether any are waiting, which `set` lets continue."""
        self.is_set = True
        return bool(self._gates)

    def set(self) -> None:
        """Let all threads continue. It may be called again, also to complete an interrupted call."""
        self.is_set = True
        for gate in tuple(self._gates):
            with contextlib.suppress(RuntimeError):  # it is released already
                gate.release()

    def wait(self, seconds: float | None) -> bool:
        """Wait until the latch is set, at most this many seconds (None: no limit); return whether it is."""
        gate = allocate_lock()
        gate.acquire()
        gates: list[LockType] = self.__dict__.setdefault("_gates", [])  # in one step, since several threads may wait
        gates.append(gate)
        try:
            if not self.is_set:  # checked once the gate is in the list: `set` may have run before that
                gate.acquire(timeout=-1 if seconds is None else seconds)
        finally:
            gates.remove(gate)
        return self.is_set
