"""The caller's side: tasks that lease an actor for each scoring."""

from __future__ import annotations

import contextvars
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from verifiers.v1 import Task, TaskError, Taskset

from envactors.errors import ActorTimeoutError
from envactors.integrations.shared_pool import SharedPool
from envactors.integrations.verifiers.hosted import Scorer
from envactors.sessions.session import Session

# The session of the scoring that runs in the current context.
_session: contextvars.ContextVar[Session[Scorer]] = contextvars.ContextVar("session")


class ActorTask(Task):  # type: ignore[misc] # it is typed where verifiers is installed
    """A task whose rewards and metrics are computed in an actor; `on_actors` makes subclasses of it."""

    shared: ClassVar[SharedPool]
    original: ClassVar[type[Task]]

    async def score(self, *args: Any, **kwargs: Any) -> None:
        """Score a trace in its own session."""
        async with self.shared.lease(self.original.__name__) as session:
            token = _session.set(session)
            try:
                await super().score(*args, **kwargs)
            finally:
                _session.reset(token)

    def hooks(self, attr: str) -> list[Callable[..., Any]]:
        """Return the task's functions of a kind; while it is scored, those that compute in the actor."""
        functions: list[Callable[..., Any]] = super().hooks(attr)
        session = _session.get(None)
        if session is None or attr not in ("reward", "metric"):
            return functions
        task = copy.copy(self)
        task.__class__ = self.original  # what the worker imports
        return [_in_session(session, task, attr, function) for function in functions]


def _in_session(session: Session[Scorer], task: Any, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scoring function that computes in the process of a session."""
    if "runtime" in inspect.signature(function).parameters:
        return function  # a runtime is a connection of this process, and runs its code in another one

    @functools.wraps(function)
    async def score(**arguments: Any) -> Any:
        try:
            result = await session.call("score", task, kind, function.__name__, arguments)
        except ActorTimeoutError as error:  # of a `TimeoutError` verifiers says only that there was one
            raise TaskError(f"{kind} {function.__name__!r}: {error}") from error
        if result.info is not None:
            arguments["trace"].info.update(result.info)
        return result.value

    return score


def on_actors(taskset: Taskset, size: int, **pool_options: Any) -> Taskset:
    """Return a view of a taskset whose rewards and metrics are computed in leased processes.

    The rollouts, their harness, tools, and runtimes are those of verifiers, which gives tools and programs processes of
    their own. A reward or metric that crashes, hangs, or leaks ends its own process: the trace has a ``TaskError`` with
    the reason, and no reward::

        env.taskset = on_actors(env.taskset, 16, deadlines=30.0)

    A scoring function gets copies of the task and the trace. What it stores in ``trace.info`` comes back. Functions
    that take the ``runtime`` are called in this process, as before, and so are judges.

    Args:
        taskset: The taskset.
        size: How many traces are scored at a time.
        **pool_options: Options of `envactors.SessionPool`.

    Returns:
        A view, like that of ``taskset.shuffle()``. Its ``shared`` pool has ``get()`` for statistics and ``close()``.
    """
    kind = type(taskset).task_type()
    shared = SharedPool(
        Scorer, size, kind.__module__ if kind.__module__ != "__main__" else Task.__module__, pool_options
    )
    variants: dict[type[Task], type[Task]] = {}

    before = taskset.transform

    def transform(tasks: Iterator[Task]) -> Iterator[Task]:
        for task in tasks if before is None else before(tasks):
            original = type(task)
            if original not in variants:
                attributes = {"shared": shared, "original": original, "__module__": original.__module__}
                variants[original] = type(original.__name__, (ActorTask, original), attributes)
            variant = copy.copy(task)
            variant.__class__ = variants[original]
            yield variant

    view = copy.copy(taskset)
    view.transform = transform
    view.shared = shared
    return view
