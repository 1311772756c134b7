"""The parent's half of one actor: what callers do to it, and what its worker sends.

Callers submit, cancel, and close; the loop reports frames, exits, and timers. Each of these events is one change under
the lock; see `envactors.actor.change`. A caller's thread may send jobs to a free worker, and kill it. Only threads of
this library start processes and handle their exits, as `envactors.actor.supervisor` does.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from envactors.actor.activity import Activity
from envactors.actor.actor_process import START_CALL_ID
from envactors.actor.future import ActorFuture
from envactors.actor.job import Close, Job, Renewal
from envactors.actor.log import STACKS_PATIENCE, warn_of_slow
from envactors.actor.states import LIVE, ActorState, ActorStats, EndReason, Phase
from envactors.actor.supervisor import Supervisor
from envactors.actor.timers import Judgment
from envactors.backends.base import Worker
from envactors.backends.log_records import handle_record
from envactors.mailbox.control_page import FINISHED
from envactors.mailbox.messages import Frame, Kind

# How long a worker that has closed its channel may take to exit, in seconds.
_EXIT_GRACE = 1.0
# Phases in which an actor that is closing counts as closed: it has no process, or has killed it.
_CLOSED_IF_CLOSING = (Phase.ASLEEP, Phase.ENDING, Phase.BACKOFF, Phase.DEAD)
_REPLIES = (Kind.RESULT, Kind.FAILED)


class Actor(Supervisor):
    """The parent's half of one actor.

    It handles the events of callers and the frames of the worker. The invariants are those of `JobQueue` and
    `Supervisor`, whose methods change the jobs and the phase.

    Args:
        config: The settings of the actor.
    """

    is_closing: bool

    # State, read-only -------------------------------------------------------------------------------------

    @property
    def state(self) -> ActorState:
        with self.lock:
            phase, process = self.phase, self.process
            if phase is Phase.CLOSED or (self.is_closing and phase in _CLOSED_IF_CLOSING):
                return ActorState.CLOSED
            if phase is Phase.ASLEEP:
                return ActorState.IDLE
            if phase is Phase.DEAD:
                return ActorState.DEAD
            if phase is Phase.NEW or (phase is Phase.STARTING and process.incarnation == 0):
                return ActorState.STARTING
            if phase in (Phase.STARTING, Phase.BACKOFF) or process.end_reason is EndReason.RENEW:
                return ActorState.RENEWING
            return ActorState.IDLE if self.jobs.activity() is None else ActorState.BUSY

    @property
    def is_usable(self) -> bool:
        return not self.is_closing and self.phase not in (Phase.ASLEEP, Phase.DEAD, Phase.CLOSED)

    @property
    def is_idle(self) -> bool:
        return self.phase is LIVE and self.jobs.running is None and not self.jobs.waiting and not self.is_closing

    @property
    def is_asleep(self) -> bool:
        return self.phase in (Phase.ASLEEP, Phase.DEAD) and self.config.is_on_demand and not self.is_closing

    @property
    def is_starting(self) -> bool:
        return self.phase in (Phase.NEW, Phase.STARTING, Phase.BACKOFF) and not self.is_closing

    @property
    def is_run_by_this_thread(self) -> bool:
        """Whether the calling thread runs env code of this actor."""
        worker = self.process.worker
        return worker is not None and worker.is_current_thread()

    def stats(self) -> ActorStats:
        worker = self.process.worker
        rss = 0 if worker is None else worker.resident_memory()  # may take long, so not under the lock
        with self.lock:
            jobs, activity = self.jobs, self.jobs.activity()
            return ActorStats(
                completed=jobs.completed,
                failed=jobs.failed,
                restarts=self.restarts,
                restart_in=max(0.0, self.restart_at - time.monotonic()) if self.phase is Phase.BACKOFF else None,
                stale=jobs.stale,
                queued=len(jobs.waiting),
                last_failure=self.restart_tracker.last,
                state=self.state,
                pid=self.pid,
                node=self.node,
                incarnation=self.process.incarnation,
                method=None if activity is None else activity.method,
                elapsed=0.0 if activity is None else time.monotonic() - activity.started,
                rss=rss,
                started_in=self.started_in,
                replays=jobs.replays,
                longest_replay=jobs.longest_replay,
            )

    def stacks(self, timeout: float) -> str:
        with self.lock:
            worker = self.process.worker
            stacks = None if worker is None or worker.at_end else worker.ask_stacks()
        if stacks is None:
            return f"actor {self.name!r} has no process now: it is {self.state.value}\n"
        return stacks.wait(timeout)

    # Events of callers -----------------------------------------------------------------------------------

    def accept(self, call: Job) -> None:
        with self.lock, self.lock.change(self):
            if self.is_closing:
                call.actor = self
                activity = call.activity()
                assert activity is not None, "it has not ended"
                raise self.lock.refuse(self.errors.closed(activity))
            self.jobs.enqueue(call)

    def renew(self, future: ActorFuture) -> None:
        self.check_owner()
        self.accept(Renewal(future))

    def cancel(self, future: ActorFuture) -> bool:
        self.check_owner()
        with self.lock, self.lock.change(self):
            if not future.running():
                self._withdraw(future, lambda _activity: future.set_canceled())
        return future.cancelled()

    def abort(self, future: ActorFuture) -> bool:
        if self.cancel(future):
            return True
        with self.lock, self.lock.change(self):
            self._process_results()
            jobs = self.jobs.running, self.jobs.renewal
            is_running = any(job and job.future is future for job in jobs) or self.tenant.is_posted_for(future)
            if is_running:
                self._check_can_kill("abort a running call")
                self.tenant.blame(future)
                self.kill_and_proceed(EndReason.ABORT)
            if is_running or future.done():
                return is_running
            # A call that was running in an earlier process may be queued for another try.
            end = functools.partial(self.errors.ended_because, reason=EndReason.ABORT)
            return self._withdraw(future, lambda activity: future.set_exception(end(activity)))

    def _withdraw(self, future: ActorFuture, end: Callable[[Activity], object]) -> bool:
        """Take the request of a future out of the queue; see `Tenant.withdraw`."""
        return self.jobs.withdraw(future, end) or self.tenant.withdraw(future, end)

    def kill(self, restart: bool) -> None:
        self.check_owner()
        with self.lock, self.lock.change(self):
            if self.jobs.activity() is not None:
                self._check_can_kill("kill it in the middle of a call")
            if not (restart and self.is_closing):
                self.is_closing |= not restart
                self.kill_and_proceed(EndReason.ABORT if restart else EndReason.CLOSE)

    def _check_can_kill(self, operation: str) -> None:
        """Refuse to do something that the backend cannot do, since it cannot kill."""
        if not self.config.backend.traits.can_kill:
            raise self.lock.refuse(self.errors.unsupported(operation))

    def begin_close(self, timeout: float | None, began: float | None = None) -> None:
        began = time.monotonic() if began is None else began
        if self.lock.is_within_change():  # a finalizer or a signal handler closes the actor in the middle of a change
            self.runtime.loop.call_soon(functools.partial(self.begin_close, timeout, began))
            return
        with self.lock, self.lock.change(self):
            if not self.is_closing:
                self.is_closing = True
                self.jobs.enqueue(Close())
            if self.config.is_standby and self.phase in (Phase.NEW, Phase.STARTING):
                self.kill_and_proceed(EndReason.CLOSE)  # no actor waits for its process
            timeout = self.config.deadlines.close if timeout is None else timeout
            if timeout is not None and self.phase is not Phase.CLOSED:
                kill = functools.partial(self.kill_and_proceed, EndReason.CLOSE)
                self.timers.set_earliest("close", began + timeout, kill)
            self.proceed_soon()

    def read_reply(self, future: ActorFuture, deadline: float | None) -> None:
        """Read the reply in the calling thread; see `ChannelLoans`. If another call is running, the loop reads."""
        self.lock.repair_if_interrupted()
        if self.is_run_by_this_thread:
            self.make_change(self.tenant.collect_completed)  # an env before it in the process may already have stepped
            if deadline is None and not future.done():
                raise self.errors.within_envs()
            return
        shared = self.jobs.shared
        if shared is not None and shared.has_jobs and self.loans.current is None:
            return  # the loop starts the next job as soon as it has read the reply
        with self.lock:
            job = self.jobs.running
            is_running = self.phase is LIVE and job is not None and job.future is future
            loan = self.loans.begin(self.process.worker if is_running else None)
        if loan is None:
            return
        # `loans.begin` has needed more stack than the report of an interrupted change does, so a RecursionError in the
        # loop is reported, and leaves no call without an end.
        try:
            until = loan.until if deadline is None else min(deadline, loan.until)
            spins = self.spin.caller_spins
            while self.loans.current is loan and not future.done() and loan.worker.wait_for_reply(until, spins=spins):
                self.on_frames(loan.worker)
                spins = False
        finally:
            with self.lock:
                if self.loans.current is loan:
                    self.loans.end()

    # Events of the worker, and of its timer ---------------------------------------------------------------

    def on_frames(self, worker: Worker) -> None:
        """Receive and handle frames, unless another thread has borrowed the channel."""
        with self.lock, self.lock.change(self):
            is_current = worker is self.process.worker and not worker.at_end
            if is_current and (self.loans.current is None or self.loans.is_mine):
                self._handle_frames(worker, worker.receive() or [])

    def check_deadlines(self) -> None:
        """Report the current step if it is slow, and end the process if it is late."""
        activity = self.check_worker()
        worker = self.process.worker
        if activity is None or worker is None:
            return
        judgment = self.deadline_watch.judge(activity)
        if judgment is Judgment.LATE:
            if self.jobs.running is not None:
                self.jobs.running.on_late(activity)
            self.kill_after_stacks()
        elif judgment is Judgment.SLOW:
            read_stacks = functools.partial(worker.ask_stacks(may_interrupt=False).wait, STACKS_PATIENCE)
            warn_of_slow(self, activity, time.monotonic() - activity.started, read_stacks)

    def check_worker(self) -> Activity | None:
        """Process results, and kill the worker if it has corrupted the memory that it shares with this process.

        Return the activity that goes on; None if there is none, or the process is ending.
        """
        worker = self.process.worker
        if self.phase is not LIVE or worker is None:
            return None
        # The worker claims that the results up to this call are written. If so, the next lines find all of them.
        finished = worker.page.counters[FINISHED]
        # A reply beats a deadline that has passed meanwhile, as while this process was stopped (SIGSTOP).
        self._process_results()
        activity = self.jobs.activity() if self.phase is LIVE else None
        if activity is None:
            return None
        untrue = worker.page.find_untrue(self.config.env_count)
        corruption = f"{untrue} on its control page cannot be true" if untrue else self.tenant.check_memory(finished)
        if corruption:
            worker.kill_corrupted(corruption)
        return None if corruption else activity

    def _process_results(self) -> None:
        """Process all results that the worker has completed by now, even if another thread has borrowed the channel."""
        worker = self.process.worker
        if worker is not None and not worker.at_end:
            self._handle_frames(worker, worker.drain())
        self.tenant.collect_completed()

    def _handle_frames(self, worker: Worker, frames: list[Frame]) -> None:
        for frame in frames:
            self.on_frame(frame)
        if worker.at_end and self.process.worker is worker and self.phase is not Phase.STOPPING:
            self.kill_in(_EXIT_GRACE)  # without a channel the worker is useless; its exit leads to `on_exit`

    def on_frame(self, frame: Frame) -> None:
        kind, incarnation, call_id, payload = frame
        job = self.jobs.running
        is_reply = job is not None and call_id == job.call_id and kind in _REPLIES
        if kind == Kind.LOGGED:
            self.runtime.log(functools.partial(handle_record, payload))
        elif incarnation != self.process.incarnation:
            self.jobs.stale += 1
        elif is_reply and self.phase is LIVE:
            self.spin.complete(time.monotonic())
            self.jobs.on_reply(frame)
        elif is_reply and self.phase is Phase.STOPPING and self.process.end_reason is not EndReason.TIMEOUT:
            pass  # its envs are closed; their finalizers may run until the close deadline
        elif kind == Kind.OVERFLOW:
            self.tenant.on_overflow(frame)
        elif kind == Kind.PART and job is not None:
            job.on_reply_piece(frame)
        elif call_id == START_CALL_ID and self.phase is Phase.STARTING:
            self.on_start_reply(frame)
        else:
            self.jobs.stale += 1
