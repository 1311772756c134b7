"""The interface of jobs, the entries of an actor's queue, and the jobs that end a process.

`envactors.actor.calls` has calls and replays, and `envactors.actor.job_queue` the queue. The worker runs one job at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from envactors.actor.actor_process import ActorProcess, EndReason, blames_request, is_crash
from envactors.actor.config import ActorConfig
from envactors.actor.future import ActorFuture, Owner
from envactors.actor.states import Phase
from envactors.crashes.inputs import Inputs
from envactors.errors import ActorError
from envactors.mailbox.messages import Frame


class Activity(NamedTuple):
    """The part of a job that a worker runs at one time, for errors and deadlines: a call, the step of one env, a close.

    Attributes:
        method: Name of the method.
        index: Index of the env in its vector; 0 for a lone actor.
        call_id: Its call id; 0 if it has none yet.
        started_at: When the worker was free to begin it (`time.monotonic`); 0.0 if it has not been sent.
        deadline: How long it may run, in seconds; None for no limit.
    """

    method: str
    index: int  # type: ignore[assignment] # it hides a method of tuples that nobody calls
    call_id: int = 0
    started_at: float = 0.0
    deadline: float | None = None

    @property
    def late_at(self) -> float:
        """When it misses its deadline (`time.monotonic`); infinity if it has none."""
        return math.inf if self.deadline is None else self.started_at + self.deadline


# Makes the error of an activity that no process will run.
ErrorOf: TypeAlias = Callable[[Activity], ActorError]


class JobActor(Owner, Protocol):
    """An actor, as its queue and the jobs of this module use it."""

    config: ActorConfig
    phase: Phase
    is_closing: bool

    def proceed_soon(self) -> None:
        """Have the loop continue after a change."""

    def end_by_closing(self, call_id: int, reason: EndReason) -> None:
        """Have the worker close its envs and exit; kill it if that takes too long."""


class Job:
    """An entry of an actor's queue. The actor calls every method under its lock.

    The queue sets:

    Attributes:
        actor: The actor that has queued it.
        call_id: Its call id; 0 until it is sent, and while it waits to be sent again.
        started_at: When it was sent, or began otherwise (`time.monotonic`); 0.0 while it waits.
        ticket: Its place in the order of permits, which grows from job to job; 0 for jobs that go first.

    A subclass declares, or its constructor sets:

    Attributes:
        future: The future of its outcome; None if nobody waits for it.
        needs_permit: Whether it steps or resets envs, so that it counts for ``max_running``.
        dies_with_process: Whether it is dropped if the process ends while it waits. A replay is, since the tenant makes
            another one for the next process. So is a renewal that no user waits for: the next process is fresh anyway.
        runs_first: Whether it runs before all jobs of other kinds, as replays do.
    """

    actor: JobActor
    future: ActorFuture | None = None
    call_id: int = 0
    started_at: float = 0.0
    ticket: int = 0
    needs_permit: bool = False
    dies_with_process: bool = False
    runs_first: bool = False

    def resolves(self, future: ActorFuture) -> bool:
        """Return whether a future waits for nothing but the reply to it, which the waiting thread may read then."""
        return self.future is future

    def can_join(self, running: Job) -> bool:
        """Return whether it may start before the running job has ended."""
        return False

    def start(self) -> Job | None:
        """Send it to the worker, which is free for it.

        Returns:
            The job that runs from now on, most often this one; None if nothing is left to run.
        """
        raise NotImplementedError

    def try_finish(self) -> bool:
        """End it if the worker has completed it without a reply; return whether it has ended."""
        return False

    def request_end_ring(self) -> None:
        """Have the worker ring when it is finished: another job waits for that, and no reply tells."""

    def activity(self) -> Activity | None:
        """Return what the worker runs for it, or begins next; None if it is finished."""
        raise NotImplementedError

    def settle_uncompleted(self, process: ActorProcess) -> Uncompleted:
        """Return what an ended process has not completed. A part of a rollout first accepts its results.

        A call is the culprit if the worker had begun it, as its control page tells, or if the parent has ended the
        process because of it.
        """
        assert process.worker is not None, "the job was sent to it"
        is_culprit = process.worker.page.progress().call_id == self.call_id or blames_request(process.end_reason)
        return Uncompleted(self.activity() if is_culprit else None)

    def inputs(self, culprit: Activity) -> Inputs:
        """Return the requests that led to the end of a process, for its crash bundle."""
        return Inputs()

    def on_late(self, activity: Activity) -> None:
        """Ignore all later progress of the worker: an activity has missed its deadline."""

    def on_reply_piece(self, frame: Frame) -> None:
        """Take a piece of the reply, which comes before the rest."""

    def on_reply(self, frame: Frame) -> bool:
        """Take the reply; return whether the job has ended. Otherwise it continues ahead of the queue."""
        return True

    def handle_exit(self, process_exit: ProcessExit) -> bool:
        """Handle the exit of the process that it was sent to; return whether the job has ended, as `on_reply` does."""
        return True

    def fail(self, error_of: ErrorOf) -> None:
        """End with an error: no process will run it."""


class Uncompleted(NamedTuple):
    """The part of a job that a process has not completed.

    Attributes:
        culprit: The activity that the exit is blamed on; None if it was idle, or had not begun the job.
        running: The step or reset of a row that was running; None if none was, or if the job has no rows.
        rows: The steps and resets of rows that are not complete, with the running one.

    If the user aborts the step of env 1 while env 0 runs, `running` is that of env 0, and `culprit` that of env 1.
    """

    culprit: Activity | None = None
    running: Activity | None = None
    rows: Sequence[Activity] = ()


class ProcessExit(NamedTuple):
    """The exit of a process, once it is decided what the actor does next.

    Attributes:
        process: The process.
        job: The job that it was running; None if it was idle.
        uncompleted: The part of that job that it has not completed.
        error: The error that says all this.
        closes: Whether the actor closes.
        delay: After how many seconds the next process starts; None if none follows.
    """

    process: ActorProcess
    job: Job | None
    uncompleted: Uncompleted
    error: ActorError
    closes: bool
    delay: float | None

    @property
    def culprit(self) -> Activity | None:
        """The activity that the exit is blamed on; None if the process was idle, or had not begun the job."""
        return self.uncompleted.culprit

    @property
    def reason(self) -> EndReason | None:
        """Why the process was ended; None if it ended by itself."""
        return self.process.end_reason

    @property
    def has_successor(self) -> bool:
        """Whether another process follows."""
        return self.delay is not None

    @property
    def allows_retry(self) -> bool:
        """Whether a call that was running may run again, if it has retries: see the table in `actor_process`.

        After a crash it may, unless the user has also killed or renewed the process, which then counts as no crash.
        """
        if self.closes:
            return False
        return self.reason is EndReason.HELPER_LOST or (is_crash(self.reason) and self.process.counts)


class _EndOfProcess(Job):
    """A job that ends the process."""

    method: str

    def activity(self) -> Activity:
        """Return the job."""
        return Activity(self.method, self.actor.config.first_index, self.call_id, self.started_at)

    def settle_uncompleted(self, process: ActorProcess) -> Uncompleted:
        """Return the job itself: the worker ends because of it."""
        return Uncompleted(self.activity())


class Close(_EndOfProcess):
    """Closes the envs; then the process ends, and with it the actor."""

    method = "close"

    def start(self) -> Job:
        """Have the worker close its envs and exit."""
        self.actor.end_by_closing(self.call_id, EndReason.CLOSE)
        return self


class Renewal(_EndOfProcess):
    """Replaces the process. It ends when the next one has started.

    Args:
        future: Its result is the new incarnation; None unless the user has asked for it.
        why: Why the process is replaced, for the log.
    """

    method = "renew"

    def __init__(self, future: ActorFuture | None = None, why: str = "on request") -> None:
        self.future: ActorFuture | None = future
        self.why: str = why
        self.dies_with_process: bool = future is None

    def start(self) -> Job:
        """Have the worker close its envs and exit."""
        if self.future is not None:
            self.future.set_running()
        self.actor.end_by_closing(self.call_id, EndReason.RENEW)
        return self

    def end(self, incarnation: int) -> None:
        """End with the new incarnation."""
        if self.future is not None:
            self.future.set_result(incarnation)

    def fail(self, error_of: ErrorOf) -> None:
        """End with an error."""
        if self.future is not None:
            self.future.set_exception(error_of(self.activity()))
