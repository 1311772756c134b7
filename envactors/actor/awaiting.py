"""Futures that can be awaited, in any event loop that runs in the awaiting thread.

asyncio is imported by the first await: programs without an event loop never load it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from envactors.actor.type_variables import R
from envactors.options import check_patience

if TYPE_CHECKING:
    import asyncio

AnyFuture = TypeVar("AnyFuture", bound="concurrent.futures.Future[Any]")


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
