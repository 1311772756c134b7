"""The jobs of one actor: in which order its worker runs them, and how each one ends.

If three calls are made while the worker is free, the first one is sent at once and is `running`, and the others are
`waiting`. The reply to the first one ends it, and starts the second one. If the process exits then, the second one
fails, or waits again, ahead of the third one.

What becomes of the process is up to `envactors.actor.actor`, and the content of a job to its class.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from envactors.actor.actor_process import EndReason
from envactors.actor.future import ActorFuture
from envactors.actor.job import Activity, Close, ErrorOf, Job, JobActor, ProcessExit, Renewal
from envactors.actor.permits import Permits
from envactors.actor.states import LIVE, Phase
from envactors.mailbox.messages import Frame
from envactors.threads import runs_library_code_only


class SharedQueue(Protocol):
    """The jobs that wait for any of several actors, which share a lock. Use it under that lock.

    An idle actor takes the next job.
    """

    @property
    def has_jobs(self) -> bool:
        """Whether jobs are waiting."""

    def take(self) -> Job | None:
        """Remove and return the next job that was not canceled; None if there is none."""

    def on_unusable(self, actor: Any) -> None:
        """Fail the jobs that no actor can run, now or later. An actor calls this when it can run none."""


class JobQueue:
    """The jobs of one actor. Every method that changes something runs within a change of the actor.

    A job enters by `enqueue`, by `start_in_process`, or as rows by `try_run_rows`. It leaves by its reply, by `end`, by
    the exit of the process, or by an error. Between two changes, every job in `unfinished` is in one place: in
    `waiting`, in `running`, or in `renewal`. While the worker is free, a job waits only if it or one before it needs
    a permit.

    The methods are reentrant. A dispatch may end the running rows, whose results may make the tenant queue other jobs:
    `dispatch` -> `Job.try_finish` -> `Tenant.collect_completed` -> `EnvGroup.recover` -> `enqueue` -> `dispatch`. That
    is safe, since each of them first changes the state, such as the status of an env or `running`, and only then queues
    or starts a job. So the inner dispatch sees a complete state, and the outer one reads the state again after it.

    Args:
        actor: The actor.

    Attributes:
        waiting: The jobs that wait for the worker, next one first. Replays come before all others.
        running: The job that the worker was given last; None if that has ended. Rows stay here after their delivery,
            until a ring, the next job, or the end of the process; a `RowsJob` is never in `unfinished`.
        renewal: The renewal between two processes: from the exit of the old one until the start of the new one. If
            there is no process at its turn in the queue, it is here from then on.
        unfinished: All jobs that were queued and have not ended. Posted rows are not here: the tenant repairs their
            envs.
        shared_jobs: The jobs that wait for any actor of a pool; None outside of pools.
        permits: The permits that steps and resets need; None if any number of actors may run.
        completed, replays: How many requests have returned or raised, and how many of them were replays.
        failed: How many calls, steps, and resets were lost with the end of a process; also the queued calls that no
            process will run.
            A request that the library makes itself counts if it has a future, such as a saved state.
        longest_replay: Duration of the longest replay, in seconds.
        stale: How many messages were dropped: no running job waited for them.
    """

    def __init__(self, actor: JobActor) -> None:
        self._actor = actor
        self.waiting: deque[Job] = deque()
        self.running: Job | None = None
        self.renewal: Renewal | None = None
        self.unfinished: dict[Job, None] = {}
        self.shared_jobs: SharedQueue | None = None
        self.permits: Permits | None = actor.config.permits
        self.completed: int = 0
        self.failed: int = 0
        self.replays: int = 0
        self.stale: int = 0
        self.longest_replay: float = 0.0

    @property
    def has_jobs_before_close(self) -> bool:
        """Whether jobs wait before the `Close` of an actor that is closing."""
        return bool(self.waiting) and not isinstance(self.waiting[0], Close)

    def activity(self) -> Activity | None:
        """Return what the worker runs, or begins next; the renewal if there is no process."""
        job = self.running or self.renewal
        return None if job is None else job.activity()

    # Counts ----------------------------------------------------------------------------------------------

    def record_completed(self, count: int) -> None:
        """Count steps and resets that have returned or raised; their results are in rows, without a reply."""
        self.completed += count

    def record_failed(self) -> None:
        """Count a call, step, or reset that has failed without the end of a job."""
        self.failed += 1

    # From the queue to the worker ------------------------------------------------------------------------

    def enqueue(self, job: Job, *, first: bool = False) -> None:
        """Queue a job, and start it if the worker is free.

        In BACKOFF, DEAD, and CLOSED, the loop looks at it soon; in other phases it waits.

        Args:
            job: The job.
            first: Whether it runs before everything that waits, except replays.
        """
        actor = self._actor
        job.actor = actor
        job.call_id, job.started_at = 0, 0.0
        self.unfinished[job] = None
        job.ticket = 0 if first or self.permits is None else self.permits.next_ticket()
        # The replays are at the front.
        place = sum(other.runs_first for other in self.waiting) if first else len(self.waiting)
        self.waiting.insert(place, job)

        if actor.phase is LIVE:
            self.dispatch()
        elif actor.phase in (Phase.BACKOFF, Phase.DEAD, Phase.CLOSED):
            actor.proceed_soon()

    def dispatch(self) -> None:
        """Start the jobs that the worker can accept; if it is free then, start one of the shared queue."""
        waits_for_permit = self.dispatch_own()
        if self.permits is not None and not waits_for_permit and not (self.running and self.running.needs_permit):
            self.permits.release(self._actor)
        if self.shared_jobs is not None and self.shared_jobs.has_jobs:
            self._take_shared(self.shared_jobs)

    def dispatch_own(self) -> bool:
        """Start the jobs of this queue that the worker can accept; return whether the next one waits for a permit."""
        actor = self._actor
        while self.waiting and actor.phase is LIVE:
            job, running = self.waiting[0], self.running
            # With permits, no job joins the running rows: it would keep their permit, for which an older job of another
            # actor may be waiting.
            if running is not None and (self.permits is not None or not job.can_join(running)):
                if not running.try_finish():
                    running.request_end_ring()
                    return False
                if self.running is running:  # recording the results may have started another job
                    self.running = None
                continue  # with the job that is now the first one

            if self.permits is not None and job.needs_permit and not self.permits.try_take(actor, job.ticket):
                return True
            self.waiting.popleft()
            self._start(job)
        return False

    def _start(self, job: Job) -> None:
        """Send a job to the worker. It is set as running first, so that jobs that its start queues wait for it."""
        job.call_id = self._actor.config.lock.next_call_id()
        job.started_at = time.monotonic()
        self.running = job
        self.running = successor = job.start()
        if successor is not job:  # the posted rows of queued ones; None if nothing is left to run
            self._forget(job)

    def _take_shared(self, shared: SharedQueue) -> None:
        """Start a job of the shared queue, if the worker is free."""
        actor = self._actor
        if self.running is not None or self.waiting or actor.phase is not LIVE or actor.is_closing:
            return
        if not runs_library_code_only():
            actor.proceed_soon()  # an interrupt of this thread could lose the job, so the loop takes it
        elif (job := shared.take()) is not None:
            assert job.future is not None, "somebody waits for each job of a pool"
            job.future.owner = actor
            self.enqueue(job)

    def try_run_rows(self, rows: Job) -> bool:
        """Make rows the running job if they may be posted now; return whether they may.

        No job may wait or run, except earlier rows if there are no permits. With permits, they need one. If none is
        free, the actor waits for it, and the caller queues the rows.
        """
        actor = self._actor
        is_free = self.running is None or (self.running is rows and self.permits is None)
        if not is_free or actor.phase is not LIVE or self.waiting or actor.is_closing:
            return False
        if self.permits is not None and not self.permits.try_take(actor, self.permits.next_ticket()):
            return False
        self.running = rows
        return True

    # Ends ------------------------------------------------------------------------------------------------

    def on_reply(self, frame: Frame) -> None:
        """Pass a reply to the running job, and start the next one."""
        job, self.running = self.running, None
        assert job is not None, "the frame is its reply"
        try:
            has_ended = job.on_reply(frame)
        except Exception:  # the reply is corrupt: the job ends with the worker, which is killed
            self.running = job
            raise
        self.completed += 1
        if has_ended:
            self.unfinished.pop(job, None)  # as `_forget`, without a call per reply
        else:
            self.enqueue(job, first=True)
        self.dispatch()

    def end(self, job: Job) -> None:
        """End a job that has no reply, and start the next one."""
        self._forget(job)
        if self.running is job:
            self.running = None
        self.dispatch()

    def withdraw(self, future: ActorFuture, end: Callable[[Activity], object]) -> bool:
        """Take the job of a future out of the queue; for the arguments see `Tenant.withdraw`."""
        job = next((job for job in self.waiting if job.future is future), None)
        if job is None:
            return False
        activity = job.activity()
        assert activity is not None, "it has not ended"
        self.waiting.remove(job)
        end(activity)
        self._forget(job)
        return True

    def fail_all(self, error_of: ErrorOf) -> bool:
        """Fail the renewal, all jobs that wait, and those of the shared queue that no other actor can take.

        Unless the actor is closing, stop at the next renewal by the user, which begins.

        Args:
            error_of: Makes the errors.

        Returns:
            Whether a renewal has begun.
        """
        self.fail_renewal(error_of)
        while self.waiting:
            if not self._actor.is_closing and self.try_begin_renewal():
                return True
            self.fail(self.waiting.popleft(), error_of)
        if self.shared_jobs is not None:
            self.shared_jobs.on_unusable(self._actor)
        return False

    def try_begin_renewal(self) -> bool:
        """Begin the next job, if it is a renewal by the user, with no process to end; return whether it has begun."""
        job = self.waiting[0] if self.waiting else None
        if self.renewal is not None or not isinstance(job, Renewal) or job.future is None:
            return False
        self.renewal = job
        self.waiting.popleft()
        job.started_at = time.monotonic()
        job.future.set_running()
        return True

    def fail_renewal(self, error_of: ErrorOf) -> None:
        """Fail the renewal, if there is one."""
        renewal, self.renewal = self.renewal, None
        if renewal is not None:
            self.fail(renewal, error_of)

    def fail(self, job: Job, error_of: ErrorOf) -> None:
        """Fail a job, count it, and forget it."""
        if job.future is not None and not isinstance(job, Renewal):
            self.failed += 1
        job.fail(error_of)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        """Remove a job from `unfinished`, whose jobs an interrupt fails. So its future must have ended."""
        self.unfinished.pop(job, None)

    # The process -----------------------------------------------------------------------------------------

    def end_renewal(self, incarnation: int) -> bool:
        """End the renewal, since the next process has started; return whether there was one."""
        renewal, self.renewal = self.renewal, None
        if renewal is not None:
            renewal.end(incarnation)
            self._forget(renewal)
        return renewal is not None

    def start_in_process(self, first: list[Job]) -> None:
        """Start the jobs that a new process runs first, then those that wait."""
        for job in first:
            job.actor = self._actor
            self.unfinished[job] = None
        self.waiting.extendleft(reversed(first))
        self.dispatch()

    def drop_with_process(self) -> None:
        """Give back the permit of an ended process, if it has one, and drop the waiting jobs that end with it."""
        if self.permits is not None:
            self.permits.release(self._actor)
        for job in [job for job in self.waiting if job.dies_with_process]:
            self.waiting.remove(job)
            self._forget(job)

    def handle_exit(self, process_exit: ProcessExit) -> None:
        """End the running job, or queue it again. A renewal goes on, unless it was ended on purpose."""
        job, self.running = self.running, None
        if isinstance(job, Renewal):
            self.renewal = job
        elif job is not None and job.handle_exit(process_exit):
            if job.future is not None and job.future.done():
                self.failed += 1
            self._forget(job)
        elif job is not None:
            job.call_id, job.started_at = 0, 0.0
            self.waiting.appendleft(job)

        if process_exit.closes or process_exit.reason is EndReason.ABORT:
            self.fail_renewal(lambda _activity: process_exit.error)

    def repair(self, error_of: ErrorOf, *, fails_all: bool) -> None:
        """Establish the invariant from any state; see `envactors.actor.change`.

        Args:
            error_of: Makes the errors of the jobs that are lost: those that may have been sent.
            fails_all: Whether all others are lost, too.
        """
        waiting = set(self.waiting)
        for job in tuple(self.unfinished):
            if fails_all or job not in waiting or job.call_id != 0:
                self.fail(job, error_of)
        self.waiting = deque(job for job in self.waiting if job in self.unfinished)
        self.running = self.renewal = None
