"""Run an episode for each of many tasks, in a session each, with retries.

Leases and actors come from the pool; this module only decides which task runs next, and when a task is retried.
"""

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
from envactors.pools.failure_kinds import kind_of
from envactors.sessions.lease import Lease
from envactors.sessions.outcomes import Completed, Failed, failed
from envactors.sessions.session import Session

Outcome = Completed | Failed


class Leases(Protocol):
    """The part of the pool that a run calls."""

    size: int

    def session(self, name: Any = None, timeout: float | None = None) -> Lease[Any]:
        """Lease an actor for a block."""


class _Tasks:
    """The tasks of a run. If their iterator raises, the run ends with that exception once what has begun has ended."""

    def __init__(self, tasks: Iterable[Any]) -> None:
        self._left = iter(tasks)
        self._error: Exception | None = None

    def take(self, count: int) -> Iterator[Any]:
        """Yield the next tasks, at most this many; fewer if there are no more."""
        try:
            yield from itertools.islice(self._left, count)
        except Exception as error:
            self._error, self._left = error, iter(())

    def check(self) -> None:
        """Raise what the iterator has raised."""
        if self._error is not None:
            raise self._error


class Run:
    """One call of `envactors.SessionPool.run` or `envactors.SessionPool.arun`.

    Args:
        pool: Provides the sessions.
        episode: Called as ``episode(env, task)``: a function, or a coroutine function.
        retries: How often a task is retried after a retryable failure.
    """

    def __init__(self, pool: Leases, episode: Callable[[Session[Any], Any], Any], retries: int) -> None:
        self._pool = pool
        self._episode = episode
        self._retries = retries
        call = getattr(type(episode), "__call__", None)  # noqa: B004 # reads the method; `callable` was checked before
        self._is_coroutine = any(map(inspect.iscoroutinefunction, (episode, call)))
        # The leases of the episodes that are running or waiting for an actor, oldest first.
        self._leases: dict[Lease[Any], None] = {}
        self._stopped_by: BaseException | None = None

    def outcomes(self, tasks: Iterable[Any]) -> Iterator[Outcome]:
        """Yield the outcome of each task, in order of completion; each episode runs in a thread."""
        left = _Tasks(tasks)
        with self._threads() as threads:
            running = {threads.submit(self._play_in_thread, task) for task in left.take(self._pool.size)}
            while running:
                done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                running.update(threads.submit(self._play_in_thread, task) for task in left.take(len(done)))
                for future in done:
                    yield future.result()
        left.check()

    async def outcomes_async(self, tasks: Iterable[Any]) -> AsyncIterator[Outcome]:
        """Yield the outcome of each task, in order of completion; coroutines share the current event loop."""
        left = _Tasks(tasks)
        running: set[asyncio.Future[Outcome]] = set()
        with self._threads() as threads:
            try:
                running.update(self._begin(task, threads) for task in left.take(self._pool.size))
                while running:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    running.update(self._begin(task, threads) for task in left.take(len(done)))
                    for future in done:
                        yield future.result()
            finally:
                self._stop(asyncio.CancelledError("the run was ended"))
                for future in running:
                    future.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        left.check()

    @contextlib.contextmanager
    def _threads(self) -> Iterator[concurrent.futures.Executor]:
        """Provide threads for episodes. On exit, end the sessions that are still running, and do not wait for them."""
        threads = concurrent.futures.ThreadPoolExecutor(self._pool.size, "envactors-episode")
        try:
            yield threads
        finally:
            self._stop(concurrent.futures.CancelledError("the run was ended"))
            threads.shutdown(wait=False)

    def _stop(self, error: BaseException) -> None:
        """End the current sessions, and prevent the waiting ones from beginning."""
        self._stopped_by = self._stopped_by or error
        for lease in list(self._leases):
            lease.cancel(error)

    def _begin(self, task: Any, threads: concurrent.futures.Executor) -> asyncio.Future[Outcome]:
        if self._is_coroutine:
            return asyncio.ensure_future(self._play(task))
        return asyncio.get_running_loop().run_in_executor(threads, self._play_in_thread, task)

    def _play_in_thread(self, task: Any) -> Outcome:
        for trial, lease in self._trials(task):
            try:
                with lease as trial.session:
                    value = self._episode(trial.session, task)
                    trial.value = asyncio.run(value) if inspect.iscoroutine(value) else value
            except BaseException as error:  # KeyboardInterrupt and SystemExit end only this session
                trial.error = error
        return trial.outcome()

    async def _play(self, task: Any) -> Outcome:
        for trial, lease in self._trials(task):
            try:
                async with lease as trial.session:
                    trial.value = await self._episode(trial.session, task)
            except KeyboardInterrupt:  # it means the program, whatever coroutine it falls into
                raise
            except BaseException as error:
                trial.error = error
        return trial.outcome()

    def _trials(self, task: Any) -> Iterator[tuple[Trial, Lease[Any]]]:
        """Yield each attempt at a task, which the caller then makes, with its lease."""
        begun = time.monotonic()
        for attempt in itertools.count():
            trial, lease = Trial(task, begun), self._lease(task)
            yield trial, lease
            self._leases.pop(lease, None)
            outcome = trial.outcome()
            is_retried = isinstance(outcome, Failed) and outcome.retryable and attempt < self._retries
            if not is_retried or self._stopped_by is not None:
                return

    def _lease(self, task: Any) -> Lease[Any]:
        lease = self._pool.session(task)
        self._leases[lease] = None
        if self._stopped_by is not None:
            lease.cancel(self._stopped_by)
        return lease


@dataclasses.dataclass
class Trial:
    """One attempt at a task.

    Attributes:
        task: The task.
        begun: When the first attempt at the task began (`time.monotonic`).
        session: The session of this attempt; None if the pool granted none.
        value: What the episode returned.
        error: What the episode or the pool raised, None if neither did.
    """

    task: Any
    begun: float
    session: Session[Any] | None = None
    value: Any = None
    error: BaseException | None = None

    def outcome(self) -> Outcome:
        """Return the outcome. A failed session counts even without an exception: the episode may have caught it."""
        seconds = time.monotonic() - self.begun
        ended = None if self.session is None else self.session.outcome
        if isinstance(ended, Failed):
            return dataclasses.replace(ended, task=self.task, seconds=seconds)
        if self.error is None:
            return Completed(self.task, self.value, seconds)
        return failed(self.task, "cancelled" if self._is_refusal() else kind_of(self.error), self.error, seconds)

    def _is_refusal(self) -> bool:
        """Return whether the pool granted no session because it is closed."""
        return self.session is None and isinstance(self.error, ActorClosedError)
