"""The pool of actors that sessions lease. It starts and ends sessions, and prepares actors for the next ones.

Which session gets which actor is decided in `envactors.sessions.requests`; the loop over tasks is in
`envactors.sessions.runs`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Generic

from envactors.actor.base import ActorBase
from envactors.actor.change import ChangeLock
from envactors.actor.future import BoundToProcess
from envactors.actor.handle import close_all, send_request
from envactors.actor.job import Renewal
from envactors.actor.spawn import make_actor
from envactors.actor.type_variables import T_co
from envactors.backends.base import Backend
from envactors.errors import ActorClosedError, ActorTimeoutError
from envactors.mailbox.messages import Call, Frame, Kind
from envactors.options import Deadlines, EnvVars, RestartPolicy, as_deadlines, as_timeout, check_kind
from envactors.pools.failure_kinds import kind_of
from envactors.sessions.arguments import check_options, check_run
from envactors.sessions.lease import Lease
from envactors.sessions.outcomes import Completed, Failed, failed
from envactors.sessions.requests import Request, Requests, SessionRequest
from envactors.sessions.runs import Run
from envactors.sessions.session import Session, fatal_error_of
from envactors.sessions.statistics import SessionBooks, SessionStats

# How long to wait for the stacks of an idle worker, in seconds. The worker is not busy, so this is generous.
_STACKS_PATIENCE = 0.5
# A session ends with its process, since a new process would have none of its state.
_NO_RESTARTS = RestartPolicy(max_restarts=0)


class SessionPool(BoundToProcess, Generic[T_co]):
    """A pool of actors, each leased by one session at a time; also a context manager.

    A session has exclusive use of its actor. It ends exactly once: when the ``with`` block of `session` or the episode
    of `run` ends, when its process crashes, when it makes no call for ``idle_timeout``, or when the pool is closed. The
    pool then kills any call that is still running, and prepares the actor for the next session.

    Args:
        factory: Creates the env, in the worker: a callable without arguments, or a string ``"module:callable"``.
        size: How many sessions run at a time.
        fresh: What each session starts with: ``"process"`` for a new process, or ``"reset"`` for the process of the
            previous session, after a call of the env's ``reset``.
        idle_timeout: How long a session may go without a call, in seconds; None for no limit.
        start_timeout: How long starting a process and creating the env may take, in seconds; None for no limit. It
            overrides ``deadlines.start``.
        deadlines: How long calls may take; a number of seconds means ``Deadlines(call=seconds)``.
        standbys: How many additional processes the pool keeps beyond ``size``. They start while sessions run, so that
            the next session waits neither for the old process to exit nor for a new one to start.
        backend: Where the actors run: the name of a backend, or a backend. It must be able to kill its workers.
        env_vars: Environment variables of the workers, or a function of an actor's index that returns them.
        name: The prefix of the actors' names.

    Raises:
        ValueError: An argument is out of range, or the backend cannot kill its workers.
        SerializationError: ``factory`` cannot be pickled.
    """

    def __init__(
        self,
        factory: Callable[[], T_co] | str,
        size: int,
        *,
        fresh: str = "process",
        idle_timeout: float | None = 600.0,
        start_timeout: float | None = 120.0,
        deadlines: Deadlines | float = Deadlines(),  # noqa: B008 # frozen
        standbys: int = 0,
        backend: str | Backend = "process",
        env_vars: EnvVars = None,
        name: str = "session",
    ) -> None:
        resolved = check_options(size, fresh, standbys, backend)
        check_kind("name", name, str)
        self.size = size
        self._fresh = fresh
        self._idle_timeout = as_timeout(idle_timeout, "SessionPool(idle_timeout=...)")
        # Guards the pool and its actors. Only the loop starts sessions, ends requests, and prepares actors, so that no
        # interrupt of a caller loses one.
        self._lock = lock = ChangeLock()
        self._is_closed = False  # no session may begin any more
        self._books = SessionBooks()
        patience = as_timeout(start_timeout, "SessionPool(start_timeout=...)")
        limits = dataclasses.replace(as_deadlines(deadlines), start=patience)
        options: dict[str, Any] = {"backend": resolved, "deadlines": limits, "restart": _NO_RESTARTS, "lock": lock}
        self._handles = [
            make_actor([factory], name=f"{name}-{i}", first=i, env_vars=env_vars, is_on_demand=True, **options)
            for i in range(int(size) + int(standbys))
        ]
        self._sessions: dict[Session[Any], None] = {}  # those that lease an actor
        self._requests = Requests([handle._actor for handle in self._handles], int(size), self._books)
        self._actor = self._handles[0]._actor
        self._loop = self._actor.runtime.loop

    # Leasing ---------------------------------------------------------------------------------------------

    def session(self, name: Any = None, timeout: float | None = None) -> Lease[T_co]:
        """Lease an actor for a block: ``with pool.session() as env`` or ``async with pool.session() as env``.

        Leaving the block ends the session and sets ``env.outcome``; exceptions propagate unchanged. Calls that have
        not finished by then are cancelled or killed.

        Args:
            name: The name of the session, for errors; the ``task`` of its outcome.
            timeout: How long to wait while all actors are in use or starting, in seconds; None for no limit.

        Raises:
            ValueError: ``timeout`` is negative or not a number.
            TimeoutError: When entering the block, if no actor became free in time.
            ActorStartError: When entering the block, if the process could not be started or the factory raised.
            ActorClosedError: When entering the block, if the pool is closed.
        """
        timeout = as_timeout(timeout, "session(timeout=...)")
        return Lease(self, name, timeout)

    def make_request(self) -> Request[Session[Any]]:
        """Return the future of a session."""
        return Request(self._handles[0])

    def request(self, name: Any, request: Request[Session[Any]]) -> None:
        """Queue for an actor. A caller that does not use the session must call `give_up`.

        Raises:
            ActorClosedError: The pool is closed, or belongs to another process.
        """
        self._actor.check_not_forked()
        with self._lock:
            if not self._is_closed:
                self._requests.add(SessionRequest(self, name, request))
        if self._is_closed:
            raise _refusal(name)
        self._loop.call_soon(self._requests.serve)

    def give_up(self, request: Request[Session[Any]], error: BaseException) -> None:
        """Stop waiting; end the session if it has already begun. Calling it again does nothing."""
        self._loop.call_soon(lambda: self._withdraw(request, error))
        self._drop(request)  # the caller may look at the statistics next

    def end(self, session: Session[Any], error: BaseException | None = None) -> None:
        """End a session; do nothing if it has already ended.

        Args:
            session: The session.
            error: The exception that ended it, None if it ended normally. A session whose process crashed has failed
                in any case, even if the user caught the exception.
        """
        fatal = fatal_error_of(session)
        outcome: Completed | Failed
        if fatal is not None:
            outcome = failed(session.name, kind_of(fatal), error or fatal, session.seconds)
        elif error is not None:
            outcome = failed(session.name, kind_of(error), error, session.seconds)
        else:
            outcome = Completed(session.name, None, session.seconds)
        self._set_outcome(session, outcome)
        self._loop.call_soon(lambda: self._finish(session, outcome))

    def _set_outcome(self, session: Session[Any], outcome: Completed | Failed) -> None:
        """Set and count the outcome of a session, unless it has one already."""
        with self._lock:
            if session.outcome is None:
                session._finish(outcome)
                self._books.count(outcome)

    # In the loop -----------------------------------------------------------------------------------------

    def _withdraw(self, request: Request[Session[Any]], error: BaseException) -> None:
        self._drop(request)
        if not request.done():
            request.set_canceled()
        elif not request.cancelled() and request.exception() is None:
            session = request.result()
            self._finish(session, failed(session.name, "cancelled", error, session.seconds))

    def _drop(self, request: Request[Session[Any]]) -> None:
        with self._lock:
            self._requests.remove(request)

    def _finish(self, session: Session[Any], outcome: Completed | Failed) -> None:
        """Set the outcome of a session, and prepare its actor for the next one."""
        self._set_outcome(session, outcome)
        try:
            with self._lock:
                if session in self._sessions:
                    del self._sessions[session]
                    self._requests.release(session._actor)
                    self._prepare(session._actor, is_running=session._cancel_calls())
                    self._requests.serve()
        except ActorClosedError:  # the program is ending, and nobody has closed the pool
            self._shut()

    def _prepare(self, actor: ActorBase, *, is_running: bool) -> None:
        """Prepare an actor for the next session, unless the pool is closed; kill what is running in any case."""
        if is_running:
            actor.kill(restart=not self._is_closed)
        elif self._is_closed:
            pass
        elif actor.is_asleep:
            actor.wake()  # its process crashed
        elif self._fresh == "reset" and not actor.reason_to_move:
            check = functools.partial(_renew_if_failed, actor)
            send_request(actor, Kind.CALL, Call(0, "reset", (), {}), "reset", before_outcome=check)
        else:
            self._handles[actor.config.first_index].renew()

    def grant(self, request: SessionRequest) -> None:
        """Begin a session on the actor that has taken the request. The lock must be held, within a change."""
        actor = request.actor
        self._requests.lease(actor)
        session: Session[Any] = Session(self._handles[actor.config.first_index], request.name)
        self._sessions[session] = None
        self._books.start_seconds.append(time.monotonic() - request.since)
        if self._idle_timeout is not None:
            self._check_idle_at(session, time.monotonic() + self._idle_timeout)
        request.future.set_result(session)

    def _shut(self) -> None:
        """Reject the waiting requests and end all sessions, but do not close the actors."""
        with self._lock:
            self._is_closed = True
            requests, sessions = self._requests.clear(), list(self._sessions)
        for request in requests:
            request.future.set_exception(_refusal(request.name))
        closed = ActorClosedError("the pool is closed")
        for session in sessions:
            self._finish(session, failed(session.name, "cancelled", closed, session.seconds))

    # Idle sessions ---------------------------------------------------------------------------------------

    def _check_idle_at(self, session: Session[Any], when: float) -> None:
        # Weak references: a timer keeps neither a pool nor a session alive that nobody uses any more.
        pool, watched = weakref.ref(self), weakref.ref(session)
        self._loop.call_at(when, lambda: _check_idle(pool(), watched()))

    def check_idle(self, session: Session[Any]) -> None:
        """End a session if it has made no call for too long; else look again when that may be the case."""
        assert self._idle_timeout is not None, "no session is idle without a limit"
        since, now = session._idle_since(), time.monotonic()
        limit_at = (now if since is None else since) + self._idle_timeout
        if limit_at <= now:
            # In another thread, since reading the stacks may take a moment.
            self._actor.runtime.callbacks.submit(lambda: self._end_idle(session))
            limit_at = now + self._idle_timeout  # a call may come in between
        self._check_idle_at(session, limit_at)

    def _end_idle(self, session: Session[Any]) -> None:
        """End a session that made no call for too long, with the stacks of the worker in its error."""
        assert self._idle_timeout is not None, "no session is idle without a limit"
        actor, limit = session._actor, self._idle_timeout
        error = ActorTimeoutError(
            f"session {session.name!r} made no call for {limit:g} s, so the pool ended it. Call its env more often, or "
            f"increase idle_timeout={limit:g}",
            actor=actor.name,
            index=actor.config.first_index,
            pid=actor.pid,
            incarnation=actor.process.incarnation,
            timeout=limit,
            stacks=actor.stacks(_STACKS_PATIENCE),
            stderr_tail=actor.stderr_tail(),
        )

        def end_if_idle() -> None:
            since = session._idle_since()
            if since is not None and time.monotonic() - since >= limit:  # no call came in between
                self._finish(session, failed(session.name, "idle", error, session.seconds))

        self._loop.call_soon(end_if_idle)

    # Episodes --------------------------------------------------------------------------------------------

    def run(
        self, episode: Callable[[Session[T_co], Any], Any], tasks: Iterable[Any], *, retries: int = 0
    ) -> Iterator[Completed | Failed]:
        """Run an episode for each task; at most ``size`` episodes run at a time.

        Args:
            episode: Called as ``episode(env, task)``, in a thread. If it returns a coroutine, as coroutine functions
                do, that runs in an event loop of the thread. The result becomes the ``value`` of the outcome.
            tasks: The tasks. The iterable is advanced only when an actor is free, and then before the outcome that has
                freed it is yielded, so that no actor waits for the caller.
            retries: How often a task is retried after a retryable failure.

        Yields:
            One outcome per task, in the order of completion. Closing the generator ends the current sessions.

        Raises:
            TypeError: ``episode`` is not callable, or a generator function, or ``tasks`` is not iterable.
            ValueError: ``retries`` is not an int >= 0.
        """
        check_run(episode, tasks, retries)
        return Run(self, episode, retries).outcomes(tasks)

    def arun(
        self, episode: Callable[[Session[T_co], Any], Any], tasks: Iterable[Any], *, retries: int = 0
    ) -> AsyncIterator[Completed | Failed]:
        """Run an episode for each task, like `run`, for use with asyncio.

        Coroutine functions run in the current event loop, other functions in threads. Canceling the task that iterates,
        or closing the generator, ends the current sessions.
        """
        check_run(episode, tasks, retries)
        return Run(self, episode, retries).outcomes_async(tasks)

    # Statistics and closing ------------------------------------------------------------------------------

    def stats(self) -> SessionStats:
        """Return how sessions ended, what the actors are doing, and how long starts and sessions take."""
        with self._lock:
            leased = sum(session.outcome is None for session in self._sessions)
            return self._books.stats(len(self._requests), leased, len(self._requests.ready()))

    def close(self, timeout: float | None = None) -> None:
        """End all sessions as cancelled and close the actors; calling it again does nothing.

        Args:
            timeout: How long to wait before killing the remaining workers, in seconds; None for the close deadline.
        """
        timeout = as_timeout(timeout, "close(timeout=...)")
        self._actor.check_not_forked()
        self._is_closed = True
        self._loop.call_soon(self._shut)
        close_all(self._handles, timeout)

    def __enter__(self) -> SessionPool[T_co]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<session pool of {self.size}: {stats.leased} leased, {stats.idle} idle, {stats.waiting} waiting>"


def _check_idle(pool: SessionPool[Any] | None, session: Session[Any] | None) -> None:
    if pool is not None and session is not None and session.outcome is None:
        pool.check_idle(session)


def _refusal(name: Any) -> ActorClosedError:
    return ActorClosedError(f"cannot start session {name!r}: the pool is closed")


def _renew_if_failed(actor: Any, reply: Frame) -> None:
    """Replace the process of an actor whose reset has raised."""
    if reply.kind == Kind.FAILED:
        actor.jobs.enqueue(Renewal(why="its reset has failed"), first=True)
