"""The interface of actors, for handles, futures, and observers: those with processes, and in-process ones."""

from __future__ import annotations

import os
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable

from envactors import runtime
from envactors.actor.actor_process import ActorProcess
from envactors.actor.change import ChangeLock
from envactors.actor.config import ActorConfig
from envactors.actor.error_factory import ErrorFactory
from envactors.actor.future import ActorFuture
from envactors.actor.job import Job
from envactors.actor.latch import Latch
from envactors.actor.states import ActorState, ActorStats
from envactors.errors import ActorClosedError, ActorError
from envactors.mailbox.control_page import ControlPage
from envactors.runtime import Runtime
from envactors.system.polling import remaining

# How long a killed worker may take to exit, in seconds.
_KILL_GRACE = 0.9


class ActorBase(ABC):
    """An actor. Any thread may call its methods.

    Args:
        config: The settings of the actor.

    Attributes:
        config: As above.
        name: Its name.
        lock: Guards the actor; all actors of a vector share it.
        errors: Makes its errors.
        runtime: The threads that serve it, once it has begun.
        closed: Set once nothing of the actor is left.
        process: The current process, the one that is starting, or the last one.
        last_exit_error: The error of the last exit of a process whose envs were made: why a lost episode was lost.
    """

    runtime: Runtime
    # With types, since pyright calls a type that it has to infer ambiguous.
    process: ActorProcess
    last_exit_error: ActorError | None

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.name: str = config.name
        self.lock: ChangeLock = config.lock
        self.closed: Latch = Latch()
        self.process = ActorProcess(0)
        self.errors: ErrorFactory = ErrorFactory(config, lambda: self.process.incarnation)
        self.last_exit_error = None
        self._has_warned = False
        self._owner_pid = os.getpid()
        self._forks = runtime.forks

    @property
    @abstractmethod
    def state(self) -> ActorState:
        """The state of the actor."""

    @property
    @abstractmethod
    def is_usable(self) -> bool:
        """Whether it can run calls, now or once a process has started. Takes no lock."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether it runs nothing and nothing waits. Takes no lock.

        Rows count as running until the worker is known to have ended their step, even if their results were delivered.
        """

    @property
    def is_asleep(self) -> bool:
        """Whether it has no process until `wake` is called. Takes no lock."""
        return False

    @property
    def is_starting(self) -> bool:
        """Whether its process has not started yet. Takes no lock."""
        return False

    @property
    def pid(self) -> int | None:
        """The process id; None without a process."""
        worker = self.process.worker
        return None if worker is None else worker.pid

    @property
    def node(self) -> str | None:
        """The node that runs the process; None on this machine."""
        worker = self.process.worker
        return None if worker is None or worker.node is None else worker.node.name

    @property
    def reason_to_move(self) -> str:
        """Why a process on another node must replace this one; empty if it may stay."""
        worker = self.process.worker
        return "" if worker is None else worker.reason_to_move

    @property
    def page(self) -> ControlPage | None:
        """The control page of the process; None without a process."""
        worker = self.process.worker
        return None if worker is None else worker.page

    @abstractmethod
    def stats(self) -> ActorStats:
        """Return counts over the actor's lifetime, without involving the worker."""

    @abstractmethod
    def stacks(self, timeout: float) -> str:
        """Return the stacks of the worker's threads, or a line that says why there are none.

        Args:
            timeout: How long to wait for them, in seconds.
        """

    def stderr_tail(self) -> str:
        """Return the last lines that the process has printed to stderr; empty without a process."""
        worker = self.process.worker
        return "" if worker is None else worker.stderr_tail

    @abstractmethod
    def join_and_start(self) -> None:
        """Join the runtime, and start the first process.

        If an exception interrupts this, `abandon` still closes the actor.

        Raises:
            Exception: The backend cannot be used.
        """

    def wake(self) -> None:  # noqa: B027 # only actors with processes may be asleep
        """Start a process, if the actor is asleep."""

    @abstractmethod
    def accept(self, job: Job) -> None:
        """Queue a call or another job. In-process actors take only calls, and run them at once.

        Raises:
            ActorClosedError: The actor was closed.
        """

    @abstractmethod
    def renew(self, future: ActorFuture) -> None:
        """Replace the process once queued calls have finished; the future gets the new incarnation."""

    @abstractmethod
    def cancel(self, future: ActorFuture) -> bool:
        """Cancel a call if it is queued; return whether it is canceled."""

    @abstractmethod
    def abort(self, future: ActorFuture) -> bool:
        """Cancel a queued call, or end a running one by replacing its process; return False if it has ended.

        Raises:
            ActorError: The call is running, and the backend cannot kill.
        """

    def read_reply(self, future: ActorFuture, until: float | None) -> None:  # noqa: B027 # in-process calls have ended
        """Read the reply to the running call in the thread that waits for it, if that is possible.

        Args:
            future: The future of the call.
            until: When to stop (`time.monotonic`); None for no limit.

        Raises:
            RuntimeError: The thread runs env code of this actor, and would wait for itself forever.
        """

    @abstractmethod
    def replace_after_raise(self, incarnation: int, make_error: Callable[[], ActorError]) -> None:
        """Replace the process of an env that has raised; it counts as a crash. Call this within a change.

        Args:
            incarnation: The incarnation of that process. Nothing happens if the current one is another.
            make_error: Returns the error that names the env. It may unpickle an exception.
        """

    @abstractmethod
    def run_as_change(self, event: Callable[..., object], *args: object) -> None:
        """Run an event under the lock; if the actor has processes, as a change of it."""

    @abstractmethod
    def kill(self, restart: bool) -> None:
        """Kill the process; without ``restart`` the actor is closed.

        Raises:
            ActorError: A call is running, and the backend cannot kill.
        """

    def check_closable(self) -> None:
        """Raise in a fork of the process, and in env code of an in-process actor."""
        self.check_not_forked()

    @abstractmethod
    def begin_close(self, timeout: float | None, began: float | None = None) -> None:
        """Let queued calls run and the envs close, then end the process. If it ends earlier, they fail.

        Args:
            timeout: Seconds until the process is killed; None for the close deadline.
            began: Start of the timeout (`time.monotonic`); None for now. Actors that are closed together share it,
                since their jobs may wait for one another.
        """

    def wait_closed(self, timeout: float | None, began: float | None = None) -> None:
        """Wait until the actor is closed and its resources are freed. For the arguments see `begin_close`.

        Return at once in the loop's thread, or in a thread that holds the lock: either would block the closing.
        """
        if self.runtime.loop.is_current_thread() or self.lock.is_held_here():
            return
        timeout = self.config.deadlines.close if timeout is None else timeout
        began = time.monotonic() if began is None else began
        self.closed.wait(remaining(None if timeout is None else began + timeout + _KILL_GRACE))
        self.runtime.join_if_ended()

    def abandon(self) -> None:
        """Have another thread close the actor. Takes no lock, so finalizers may call it."""
        if (joined := runtime.runtime_of(self)) is not None:
            joined.callbacks.submit(lambda: self.begin_close(None))

    def warn_of_deadlines(self, *deadlines: float | None) -> None:
        """Warn once, in the user's line, if any deadline is not None and the backend does not enforce it."""
        if self._has_warned or self.config.backend.traits.can_kill or all(seconds is None for seconds in deadlines):
            return
        self._has_warned = True
        depth = 1
        while sys._getframe(depth).f_globals.get("__name__", "").partition(".")[0] == "envactors":
            depth += 1
        text = f"actor {self.name!r} lives in {self.config.backend!r}, where deadlines are not enforced"
        warnings.warn(text, stacklevel=depth + 1)

    def check_not_forked(self) -> None:
        """Raise in a forked process, which must not use the actors of its parent.

        Raises:
            ActorClosedError: This is not the process that made the actor.
        """
        if runtime.forks != self._forks:
            where = f"process {self._owner_pid} and this is its fork {os.getpid()}"
            raise ActorClosedError(
                f"actor {self.name!r} belongs to {where}: make an actor here, or call it there", actor=self.name
            )
