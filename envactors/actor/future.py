"""The future of one call: the standard library's, with a deadline outside and a way to end a running call."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envactors.actor.supervisor import Supervisor

_SETTLED = frozenset(("FINISHED", "CANCELLED", "CANCELLED_AND_NOTIFIED"))


class _Making:
    """Held for a moment while a future gets a condition, and while one gets its outcome that has none."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.RLock()


_MAKING = _Making()


class ActorFuture(concurrent.futures.Future[Any]):
    """The result of one call, a real `concurrent.futures.Future`.

    Waiting for it with a timeout ends the waiting, never the call. Its callbacks run in a thread of the
    library's own, where they may wait for other calls.

    Attributes:
        incarnation: The process that the outcome comes from; None before.
    """

    incarnation: int | None = None

    def __init__(self, supervisor: Supervisor, keep: object) -> None:
        # What the standard library's sets, but for its condition, which takes longer to make than all else and which
        # few ask for.
        self._state = "PENDING"
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self._made_condition: threading.Condition | None = None
        self._supervisor = supervisor
        # An actor lives while a future of it is unfinished: this is what keeps its handle.
        self._keep: object | None = keep

    if not TYPE_CHECKING:  # to whom it is the plain attribute that it looks like

        @property
        def _condition(self) -> threading.Condition:
            """What the standard library takes before it looks at a future, or changes it."""
            with _MAKING.lock:
                if self._made_condition is None:
                    self._made_condition = threading.Condition()
            return self._made_condition

    def result(self, timeout: float | None = None) -> Any:
        """The call's result.

        Args:
            timeout: How long to wait, in seconds; None waits until the call ends.

        Raises:
            concurrent.futures.TimeoutError: The waiting ended; the call goes on.
            concurrent.futures.CancelledError: The call was cancelled.
            Exception: What the env raised, or the `ActorError` that ended the call.
        """
        self._await(timeout)
        error = self._ended_with()
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del self, error  # the traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The exception that the call ended with, None where it did not; waits like `result`."""
        self._await(timeout)
        return self._ended_with()

    def cancel(self) -> bool:
        """Takes the call out of the queue; False once it runs or has ended."""
        return self._supervisor.cancel(self)

    def abort(self) -> bool:
        """Ends the call: a queued one is cancelled, a running one ended by replacing its process.

        The replacement is not counted as a restart. A call that was running raises
        ``ActorDiedError(aborted=True)``, whatever retries it had.

        Returns:
            False when the call has ended already.
        """
        return self._supervisor.abort(self)

    def settled(self) -> bool:
        """Like ``done``, without taking a lock."""
        return self._state in _SETTLED

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        """Gives the future its outcome, once; a second outcome is left out.

        Args:
            value: The call's result.
            error: What it ended with instead, or None.
            incarnation: Where the outcome comes from.
        """
        if self.settled():
            return
        self.incarnation = incarnation
        with _MAKING.lock:
            unseen = self._made_condition is None
            if unseen:  # nobody waits for it, nor has left a callback
                self._result, self._exception = value, error
                self._state = "FINISHED"
        if not unseen and error is None:
            self.set_result(value)
        elif not unseen:
            self.set_exception(error)
        self._keep = None

    def begin(self) -> None:
        """Marks the call as running; one that runs again does already."""
        if self._state == "PENDING":
            # As `set_running_or_notify_cancel` does, without the future's lock: nobody is told of it, and no other
            # change comes in between, since each is made under the actor's.
            self._state = "RUNNING"

    def discard(self) -> None:
        """Marks a call that was taken out of the queue as cancelled, for those that wait too."""
        super().cancel()
        self.set_running_or_notify_cancel()
        self._keep = None

    def _await(self, timeout: float | None) -> None:
        if self._state not in _SETTLED:
            self._supervisor.check_owner()
            if self._supervisor.spin_for(self) and self._state in _SETTLED:
                return
            deadline = None if timeout is None else time.monotonic() + timeout
            self._supervisor.reactor.wait(self.settled, self, deadline)

    def _ended_with(self) -> BaseException | None:
        # Without the future's lock, which an interrupt could leave taken.
        state = self._state
        if state not in _SETTLED:
            raise concurrent.futures.TimeoutError
        if state != "FINISHED":
            raise concurrent.futures.CancelledError
        return self._exception

    def _invoke_callbacks(self) -> None:
        # A callback may wait for another call: never in the thread that reads the replies.
        if self._done_callbacks:
            self._supervisor.reactor.callbacks.submit(super()._invoke_callbacks)  # type: ignore[misc]
