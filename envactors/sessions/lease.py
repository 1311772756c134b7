"""The context manager of a session, for ``with`` and for ``async with``.

It waits for an actor on entry and ends the session on exit. The pool decides who gets which actor.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any, Generic, Protocol

from envactors.actor.type_variables import T_co
from envactors.sessions.requests import Request
from envactors.sessions.session import Session

# How long the loop may take to grant a session while an actor is free, in seconds, also if ``timeout`` is shorter.
_LEAST_PATIENCE = 0.1


class Lessor(Protocol):
    """The part of the pool that a lease calls. None of these methods waits."""

    def make_request(self) -> Request[Session[Any]]:
        """Return the future of a session."""

    def request(self, name: Any, request: Request[Session[Any]]) -> None:
        """Queue for an actor."""

    def give_up(self, request: Request[Session[Any]], error: BaseException) -> None:
        """Stop waiting; end the session if it has already begun. Calling it again does nothing."""

    def end(self, session: Session[Any], error: BaseException | None = None) -> None:
        """End a session; do nothing if it has already ended."""


class Lease(Generic[T_co]):
    """A single-use context manager; see `envactors.SessionPool.session`."""

    def __init__(self, pool: Lessor, name: Any, timeout: float | None) -> None:
        self._pool = pool
        self._name = name
        self._timeout = timeout
        self._patience = None if timeout is None else max(timeout, _LEAST_PATIENCE)
        self._request: Request[Session[Any]] | None = None
        self._cancelled_by: BaseException | None = None

    def __enter__(self) -> Session[T_co]:
        request = self._begin()
        try:
            self._pool.request(self._name, request)
            self._check_cancelled()
            return request.result(self._patience)
        except BaseException as error:
            timed_out = isinstance(error, concurrent.futures.TimeoutError) and not request.done()
            self._pool.give_up(request, error)
            if timed_out:
                raise self._too_late() from None
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        try:
            self._end(error)
        except BaseException:  # an interrupt
            self._end(error)
            raise

    async def __aenter__(self) -> Session[T_co]:
        request = self._begin()
        try:
            self._pool.request(self._name, request)
            self._check_cancelled()
            # `asyncio.wait` does not cancel the future at the timeout, so a session granted then is not lost.
            waiting = asyncio.wrap_future(request)
            await asyncio.wait([waiting], timeout=self._patience)
            if not waiting.done():
                raise self._too_late()
            return waiting.result()
        except BaseException as error:
            self._pool.give_up(request, error)
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.__exit__(kind, error, traceback)

    def cancel(self, error: BaseException) -> None:
        """End the session, or prevent it from beginning; the thread or task in the block receives an error."""
        self._cancelled_by = error
        self._check_cancelled()

    def _begin(self) -> Request[Session[Any]]:
        if self._request is not None:
            raise RuntimeError(
                f"the lease of session {self._name!r} has already been used: call pool.session() again for each block"
            )
        self._request = self._pool.make_request()
        return self._request

    def _end(self, error: BaseException | None) -> None:
        assert self._request is not None, "the block was entered"
        self._pool.end(self._request.result(), error)

    def _check_cancelled(self) -> None:
        if self._cancelled_by is not None and self._request is not None:
            self._pool.give_up(self._request, self._cancelled_by)

    def _too_late(self) -> TimeoutError:
        return TimeoutError(
            f"session {self._name!r} did not start within {self._timeout:g} s: all actors of the pool are in use or "
            "starting. Increase session(timeout=...), or the size of the pool"
        )
