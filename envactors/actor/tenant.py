"""Tenants: the part of an actor that lives in its process, and is affected when the process ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from envactors.actor.job_runner import CallRecorder
from envactors.mailbox.messages import Attach, Frame, Kind

if TYPE_CHECKING:
    from envactors.actor.exits import Exit, Step
    from envactors.actor.future import ActorFuture
    from envactors.actor.incarnation import Incarnation
    from envactors.actor.jobs import ErrorOf, Job


class Tenant(CallRecorder, Protocol):
    """Lives in the process of an actor. An actor calls every method under its lock."""

    attach: Attach | None  # for the first message to a worker

    def on_started(self, incarnation: Incarnation, *, is_renewal: bool) -> list[Job]:
        """Prepare for a new process; return the jobs that it runs first.

        Args:
            incarnation: The process.
            is_renewal: Whether the user has asked for a fresh process.
        """

    def on_overflow(self, frame: Frame) -> None:
        """Keep a part of a result that did not fit into its row."""

    def collect_completed(self) -> None:
        """Record the results that the worker has completed."""

    def check_memory(self, finished: int) -> str:
        """Return how the worker has corrupted the shared memory; empty if it has not.

        Args:
            finished: The call id up to which the worker claimed to have finished, before its frames were read.
        """

    def on_exit(self, exit: Exit) -> None:  # noqa: A002
        """Continue or fail everything that was in an ended process."""

    def withdraw(self, future: ActorFuture) -> Step | None:
        """Take the request of a future out of the queue; return its step, or None if it is not queued."""

    def is_running(self, future: ActorFuture) -> bool:
        """Return whether the worker runs the request of this future."""

    def repair(self, error_of: ErrorOf) -> None:
        """Establish the invariant from any state; see `envactors.actor.change`.

        Args:
            error_of: Makes the error of a request that is lost.
        """


class NoTenant:
    """The tenant of a lone actor, whose env nobody keeps track of."""

    attach: Attach | None = None

    def on_started(self, incarnation: Incarnation, *, is_renewal: bool) -> list[Job]:
        """Return no jobs."""
        del incarnation, is_renewal
        return []

    def on_call(self, kind: Kind, index: int, payload: bytes | bytearray, frame: Frame) -> None:
        """Do nothing."""

    def on_overflow(self, frame: Frame) -> None:
        """Do nothing."""

    def collect_completed(self) -> None:
        """Do nothing."""

    def check_memory(self, finished: int) -> str:
        """Return an empty string."""
        del finished
        return ""

    def on_exit(self, exit: Exit) -> None:  # noqa: A002
        """Do nothing."""

    def withdraw(self, future: ActorFuture) -> None:
        """Return None."""

    def is_running(self, future: ActorFuture) -> bool:
        """Return False."""
        del future
        return False

    def repair(self, error_of: ErrorOf) -> None:
        """Do nothing."""


NO_TENANT = NoTenant()
