"""In-process actors: a call runs at once, in the thread that makes it, and its future is finished when it returns.

They have the interface of `envactors.actor.actor.Actor`, as far as handles and futures use it. Factories, arguments,
and results are pickled all the same, so that neither side can change the other's values.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from envactors import runtime as runtimes
from envactors.actor import recording
from envactors.actor.config import ActorConfig
from envactors.actor.error_factory import ErrorFactory
from envactors.actor.exits import Step
from envactors.actor.future import ActorFuture, ReadyOutcome
from envactors.actor.incarnation import ExitReport, Incarnation
from envactors.actor.inline_watch import InlineRequest, InlineWatch, stack_of
from envactors.actor.jobs import Call, UnreadReply
from envactors.actor.latch import Latch
from envactors.actor.states import ActorState, ActorStats, EndReason
from envactors.errors import ActorClosedError, ActorError, copy_error
from envactors.mailbox.control_page import METHOD_CALL, ControlPage, page_size
from envactors.mailbox.messages import Fault, Frame, Kind
from envactors.mailbox.pickling import dumps, pack_failure, unpack_failure
from envactors.runtime import Runtime
from envactors.worker import context
from envactors.worker.context import ActorContext
from envactors.worker.host import HostedEnv
from envactors.worker.main import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class InlineActor:
    """An actor whose envs run in the threads of its callers.

    Args:
        config: The settings of the actor.
    """

    runtime: Runtime  # once it has begun

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.errors: ErrorFactory = ErrorFactory(config)
        self.incarnation: Incarnation = Incarnation(0)
        self.pid: int = os.getpid()
        self.node: str | None = None
        self.closed: Latch = Latch()
        self._forks = runtimes.forks
        # Held while env code runs; the actors of a vector share it. Env code may use other actors.
        self._lock = config.lock
        self._thread: int | None = None
        self._completed = self._call_id = 0
        # The error of all calls, if a factory has raised.
        self._start_error: ActorError | None = None
        self._server: Server | None = None
        # Why the envs before the current ones are gone; None if these are the first.
        self.last_crash: ActorError | None = None
        self.range: range = range(config.first_index, config.first_index + len(config.start.factories))
        # The envs whose code is running, the outermost one first; an interrupt may leave more. Actors of a vector share
        # the list.
        self.running_envs: list[int] = []
        # Returns the thread that steps or resets an env of this actor; None if none does.
        self.find_stepping_thread: Callable[[], int | None] = lambda: None
        # Returns how many steps and resets a vector has run, which are no calls.
        self.count_rows: Callable[[], int] = lambda: 0
        # Called once the envs are others, or gone.
        self.on_change: Callable[[], object] = lambda: None
        self._running: Step | None = None

    def begin(self) -> None:
        """Join the runtime, and make the envs; see `Actor.begin`."""
        runtimes.join(self)
        self._watch = InlineWatch(self.runtime.loop, self.config.deadlines.slow, self._find_running)
        self._start()

    # State -----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the actor."""
        return self.config.name

    @property
    def state(self) -> ActorState:
        """The state of the actor."""
        if self.closed.is_open:
            return ActorState.CLOSED
        if self._start_error is not None:
            return ActorState.DEAD
        return ActorState.IDLE if self._find_thread() is None else ActorState.BUSY

    @property
    def is_usable(self) -> bool:
        """Whether it can run calls."""
        return not self.closed.is_open and self._start_error is None

    @property
    def is_idle(self) -> bool:
        """Whether no code of its envs is running."""
        return self.state is ActorState.IDLE

    @property
    def page(self) -> ControlPage | None:
        """The control page of the envs; None if a factory has raised, or the actor is closed."""
        return None if self._server is None else self._server.page

    @property
    def hosted_envs(self) -> list[tuple[HostedEnv, ActorContext]]:
        """The envs and their contexts; empty if a factory has raised."""
        host = None if self._server is None else self._server.host
        return [] if host is None else list(zip(host.hosted_envs, host._contexts, strict=True))

    def stats(self) -> ActorStats:
        """Return counts over the actor's lifetime."""
        return ActorStats(
            completed=self._completed + self.count_rows(),
            failed=0,
            restarts=0,
            stale=0,
            queued=0,
            last_failure=None,
            state=self.state,
            pid=self.pid,
            node=self.node,
            incarnation=self.incarnation.index,
            method=None,
            elapsed=0.0,
            rss=0,
            started_in=None,
            replays=0,
            longest_replay=0.0,
        )

    def stacks(self, timeout: float) -> str:
        """Return the stack of the thread that runs env code."""
        del timeout
        return stack_of(self._find_thread())

    def stderr_tail(self) -> str:
        """Return an empty string: envs print to the streams of the program."""
        return ""

    def check_owner(self) -> None:
        """Raise in a forked process."""
        if runtimes.forks != self._forks:
            name = self.config.name
            text = f"actor {name!r} belongs to process {self.pid} and this is its fork {os.getpid()}: make one here"
            raise ActorClosedError(text, actor=name)

    # Requests --------------------------------------------------------------------------------------------

    def accept(self, call: Call) -> None:
        """Run a pickled call.

        Raises:
            ActorClosedError: The actor was closed.
        """
        step, future = Step(call.method, call.index), call.future
        if self.closed.is_open:
            raise self.errors.closed(step, self.incarnation.index)
        try:
            self.make_missing(step)
        except ActorError as error:
            future.set_error(error)
            return
        if call.incarnation not in (None, self.incarnation.index):
            future.set_error(self.errors.lost_process(self.last_crash, call.incarnation)(step))
            return
        self.check_not_within()
        self._call_id += 1
        step = step._replace(call_id=self._call_id, started=time.monotonic())
        future.set_running()
        is_nested = self._lock.is_held_here()
        with self.running_env(self._server):
            if not is_nested:
                self.running_envs.clear()
            self.running_envs.append(call.index)
            before, self._running = self._running, step
            try:
                self._watch.begin()
                if self._server is None:  # another thread has closed the actor, or its factory has raised, meanwhile
                    future.set_error(self.unusable_error(step))
                    return
                kind, payload = self._server.execute(call.kind, call.payload)
            finally:
                self._running = before
                self.running_envs.pop()
        self._completed += 1
        recording.recorder.on_span(self, call.method, step.started)
        reply = Frame(kind, self.incarnation.index, self._call_id, payload)
        if call.take_reply is not None:
            call.take_reply(reply)
        future.set_outcome(UnreadReply(self.errors, step, reply, self.pid))

    def _find_thread(self) -> int | None:
        """Return the thread that runs code of an env of this actor; None if none does."""
        return self.find_stepping_thread() if self._thread is None else self._thread

    def check_not_within(self) -> None:
        """Raise if the calling thread runs code of an env of this actor, whose next request must run after that.

        Raises:
            RuntimeError: It does.
        """
        if self.running_envs and self._lock.is_held_here() and any(index in self.range for index in self.running_envs):
            raise self.errors.within_envs()

    def _find_running(self) -> InlineRequest | None:
        step, thread = self._running, self._thread
        return None if step is None or thread is None else InlineRequest(self, step, step.call_id, thread)

    @contextmanager
    def running_env(self, server: Server | None = None) -> Iterator[None]:
        """Return the context in which env code runs."""
        server = server or self._server
        assert server is not None, "a factory has raised"
        with self._lock:
            before, token = self._thread, context.of_thread.set(server.host.running)
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = before
                context.of_thread.reset(token)

    def renew(self, future: ActorFuture) -> None:
        """Close the envs and make new ones."""
        self.check_owner()
        if self.closed.is_open:
            raise self.errors.closed(Step("renew", self.config.first_index), self.incarnation.index)
        self.check_not_within()
        self.replace(self._describe_end(EndReason.RENEW), closes=True)
        future.set_outcome(ReadyOutcome(self.incarnation.index, self._start_error))

    def replace(self, reason: ActorError, *, closes: bool = False) -> None:
        """Make new envs; if an interrupt ends that, `make_missing` makes them later.

        Args:
            reason: Why the present ones end.
            closes: Whether to close those.
        """
        with self._lock:
            recording.recorder.on_exit(self, None)
            server, self._server, self._start_error = self._server, None, None
            self.last_crash = reason
            self.incarnation = Incarnation(self.incarnation.index + 1)
            self.on_change()
            if closes and server is not None:
                self._close_envs(server)
            self._start()

    def make_missing(self, step: Step) -> None:
        """Make the envs, unless they exist; an interrupt may have ended an earlier attempt.

        Args:
            step: The request that needs the envs.

        Raises:
            ActorError: The actor is closed, or a factory has raised.
        """
        if self._server is None and self.is_usable:
            with self._lock:
                self._start()
        if self._server is None:
            raise self.unusable_error(step)

    def run(self, event: Callable[..., object], *args: object) -> None:
        """Run an event under the lock."""
        with self._lock:
            event(*args)

    def discard(self, incarnation: int, make_error: Callable[[], ActorError]) -> None:
        """Replace envs that are not fit for use any more; see `Actor.discard`."""
        if incarnation == self.incarnation.index and not self.closed.is_open:
            self.replace(make_error())

    def _describe_end(self, reason: EndReason) -> ActorError:
        return self.errors.exit(ExitReport(self.pid, reason=reason), self.incarnation.index, None)

    def unusable_error(self, step: Step) -> ActorError:
        """Return the error of a request that cannot run: a factory has raised, or the actor was closed."""
        error = self._start_error
        return self.errors.closed(step, self.incarnation.index) if error is None else copy_error(error)

    def kill(self, restart: bool) -> None:
        """Drop the envs without closing them; with ``restart``, make new ones."""
        self.check_owner()
        if self.closed.is_open:
            return
        if self._find_thread() is not None:
            raise self.errors.unsupported("kill it in the middle of a call", self.incarnation.index)
        if restart:
            self.replace(self._describe_end(EndReason.ABORT))
        else:
            self._close()

    def begin_close(self, timeout: float | None, began: float | None = None) -> None:
        """Close the envs."""
        del timeout, began
        with self._lock:
            if not self.closed.is_open:
                if self._server is not None:
                    self._close_envs(self._server)
                self._close()

    def wait_closed(self, timeout: float | None, began: float | None = None) -> None:
        """Wait until the actor is closed."""
        del began
        self.closed.wait(timeout)
        self.runtime.join_if_ended()

    def abandon(self) -> None:
        """Close the actor; called by a finalizer."""
        runtime = runtimes.runtime_of(self)
        if runtime is not None:
            runtime.callbacks.submit(lambda: self.begin_close(None))

    # For futures, whose calls have ended when they are returned -------------------------------------------

    def cancel(self, future: ActorFuture) -> bool:
        """Return whether the call was canceled."""
        return future.cancelled()

    def abort(self, future: ActorFuture) -> bool:
        """Return False: the call has ended."""
        if not future.done():
            raise self.errors.unsupported("abort a running call", self.incarnation.index)
        return False

    def read_reply(self, future: ActorFuture, deadline: float | None) -> None:
        """Do nothing."""

    # Envs ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Make the envs."""
        config, count = self.config, len(self.config.start.factories)
        page: Any = ControlPage(bytearray(page_size(count)), None, None)  # type: ignore[arg-type] # nobody rings
        server = Server(None, page, send=lambda _frame: None)  # type: ignore[arg-type] # nothing is sent
        incarnation = self.incarnation
        incarnation.launched = time.monotonic()
        with self.running_env(server):
            try:
                server.host.start(config.start, incarnation.index, lambda _made: None)
            except Exception as error:
                incarnation.envs_made = len(server.host._made)
                incarnation.failure = pack_failure(error, Fault.RAISED)
                incarnation.failure_cause = unpack_failure(incarnation.failure)
                self._start_error = self.errors.start(ExitReport(self.pid), incarnation)
                return
        page.record_env(METHOD_CALL, 0)
        self._server = server
        self.on_change()
        recording.recorder.on_span(self, "start", incarnation.launched)

    def _close_envs(self, server: Server) -> None:
        with self.running_env(server):
            server.execute(Kind.CLOSE, dumps(()))

    def _close(self) -> None:
        recording.recorder.on_exit(self, None)
        self._server = None
        self.runtime.leave(self)
        self.closed.open()
        self.on_change()
