"""The loan of a channel to a waiting thread, which saves the switch to the loop and back."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from envactors.actor.change import ChangeLock
from envactors.backends.base import LendingWorker, Worker
from envactors.loop import Loop

# How long a loan lasts at most, in seconds. After this time the switch to the loop hardly counts.
_LONGEST = 0.1


@dataclasses.dataclass(eq=False, slots=True)
class Loan:
    """The loan of a worker's channel.

    Attributes:
        worker: The worker.
        borrower: The thread that reads replies.
        until: When it ends, unless it has ended before, in seconds of `time.monotonic`.
    """

    worker: LendingWorker
    borrower: int
    until: float


class ChannelLoans:
    """Lends the channels of an actor's workers to one waiting thread at a time.

    The borrower reads replies in place of the loop, which still handles the exit of the process. A signal handler may
    keep the borrower from reading, and an exception may keep it from ending the loan, so each loan is also ended by a
    timer. Every method is called under the actor's lock.

    Args:
        get_loop: Returns the loop that watches the channels.
        actor_lock: The actor's lock.

    Attributes:
        current: The loan that has not ended; None if the loop reads.
    """

    def __init__(self, get_loop: Callable[[], Loop], actor_lock: ChangeLock) -> None:
        self._get_loop = get_loop
        self._actor_lock = actor_lock
        self.current: Loan | None = None
        self._has_timer = False

    @property
    def is_borrowed_here(self) -> bool:
        """Whether the calling thread is the borrower, or a signal handler has interrupted the borrower."""
        return self.current is not None and self.current.borrower == threading.get_ident()

    def lend(self, worker: Worker | None) -> Loan | None:
        """Lend the channel of a worker to the calling thread; return None if the loop must read.

        A thread that has a loan and asks for another one is in a signal handler, which waits for another reply. Its
        first loan ends. The wait that the handler has interrupted continues without a loan: the loop reads its reply.

        Args:
            worker: The worker; None if it does not run the call that the thread waits for.
        """
        if self.is_borrowed_here:
            self.end()
        lender = None if worker is None or self.current is not None else worker.as_lender()
        if lender is None:
            return None
        until = time.monotonic() + _LONGEST
        if not self._has_timer:
            self._set_timer(until)
        self.current = loan = Loan(lender, threading.get_ident(), until)
        lender.lend()
        return loan

    def end(self) -> None:
        """Have the worker report to the loop again."""
        if self.current is not None:
            self.current.worker.take_back()
            self.current = None

    def _set_timer(self, when: float) -> None:
        self._get_loop().call_at(when, self._check)
        self._has_timer = True

    def _check(self) -> None:
        """End the current loan if its time is over. Otherwise it began after the timer was set: set the timer again."""
        with self._actor_lock:
            self._has_timer = False
            if self.current is not None and self.current.until > time.monotonic():
                self._set_timer(self.current.until)
            else:
                self.end()
