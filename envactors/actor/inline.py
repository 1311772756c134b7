"""In-process actors: a call runs at once, in the thread that makes it, and its future is finished when it returns.

With ``backend="inline"``, ``actor.add(1)`` calls `InlineActor.accept`. This runs ``add`` under the actor's lock, with
the code of a worker (`envactors.worker.main.Server`), and ends the future.

Factories, arguments, and results are pickled nevertheless, so that neither side can change the other's values.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from envactors.actor import recording
from envactors.actor.actor_process import ActorProcess, EndReason
from envactors.actor.base import ActorBase
from envactors.actor.calls import Call
from envactors.actor.config import ActorConfig
from envactors.actor.future import ActorFuture, ReadyOutcome
from envactors.actor.job import Activity, Job
from envactors.actor.log import ActorLog
from envactors.actor.request_stack import InlineRequest, RequestStack, stack_of
from envactors.actor.states import ActorState, ActorStats
from envactors.errors import ActorError, copy_error
from envactors.mailbox.control_page import METHOD_CALL, ControlPage, page_size
from envactors.mailbox.messages import Fault, Frame, Kind
from envactors.mailbox.pickling import dumps, pack_failure, unpack_failure
from envactors.runtime import enroll
from envactors.worker.context import ActorContext
from envactors.worker.host import HostedEnv
from envactors.worker.main import Server


class InlineVector(Protocol):
    """The vector of in-process actors, as these use it."""

    def on_change(self, actor: InlineActor) -> None:
        """Take the current envs of an actor, which has replaced or dropped the previous ones."""

    def count_requests(self, actor: InlineActor) -> int:
        """Return how many steps and resets the envs of an actor have run, without calls."""


class _Request(InlineRequest):
    """A request that runs code of an actor's envs.

    Args:
        actor: The actor.
        activity: The request; None to warn of nothing if it is slow, as for a start or a close.
        server: The server that runs it; None until it is known.
    """

    def __init__(self, actor: InlineActor, activity: Activity | None = None, server: Server | None = None) -> None:
        index = actor.config.first_index if activity is None else activity.index
        super().__init__(actor.request_stack, index)
        self.actor, self.activity, self.server = actor, activity, server

    def get_context(self) -> ActorContext | None:
        return None if self.server is None else self.server.host.running()

    def describe(self) -> tuple[InlineActor, Activity] | None:
        return None if self.activity is None else (self.actor, self.activity)


class InlineActor(ActorBase):
    """An actor whose envs run in the threads of its callers.

    Args:
        config: The settings of the actor.

    Attributes:
        request_stack: The requests that run env code, once it has begun; the actors of a vector share it.
        vector: Its vector; None for a lone actor.
        indices: The indices of its envs.
    """

    def __init__(self, config: ActorConfig) -> None:
        super().__init__(config)
        self.vector: InlineVector | None = None
        self._completed = self._restarts = 0
        self._call_ids = itertools.count(1)
        self._last_failure: ActorError | None = None
        # The error of all calls, if a factory has raised.
        self._start_error: ActorError | None = None
        self._server: Server | None = None
        self.indices: range = config.indices
        self.request_stack: RequestStack = RequestStack(self.lock, lambda: self.runtime.loop, config.deadlines.slow)
        self._log = ActorLog(self)

    def join_and_start(self) -> None:
        enroll(self)
        self._start()

    def join_vector(self, vector: InlineVector, request_stack: RequestStack) -> None:
        """Become an actor of a vector. All its actors share one stack of requests."""
        self.vector, self.request_stack = vector, request_stack

    # State -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> ActorState:
        if self.closed.is_set:
            return ActorState.CLOSED
        if self._start_error is not None:
            return ActorState.DEAD
        return ActorState.IDLE if self.request_stack.thread_of(self.indices) is None else ActorState.BUSY

    @property
    def is_usable(self) -> bool:
        return not self.closed.is_set and self._start_error is None

    @property
    def is_idle(self) -> bool:
        return self.state is ActorState.IDLE

    @property
    def pid(self) -> int:
        """The process id, which is that of the caller."""
        return self._owner_pid

    @property
    def page(self) -> ControlPage | None:
        return None if self._server is None else self._server.page

    @property
    def hosted_envs(self) -> list[HostedEnv]:
        """The envs; empty if a factory has raised."""
        return [] if self._server is None else self._server.host.hosted_envs

    def stats(self) -> ActorStats:
        requests = 0 if self.vector is None else self.vector.count_requests(self)
        return ActorStats(
            completed=self._completed + requests,
            restarts=self._restarts,
            last_failure=self._last_failure,
            state=self.state,
            pid=self.pid,
            node=self.node,
            incarnation=self.process.incarnation,
        )

    def stacks(self, timeout: float) -> str:
        return stack_of(self.request_stack.thread_of(self.indices))

    # Requests --------------------------------------------------------------------------------------------

    def accept(self, job: Job) -> None:
        assert isinstance(job, Call), "all other jobs need a process"
        activity = Activity(job.method, job.index)
        if self.closed.is_set:
            raise self.errors.actor_closed(activity)
        self.check_not_within()
        request = _Request(self, activity)
        with self.lock:
            try:
                request.server = server = self.make_missing(activity)
            except ActorError as error:
                job.future.set_exception(error)
                return
            if job.incarnation not in (None, self.process.incarnation):
                job.future.set_exception(self.errors.process_gone(activity, job.incarnation, self.last_exit_error))
                return

            job.future.set_running()
            activity = activity._replace(call_id=next(self._call_ids), started_at=time.monotonic())
            with request:
                kind, payload = server.execute(job.kind, job.payload)
                self._completed += 1
                reply = Frame(kind, self.process.incarnation, activity.call_id, payload)
                if job.before_outcome is not None:
                    job.before_outcome(reply)

        recording.recorder.on_span(self, job.method, activity.started_at)
        job.future.set_outcome(self.errors.outcome(activity, reply, self.pid))

    def check_not_within(self) -> None:
        """Raise if the calling thread runs code of an env of this actor, whose next request must run after that.

        Raises:
            RuntimeError: It does.
        """
        if self.request_stack.is_within(self.indices):
            raise self.errors.called_by_own_env()

    def renew(self, future: ActorFuture) -> None:
        self.check_not_forked()
        self.check_not_within()
        with self.lock:
            if self.closed.is_set:
                raise self.errors.actor_closed(Activity("renew", self.config.first_index))
            self._replace(EndReason.RENEW)
            outcome = ReadyOutcome(self.process.incarnation, self._start_error)
        future.set_outcome(outcome)

    def _replace(self, reason: EndReason, error: ActorError | None = None) -> None:
        """Make new envs, under the lock; if an interrupt ends that, `make_missing` makes them later.

        Args:
            reason: Why the current ones end. Unless they are aborted, they are closed.
            error: The error that says so; None for one that names only the reason.
        """
        recording.recorder.on_exit(self, None)
        server, self._server = self._server, None
        self._start_error = None
        self.process.end_reason = reason
        self.last_exit_error: ActorError | None = error or self.errors.exit_during(None, self.process)
        self.process: ActorProcess = ActorProcess(self.process.incarnation + 1)
        self._report_change()
        if reason is not EndReason.ABORT and server is not None:
            self._close_envs(server)
        self._start()

    def make_missing(self, activity: Activity) -> Server:
        """Return the server of the envs. Make them unless they exist: an interrupt may have ended an earlier attempt.

        Args:
            activity: The request that needs the envs.

        Raises:
            ActorError: The actor is closed, or a factory has raised.
        """
        with self.lock:
            if self._server is None and self.is_usable:
                self._start()
            if self._server is None:
                raise self.unusable_error(activity)
            return self._server

    def run_as_change(self, event: Callable[..., object], *args: object) -> None:
        with self.lock:
            event(*args)

    def replace_after_raise(self, incarnation: int, make_error: Callable[[], ActorError]) -> None:
        error = make_error()
        with self.lock:
            if incarnation == self.process.incarnation and not self.closed.is_set:
                self._log.write(logging.WARNING, str(error).partition("\n")[0], error=error)
                self._restarts, self._last_failure = self._restarts + 1, copy_error(error)
                self._replace(EndReason.ENV_RAISED, error)

    def unusable_error(self, activity: Activity) -> ActorError:
        """Return the error of a request that cannot run: a factory has raised, or the actor was closed."""
        error = self._start_error
        return self.errors.actor_closed(activity) if error is None else copy_error(error)

    def kill(self, restart: bool) -> None:
        """Drop the envs without closing them; with ``restart``, make new ones."""
        self.check_not_forked()
        if self.state is ActorState.BUSY:
            raise self.errors.unsupported_operation("kill it in the middle of a call")
        with self.lock:
            if not self.closed.is_set and restart:
                self._replace(EndReason.ABORT)
            elif not self.closed.is_set:
                self._close()

    def check_closable(self) -> None:
        super().check_closable()
        self.check_not_within()

    def begin_close(self, timeout: float | None, began: float | None = None) -> None:
        with self.lock:
            if not self.closed.is_set:
                if self._server is not None:
                    self._close_envs(self._server)
                self._close()

    # For futures, whose calls have ended when they are returned -------------------------------------------

    def cancel(self, future: ActorFuture) -> bool:
        return future.cancelled()

    def abort(self, future: ActorFuture) -> bool:
        if not future.done():
            raise self.errors.unsupported_operation("abort a running call")
        return False

    # Envs ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Make the envs."""
        memory = bytearray(page_size(self.config.env_count))
        page: Any = ControlPage(memory, None, None)  # type: ignore[arg-type] # nobody rings
        server = Server(None, page, send=lambda _frame: None)  # type: ignore[arg-type] # nothing is sent
        process = self.process
        process.pid, process.launched_at = self.pid, time.monotonic()
        request = _Request(self, server=server)

        def on_made(count: int) -> None:
            process.envs_made = count

        with self.lock, request:
            try:
                server.host.start(self.config.start, process.incarnation, on_made)
            except Exception as error:
                process.failure = pack_failure(error, Fault.RAISED)
                process.cause = unpack_failure(process.failure)
                self._start_error = self._last_failure = self.errors.start_failed(process)
                server.execute(Kind.CLOSE, dumps(()))
                return
        page.record_env(METHOD_CALL, 0)
        self._server = server
        self._report_change()
        recording.recorder.on_span(self, "start", process.launched_at)

    def _close_envs(self, server: Server) -> None:
        request = _Request(self, server=server)
        with self.lock, request:
            server.execute(Kind.CLOSE, dumps(()))

    def _close(self) -> None:
        recording.recorder.on_exit(self, None)
        self._server = None
        self.runtime.leave(self)
        self.closed.set()
        self._report_change()

    def _report_change(self) -> None:
        if self.vector is not None:
            self.vector.on_change(self)
