"""The pool of actors that sessions lease. It starts and ends sessions, and prepares actors for the next ones.

The bookkeeping lives in `envactors.sessions.places`, and the loop over tasks in `envactors.sessions.runs`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Generic

from envactors.actor.bound import BoundToProcess
from envactors.actor.handle import ActorHandle, close_all
from envactors.actor.spawn import launch
from envactors.actor.type_variables import T_co
from envactors.backends.base import Backend
from envactors.errors import ActorClosedError, ActorTimeoutError
from envactors.mailbox.messages import Get, Kind
from envactors.options import Deadlines, RestartPolicy, as_deadlines, check_timeout
from envactors.pools.failure_kinds import kind_of
from envactors.sessions.arguments import check_episode, check_options
from envactors.sessions.lease import Lease
from envactors.sessions.outcomes import Completed, Failed, failed
from envactors.sessions.places import Phase, Place, Places, Request, Waiter
from envactors.sessions.runs import Run
from envactors.sessions.session import Session
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
        env_vars: Environment variables of the workers.
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
        env_vars: Mapping[str, str] | None = None,
        name: str = "session",
    ) -> None:
        resolved = check_options(size, fresh, idle_timeout, start_timeout, standbys, backend)
        self.size = size
        self._fresh = fresh
        self._idle_timeout = idle_timeout
        # Guards the places and the books. Reentrant, since signal handlers may use the pool; never held while an actor
        # is called. Only the loop starts sessions and prepares actors, so that no interrupt of a caller loses one.
        self._lock = threading.RLock()
        self._is_closed = False  # no session may begin any more
        self._books = SessionBooks()
        limits = dataclasses.replace(as_deadlines(deadlines), start=start_timeout)
        start = functools.partial(
            launch, [factory], backend=resolved, deadlines=limits, restart=_NO_RESTARTS, env_vars=env_vars
        )
        self._places = Places([start(name=f"{name}-{i}", first=i) for i in range(int(size) + int(standbys))], size)
        self._actor = self._places.all[0].actor._actor
        self._loop = self._actor.runtime.loop
        for place in self._places.all:
            self._prepare(place, functools.partial(_readiness, place.actor))

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
        check_timeout(timeout, "session(timeout=...)")
        return Lease(self, name, timeout)

    def make_request(self) -> Request[Session[Any]]:
        """Return the future of a session."""
        return Request(self._places.all[0].actor)

    def request(self, name: Any, request: Request[Session[Any]]) -> None:
        """Queue for an actor. A caller that does not use the session must call `give_up`.

        Raises:
            ActorClosedError: The pool is closed, or belongs to another process.
        """
        self._actor.check_owner()
        with self._lock:
            if not self._is_closed:
                self._places.waiting.append(Waiter(name, request, time.monotonic()))
        if self._is_closed:
            raise _refusal(name)
        self._loop.call_soon(self._serve)

    def give_up(self, request: Request[Session[Any]], error: BaseException) -> None:
        """Stop waiting; end the session if it has already begun. Calling it again does nothing."""
        with self._lock:
            self._places.forget(request)
        self._loop.call_soon(lambda: self._withdraw(request, error))

    def end(self, session: Session[Any], error: BaseException | None = None) -> None:
        """End a session; do nothing if it has already ended.

        Args:
            session: The session.
            error: The exception that ended it, None if it ended normally. A session whose process crashed has failed
                in any case, even if the user caught the exception.
        """
        fatal = session.fatal_error()
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
                session.finish(outcome)
                self._books.count(outcome)

    # In the loop -----------------------------------------------------------------------------------------

    def _withdraw(self, request: Request[Session[Any]], error: BaseException) -> None:
        if not request.done():
            request.set_canceled()
        elif not request.cancelled() and request.exception() is None:
            session = request.result()
            self._finish(session, failed(session.name, "cancelled", error, session.seconds))

    def _finish(self, session: Session[Any], outcome: Completed | Failed) -> None:
        """Set the outcome of a session, and prepare its actor for the next one."""
        self._set_outcome(session, outcome)
        with self._lock:
            place = self._places.take_back(session)
        if place is None:
            return
        is_running = session.cancel_calls()
        if self._is_closed:
            if is_running:
                place.actor.kill()
        elif is_running:
            place.actor.kill(restart=True)
            self._prepare(place, functools.partial(_readiness, place.actor))
        elif self._fresh == "reset" and place.actor._actor.is_usable:
            self._prepare(place, functools.partial(place.actor.call, "reset"))
        else:
            self._prepare(place, place.actor.renew)
        self._serve()

    def _prepare(self, place: Place, begin: Callable[[], concurrent.futures.Future[Any]]) -> None:
        try:
            preparation = begin()
        except ActorClosedError:  # the program is ending, and nobody has closed the pool
            self._shut()
            return
        with self._lock:
            place.phase = Phase.PREPARING
            place.preparation = preparation

        def report(_: object) -> None:
            # Here and not in the loop, since reading what a reset returned runs code of users.
            error = None if preparation.cancelled() else preparation.exception()
            self._loop.call_soon(lambda: self._on_prepared(place, preparation, error))

        preparation.add_done_callback(report)

    def _on_prepared(
        self, place: Place, preparation: concurrent.futures.Future[Any], error: BaseException | None
    ) -> None:
        """Offer a prepared actor to the waiting requests, or fail one of them if the start failed."""
        if self._is_closed or place.preparation is not preparation:
            return
        waiter: Waiter | None = None
        with self._lock:
            place.preparation = None
            place.phase = Phase.READY if error is None else Phase.FAILED
            if error is not None and kind_of(error) == "start" and self._places.lacking() > 0:
                waiter = self._places.next_waiter()
            if error is not None and waiter is not None:
                self._books.count(failed(waiter.name, "start", error, time.monotonic() - waiter.since))
        if waiter is not None:
            assert error is not None, "it was not prepared"
            waiter.request.set_exception(error)
        self._serve()

    def _serve(self) -> None:
        """Assign ready actors to waiting requests; restart failed actors if there are too few."""
        while not self._is_closed:
            with self._lock:
                broken = self._places.take_broken()
                waiter, place = self._places.match()
                if waiter is not None and place is not None:
                    place.session = session = Session(place.actor, waiter.name)
                    self._books.start_seconds.append(time.monotonic() - waiter.since)
            for lost in broken:
                self._prepare(lost, lost.actor.renew)
            if waiter is None:
                return
            if self._idle_timeout is not None:
                self._check_idle_at(session, time.monotonic() + self._idle_timeout)
            waiter.request.set_result(session)

    def _shut(self) -> None:
        """Reject the waiting requests and end all sessions, but do not close the actors."""
        with self._lock:
            self._is_closed = True
            waiting, sessions = self._places.take_waiting(), self._places.sessions()
        for waiter in waiting:
            waiter.request.set_exception(_refusal(waiter.name))
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
        since, now = session.idle_since(), time.monotonic()
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
            incarnation=actor.incarnation.index,
            timeout=limit,
            stacks=actor.stacks(_STACKS_PATIENCE),
            stderr_tail=actor.stderr_tail(),
        )

        def end_if_idle() -> None:
            since = session.idle_since()
            if since is not None and time.monotonic() - since >= limit:  # no call came in between
                self._finish(session, failed(session.name, "idle", error, session.seconds))

        self._loop.call_soon(end_if_idle)

    # Episodes --------------------------------------------------------------------------------------------

    def run(
        self, episode: Callable[[Session[T_co], Any], Any], tasks: Iterable[Any], *, retries: int = 0
    ) -> Iterator[Completed | Failed]:
        """Run an episode for each task; at most ``size`` episodes run at a time.

        Args:
            episode: Called as ``episode(env, task)``, in a thread; a coroutine function gets a separate event loop.
                What it returns becomes the ``value`` of the outcome.
            tasks: The tasks. The iterable is advanced only when an actor is free.
            retries: How often a task is retried after a retryable failure.

        Yields:
            One outcome per task, in the order of completion. Closing the generator ends the current sessions.

        Raises:
            TypeError: ``episode`` is not callable.
            ValueError: ``retries`` is not an int >= 0.
        """
        check_episode(episode, retries)
        return Run(self, episode, retries).outcomes(tasks)

    def arun(
        self, episode: Callable[[Session[T_co], Any], Any], tasks: Iterable[Any], *, retries: int = 0
    ) -> AsyncIterator[Completed | Failed]:
        """Run an episode for each task, like `run`, for use with asyncio.

        Coroutine functions run in the current event loop, other functions in threads. Canceling the task that iterates,
        or closing the generator, ends the current sessions.
        """
        check_episode(episode, retries)
        return Run(self, episode, retries).outcomes_async(tasks)

    # Statistics and closing ------------------------------------------------------------------------------

    def stats(self) -> SessionStats:
        """Return how sessions ended, what the actors are doing, and how long starts and sessions take."""
        with self._lock:
            places = self._places
            leased = sum(session.outcome is None for session in places.sessions())
            return self._books.stats(len(places.waiting), leased, places.count(Phase.READY))

    def close(self, timeout: float | None = None) -> None:
        """End all sessions as cancelled and close the actors; calling it again does nothing.

        Args:
            timeout: How long to wait before killing the remaining workers, in seconds; None for the close deadline.
        """
        check_timeout(timeout, "close(timeout=...)")
        self._actor.check_owner()
        self._shut()
        close_all([place.actor for place in self._places.all], timeout)

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


def _readiness(actor: ActorHandle[Any]) -> concurrent.futures.Future[Any]:
    """Return a future that completes once the env exists, or fails if it cannot be created."""
    # Every object has this attribute, and reading it runs no code of the env.
    return actor._submit(Kind.GET, Get(0, "__module__"), "get")
