"""Tenants: the records of what lives in the process of an actor, and is affected when the process ends."""

from __future__ import annotations

from collections.abc import Callable

from envactors.actor.actor_process import ActorProcess
from envactors.actor.future import ActorFuture
from envactors.actor.job import Activity, ErrorOf, Job, ProcessExit
from envactors.crashes.inputs import Inputs
from envactors.mailbox.messages import Attach, Frame, Kind


class Tenant:
    """The record of what lives in the process of an actor, in one process after another.

    An actor calls every method under its lock.

    This is the tenant of a lone actor, whose env nobody keeps track of, and the base class of others.

    Attributes:
        attach: A part of the first message to a worker; None for nothing.
    """

    attach: Attach | None = None

    def on_started(self, process: ActorProcess, *, is_renewal: bool) -> list[Job]:
        """Prepare for a new process; return the jobs that it runs first.

        Args:
            process: The process.
            is_renewal: Whether a `Renewal` has replaced the last process.
        """
        return []

    def on_call(self, kind: Kind, index: int, payload: bytes | bytearray, frame: Frame) -> None:
        """Record a call that has returned or raised.

        Args:
            kind: The kind of its message.
            index: The index of the env.
            payload: Its message, pickled.
            frame: The reply.
        """

    def inputs_of_call(self, index: int, request: tuple[int, bytes]) -> Inputs:
        """Return a call of an env with the requests before it, for a crash bundle.

        Args:
            index: The index of the env.
            request: The kind of the message, and its fields, pickled.
        """
        return Inputs(request=request)

    def on_overflow(self, frame: Frame) -> None:
        """Keep a part of a result that did not fit into its row."""

    def collect_completed(self) -> None:
        """Record the results that the worker has completed."""

    def check_memory(self, finished: int) -> str:
        """Return how the worker has corrupted the shared memory; empty if it has not.

        Args:
            finished: The call id up to which the worker claimed to have finished, before its frames were read.
        """
        return ""

    def handle_exit(self, process_exit: ProcessExit) -> None:
        """Continue or fail everything that was in an ended process."""

    def withdraw(self, future: ActorFuture, end: Callable[[Activity], object]) -> bool:
        """Take the request of a future out of the queue; return False if it is not queued.

        Args:
            future: The future.
            end: Ends the future. Until it has, the request is not forgotten, so that no interrupt leaves it without an
                end.
        """
        return False

    def is_posted_for(self, future: ActorFuture) -> bool:
        """Return whether the request of this future was posted to the worker, and is not complete."""
        del future
        return False

    def blame(self, future: ActorFuture) -> None:
        """Blame the request of this future, if it was posted: the process is about to be ended because of it."""

    def repair(self, error_of: ErrorOf) -> None:
        """Establish the invariant from any state; see `envactors.actor.change`.

        Args:
            error_of: Makes the error of a request that is lost.
        """


NO_TENANT = Tenant()
