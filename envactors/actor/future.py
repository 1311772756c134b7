"""The future of one call: the standard library's, with a deadline outside and a way to end a running call.

It can be awaited in any event loop that runs in the awaiting thread. asyncio is imported by the first await: programs
without an event loop never load it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from envactors.actor.reactor import Reactor
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.type_variables import R, T
from envactors.options import check_patience

if TYPE_CHECKING:
    import asyncio

AnyFuture = TypeVar("AnyFuture", bound="concurrent.futures.Future[Any]")
_SETTLED = frozenset(("FINISHED", "CANCELLED", "CANCELLED_AND_NOTIFIED"))


class AwaitableFuture(concurrent.futures.Future[R]):
    """A `concurrent.futures.Future` that can be awaited as well."""

    def __await__(self) -> Generator[Any, None, R]:
        """Wait in the running event loop. If the awaiting task is cancelled, request cancellation of the call."""
        import asyncio

        loop = asyncio.get_running_loop()
        # Not through `asyncio.wrap_future`: in Python 3.10 and 3.11 it never ends when the call raised StopIteration.
        ended: asyncio.Future[None] = loop.create_future()
        _call_when_done(self, loop, functools.partial(_end_wait, ended))
        try:
            yield from ended
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.cancelled():
            raise asyncio.CancelledError
        return self.result()


class CallOwner(Protocol):
    """The interface of an actor that its futures use."""

    reactor: Reactor

    def cancel(self, future: ActorFuture) -> bool:
        """Take a queued call out of the queue; return whether the future is cancelled."""

    def abort(self, future: ActorFuture) -> bool:
        """Cancel a queued call, or end a running one by replacing its process."""

    def wait(self, future: ActorFuture, done: Callable[[], bool], deadline: float | None) -> None:
        """Wait until ``done()``, which says something about the future, or the deadline (`time.monotonic`)."""


class ActorFuture(AwaitableFuture[R]):
    """The result of one call: a real `concurrent.futures.Future` that can also be awaited.

    A timeout ends the wait, never the call. Callbacks run in a thread of this library, where they may wait for other
    calls.

    Args:
        owner: The actor that runs the call.
        keep_alive: Held until the future is settled: an actor stays alive while one of its futures is unfinished.

    Attributes:
        incarnation: The process that the outcome came from; None until there is an outcome.
    """

    incarnation: int | None = None
    # Reads the outcome and settles the future; None until the outcome has arrived, or if it was read at once.
    _read: Callable[[], None] | None = None
    # Who reads each outcome; None once that has started a retry, whose outcome may have arrived by then.
    _readers: dict[Callable[[], None], object] | None = None

    def __init__(self, owner: CallOwner, keep_alive: object) -> None:
        # What the standard library's constructor sets, without its condition: making one takes longer than all else,
        # and few futures need it.
        self._state = "PENDING"
        self._result: R = None  # type: ignore[assignment] # read only once there is a result
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        # The first thread that settles the future or needs its condition adds an entry: the outcome, or None. A
        # dict's setdefault is atomic, and unlike a lock it cannot deadlock with a finalizer.
        self._claim: dict[None, tuple[Any, BaseException | None] | None] = {}
        self._made: dict[None, threading.Condition] = {}
        # The ids of the threads that wait in `ActorFuture.exception`.
        self._waiting: list[int] = []
        self._owner = owner
        self._keep_alive: object | None = keep_alive

    if not TYPE_CHECKING:  # typeshed has a plain attribute

        @property
        def _condition(self) -> threading.Condition:
            """The condition that the standard library takes before it reads or changes a future; made when needed."""
            outcome = self._claim.setdefault(None, None)
            if outcome is not None:  # the thread that settles it may be only about to
                self._result, self._exception = outcome
                self._state = "FINISHED"
            return self._made.get(None) or self._made.setdefault(None, threading.Condition())

    def result(self, timeout: float | None = None) -> R:
        """Return the call's result.

        Args:
            timeout: How long to wait, in seconds; None waits until the call ends.

        Raises:
            ValueError: ``timeout`` is not a number.
            concurrent.futures.TimeoutError: No outcome came in time; the call continues.
            concurrent.futures.CancelledError: The call was cancelled.
            Exception: What the env raised, or the `ActorError` that ended the call.
        """
        error = self.exception(timeout)
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del self, error  # the traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception that the call ended with, None if it has a result; wait like `result`."""
        if timeout is not None:
            check_patience(timeout, "result(timeout=...)")
        if self._state not in _SETTLED:
            self._wait(None if timeout is None else time.monotonic() + timeout)
        # Without the future's lock, which an interrupt could leave taken.
        state = self._state
        if state not in _SETTLED:
            raise concurrent.futures.TimeoutError
        if state != "FINISHED":
            raise concurrent.futures.CancelledError
        return self._exception

    def _wait(self, deadline: float | None) -> None:
        """Wait until the future is settled or the deadline (`time.monotonic`) passes; read the outcome if need be."""
        me = threading.get_ident()
        try:
            self._waiting.append(me)
            read: Callable[[], None] | None = None
            while self._state not in _SETTLED:
                # What another thread reads stays the same meanwhile.
                self._owner.wait(self, functools.partial(self._is_past, read), deadline)
                if self._read is not read:
                    read = self._read
                    with defer_signals:
                        self._read_here()
                elif deadline is not None and time.monotonic() >= deadline:
                    break  # otherwise the reply is there, and another thread is about to settle the future
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            if self._read is not None and self._state not in _SETTLED:
                self._owner.reactor.callbacks.submit(self._read_here)

    def arrive(self, read: Callable[[], None]) -> None:
        """Have the outcome read, which may run code of users, by a thread that waits for it.

        If none does, a thread of the library's own reads it.

        Args:
            read: Reads the outcome and settles the future.
        """
        self._read = read
        if self._waiting:
            self._owner.reactor.wake(self)
        else:
            self._owner.reactor.callbacks.submit(self._read_here)

    def _read_here(self) -> None:
        """Read the outcome in this thread, unless another thread is reading it.

        The outcome may be a retry; then another outcome arrives later.
        """
        read, me = self._read, object()
        if read is None:
            return  # another thread has read it
        try:
            readers = vars(self).setdefault("_readers", {})
            if readers.setdefault(read, me) is me and self._state not in _SETTLED:
                read()
                if self._state not in _SETTLED:
                    readers[read] = None
                    self._owner.reactor.wake(self)
        except BaseException:  # an interrupt
            self._owner.reactor.callbacks.submit(read)
            raise

    @property
    def is_being_read(self) -> bool:
        """Whether the outcome has arrived, and a thread reads it or is about to."""
        return self._read is not None and vars(self).get("_readers", {}).get(self._read, self) is not None

    def _is_past(self, read: Callable[[], None] | None) -> bool:
        """Return whether the future is settled, or there is another way to read the outcome than this one."""
        return self._state in _SETTLED or self._read is not read

    def cancel(self) -> bool:
        """Take the call out of the queue; return False once it runs or has ended."""
        return self._owner.cancel(self)

    def abort(self) -> bool:
        """Cancel the call if it is queued; end it by replacing its process if it is running.

        The replacement is not counted as a restart. A call that was running raises
        ``ActorDiedError(aborted=True)``, whatever retries it had.

        Returns:
            False if the call has ended already.
        """
        return self._owner.abort(self)

    def settled(self) -> bool:
        """Return what ``done`` returns, without taking a lock."""
        return self._state in _SETTLED

    def claim(self, value: Any, incarnation: int) -> bool:
        """Return whether `settle` will take no lock, with this value as the result."""
        self.incarnation = incarnation  # first: any thread may finish what was claimed
        return self._claim.setdefault(None, (value, None)) is not None

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        """Set the outcome, once; ignore a second one.

        Args:
            value: The call's result.
            error: What it ended with instead, or None.
            incarnation: The process that the outcome comes from.
        """
        if self._state not in _SETTLED:
            self.incarnation = incarnation
            outcome = self._claim.setdefault(None, (value, error))
            if outcome is not None:  # without a condition nobody waits, and no callback exists
                self._result, self._exception = outcome
                self._state = "FINISHED"
            elif error is None:
                self.set_result(value)
            else:
                self.set_exception(error)
        # The second time, too: an exception may have ended the first one before this.
        # Let go of what it was made of, such as the memory of a vector: futures may be kept for long.
        self._keep_alive = self._read = None
        if self._readers is not None:  # looking into its dict would make one, which takes longer than all else here
            vars(self).pop("_readers", None)
        if self._waiting:
            self._owner.reactor.wake(self)

    @property
    def has_run(self) -> bool:
        """Whether the call runs, or waits to run again."""
        return self._state == "RUNNING"

    def mark_running(self) -> None:
        """Mark the call as running; one that runs again already is."""
        if self._state == "PENDING":
            # As `set_running_or_notify_cancel` does, without the future's lock: nobody is notified of this change,
            # and no other one can come in between, since each is made under the actor's lock.
            self._state = "RUNNING"

    def mark_cancelled(self) -> None:
        """Mark a call that was taken out of the queue as cancelled, and notify its waiters."""
        super().cancel()
        self.set_running_or_notify_cancel()
        self._keep_alive = None
        self._owner.reactor.wake(self)

    def _invoke_callbacks(self) -> None:
        # A callback may wait for another call, so never in the thread that reads the replies.
        if self._done_callbacks:
            self._owner.reactor.callbacks.submit(super()._invoke_callbacks)  # type: ignore[misc]


def results_of(futures: Sequence[ActorFuture[T]]) -> list[T]:
    """Wait for all futures, then return their results or raise the first failure."""
    for future in futures:
        future.exception()
    return [future.result() for future in futures]


def as_completed_async(futures: Iterable[AnyFuture], timeout: float | None = None) -> AsyncIterator[AnyFuture]:
    """Yield futures as they complete, for ``async for``; the counterpart of `concurrent.futures.as_completed`.

    Args:
        futures: The futures, also those of other executors. Each one is yielded once, the completed ones first.
        timeout: How long to wait for all of them, in seconds; None waits until they complete.

    Raises:
        ValueError: ``timeout`` is not a number.
        concurrent.futures.TimeoutError: Not all futures completed in time; their calls continue.
    """
    check_patience(timeout, "as_completed_async(timeout=...)")
    return _in_order_of_completion(list(dict.fromkeys(futures)), timeout)


async def _in_order_of_completion(futures: list[AnyFuture], timeout: float | None) -> AsyncIterator[AnyFuture]:
    import asyncio

    deadline = None if timeout is None else time.monotonic() + timeout
    loop = asyncio.get_running_loop()
    completed: asyncio.Queue[AnyFuture] = asyncio.Queue()
    for future in futures:
        if future.done():
            completed.put_nowait(future)
        else:
            _call_when_done(future, loop, functools.partial(completed.put_nowait, future))
    for left in range(len(futures), 0, -1):
        remaining = None if deadline is None else deadline - time.monotonic()
        try:
            future = completed.get_nowait() if completed.qsize() else await asyncio.wait_for(completed.get(), remaining)
        except asyncio.TimeoutError:
            raise concurrent.futures.TimeoutError(
                f"as_completed_async waited {timeout} s, and {left} of {len(futures)} futures are unfinished"
            ) from None
        yield future


def _end_wait(ended: asyncio.Future[None]) -> None:
    if not ended.done():  # the awaiting task may have been cancelled
        ended.set_result(None)


def _call_when_done(
    future: concurrent.futures.Future[Any], loop: asyncio.AbstractEventLoop, function: Callable[[], object]
) -> None:
    """Have an event loop call a function once a future is done."""

    def notify(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nothing waits in it any more
            loop.call_soon_threadsafe(function)

    future.add_done_callback(notify)
