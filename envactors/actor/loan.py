"""The loan of a channel to a waiting thread, which saves the switch to the loop and back."""

from __future__ import annotations

import threading
import time
from _thread import LockType, allocate_lock
from collections.abc import Callable

from envactors.actor.change import ChangeLock
from envactors.backends.base import LendingWorker
from envactors.loop import Loop

# How often the loop looks whether a loan was forgotten, in seconds.
_PERIOD = 0.5
_NO_LOAN = allocate_lock()


class ChannelLoan:
    """Lends the channels of an actor's workers to one waiting thread at a time.

    The borrower reads replies in place of the loop, and the exit of the process is left to it, too. A loan is a lock
    that the borrower holds in a ``with`` statement: whatever ends the borrower, the loan has ended. The loop may
    learn that late, so a timer has it look again. Every method is called under the actor's lock.

    Args:
        find_loop: Returns the loop that watches the channels.
        actor_lock: The actor's lock.
    """

    def __init__(self, find_loop: Callable[[], Loop], actor_lock: ChangeLock) -> None:
        self._find_loop = find_loop
        self._actor_lock = actor_lock
        self._loan_lock: LockType = _NO_LOAN
        self._borrower = 0
        self._worker: LendingWorker | None = None
        self._has_timer = False

    @property
    def is_active(self) -> bool:
        """Whether a thread has borrowed the channel."""
        return self._loan_lock.locked()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has borrowed it: a signal handler may use the actor while its thread waits."""
        return self._loan_lock.locked() and self._borrower == threading.get_ident()

    def is_current(self, loan_lock: LockType) -> bool:
        """Return whether the loan with this lock is the current one."""
        return self._loan_lock is loan_lock

    def begin(self, loan_lock: LockType, worker: LendingWorker) -> None:
        """Lend the channel of a worker to the calling thread, for as long as it holds the lock of the loan."""
        if not self._has_timer:
            self._find_loop().call_at(time.monotonic() + _PERIOD, self._check)
            self._has_timer = True
        self._loan_lock = loan_lock
        self._borrower = threading.get_ident()
        self._worker = worker
        worker.lend()

    def end(self) -> None:
        """Have the worker report to the loop again."""
        self._loan_lock = _NO_LOAN
        if self._worker is not None:
            self._worker.take_back()
            self._worker = None

    def leave_exit(self) -> None:
        """Leave the exit of the worker to the borrower, which notices it, too, and then ends the loan."""
        if self._worker is not None:
            self._worker.leave_exit()

    def _check(self) -> None:
        """End a loan that was forgotten. This runs in the loop, and looks again while there are loans."""
        with self._actor_lock:
            self._has_timer = self._loan_lock.locked()
            if self._has_timer:
                self._find_loop().call_at(time.monotonic() + _PERIOD, self._check)
            else:
                self.end()
