"""Episodes for many tasks: one session each, as many at a time as the pool has actors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import inspect
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Protocol

from envactors.errors import ActorClosedError
from envactors.sessions.lease import Lease
from envactors.sessions.outcomes import Completed, Failed, failed, kind_of
from envactors.sessions.session import Session

Outcome = Completed | Failed


class Leases(Protocol):
    """What a run needs of the pool."""

    size: int

    def session(self, name: Any = None, timeout: float | None = None) -> Lease[Any]:
        """Lease an actor for a block."""


class Run:
    """One use of `envactors.SessionPool.run` or `envactors.SessionPool.arun`.

    Args:
        pool: Where its sessions come from.
        episode: Called as ``episode(env, task)``: a function, or a coroutine function.
        retries: How often a task is tried again after a retryable failure.
    """

    def __init__(self, pool: Leases, episode: Callable[[Session[Any], Any], Any], retries: int) -> None:
        self._pool = pool
        self._episode = episode
        self._retries = retries
        called = episode if inspect.isroutine(episode) else getattr(type(episode), "__call__", episode)  # noqa: B004 # not whether there is one
        self._is_coroutine = inspect.iscoroutinefunction(called)
        # The leases of the episodes that run or wait.
        self._leases: set[Lease[Any]] = set()
        self._stopped_by: BaseException | None = None

    def outcomes(self, tasks: Iterable[Any]) -> Iterator[Outcome]:
        """Yield the outcome of each task, in order of completion; each episode has a thread."""
        remaining = iter(tasks)
        with self._threads() as threads:
            running = {threads.submit(self._play_in_thread, task) for task in self._first(remaining)}
            while running:
                done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                running |= {
                    threads.submit(self._play_in_thread, task) for task in itertools.islice(remaining, len(done))
                }
                for future in done:
                    yield future.result()

    async def outcomes_async(self, tasks: Iterable[Any]) -> AsyncIterator[Outcome]:
        """Yield the outcome of each task, in order of completion; coroutines share the current event loop."""
        remaining = iter(tasks)
        running: set[asyncio.Future[Outcome]] = set()
        with self._threads() as threads:
            try:
                running = {self._begin(task, threads) for task in self._first(remaining)}
                while running:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    running |= {self._begin(task, threads) for task in itertools.islice(remaining, len(done))}
                    for future in done:
                        yield future.result()
            finally:
                self._stop(asyncio.CancelledError("the run was ended"))
                for future in running:
                    future.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def _first(self, remaining: Iterator[Any]) -> Iterator[Any]:
        return itertools.islice(remaining, self._pool.size)

    @contextlib.contextmanager
    def _threads(self) -> Iterator[concurrent.futures.Executor]:
        """Return threads for episodes; on the way out, end what still runs in them without waiting for it."""
        threads = concurrent.futures.ThreadPoolExecutor(self._pool.size, "envactors-episode")
        try:
            yield threads
        finally:
            self._stop(concurrent.futures.CancelledError("the run was ended"))
            threads.shutdown(wait=False)

    def _stop(self, error: BaseException) -> None:
        """End the sessions that run, and have those that wait not begin."""
        self._stopped_by = self._stopped_by or error
        for lease in list(self._leases):
            lease.cancel(error)

    def _begin(self, task: Any, threads: concurrent.futures.Executor) -> asyncio.Future[Outcome]:
        if self._is_coroutine:
            return asyncio.ensure_future(self._play(task))
        return asyncio.get_running_loop().run_in_executor(threads, self._play_in_thread, task)

    def _play_in_thread(self, task: Any) -> Outcome:
        if self._is_coroutine:
            return asyncio.run(self._play(task))
        begun = time.monotonic()
        for attempt in itertools.count():
            trial = Trial(task, begun)
            lease = self._lease(task)
            try:
                with lease as trial.session:
                    trial.value = self._episode(trial.session, task)
            except BaseException as error:  # KeyboardInterrupt and SystemExit of an episode end its session alone
                trial.error = error
            self._leases.discard(lease)
            if self._is_final(trial, attempt):
                break
        return trial.outcome()

    async def _play(self, task: Any) -> Outcome:
        begun = time.monotonic()
        for attempt in itertools.count():
            trial = Trial(task, begun)
            lease = self._lease(task)
            try:
                async with lease as trial.session:
                    trial.value = await self._episode(trial.session, task)
            except KeyboardInterrupt:  # it means the program, whatever coroutine it falls into
                raise
            except BaseException as error:
                trial.error = error
            self._leases.discard(lease)
            if self._is_final(trial, attempt):
                break
        return trial.outcome()

    def _lease(self, task: Any) -> Lease[Any]:
        lease = self._pool.session(task)
        self._leases.add(lease)
        if self._stopped_by is not None:
            lease.cancel(self._stopped_by)
        return lease

    def _is_final(self, trial: Trial, attempt: int) -> bool:
        outcome = trial.outcome()
        is_retried = isinstance(outcome, Failed) and outcome.retryable and attempt < self._retries
        return not is_retried or self._stopped_by is not None


@dataclasses.dataclass
class Trial:
    """One attempt at a task.

    Attributes:
        task: The task.
        begun: When the first attempt at it began (`time.monotonic`).
        session: Its session; None if it did not get one.
        value: What the episode returned.
        error: What was raised instead.
    """

    task: Any
    begun: float
    session: Session[Any] | None = None
    value: Any = None
    error: BaseException | None = None

    def outcome(self) -> Outcome:
        """Return its outcome. That of the session counts: the env may have been lost without an exception here."""
        seconds = time.monotonic() - self.begun
        ended = None if self.session is None else self.session.outcome
        if isinstance(ended, Failed):
            return dataclasses.replace(ended, task=self.task, seconds=seconds)
        if self.error is None:
            return Completed(self.task, self.value, seconds)
        return failed(self.task, "cancelled" if self._is_refusal() else kind_of(self.error), self.error, seconds)

    def _is_refusal(self) -> bool:
        """Return whether there was no session because the pool is closed."""
        return self.session is None and isinstance(self.error, ActorClosedError)
