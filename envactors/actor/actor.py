"""The parent's half of one actor: its phase, its queue of jobs, the running job, and its process.

Callers submit, cancel, and close; the loop reports frames, exits, and timers. Each of these events is one change under
the lock; see `envactors.actor.change`. A caller's thread may send jobs to a free worker, and kill it. Only threads of
this library start processes and handle their exits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import multiprocessing
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from envactors import runtime as runtimes
from envactors.actor import recording, slow_calls
from envactors.actor.activity import Activity
from envactors.actor.base import ActorBase
from envactors.actor.config import ActorConfig
from envactors.actor.evidence import evidence_of
from envactors.actor.exits import Next, Plan, ProcessExit, RestartTracker, Unfinished
from envactors.actor.future import ActorFuture
from envactors.actor.incarnation import START_CALL_ID, ExitReport, Incarnation
from envactors.actor.job import Close, ErrorOf, Job, Renewal, SharedQueue
from envactors.actor.loan import ChannelLoans, Loan
from envactors.actor.permits import Permits
from envactors.actor.spinning import SpinPolicy
from envactors.actor.states import ActorState, ActorStats, EndReason, Phase, is_crash
from envactors.actor.tenant import NO_TENANT, Tenant
from envactors.actor.timers import DeadlineWatch, Judgment, Timers
from envactors.backends.base import ExitStatus, Use, Worker
from envactors.backends.log_records import handle_record
from envactors.crashes.inputs import Inputs
from envactors.errors import ActorError, describe_bundle
from envactors.mailbox.control_page import FINISHED
from envactors.mailbox.messages import Adopt, Failure, Frame, Kind
from envactors.mailbox.pickling import dumps, load_plain, loads, unpack_failure
from envactors.threads import runs_library_code_only

# Users also get these messages as errors and results, so the null handler keeps them off stderr by default.
_log = logging.getLogger("envactors.actors")
_log.addHandler(logging.NullHandler())
# Users get these messages in no other way, so they are printed by default.
_notices = logging.getLogger("envactors")

# How long a worker that has closed its channel may take to exit, in seconds.
_EXIT_GRACE = 1.0
# How long a worker may take to write its stacks before it is killed for a deadline, in seconds.
_STACKS_GRACE = 0.2
# How long unpickling an exception may delay the end of the process that raised it, in seconds.
_READ_PATIENCE = 10.0
# How long a standby may take to switch to another actor, in seconds. It only records its new identity.
_ADOPTION_GRACE = 1.0
# How often at most the log shows why a process has ended, in seconds: all actors may crash in a loop.
_EVIDENCE_PERIOD = 1.0
# Before Python 3.12, looking up a member of an enum takes as long as a function call.
_WITHOUT_PROCESS = (Phase.ASLEEP, Phase.ENDING, Phase.BACKOFF, Phase.DEAD)
_ASLEEP, _LIVE, _DEAD = Phase.ASLEEP, Phase.LIVE, Phase.DEAD
_FAILED, _REPLIES = Kind.FAILED, (Kind.RESULT, Kind.FAILED)


class Actor(ActorBase):
    """The parent's half of one actor.

    Args:
        config: The settings of the actor.

    Attributes:
        tenant: Keeps track of the envs in the process; `NO_TENANT` for a lone actor.
        phase: The phase of the current process.
        queue: The jobs that wait for this actor, next one first. Replays come before all others.
        shared: The jobs that wait for any actor of a pool; None outside of pools.
        running: The job that the worker runs; None if it is free.
        renewal: The renewal that is replacing the process, until the next process has started.
        unfinished: All jobs that were accepted and have not ended. Each is queued, the running one, or the renewal.
        is_closing: Whether the actor accepts no more jobs.
        timers: The timers of the actor.
        deadline_watch: Checks whether the running job is late or slow.
        permits: The permits that steps and resets need; None if any number of actors may run.
        spin: Decides whether callers and the worker spin before they sleep.
        completed, replays: How many requests have returned or raised, and how many of them were replays.
        failed: How many were ended by the end of their process, and not run again.
        longest_replay: Duration of the longest replay, in seconds.
    """

    incarnation: Incarnation
    last_exit_error: ActorError | None

    def __init__(self, config: ActorConfig) -> None:
        super().__init__(config)
        self.tenant: Tenant = NO_TENANT
        self.phase: Phase = Phase.NEW
        self.queue: deque[Job] = deque()
        self.shared: SharedQueue | None = None
        self.running: Job | None = None
        self.renewal: Renewal | None = None
        self.unfinished: dict[Job, None] = {}
        self.is_closing: bool = False
        self.completed: int = 0
        self.replays: int = 0
        self.longest_replay: float = 0.0
        self.failed: int = 0
        self._restarts = self._stale = 0
        self._started_in: float | None = None
        self._restart_at = 0.0
        self._evidence_at = -math.inf  # when evidence of an exit was logged last
        self._restart_tracker = RestartTracker(config.restart)
        self.timers: Timers = Timers(lambda: self.runtime.loop, self.make_change)
        self.deadline_watch: DeadlineWatch = DeadlineWatch(config.deadlines, self.timers, self._check_deadlines)
        self.permits: Permits | None = config.permits
        self.spin: SpinPolicy = SpinPolicy(config.backend.traits.may_spin)
        self._loans = ChannelLoans(lambda: self.runtime.loop, self.lock)
        # The last worker, if it counts as ended while its code may still be running, as on a node that is unreachable.
        self._unconfirmed: Worker | None = None
        self._use: Use | None = None

    def begin(self) -> None:
        runtimes.join(self)
        self._use = self.config.backend.use(self.config.env_vars, self.runtime)
        self._use.open()
        if self.config.crashes is not None:
            self.config.crashes.submit = self.runtime.printer.submit
        if self.config.is_on_demand:
            self.phase = Phase.ASLEEP
        self.proceed_soon()

    def wake(self) -> None:
        with self.lock, self.lock.change(self):
            if self.is_asleep:
                if self.phase is _DEAD:
                    self.incarnation = Incarnation(self.incarnation.index + 1)
                self.phase = Phase.NEW
                self.proceed_soon()

    # State, read-only -------------------------------------------------------------------------------------

    @property
    def state(self) -> ActorState:
        with self.lock:
            phase = self.phase
            incarnation = self.incarnation
            if phase is Phase.CLOSED or (self.is_closing and phase in _WITHOUT_PROCESS):
                return ActorState.CLOSED
            if phase is Phase.ASLEEP:
                return ActorState.IDLE
            if phase is Phase.DEAD:
                return ActorState.DEAD
            if phase is Phase.NEW or (phase is Phase.STARTING and incarnation.index == 0):
                return ActorState.STARTING
            if phase in (Phase.STARTING, Phase.BACKOFF) or incarnation.end_reason is EndReason.RENEW:
                return ActorState.RENEWING
            return ActorState.IDLE if self._running_activity() is None else ActorState.BUSY

    @property
    def is_usable(self) -> bool:
        return not self.is_closing and self.phase not in (Phase.ASLEEP, Phase.DEAD, Phase.CLOSED)

    @property
    def is_idle(self) -> bool:
        return self.phase is _LIVE and self.running is None and not self.queue and not self.is_closing

    @property
    def is_asleep(self) -> bool:
        return (self.phase is _ASLEEP or self.phase is _DEAD) and self.config.is_on_demand and not self.is_closing

    @property
    def is_starting(self) -> bool:
        return self.phase in (Phase.NEW, Phase.STARTING, Phase.BACKOFF) and not self.is_closing

    def stats(self) -> ActorStats:
        worker = self.incarnation.worker
        rss = 0 if worker is None else worker.resident_memory()  # may take long, so not under the lock
        with self.lock:
            activity = self._running_activity()
            return ActorStats(
                completed=self.completed,
                failed=self.failed,
                restarts=self._restarts,
                restart_in=max(0.0, self._restart_at - time.monotonic()) if self.phase is Phase.BACKOFF else None,
                stale=self._stale,
                queued=len(self.queue),
                last_failure=self._restart_tracker.last,
                state=self.state,
                pid=self.pid,
                node=self.node,
                incarnation=self.incarnation.index,
                method=None if activity is None else activity.method,
                elapsed=0.0 if activity is None else time.monotonic() - activity.started,
                rss=rss,
                started_in=self._started_in,
                replays=self.replays,
                longest_replay=self.longest_replay,
            )

    def stacks(self, timeout: float) -> str:
        with self.lock:
            worker = self.incarnation.worker
            stacks = None if worker is None or worker.at_end else worker.ask_stacks()
        if stacks is None:
            return f"actor {self.name!r} has no process now: it is {self.state.value}\n"
        return stacks.wait(timeout)

    def _running_activity(self) -> Activity | None:
        job = self.running or self.renewal
        return None if job is None else job.activity()

    # Events of callers -----------------------------------------------------------------------------------

    def accept(self, call: Job) -> None:
        with self.lock, self.lock.change(self):
            if self.is_closing:
                activity = call.activity()
                assert activity is not None, "it has not ended"
                raise self.lock.refuse(self.errors.closed(activity, self.incarnation.index))
            self.enqueue(call)

    def renew(self, future: ActorFuture) -> None:
        self.check_owner()
        self.accept(Renewal(self.config.first_index, future))

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
            jobs = [job for job in (self.running, self.renewal) if job is not None]
            is_running = any(job.future is future for job in jobs) or self.tenant.is_posted_for(future)
            if is_running:
                self._check_can_kill("abort a running call")
                self.tenant.blame(future)
                self._kill_and_proceed(EndReason.ABORT)
            if is_running or future.done():
                return is_running
            # A call that was running in an earlier process may be queued for another try.
            report, index = ExitReport(reason=EndReason.ABORT), self.incarnation.index
            return self._withdraw(future, lambda at: future.set_exception(self.errors.ended(report, index, at)))

    def kill(self, restart: bool) -> None:
        self.check_owner()
        with self.lock, self.lock.change(self):
            if self._running_activity() is not None:
                self._check_can_kill("kill it in the middle of a call")
            if not (restart and self.is_closing):
                self.is_closing |= not restart
                self._kill_and_proceed(EndReason.ABORT if restart else EndReason.CLOSE)

    def _check_can_kill(self, operation: str) -> None:
        """Refuse to do something that the backend cannot do, since it cannot kill."""
        if not self.config.backend.traits.can_kill:
            raise self.lock.refuse(self.errors.unsupported(operation, self.incarnation.index))

    def begin_close(self, timeout: float | None, began: float | None = None) -> None:
        began = time.monotonic() if began is None else began
        if self.lock.is_changing_below():  # a finalizer or a signal handler closes the actor in the middle of a change
            self.runtime.loop.call_soon(functools.partial(self.begin_close, timeout, began))
            return
        with self.lock, self.lock.change(self):
            if not self.is_closing:
                self.is_closing = True
                self.enqueue(Close(self.config.first_index))
            if self.config.is_standby and self.phase in (Phase.NEW, Phase.STARTING):
                self._kill_and_proceed(EndReason.CLOSE)  # no actor waits for its process
            timeout = self.config.deadlines.close if timeout is None else timeout
            if timeout is not None and self.phase is not Phase.CLOSED:
                kill = functools.partial(self._kill_and_proceed, EndReason.CLOSE)
                self.timers.set_earliest("close", began + timeout, kill)
            self.proceed_soon()

    def read_reply(self, future: ActorFuture, deadline: float | None) -> None:
        """Read the reply in the calling thread; see `ChannelLoans`. If another call is running, the loop reads."""
        self.lock.reset_if_interrupted()
        if self.runs_this_thread:
            self._check_no_deadlock(future, deadline)
            return
        if self.shared is not None and self.shared.has_jobs and self._loans.current is None:
            return  # the loop starts the next job as soon as it has read the reply
        with self.lock:
            loan = self._borrow_channel(future)
        if loan is None:
            return
        try:
            until = loan.until if deadline is None else min(deadline, loan.until)
            spins = self.spin.caller_spins
            while self._loans.current is loan and not future.done() and loan.worker.wait_for_reply(until, spins=spins):
                self.on_frames(loan.worker)
                spins = False
        finally:
            with self.lock:
                if self._loans.current is loan:
                    self._loans.end()

    @property
    def runs_this_thread(self) -> bool:
        """Whether the calling thread runs env code of this actor."""
        worker = self.incarnation.worker
        return worker is not None and worker.is_current_thread()

    def _check_no_deadlock(self, future: ActorFuture, deadline: float | None) -> None:
        """Raise if env code of this actor would wait forever, for a call that can only run once it has returned."""
        self.make_change(self.tenant.collect_completed)  # an env before it in the same process may already have stepped
        if deadline is None and not future.done():
            raise self.errors.within_envs()

    def _borrow_channel(self, future: ActorFuture) -> Loan | None:
        """Lend the channel to the thread that waits for a future; return None if the loop must read."""
        if self._loans.is_mine:
            # A signal handler waits in the thread that has the loan. The wait that it interrupted leaves reading to
            # the loop from now on.
            self._loans.end()
        worker = self.incarnation.worker
        is_running = self.phase is _LIVE and self.running is not None and self.running.future is future
        is_free = is_running and self._loans.current is None
        lender = worker.as_lender() if worker is not None and is_free else None
        return None if lender is None else self._loans.begin(lender)

    def _withdraw(self, future: ActorFuture, end: Callable[[Activity], object]) -> bool:
        """Take the request of a future out of the queue; see `Tenant.withdraw`."""
        job = next((job for job in self.queue if job.future is future), None)
        if job is None:
            return self.tenant.withdraw(future, end)
        activity = job.activity()
        assert activity is not None, "it has not ended"
        end(activity)
        self.queue.remove(job)
        self.unfinished.pop(job, None)
        return True

    # For jobs and tenants, under the lock ----------------------------------------------------------------

    def admit(self, tenant: Tenant) -> None:
        """Have a tenant live in this process and in later ones."""
        self.tenant = tenant

    def enqueue(self, job: Job, *, first: bool = False) -> None:
        """Queue a job, and start it if the worker is free.

        Args:
            job: The job.
            first: Whether it runs before everything that is queued, except replays.
        """
        job.actor = self
        job.call_id = 0
        job.age = 0 if first or self.permits is None else self.permits.next_age()
        self.unfinished[job] = None
        if first:
            replays = sum(queued.runs_first for queued in self.queue)
            self.queue.insert(replays, job)
        else:
            self.queue.append(job)
        if self.phase is _LIVE:
            self.dispatch()
        elif self.phase in (Phase.DEAD, Phase.CLOSED):
            self.proceed_soon()

    def dispatch(self) -> None:
        """Start queued jobs that the worker can accept; if it is free then, start one of the shared queue."""
        waits_for_permit = False
        while self.queue and self.phase is _LIVE and not waits_for_permit:
            job, running = self.queue[0], self.running
            # With permits no job joins: the permit may be due to another actor, whose next job is older.
            if running is not None and (self.permits is not None or not job.can_join(running)):
                if not running.try_finish():
                    running.call_when_finished()
                    break
                if self.running is running:  # recording the results may have started another job
                    self.running = None
            elif self.permits is not None and job.needs_permit and not self.permits.try_take(self, job.age):
                waits_for_permit = True
            else:
                self.queue.popleft()
                job.call_id = self.lock.next_call_id()
                job.started = time.monotonic()
                self.running = job  # while it starts, it may queue other jobs, which wait for it
                self.running = job.start()
                if self.running is not job:
                    self.unfinished.pop(job, None)
        if self.permits is not None and not waits_for_permit and not (self.running and self.running.needs_permit):
            self.permits.give_back(self)
        if self.shared is not None and self.is_idle and self.shared.has_jobs:
            if not runs_library_code_only():
                self.proceed_soon()  # an interrupt may end this change, so the loop takes the job
            elif (taken := self.shared.take()) is not None and taken.future is not None:
                taken.future.owner = self
                self.enqueue(taken)

    def end_job(self, job: Job) -> None:
        """Forget a job that has ended without a reply, and start the next one."""
        self.unfinished.pop(job, None)
        if self.running is job:
            self.running = None
        self.dispatch()

    def try_run_rows(self, rows: Job) -> bool:
        """Make rows the running job if they may be posted now: only earlier ones are running, and the queue is empty.

        With permits, True takes one for them, and False may have the actor wait for one.
        """
        is_free = self.running is None or (self.running is rows and self.permits is None)
        if not is_free or self.phase is not _LIVE or self.queue or self.is_closing:
            return False
        if self.permits is not None and not self.permits.try_take(self, self.permits.next_age()):
            return False
        self.running = rows
        return True

    def add_completed(self, count: int) -> None:
        """Count results of steps and resets."""
        self.completed += count

    def add_failed(self) -> None:
        """Count a step or reset that was ended by the end of the process, and is not run again."""
        self.failed += 1

    def send(self, kind: Kind, call_id: int, payload: Any) -> None:
        """Send a message to the worker."""
        worker = self.incarnation.worker
        assert worker is not None, "jobs start in a live process"
        worker.send(Frame(kind, self.incarnation.index, call_id, payload), self.spin.start(time.monotonic()))

    def ask_to_close(self, call_id: int, reason: EndReason, *, kill_in: float | None) -> None:
        """Ask the worker to close its envs and to exit; kill it if it takes longer than this, in seconds."""
        self._stop_process(reason, kill_in)
        self.send(Kind.CLOSE, call_id, dumps(()))

    def _stop_process(self, reason: EndReason, kill_in: float | None) -> None:
        """Send no more requests to the process, and kill it unless it ends by itself in time; None for no limit."""
        self.phase = Phase.STOPPING
        self.incarnation.blame(reason)
        if kill_in is not None:
            self._kill_in(kill_in)

    def _kill_in(self, seconds: float) -> None:
        """Kill the process unless it ends by itself within this time."""
        self.timers.set_earliest("kill", time.monotonic() + seconds, self.incarnation.kill)

    def discard(self, incarnation: int, make_error: Callable[[], ActorError]) -> None:
        if incarnation == self.incarnation.index and self.phase is _LIVE:
            self.phase = Phase.ENDING  # so it gets no more requests until it is killed
            self.incarnation.blame(EndReason.DISCARD)
            self._read_then(make_error, self._on_discard_error)

    def _on_discard_error(self, incarnation: Incarnation, error: ActorError) -> None:
        incarnation.discard_error = error
        incarnation.kill()

    def _read_then(self, read: Callable[[], Any], handle: Callable[[Incarnation, Any], None]) -> None:
        """Read an exception from the process, then handle it in a change, which ends the process.

        Unpickling runs code of users, so a callback thread does it. The process is killed if that takes too long.
        """
        incarnation = self.incarnation
        self._kill_in(_READ_PATIENCE)
        self.runtime.callbacks.submit(lambda: self.make_change(handle, incarnation, read()))

    # Events of the loop ----------------------------------------------------------------------------------

    def make_change(self, event: Callable[..., object], *args: object) -> None:
        with self.lock, self.lock.change(self):
            event(*args)

    def on_frames(self, worker: Worker) -> None:
        """Receive and handle frames, unless another thread has borrowed the channel."""
        with self.lock, self.lock.change(self):
            is_current = worker is self.incarnation.worker and not worker.at_end
            if is_current and (self._loans.current is None or self._loans.is_mine):
                self._handle_frames(worker, worker.receive() or [])

    def on_exit(self, worker: Worker) -> None:
        """Handle the exit of the process."""
        with self.lock, self.lock.change(self):
            incarnation = self.incarnation
            if worker is not incarnation.worker:
                return
            self._loans.end()
            for frame in worker.drain():
                self._on_frame(frame)
            report = incarnation.reap(worker)
            has_crashed = is_crash(incarnation.end_reason) and not self.is_closing
            if incarnation.is_standby and not incarnation.has_started and has_crashed:
                # Not a crash of this actor, which the standby has not served yet: launch a process instead.
                self._start_process(Incarnation(incarnation.index))
            else:
                self._after_exit(report)

    def on_certain_end(self, worker: Worker) -> None:
        """Launch the next process if it has waited for the certain end of the last one."""
        with self.lock, self.lock.change(self):
            if worker is self._unconfirmed:
                self._unconfirmed = None
                if self.incarnation.is_launching:
                    self._submit_launch()

    def _check_deadlines(self) -> None:
        """Report the current step if it is slow, and end the process if it is late."""
        activity = self.check_worker()
        worker = self.incarnation.worker
        if activity is None or worker is None:
            return
        judgment = self.deadline_watch.judge(activity)
        if judgment is Judgment.LATE:
            if self.running is not None:
                self.running.on_late(activity)
            self._kill_after_stacks()
        elif judgment is Judgment.SLOW:
            read_stacks = functools.partial(worker.ask_stacks(may_interrupt=False).wait, slow_calls.STACKS_PATIENCE)
            slow_calls.warn(self, activity, time.monotonic() - activity.started, read_stacks)

    def check_worker(self) -> Activity | None:
        """Process results, and kill the worker if it has corrupted the memory that it shares with this process.

        Return the activity that goes on; None if there is none, or the process is ending.
        """
        worker = self.incarnation.worker
        if self.phase is not _LIVE or worker is None:
            return None
        # The worker claims that the results up to this call are written. If so, the next lines find all of them.
        finished = worker.page.counters[FINISHED]
        # A reply beats a deadline that has passed meanwhile, as while this process was stopped (SIGSTOP).
        self._process_results()
        activity = self._running_activity() if self.phase is _LIVE else None
        if activity is None:
            return None
        untrue = worker.page.find_untrue(self.config.env_count)
        corruption = f"{untrue} on its control page cannot be true" if untrue else self.tenant.check_memory(finished)
        if not corruption:
            return activity
        worker.kill_corrupted(corruption)
        return None

    def _on_start_deadline(self, seconds: float) -> None:
        """End a process that has not started in time, but not while it waits on its node until others have started."""
        if self.phase is Phase.STARTING:
            worker = self.incarnation.worker
            due = 0.0 if worker is None else worker.launched + seconds
            if due > time.monotonic():
                self._set_start_deadline(due, seconds)
            else:
                self._kill_after_stacks()

    def _set_start_deadline(self, due: float, seconds: float) -> None:
        self.timers.set("start", due, functools.partial(self._on_start_deadline, seconds))

    def _kill_after_stacks(self) -> None:
        """Ask a late worker for its stacks, and kill it once it has had time to write them."""
        self.incarnation.request_stacks()
        self._stop_process(EndReason.TIMEOUT, _STACKS_GRACE)

    def _handle_frames(self, worker: Worker, frames: list[Frame]) -> None:
        for frame in frames:
            self._on_frame(frame)
        if worker.at_end and self.incarnation.worker is worker and self.phase is not Phase.STOPPING:
            self._kill_in(_EXIT_GRACE)  # without a channel the worker is useless; its exit leads to `on_exit`

    def _process_results(self) -> None:
        """Process all results that the worker has completed by now, even if another thread has borrowed the channel."""
        worker = self.incarnation.worker
        if worker is not None and not worker.at_end:
            self._handle_frames(worker, worker.drain())
        self.tenant.collect_completed()

    def _on_frame(self, frame: Frame) -> None:
        kind, incarnation_index, call_id, payload = frame
        job = self.running
        is_reply = job is not None and call_id == job.call_id and kind in _REPLIES
        if kind == Kind.LOGGED:
            self.runtime.log(functools.partial(handle_record, payload))
        elif incarnation_index != self.incarnation.index:
            self._stale += 1
        elif is_reply and self.phase is _LIVE:
            self._on_reply(frame)
        elif is_reply and self.phase is Phase.STOPPING and not self.incarnation.is_late:
            pass  # its envs are closed; their finalizers may run until the close deadline
        elif kind == Kind.OVERFLOW:
            self.tenant.on_overflow(frame)
        elif kind == Kind.PART and job is not None:
            job.on_part(frame)
        elif call_id == START_CALL_ID and self.phase is Phase.STARTING:
            self._on_start_reply(frame)
        else:
            self._stale += 1

    def _on_reply(self, frame: Frame) -> None:
        job, self.running = self.running, None
        assert job is not None, "the frame is its reply"
        self.completed += 1
        self.spin.complete(time.monotonic())
        if job.on_reply(frame):
            self.unfinished.pop(job, None)
        else:
            self.enqueue(job, first=True)
        self.dispatch()

    # Jobs ------------------------------------------------------------------------------------------------

    def _fail(self, job: Job, error_of: ErrorOf) -> None:
        """End a job that no process will run."""
        self.failed += job.future is not None
        job.fail(error_of)
        self.unfinished.pop(job, None)

    def _fail_queue_until_renewal(self) -> None:
        """Fail the queue of a dead actor. If there is a renewal, it starts a process, which runs the jobs behind it."""
        error_of = functools.partial(self.errors.after_last, self._exhausted_error())
        self._fail_renewal(error_of)
        while self.queue:
            job = self.queue.popleft()
            if isinstance(job, Renewal):
                job.started = time.monotonic()
                job.begin()
                self._start_next_process()
                return
            self._fail(job, error_of)

    def _fail_renewal(self, error_of: ErrorOf) -> None:
        """Fail the renewal that waits for the next process, if there is one."""
        renewal, self.renewal = self.renewal, None
        if renewal is not None:
            self._fail(renewal, error_of)

    def _fail_queue(self, error_of: ErrorOf) -> None:
        """Fail all queued jobs."""
        while self.queue:
            self._fail(self.queue.popleft(), error_of)

    def _fail_shared(self) -> None:
        """Fail the jobs of the shared queue that no other actor can take."""
        if self.shared is not None:
            self.shared.on_unusable(self)

    def _exhausted_error(self) -> ActorError:
        """Return the error that jobs get once the restart policy allows no more processes."""
        tracker = self._restart_tracker
        return self.errors.exhausted(tracker.errors, tracker.failed_starts, self.incarnation.index)

    # Starting --------------------------------------------------------------------------------------------

    def _start_next_process(self, worker: Worker | None = None) -> None:
        """Start the next incarnation, in the given process or that of a standby if there is one."""
        self._start_process(Incarnation(self.incarnation.index + 1), worker or self._take_standby(0.0))

    def _start_process(self, incarnation: Incarnation, worker: Worker | None = None) -> None:
        """Start an incarnation, in the process of a standby or in a new one.

        A new process waits until the last one has certainly ended.
        """
        self.timers.cancel("start", "kill", "backoff")  # timers of the last process
        self.phase = Phase.STARTING
        self.incarnation = incarnation
        incarnation.launched = time.monotonic()
        if worker is not None:
            self._adopt(worker)
            return
        incarnation.is_launching = True
        if self._unconfirmed is None:
            self._submit_launch()

    def _submit_launch(self) -> None:
        self.runtime.launcher.submit(self._launch, self.config.backend.traits.max_starting)

    def _adopt(self, worker: Worker) -> None:
        """Take over the process of a standby."""
        config, incarnation = self.config, self.incarnation
        incarnation.is_standby = True
        incarnation.worker = worker
        worker.report_to(self)
        self._set_start_deadline(incarnation.launched + _ADOPTION_GRACE, _ADOPTION_GRACE)
        message = Adopt(config.name, config.first_index, config.env_count, self.tenant.attach)
        worker.send(Frame(Kind.ADOPT, incarnation.index, START_CALL_ID, dumps(tuple(message))))

    def _take_standby(self, delay: float) -> Worker | None:
        """Take the process of a ready standby, which starts another one after a delay, in seconds.

        Return None if no standby is ready, or while code of the last process may still be running.
        """
        if self._unconfirmed is not None:
            return None
        offers = (give_process(delay) for give_process in self.config.standbys)
        return next((worker for worker in offers if worker is not None), None)

    def give_process(self, delay: float) -> Worker | None:
        """Give the process of this standby away if it is ready, and start another one after a delay, in seconds.

        The taker has the same lock, and calls this within its own change.
        """
        worker = self.incarnation.worker
        if self.phase is not _LIVE or worker is None or worker.at_end or self.running is not None or self.queue:
            return None
        self.lock.include(self)
        self.deadline_watch.stop()
        self.timers.set("backoff", time.monotonic() + delay, self._on_backoff)
        self.incarnation.worker = None
        self.phase = Phase.BACKOFF
        return worker

    def _withdraw_launch(self) -> bool:
        """Withdraw the launch unless it has begun; return whether it is withdrawn."""
        return self._unconfirmed is not None or self.runtime.launcher.withdraw(self._launch)

    def _launch(self) -> None:
        """Launch a worker, in the launcher's thread."""
        config, incarnation = self.config, self.incarnation
        with self.lock, self.lock.change(self):
            is_wanted = self.phase is Phase.STARTING
            incarnation.launched = time.monotonic()
            if is_wanted and config.deadlines.start is not None:
                self._set_start_deadline(incarnation.launched + config.deadlines.start, config.deadlines.start)
        worker: Worker | None = None
        refusal: BaseException | None = None
        if is_wanted and self._use is not None:
            try:
                worker = self._use.start(config.name, config.memory, config.env_count)
            except Exception as error:
                refusal = error
        self.make_change(self._on_launched, incarnation, worker, refusal)

    def _on_launched(self, incarnation: Incarnation, worker: Worker | None, refusal: BaseException | None) -> None:
        """Send the worker its first message, or handle the failure of its launch."""
        incarnation.is_launching = False
        if worker is not None:
            try:
                worker.report_to(self)
            except Exception as error:
                worker, refusal = None, error
        incarnation.worker = worker
        if worker is None:
            self._after_exit(ExitReport(status=ExitStatus(refusal=refusal)))
        elif self.phase is Phase.STARTING:
            # The key is for managers of `multiprocessing`, which workers on other machines cannot reach.
            key = None if self.config.backend.traits.is_remote else bytes(multiprocessing.current_process().authkey)
            start = self.config.start._replace(attach=self.tenant.attach, authkey=key)
            worker.send(Frame(Kind.START, incarnation.index, START_CALL_ID, dumps(tuple(start))))
        else:
            worker.kill()  # the actor has ended the process during its launch

    def _on_start_reply(self, frame: Frame) -> None:
        incarnation = self.incarnation
        if frame.kind == Kind.ENV_MADE:
            incarnation.envs_made = load_plain(frame.payload)
        elif frame.kind == _FAILED:
            incarnation.failure = Failure(*loads(frame.payload))
            self._read_then(functools.partial(unpack_failure, incarnation.failure), self._on_start_failure)
        else:
            self._on_started()

    def _on_start_failure(self, incarnation: Incarnation, cause: BaseException | None) -> None:
        incarnation.failure_cause = cause
        if incarnation is self.incarnation and self.phase is Phase.STARTING:
            self.phase = Phase.ENDING
            incarnation.kill()

    def _on_started(self) -> None:
        incarnation = self.incarnation
        self.timers.cancel("start")
        self.runtime.launcher.finish(self._launch)
        self.phase = _LIVE
        incarnation.has_started = True
        self._started_in = time.monotonic() - incarnation.launched
        recording.recorder.on_span(self, "start", incarnation.launched)
        self.log(logging.INFO, f"actor {self.name!r} has started in {self._started_in:.3g} s, pid {self.pid}")
        renewal, self.renewal = self.renewal, None
        if renewal is not None:
            renewal.end(incarnation.index)
            self.unfinished.pop(renewal, None)
        first = self.tenant.on_started(incarnation, is_renewal=renewal is not None)
        for job in first:
            job.actor = self
            self.unfinished[job] = None
        self.queue.extendleft(reversed(first))
        self.dispatch()

    # Ending ----------------------------------------------------------------------------------------------

    def _kill_and_proceed(self, reason: EndReason) -> None:
        """Kill the process, or withdraw its launch, and have the loop start the next one or close the actor."""
        if self.phase is Phase.CLOSED:
            return
        self.phase = Phase.ENDING
        self.incarnation.blame(reason)
        self.incarnation.kill()
        self.proceed_soon()
        if reason is EndReason.CLOSE and not self.config.backend.traits.can_kill:
            self.runtime.loop.call_soon(functools.partial(self.make_change, self._leave_running))

    @property
    def _has_jobs_before_close(self) -> bool:
        """Whether jobs are queued before the `Close` of an actor that is closing."""
        return len(self.queue) > 1

    def proceed_soon(self) -> None:
        """Have the loop continue after a change: start jobs or a process, fail the queue, or close the actor."""
        self.runtime.loop.call_soon(functools.partial(self.make_change, self._proceed))

    def _proceed(self) -> None:
        """Continue in the loop after a change by a caller."""
        incarnation = self.incarnation
        is_needed = not self.is_closing or self._has_jobs_before_close
        if incarnation.worker is not None:
            self.dispatch()  # does nothing if the process is ending: `on_exit` continues
        elif incarnation.is_launching:
            is_wanted = is_needed and self.phase is Phase.STARTING
            if not is_wanted and self._withdraw_launch():
                self._after_exit(ExitReport())
        elif self.phase is Phase.CLOSED:
            error_of = functools.partial(self.errors.closed, incarnation=incarnation.index)
            self._fail_queue(error_of)
            self._fail_shared()
        elif self.phase is Phase.DEAD and not self.is_closing:
            self._fail_queue_until_renewal()
        elif self.phase is Phase.NEW and is_needed:
            self._start_process(incarnation)
        elif self.phase not in (Phase.ASLEEP, Phase.BACKOFF) or not is_needed:
            self._replace_ended()

    def _replace_ended(self) -> None:
        """Start the next process, or close the actor, while it has no process whose exit would do so."""
        incarnation = self.incarnation
        reason = EndReason.CLOSE if self.is_closing else incarnation.end_reason
        error_of = functools.partial(self.errors.ended, ExitReport(reason=reason), incarnation.index)
        if reason in (EndReason.CLOSE, EndReason.ABORT):
            self._fail_renewal(error_of)
        if self.is_closing:
            self._close(error_of)
        else:
            self._start_next_process()

    def _leave_running(self) -> None:
        """Close the actor without waiting for its worker, which may hang, and which the backend cannot kill."""
        worker = self.incarnation.worker
        if worker is not None and self.phase is Phase.ENDING:
            self._loans.end()
            self._after_exit(self.incarnation.reap(worker))

    def _after_exit(self, report: ExitReport) -> None:
        """Handle the exit of the process, or a launch that has failed or was withdrawn, in five steps."""
        incarnation = self.incarnation
        job = self.running
        self.phase = Phase.ENDING
        report = report._replace(reason=incarnation.end_reason)
        incarnation.report = report
        incarnation.is_launching = False
        self.runtime.launcher.finish(self._launch)
        self.deadline_watch.stop()
        if self.permits is not None:
            self.permits.give_back(self)
        # 1. Collect: record the results that the worker has completed.
        self.tenant.collect_completed()
        if job is not None:
            job.count_completed()
        for job_of_process in [queued for queued in self.queue if queued.is_of_process]:
            self.queue.remove(job_of_process)
            del self.unfinished[job_of_process]
        # 2. Describe: find out what was running, make the error, and record it.
        unfinished = Unfinished() if job is None else job.unfinished(incarnation)
        culprit = unfinished.culprit
        error = self._describe_exit(report, culprit)
        if self.config.crashes is not None and is_crash(report.reason) and report.pid is not None:
            find_inputs = Inputs if job is None or culprit is None else functools.partial(job.inputs, culprit)
            error.bundle = self.config.crashes.report(error, find_inputs, incarnation.failure)
        if incarnation.has_started:
            self.last_exit_error = error
        # 3. Decide: start another process now, later, or never.
        plan = self._plan(report, error)
        ended = ProcessExit(incarnation, report, job, unfinished, error, plan)
        if plan.next is not Next.CLOSE:
            self._log_exit(ended)
        recording.recorder.on_exit(self, culprit)
        # 4. Lose: end the episodes and the running job, or queue them again for the next process.
        self.tenant.on_exit(ended)
        self._lose(ended)
        self.running = None
        # 5. Continue: start the next process, fail the queue, or free everything.
        self._continue(ended)

    def _describe_exit(self, report: ExitReport, culprit: Activity | None) -> ActorError:
        """Return the error that says how the process ended."""
        incarnation = self.incarnation
        if report.reason is EndReason.DISCARD and incarnation.discard_error is not None:
            return incarnation.discard_error
        if incarnation.has_started:
            return self.errors.ended(report, incarnation.index, culprit)
        return self.errors.start(report, incarnation)

    def _plan(self, report: ExitReport, error: ActorError) -> Plan:
        """Decide whether and when to start another process; count the exit if it is a crash."""
        incarnation = self.incarnation
        # An actor that is closed in the middle of a renewal runs the calls behind that in the next process.
        is_renewing = incarnation.end_reason is EndReason.RENEW and self._has_jobs_before_close
        if self.is_closing and not is_renewing:
            return Plan(Next.CLOSE)
        if incarnation.is_replaced:
            return Plan(Next.START)
        is_first = incarnation.index == 0 or self.config.is_on_demand
        is_hopeless = report.is_refused or (incarnation.failure is not None and is_first)
        delay = self._restart_tracker.add(
            error, time.monotonic(), has_started=incarnation.has_started, may_restart=not is_hopeless
        )
        return Plan(Next.DIE) if delay is None else Plan(Next.RESTART, delay)

    def _lose(self, ended: ProcessExit) -> None:
        """End the job that was running, or queue it again. A renewal stays until the next process has started."""
        job = ended.job
        if job is not None and job is not self.renewal:
            if job.after_exit(ended):
                self.failed += job.future is not None and job.future.done()
                self.unfinished.pop(job, None)
            else:
                job.call_id = 0
                self.queue.appendleft(job)
        if ended.plan.next is Next.CLOSE or ended.reason is EndReason.ABORT:
            self._fail_renewal(lambda _activity: ended.error)

    def _continue(self, ended: ProcessExit) -> None:
        """Start the next process, now or later, or fail all jobs that wait for it."""
        report = ended.report
        if not report.status.is_certain:
            self._unconfirmed = ended.incarnation.worker
        ended.incarnation.worker = None
        chosen, delay = ended.plan
        if chosen is Next.START:
            self._start_next_process()
        elif chosen is Next.RESTART:
            # The standby observes the delay in place of the actor, so no more processes start than without standbys.
            standby = self._take_standby(delay) if ended.incarnation.has_started else None
            if standby is not None:
                self._restart(standby)
            else:
                self.phase = Phase.BACKOFF
                self._restart_at = time.monotonic() + delay
                if delay > 0:
                    self.log(logging.WARNING, f"actor {self.name!r}: {self._restart_tracker.describe(delay)}")
                self.timers.set("backoff", self._restart_at, self._on_backoff)
        elif chosen is Next.DIE:
            self.phase = Phase.DEAD
            if self.config.is_standby:
                text = f"{self.name} cannot be restarted; the actors that it served continue: {self._exhausted_error()}"
                self.runtime.log(lambda: _notices.warning("%s", text))
            self._fail_queue_until_renewal()
            if self.phase is Phase.DEAD:  # no renewal was queued
                self._fail_shared()
        else:
            closing = report if report.reason is None else report._replace(reason=EndReason.CLOSE)
            self._close(functools.partial(self.errors.ended, closing, ended.incarnation.index))

    def _on_backoff(self) -> None:
        if self.phase is Phase.BACKOFF:
            self._restart()

    def _restart(self, standby: Worker | None = None) -> None:
        """Start the next process, and count it as a restart."""
        self._restarts += 1
        self._start_next_process(standby)

    def _close(self, error_of: ErrorOf) -> None:
        """Fail all jobs that are left, and free the resources of the actor."""
        self.phase = Phase.CLOSED
        self.incarnation.worker = None
        self._fail_queue(error_of)
        self._fail_shared()
        self.timers.cancel_all()
        self.tenant = NO_TENANT  # frees the memory of the vector
        self.runtime.callbacks.submit(self._release)

    def _release(self) -> None:
        """Free the backend, which may take long, and leave the runtime."""
        if self._use is not None:
            with contextlib.suppress(OSError):
                self._use.close()
        self.runtime.leave(self)
        self.closed.open()

    # Other -----------------------------------------------------------------------------------------------

    def repair(self, bug: BaseException | None) -> None:
        """Establish the invariant from any state; see `envactors.actor.change`.

        Args:
            bug: The error of this library that has ended the change; it closes the actor. None if the change was
                interrupted: then the process is replaced, but a dead actor stays dead.
        """
        reason = EndReason.INTERRUPT if bug is None else EndReason.CLOSE
        if bug is None:
            text = f"actor {self.name!r} gets another process: a change of its state was interrupted"
            error_of = functools.partial(self.errors.ended, ExitReport(reason=reason), self.incarnation.index)
        else:
            text = f"actor {self.name!r} is closed by an internal error of envactors; please report it"
            error_of = functools.partial(self.errors.broken, bug, self.incarnation.index)
        self.log(logging.WARNING if bug is None else logging.ERROR, text, bug)
        self.is_closing |= bug is not None
        if self.phase not in (Phase.DEAD, Phase.CLOSED):
            self.phase = Phase.ENDING  # the process runs nothing more, also of what the lines below queue
        queued = set(self.queue)
        for job in tuple(self.unfinished):
            if bug is not None or job not in queued or job.call_id != 0 or not job.survives_interrupt:
                self._fail(job, error_of)
        self.queue = deque(job for job in self.queue if job in self.unfinished)
        self.running = self.renewal = None
        self.tenant.repair(error_of)
        if self.phase is Phase.DEAD and bug is None:
            self.proceed_soon()
        elif bug is not None and self.incarnation.report is not None and self.phase is not Phase.CLOSED:
            self._close(error_of)  # the bug is in the handling of the exit, so do not handle it again
        else:
            self._kill_and_proceed(reason)

    def _log_exit(self, ended: ProcessExit) -> None:
        if ended.reason in (EndReason.ABORT, EndReason.RENEW):
            renewal = self.renewal if ended.reason is EndReason.RENEW else None
            why = "on request" if renewal is None else renewal.reason
            self.log(logging.INFO, f"actor {self.name!r} gets a new process: {why}")
        else:
            # One warning tells of all actors whose helper was lost.
            level = logging.INFO if ended.reason is EndReason.HELPER_LOST else logging.WARNING
            text, bundle = str(ended.error).partition("\n")[0], ended.error.bundle
            self.log(level, text if bundle is None else f"{text}; {describe_bundle(bundle)}", of=ended.error)

    def log(self, level: int, text: str, bug: BaseException | None = None, of: ActorError | None = None) -> None:
        """Log a message in the thread for printing: handlers may block, and evidence runs code of users.

        Args:
            level: The level.
            text: The message.
            bug: An error of this library, whose traceback is logged with it.
            of: The error of an ended process, whose stacks or traceback in the worker are logged with it.
        """
        recording.recorder.on_notice(self, text)
        extra = {"actor": self.name, "incarnation": self.incarnation.index, "env_id": self.config.first_index}

        def write() -> None:
            now = time.monotonic()
            found = "" if of is None or now < self._evidence_at + _EVIDENCE_PERIOD else evidence_of(of)
            if found:
                self._evidence_at = now
            _log.log(level, "%s", f"{text}\n{found}" if found else text, exc_info=bug, extra=extra)

        self.runtime.log(write)
