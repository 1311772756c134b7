"""The future of a call: the standard library's, plus `ActorFuture.abort` and ``await``.

The owner of a future sets its *outcome*: the bytes of a reply, and how to read them. The thread that first asks for the
result reads it, since unpickling runs code of users. asyncio is imported by the first ``await``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from envactors.actor.change import RLock
from envactors.actor.latch import Latch
from envactors.actor.type_variables import R, T
from envactors.options import as_timeout
from envactors.runtime import Runtime
from envactors.system.polling import remaining

if TYPE_CHECKING:
    import asyncio

AnyFuture = TypeVar("AnyFuture", bound="concurrent.futures.Future[Any]")
# The states of the standard library.
_PENDING, _RUNNING, _CANCELED, _FINISHED = "PENDING", "RUNNING", "CANCELLED_AND_NOTIFIED", "FINISHED"
# How long a waiter of `concurrent.futures` may look at the state of a future, in seconds.
_LOCK_PATIENCE = 1.0


class BoundToProcess:
    """An object that refers to running actors, so it can be neither pickled nor copied."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it belongs to the process that made it; send its "
            "results instead"
        )


class Outcome(Protocol):
    """The outcome of a call, not read yet."""

    is_failure: bool

    def read(self) -> tuple[Any, BaseException | None]:
        """Return the result, or the exception. This may run code of users."""


class Owner(Protocol):
    """The actor that runs the call of a future, or the pool that has not chosen one yet."""

    @property
    def runtime(self) -> Runtime: ...

    def check_not_forked(self) -> None:
        """Raise `ActorClosedError` in a forked process."""

    def cancel(self, future: ActorFuture) -> bool:
        """Cancel the call if it is queued."""

    def abort(self, future: ActorFuture) -> bool:
        """Cancel the call, or end it by replacing its process."""

    def read_reply(self, future: ActorFuture, until: float | None) -> None:
        """Read the reply in the calling thread until a time of `time.monotonic`, if that is possible."""


class _WaiterLock(RLock):
    """The lock that `concurrent.futures.wait` and `as_completed` hold while they look at the state of a future.

    Under the lock, these functions read the state of the future, and add a waiter if the call has not ended. In the
    standard library, the thread that ends the call takes the lock, too, so no waiter comes in between. Here that thread
    must never block: it may be the loop's, and an interrupt may have left the lock held. So it publishes the state
    later, and there are two states:

    1. The thread that ends the call writes `state`, without the lock.
    2. The next thread that acquires the lock copies it to `state_for_waiters`, which these functions read. Waiters that
       were added before have seen no end: they are copied to `early_waiters`. Later threads see it. If they add a
       waiter, since they also wait for other futures, it expects no notice from this one.
    3. A callback thread acquires the lock once the call has ended, and notifies the waiters in `early_waiters`.

    Attributes:
        state: The state of the future. Its owner writes it, without this lock.
        state_for_waiters: The state when the lock was last acquired. The thread that holds the lock writes it.
        waiters: The waiters of the future, which these functions add under the lock. None until a thread acquires it,
            so that there are none.
        early_waiters: The waiters that were added before the end was visible. The thread that holds the lock writes
            them, and a callback thread notifies and removes them.
    """

    state: str = _PENDING
    state_for_waiters: str = _PENDING
    waiters: list[Any] | None = None
    early_waiters: Sequence[Any] = ()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock, and make the actual state visible.

        `concurrent.futures` calls this method. The base class's ``with`` statement does not, and publishes no state.
        """
        # Made before the lock is acquired, and in one step, since a signal handler may wait, too. The owner writes the
        # state, and then reads this. So the owner sees that there may be a waiter, or the waiter sees the end.
        self.__dict__.setdefault("waiters", [])
        is_acquired = super().acquire(blocking, timeout)
        if is_acquired:
            self.publish_state()
        return is_acquired

    def publish_state(self) -> None:
        """Make the actual state visible. The lock must be held, unless an interrupt has left it to another thread."""
        if self.state_for_waiters != self.state:
            self.state_for_waiters = self.state
            self.early_waiters = [*(self.waiters or ())]


class ActorFuture(BoundToProcess, concurrent.futures.Future[R]):
    """The result of one call. A real `concurrent.futures.Future` that can also be awaited.

    A timeout ends the wait, never the call. Callbacks run in a thread of this library, where they may wait for other
    calls.

    One thread at a time changes its state: the one that makes the call until the owner has it, then the owner, under
    its lock if it has processes. The condition of the base class serves `concurrent.futures.wait` and
    `concurrent.futures.as_completed` alone.

    Args:
        owner: The actor that runs the call.
        keep_alive: An object to hold until the call has ended: an actor lives while one of its futures is unfinished.
    """

    # Whether a thread that waits is woken before the loop waits for events; see `Loop.wake_after_events`.
    _is_urgent = True

    # Defaults in the class, since an executor makes many futures at once.
    _result: R | None = None
    _exception: BaseException | None = None
    _outcome: Outcome | None = None
    _done_callbacks: Any = ()  # or a list

    def __init__(self, owner: Owner, keep_alive: object) -> None:
        self._condition: Any = _WaiterLock()
        self.owner: Owner = owner
        self._keep_alive: Any = keep_alive
        # Reentrant: a signal handler may ask for the result while its thread reads it.
        self._reading = RLock()
        self._ended = Latch()

    if not TYPE_CHECKING:  # typeshed has a plain attribute

        @property
        def _state(self) -> str:
            """The state that `concurrent.futures` sees. In a fork that would wait forever, reading it raises."""
            self._check_will_end()
            return self._condition.state_for_waiters

        @property
        def _waiters(self) -> list[Any]:
            """The list to which `concurrent.futures` adds waiters, with the condition acquired."""
            return self._condition.waiters

    # Users -----------------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> R:
        """Return the call's result.

        Args:
            timeout: How long to wait, in seconds; None waits until the call has ended.

        Raises:
            ValueError: ``timeout`` is not a number.
            concurrent.futures.TimeoutError: The call has not ended in time; it continues.
            concurrent.futures.CancelledError: The call was canceled.
            ActorClosedError: The call had not ended when this process was forked.
            Exception: The exception that the env raised, or the `ActorError` that ended the call.
        """
        self._wait(timeout, "result(timeout=...)")
        if self._exception is None:
            return self._result  # type: ignore[return-value] # if it is None, `R` includes None
        try:
            raise self._exception
        finally:
            del self  # the traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception that the call ended with, or None if it has a result. Wait like `result`."""
        self._wait(timeout, "exception(timeout=...)")
        return self._exception

    def _get_snapshot(self) -> tuple[bool, bool, R | None, BaseException | None]:
        """Return whether it is done, whether it was canceled, the result, and the exception; for asyncio since 3.15."""
        if self._condition.state != _FINISHED:
            return self.done(), self.cancelled(), None, None
        error = self.exception()
        return True, False, self._result, error

    def done(self) -> bool:
        """Return whether the call has ended, or was canceled."""
        return self._condition.state not in (_PENDING, _RUNNING)

    def running(self) -> bool:
        """Return whether the call is running, or waits to be retried."""
        return bool(self._condition.state == _RUNNING)

    def cancelled(self) -> bool:
        """Return whether the call was canceled."""
        return bool(self._condition.state == _CANCELED)

    def cancel(self) -> bool:
        """Take the call out of the queue; return whether it is canceled. It is not if it is running or has ended."""
        return self.owner.cancel(self)

    def abort(self) -> bool:
        """Cancel the call if it is queued; if it is running, end it by replacing its process.

        The replacement does not count as a restart. The call raises ``ActorDiedError(aborted=True)``, whatever retries
        it had. Rollouts can be neither canceled nor aborted.

        Returns:
            True if the call was canceled, now or before, or was running; False if it had ended, or for a rollout.

        Raises:
            ActorError: The call is running, and its backend cannot kill.
            ActorClosedError: This process is a fork of the one that made the actor.
        """
        return self.owner.abort(self)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[R]], object]) -> None:
        """Call a function with this future once it is done, in a thread of this library; now if it is done.

        Raises:
            ActorClosedError: The call had not ended when this process was forked.
        """
        self._check_will_end()
        callbacks = self.__dict__.setdefault("_done_callbacks", [])  # in one step, since other threads add some, too
        callbacks.append(fn)
        if self.done():
            with contextlib.suppress(ValueError):  # the other thread has taken it
                callbacks.remove(fn)
                _call_back(self, fn, Exception)

    def __await__(self) -> Generator[Any, None, R]:
        """Wait in the running event loop. If the awaiting task is canceled, cancel the call if it is queued."""
        import asyncio

        loop = asyncio.get_running_loop()
        # Not `asyncio.wrap_future`, which never ends in Python 3.10 and 3.11 if the call raised StopIteration.
        ended: asyncio.Future[None] = loop.create_future()
        _call_when_done(self, loop, lambda: None if ended.done() else ended.set_result(None))
        try:
            yield from ended
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.cancelled():
            raise asyncio.CancelledError
        return self.result()

    def __repr__(self) -> str:
        """Describe the future as the standard library does; name the type of an outcome only once it was read."""
        state, error = self._condition.state.partition("_")[0].lower(), self._exception
        if state == "finished" and self._outcome is None:
            state += f" returned {type(self._result).__name__}" if error is None else f" raised {type(error).__name__}"
        return f"<{type(self).__name__} at {id(self):#x} state={state}>"

    def _check_will_end(self) -> None:
        """Raise in a forked process, unless the call has ended before."""
        if not self.done():
            self.owner.check_not_forked()

    def _wait(self, timeout: float | None, option: str) -> None:
        """Wait for the outcome and read it; errors name the option that limits the time."""
        timeout = as_timeout(timeout, option, may_be_past=True)
        if not self.done():
            self.owner.check_not_forked()
            until = None if timeout is None else time.monotonic() + min(timeout, threading.TIMEOUT_MAX)
            self.owner.read_reply(self, until)
            while not self.done() and not self._ended.wait(remaining(until)):
                if remaining(until) == 0.0:
                    raise concurrent.futures.TimeoutError
        if self._condition.state != _FINISHED:
            raise concurrent.futures.CancelledError
        if self._outcome is not None:
            with self._reading:
                if self._outcome is not None:
                    self._result, self._exception = self._outcome.read()
                    self._outcome = None  # after an interrupt in `read`, the next caller reads it again

    def wait_ended(self) -> None:
        """Wait until the call has ended, without reading the outcome."""
        self._ended.wait(None)

    # The owner -------------------------------------------------------------------------------------------

    def set_running(self) -> None:
        """Mark the call as running; a retried call is already."""
        condition = self._condition
        if condition.state == _PENDING:
            condition.state = _RUNNING

    def set_outcome(self, outcome: Outcome) -> None:
        """End the call. If it has ended before, only notify those that wait, which completes an interrupted call."""
        condition = self._condition
        if condition.state in (_PENDING, _RUNNING):
            self._outcome = outcome
            condition.state = _FINISHED
        self._notify()

    def set_result(self, result: R) -> None:
        """End the call with a result; see `set_outcome`."""
        self.set_outcome(ReadyOutcome(result))

    def set_exception(self, exception: BaseException | None) -> None:
        """End the call with an exception; see `set_outcome`."""
        self.set_outcome(ReadyOutcome(None, exception))

    def set_canceled(self) -> None:
        """Mark a call that was taken out of the queue as canceled."""
        if self._condition.state in (_PENDING, _RUNNING):
            self._condition.state = _CANCELED
        self._notify()

    def _notify(self) -> None:
        """Wake threads that wait, and have callbacks run in another thread. Calling this again does no harm."""
        self._keep_alive = None
        if self._ended.mark_set() or self._condition.waiters is not None or self._done_callbacks:
            self.owner.runtime.loop.wake_after_events(self._wake_others, is_urgent=self._is_urgent)

    def _wake_others(self) -> None:
        self._ended.set()
        if self._condition.waiters is not None or self._done_callbacks:
            self.owner.runtime.callbacks.submit(self._notify_others)

    def _notify_others(self) -> None:
        """Run callbacks, and wake the waiters of `concurrent.futures`."""
        # Waiters hold the lock only for a moment, unless an interrupt has kept one from releasing it.
        is_acquired = self._condition.acquire(timeout=_LOCK_PATIENCE)
        self._condition.publish_state()
        while self._condition.early_waiters:
            waiter = self._condition.early_waiters.pop()
            outcome = self._outcome  # a thread that reads it sets this to None
            is_failure = outcome.is_failure if outcome is not None else self._exception is not None
            if self._condition.state == _CANCELED:
                waiter.add_cancelled(self)
            elif is_failure:
                waiter.add_exception(self)
            else:
                waiter.add_result(self)
        if is_acquired:
            self._condition.release()
        while self._done_callbacks:
            with contextlib.suppress(IndexError):  # another thread has taken the last one
                _call_back(self, self._done_callbacks.pop(0), BaseException)


def _call_back(future: ActorFuture[Any], callback: Callable[[Any], object], kind: type[BaseException]) -> None:
    """Run a callback; log its exception if it is of a kind, as the standard library does."""
    try:
        callback(future)
    except kind:
        concurrent.futures._base.LOGGER.exception("exception calling callback for %r", future)


class ReadyOutcome:
    """An outcome that needs no reading: a value or an error that the parent has made."""

    def __init__(self, value: Any, error: BaseException | None = None) -> None:
        self.is_failure: bool = error is not None
        self._content = value, error

    def read(self) -> tuple[Any, BaseException | None]:
        """Return the value, or the error."""
        return self._content


class LazyOutcome:
    """An outcome that the first thread that asks for it reads, such as a reply that is not unpickled yet.

    Args:
        read: Returns the result, or the exception. This may run code of users.
        *args: Its arguments.
        is_failure: Whether it is an exception, as far as that is known before it is read.
    """

    __slots__ = ("_args", "_content", "_read", "is_failure")

    def __init__(self, read: Callable[..., tuple[Any, BaseException | None]], *args: Any, is_failure: bool) -> None:
        self.is_failure: bool = is_failure
        self._read = read
        self._args = args
        self._content: tuple[Any, BaseException | None] | None = None

    def read(self) -> tuple[Any, BaseException | None]:
        """Return the result, or the exception: the same one each time, unless several threads are the first to ask."""
        if self._content is None:
            self._content = self._read(*self._args)
        return self._content


def results_of(futures: Sequence[ActorFuture[T]]) -> list[T]:
    """Wait for all futures, then return their results or raise the first failure; a canceled one ends the wait."""
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
    seconds = as_timeout(timeout, "as_completed_async(timeout=...)", may_be_past=True)
    return _in_order_of_completion(list(dict.fromkeys(futures)), seconds)


async def _in_order_of_completion(futures: list[AnyFuture], timeout: float | None) -> AsyncIterator[AnyFuture]:
    import asyncio

    until = None if timeout is None else time.monotonic() + timeout
    loop = asyncio.get_running_loop()
    completed: asyncio.Queue[AnyFuture] = asyncio.Queue()
    for future in futures:
        if future.done():
            completed.put_nowait(future)
        else:
            _call_when_done(future, loop, functools.partial(completed.put_nowait, future))
    for left in range(len(futures), 0, -1):
        try:
            if completed.qsize():
                future = completed.get_nowait()
            else:
                future = await asyncio.wait_for(completed.get(), remaining(until))
        except asyncio.TimeoutError:
            raise concurrent.futures.TimeoutError(
                f"as_completed_async waited {timeout} s, and {left} of {len(futures)} futures are unfinished"
            ) from None
        yield future


def _call_when_done(
    future: concurrent.futures.Future[Any], loop: asyncio.AbstractEventLoop, function: Callable[[], object]
) -> None:
    """Have an asyncio loop call a function once a future is done."""

    def notify(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile, so nothing waits in it any more
            loop.call_soon_threadsafe(function)

    future.add_done_callback(notify)
