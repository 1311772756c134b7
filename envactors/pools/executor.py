"""`Executor`: runs functions in processes, one of which may hang or crash without breaking the others."""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from envactors import backends
from envactors.actor.change import ChangeLock
from envactors.actor.future import ActorFuture, BoundToProcess
from envactors.actor.spawn import make_actor
from envactors.actor.type_variables import P, R
from envactors.backends.base import Backend
from envactors.crashes.writer import CrashDir
from envactors.errors import ActorClosedError
from envactors.mailbox.messages import Kind
from envactors.mailbox.pickling import dumps, pickle_argument, try_to_pickle
from envactors.options import Deadlines, EnvVars, RecyclePolicy, RestartPolicy, as_timeout, check_kind, is_int
from envactors.pools.failure_kinds import FailureKind
from envactors.pools.functions import FunctionPickler, Functions
from envactors.pools.runner import FunctionRunner
from envactors.pools.shared_calls import SharedCall, SharedCalls, SharedFuture
from envactors.system.cpus import usable_cores

S = TypeVar("S")
# The deadline of a call, and its retries.
_Limits = tuple[float | None, int]
# How long starting a worker and its initializer may take, in seconds: initializers load models.
_START_PATIENCE = 600.0
# The calls of the executors of this process, which end before the program does.
_open: weakref.WeakSet[SharedCalls] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class ExecutorStats:
    """What an `Executor` has done, and is doing.

    Attributes:
        submitted: How many calls were submitted.
        completed: How many of them have returned a result.
        failed: How many have failed, by kind: ``"exception"``, ``"died"`` (the worker crashed or exited),
            ``"timeout"``, ``"start"``, ``"cancelled"`` (canceled or aborted), ``"node"``. Kinds without failures are
            left out.
        waiting: How many calls wait for a worker.
        running: How many calls are running.
        restarts: How many workers were replaced after a crash or a deadline.
    """

    submitted: int
    completed: int
    failed: dict[FailureKind, int]
    waiting: int
    running: int
    restarts: int


class ExecutorOptions:
    """Submits functions with a deadline and retries. `Executor.options` makes it, and an `Executor` is one.

    Args:
        calls: The calls of the executor.
        functions: Its functions.
        limits: The deadline and the retries.
    """

    def __init__(self, calls: SharedCalls, functions: Functions, limits: _Limits) -> None:
        self._calls = calls
        self._functions = functions
        self._limits = limits

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> ActorFuture[R]:
        """Run a function in a worker.

        Args:
            fn: The function, pickled immediately like its arguments.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Raises:
            TypeError: ``fn`` cannot be called.
            RuntimeError: The executor was shut down.
        """
        return self._submit(fn, "run", (args, kwargs))

    def map(
        self, fn: Callable[..., R], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[R]:
        """Call a function with the items of iterables; return the results in their order.

        Args:
            fn: The function.
            *iterables: Its arguments, one iterable each; the shortest ends the calls. All calls are submitted at once.
            timeout: How long all results may take, in seconds; None for no limit.
            chunksize: How many calls travel together. They share a deadline, and fail together.

        Raises:
            ValueError: ``chunksize`` or ``timeout`` is out of range.
            RuntimeError: The executor was shut down.
        """
        timeout = as_timeout(timeout, "map(timeout=...)", may_be_past=True)
        if not is_int(chunksize):
            raise ValueError(f"map(chunksize={chunksize!r}): expected an int >= 1")
        end = None if timeout is None else time.monotonic() + timeout
        items = zip(*iterables, strict=False)
        if chunksize == 1:
            return _results([self._submit(fn, "run", (args, {})) for args in items], end)
        chunks = iter(lambda: list(itertools.islice(items, min(chunksize, sys.maxsize))), [])
        futures = [self._submit(fn, "run_chunk", (chunk,)) for chunk in chunks]
        return (chunk.pop(0) for chunk in _results(futures, end) for _ in range(len(chunk)))

    def _submit(self, fn: Callable[..., Any], method: str, args: tuple[Any, ...]) -> ActorFuture[Any]:
        if not callable(fn):
            raise TypeError(f"cannot submit {fn!r}: expected a function")
        calls, title = self._calls, getattr(fn, "__qualname__", None) or type(fn).__qualname__
        encoded, error = try_to_pickle(lambda: self._functions.encode(fn))
        # If it fails, pickling the message fails in the same way, and the future gets the error.
        message: tuple[Any, ...] = 0, method, (fn if error is not None else encoded, *args), {}
        future: ActorFuture[Any] = SharedFuture(calls)
        call = SharedCall(title, 0, Kind.CALL, future, *self._limits)
        try:
            calls.submit(call, message, FunctionPickler)
        except ActorClosedError as error:
            if calls.is_closed:
                raise RuntimeError(f"cannot submit {title!r}: the executor was shut down") from None
            raise error from None
        return future


class Executor(ExecutorOptions, concurrent.futures.Executor, BoundToProcess):
    """Runs functions in worker processes, like `concurrent.futures.ProcessPoolExecutor`, and is never broken.

    A function that crashes its worker, exits, or passes its deadline fails only its own future. Its worker is then
    replaced, and the processes that the function has started are ended.

    Functions and arguments may be anything that cloudpickle can pickle. Functions of ``__main__`` share one set of
    globals in each worker.

    Args:
        max_workers: How many workers there are at most; None for the number of usable cores. They start when calls
            need them.
        deadline: How long a call may run, in seconds, counted from when a worker could run it; None for no limit.
        retries: How many crashes and missed deadlines a call survives; an exception is never retried.
        max_pending: How many calls may wait for a worker before `submit` waits; None for no limit.
        recycle: When to replace a worker between two calls: its ``max_calls`` and ``max_memory``.
        initializer: Called once in each worker process, before its first function.
        initargs: The arguments of the initializer.
        env_vars: Environment variables of the workers, or a function of an actor's index that returns them.
        backend: Where the workers run: the name of a backend, or a backend.
        name: The prefix of the workers' names.
        crash_dir: Directory for crash bundles of calls; see `envactors.spawn`.

    Raises:
        TypeError: ``initializer`` cannot be called, or an option is of a wrong class.
        ValueError: A number is out of range, or ``recycle`` limits steps.
        SerializationError: The initializer or its arguments cannot be pickled.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        deadline: float | None = None,
        retries: int = 0,
        max_pending: int | None = None,
        recycle: RecyclePolicy | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        env_vars: EnvVars = None,
        backend: str | Backend = "process",
        name: str = "executor",
        crash_dir: CrashDir = None,
    ) -> None:
        if max_workers is not None and not is_int(max_workers):
            raise ValueError(f"Executor(max_workers={max_workers!r}): expected an int >= 1, or None for one per core")
        if max_pending is not None and not is_int(max_pending):
            raise ValueError(f"Executor(max_pending={max_pending!r}): expected an int >= 1, or None for no limit")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"Executor(initializer={initializer!r}): expected a function, or None")
        check_kind("initargs", initargs, Iterable)
        check_kind("name", name, str)
        check_kind("recycle", recycle, RecyclePolicy, type(None))
        if recycle is not None and recycle.max_steps is not None:
            raise ValueError(f"Executor(recycle={recycle!r}): only vectors run steps; use max_calls")
        limits = _check_limits(deadline, retries, "Executor")
        what, call = "the initializer or its arguments", (initializer, initargs)
        pickled = None if initializer is None else pickle_argument(what, call, _pickle_initializer)
        traits = backends.resolve(backend).traits
        lock = ChangeLock()
        handles = [
            make_actor(
                [functools.partial(FunctionRunner, pickled, has_process=traits.can_kill)],
                name=f"{name}-{index}",
                first=index,
                backend=backend,
                deadlines=Deadlines(start=_START_PATIENCE, call=deadline),
                restart=RestartPolicy(max_restarts=math.inf, backoff=0),
                env_vars=env_vars,
                crash_dir=crash_dir,
                lock=None if traits.is_inline else lock,
                is_on_demand=True,
                is_executor=True,
            )
            for index in range(max_workers or usable_cores())
        ]
        calls = SharedCalls(handles, lock, max_pending, recycle or RecyclePolicy())
        super().__init__(calls, Functions(), limits)
        _open.add(self._calls)
        atexit.unregister(_shut_down_all)
        atexit.register(_shut_down_all)  # before the actors are closed, which `envactors.runtime` has registered

    def options(self, *, deadline: float | None = None, retries: int | None = None) -> ExecutorOptions:
        """Return the same executor with another deadline, or other retries.

        Args:
            deadline: Seconds after which a call is ended; None for the deadline of the executor.
            retries: How many crashes and missed deadlines a call survives; None for the retries of the executor.

        Raises:
            ValueError: A value is negative.
        """
        own_deadline, own_retries = self._limits
        deadline = own_deadline if deadline is None else deadline
        limits = _check_limits(deadline, own_retries if retries is None else retries, "options")
        self._calls.first_actor.warn_of_deadlines(limits[0])
        return ExecutorOptions(self._calls, self._functions, limits)

    def stats(self) -> ExecutorStats:
        """Return how calls have ended, and what the workers are doing."""
        counts, waiting = self._calls.counts, len(self._calls.queue)
        completed, failed = counts.completed, dict(counts.failed)
        running = max(0, counts.submitted - completed - sum(failed.values()) - waiting)
        restarts = sum(handle.stats().restarts for handle in self._calls.handles)
        return ExecutorStats(counts.submitted, completed, failed, waiting, running, restarts)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; end the workers once all calls have ended. It may be called again.

        Args:
            wait: Whether to wait until the workers have ended.
            cancel_futures: Whether to cancel the calls that wait for a worker.

        Raises:
            ActorClosedError: The executor belongs to another process.
        """
        calls = self._calls
        calls.check_not_forked()
        calls.refuse_calls(cancel=cancel_futures)
        if wait:
            calls.close_once_ended()
        else:
            calls.runtime.callbacks.submit(calls.close_once_ended)

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None or issubclass(kind, (Exception, SystemExit, GeneratorExit)):
                self.shutdown(wait=True)
        finally:  # also after Ctrl-C while it waits
            _abandon(self._calls)

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<executor of {len(self._calls.handles)} workers: {stats.running} running, {stats.waiting} waiting>"


def _pickle_initializer(call: tuple[Callable[..., object] | None, Iterable[Any]]) -> bytes:
    return bytes(dumps((call[0], tuple(call[1])), FunctionPickler))


def _check_limits(deadline: float | None, retries: int, where: str) -> _Limits:
    deadline = as_timeout(deadline, f"{where}(deadline=...)")
    if not is_int(retries, 0):
        raise ValueError(f"{where}(retries=...) is {retries!r}: expected an int >= 0")
    return deadline, retries


def _results(futures: list[ActorFuture[S]], end: float | None) -> Iterator[S]:
    """Yield results in order; cancel the calls that are left if the caller stops, or one has failed."""
    left = deque(futures)
    futures.clear()  # so that results are freed once they were yielded
    try:
        while left:
            result = [left[0].result(None if end is None else end - time.monotonic())]
            del left[0]  # before the result is used, which may take long
            yield result.pop()  # so that the result is freed once the caller drops it
    finally:
        for future in left:
            future.cancel()


def _abandon(calls: SharedCalls) -> None:
    """Cancel the calls that wait, and end those that run: the program is ending."""
    calls.check_not_forked()
    calls.refuse_calls(cancel=True)
    calls.close_actors(0)


def _shut_down_all() -> None:
    """Let all calls end at the exit of the program, unless Ctrl-C or the like ends it."""
    # An interactive session keeps the exception of an earlier statement.
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_type", None)
    is_interrupted = error is not None and not issubclass(error, Exception)
    for calls in list(_open):
        if is_interrupted:
            _abandon(calls)
        else:
            calls.refuse_calls(cancel=False)
            calls.close_once_ended()


os.register_at_fork(after_in_child=_open.clear)
