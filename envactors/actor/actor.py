"""The parent's half of one actor.

An actor reacts to events. These are the events of one that starts, runs a call, and crashes:

    thread      event                                  reaction                               phase after it
    caller      `join_and_start`                       asks the loop for `_proceed`           NEW
    loop        `_proceed`                             submits a launch                       STARTING
    launcher    `ProcessStarter._on_launched`          sends the first message                STARTING
    loop        `on_frames`: the envs are made         sends the calls that wait              LIVE
    caller      `accept`                               sends a call, if the worker is free    LIVE
    loop        `on_frames`: the reply to the call     gives the future its outcome           LIVE
    loop        `on_exit`                              fails the running call, sets a timer   BACKOFF
    loop        the timer "backoff"                    submits a launch                       STARTING

Each event is one change under the lock; see `envactors.actor.change`. The thread of a caller may send jobs to a free
worker, read their replies, and kill the worker. Only threads of this library start processes and handle their exits.

The jobs of an actor are in `envactors.actor.job_queue`, the start of its processes is in `envactors.actor.starter`, and
the decision whether another one follows is in `envactors.actor.actor_process`.
"""

from __future__ import annotations

import functools
import logging
import struct
import time
from collections.abc import Callable
from typing import Any

from envactors.actor.actor_process import START_CALL_ID, ActorProcess, EndReason, RestartTracker, is_crash
from envactors.actor.base import ActorBase
from envactors.actor.config import ActorConfig
from envactors.actor.future import ActorFuture
from envactors.actor.job import Activity, Close, Job, ProcessExit, Renewal, Uncompleted
from envactors.actor.job_queue import JobQueue
from envactors.actor.loan import ChannelLoans
from envactors.actor.log import STACKS_PATIENCE, ActorLog, warn_of_slow
from envactors.actor.spinning import SpinPolicy
from envactors.actor.starter import ProcessStarter
from envactors.actor.states import LIVE, ActorState, ActorStats, Phase
from envactors.actor.tenant import NO_TENANT, Tenant
from envactors.actor.timers import DeadlineWatch, Timers
from envactors.backends.base import Worker
from envactors.backends.log_records import handle_record
from envactors.crashes.inputs import Inputs
from envactors.errors import ActorError
from envactors.mailbox.channel import ChannelCorruptError
from envactors.mailbox.control_page import FINISHED
from envactors.mailbox.messages import Failure, Frame, Kind
from envactors.mailbox.pickling import dumps, load_message, unpack_failure
from envactors.runtime import enroll

# How long a worker that has closed its channel may take to exit, in seconds.
_EXIT_GRACE = 1.0
# How long a worker may take to write its stacks before it is killed for a deadline, in seconds.
_STACKS_GRACE = 0.2
# How long unpickling an exception may delay the end of the process that raised it, in seconds.
_READ_PATIENCE = 10.0
# Phases in which an actor has no process, or has killed it.
_WITHOUT_PROCESS = (Phase.ASLEEP, Phase.ENDING, Phase.BACKOFF, Phase.DEAD)
_REPLIES = (Kind.RESULT, Kind.FAILED)


class Actor(ActorBase):
    """The parent's half of one actor, which runs one process after another.

    An actor waits for nobody, so in each phase something must be pending whose event leads on. The table is the
    invariant between two changes:

    ========  ==========================================  ==========================================================
    phase     pending                                     the phase that it leads to
    ========  ==========================================  ==========================================================
    ASLEEP    nothing, until `wake`                       NEW
    NEW       a call of `_proceed`                        STARTING
    STARTING  a launch, or a worker that makes its envs   LIVE
    LIVE      a worker that runs jobs                     STOPPING, to close or renew; BACKOFF, if this is a standby
                                                          and another actor takes the process
    STOPPING  the exit of the worker, or a launch         as the exit is planned: STARTING, BACKOFF, DEAD, or CLOSED
    ENDING    with a worker: its exit                     as the exit is planned
              without one: a call of `_proceed`, and      STARTING, or CLOSED if the actor is closing; if a launch was
              perhaps a launch                            pending, as its exit is planned
    BACKOFF   a timer                                     STARTING
    DEAD      nothing, until `wake`, or `renew`           NEW, or STARTING
    CLOSED    nothing                                     nothing
    ========  ==========================================  ==========================================================

    Further events cut that short:

    - The worker exits in STARTING or LIVE: the exit is planned, too.
    - A deadline of a start or of a job passes: STOPPING, while the worker writes its stacks.
    - In STARTING a factory raises, or in LIVE an env whose process is to be replaced: STOPPING, while a callback thread
      unpickles the exception, and then while the worker closes its envs.
    - `abort`, `kill`, an interrupted change, and the timer "close" of an actor that takes too long to close: ENDING.
    - A closing actor has no process and no job left: CLOSED, by `_proceed`.
    - In BACKOFF, the next job is a renewal: STARTING.

    Args:
        config: The settings of the actor.

    Attributes:
        phase: What the actor is doing; see above.
        is_closing: Whether the actor accepts no more jobs.
        jobs: The jobs that wait for the process, and the one that it runs.
        tenant: Keeps track of the envs in the process; `NO_TENANT` for a lone actor.
        timers: The timers of the actor.
        deadline_watch: Checks whether the running job is late or slow.
        loans: Lends the channel of the process to waiting threads.
        spin: Decides whether callers and the worker spin before they sleep.
        log: The log of the actor.
        restart_tracker: Decides about restarts.
        starter: Starts the processes.
        restarts: How many restarts there were.
        restart_at: When the last backoff ends (`time.monotonic`).
        started_in: How long the last start took, in seconds; None before the first.
    """

    def __init__(self, config: ActorConfig) -> None:
        super().__init__(config)
        self.phase: Phase = Phase.ASLEEP if config.is_on_demand else Phase.NEW
        self.is_closing: bool = False
        self.jobs: JobQueue = JobQueue(self)
        self.tenant: Tenant = NO_TENANT
        self.timers: Timers = Timers(lambda: self.runtime.loop, self.run_as_change)
        self.deadline_watch: DeadlineWatch = DeadlineWatch(config.deadlines, self.timers, self._check_deadlines)
        self.loans: ChannelLoans = ChannelLoans(lambda: self.runtime.loop, self.lock)
        self.spin: SpinPolicy = SpinPolicy(config.backend.traits.may_spin)
        self.log: ActorLog = ActorLog(self)
        self.restart_tracker: RestartTracker = RestartTracker(config.restart)
        self.starter: ProcessStarter = ProcessStarter(self)
        self.restarts: int = 0
        self.restart_at: float = 0.0
        self.started_in: float | None = None

    def join_and_start(self) -> None:
        enroll(self)
        self.starter.open()
        if self.config.crashes is not None:
            self.config.crashes.submit = self.runtime.printer.submit
        self.proceed_soon()

    def run_as_change(self, event: Callable[..., object], *args: object) -> None:
        with self.lock, self.lock.change(self):
            event(*args)

    # State, read-only -------------------------------------------------------------------------------------

    @property
    def state(self) -> ActorState:
        with self.lock:
            phase, process = self.phase, self.process
            if phase is Phase.CLOSED or (phase in _WITHOUT_PROCESS and self._needs_no_process):
                return ActorState.CLOSED
            if phase is Phase.DEAD:
                return ActorState.DEAD
            if phase is Phase.NEW or (phase is Phase.STARTING and process.incarnation == 0):
                return ActorState.STARTING
            is_replaced = phase in (Phase.STOPPING, Phase.ENDING) and not self.is_closing
            if is_replaced or phase in (Phase.STARTING, Phase.BACKOFF) or process.end_reason is EndReason.RENEW:
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
                elapsed=0.0 if activity is None else time.monotonic() - activity.started_at,
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

    def wake(self) -> None:
        with self.lock, self.lock.change(self):
            if self.is_asleep:
                if self.phase is Phase.DEAD:
                    self.process = ActorProcess(self.process.incarnation + 1)
                self.phase = Phase.NEW
                self.proceed_soon()

    def accept(self, job: Job) -> None:
        with self.lock, self.lock.change(self):
            if self.is_closing:
                job.actor = self
                activity = job.activity()
                assert activity is not None, "a new job has an activity"
                raise self.lock.end_with(self.errors.actor_closed(activity))
            self.jobs.enqueue(job)

    def renew(self, future: ActorFuture) -> None:
        self.check_not_forked()
        self.accept(Renewal(future))

    def cancel(self, future: ActorFuture) -> bool:
        self.check_not_forked()
        with self.lock, self.lock.change(self):
            if not future.running():
                self._withdraw(future, lambda _activity: future.set_canceled())
        return future.cancelled()

    def abort(self, future: ActorFuture) -> bool:
        if self.cancel(future):
            return True
        with self.lock, self.lock.change(self):
            self._process_results()
            begun = self.jobs.running, self.jobs.renewal
            if any(job is not None and job.future is future for job in begun) or self.tenant.is_posted_for(future):
                self._check_can_kill("abort a running call")
                self.tenant.blame(future)
                self.end_now(EndReason.ABORT)
                return True
            if future.done():
                return False

            def fail(activity: Activity) -> None:
                future.set_exception(self.errors.not_run(activity, EndReason.ABORT))
                self.jobs.record_failed()

            return self._withdraw(future, fail)  # a call that ran in an earlier process may wait to run again

    def _withdraw(self, future: ActorFuture, end: Callable[[Activity], object]) -> bool:
        """Take the request of a future out of the queue, and start what waited behind it; see `Tenant.withdraw`."""
        was_queued = self.jobs.withdraw(future, end) or self.tenant.withdraw(future, end)
        self.jobs.dispatch_own()  # and nothing of a shared queue, since a session may be ending its actor
        return was_queued

    def kill(self, restart: bool) -> None:
        self.check_not_forked()
        with self.lock, self.lock.change(self):
            if self.jobs.activity() is not None:
                self._check_can_kill("kill it in the middle of a call")
            if not (restart and self.is_closing):
                self.is_closing |= not restart
                self.end_now(EndReason.ABORT if restart else EndReason.CLOSE)

    def _check_can_kill(self, operation: str) -> None:
        """Refuse an operation that may have to kill the process, if the backend cannot kill."""
        if not self.config.backend.traits.can_kill:
            raise self.lock.end_with(self.errors.unsupported_operation(operation))

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
                self.end_now(EndReason.CLOSE)  # no actor waits for its process

            timeout = self.config.deadlines.close if timeout is None else timeout
            if timeout is not None and self.phase is not Phase.CLOSED:
                self.timers.set_earliest("close", began + timeout, lambda: self.end_now(EndReason.CLOSE))
            self.proceed_soon()

    def read_reply(self, future: ActorFuture, until: float | None) -> None:
        """Read the reply in the calling thread; see `ChannelLoans`. If another call is running, the loop reads."""
        self.lock.repair_if_interrupted()
        if self.is_run_by_this_thread:
            # Env code waits for its own actor: only a row that the worker ran before the current one can have ended.
            self.run_as_change(self.tenant.collect_completed)
            if until is None and not future.done():
                raise self.errors.called_by_own_env()
            return

        shared = self.jobs.shared_jobs
        if shared is not None and shared.has_jobs and self.loans.current is None:
            return  # the loop starts the next job as soon as it has read the reply

        with self.lock:
            job = self.jobs.running
            is_running = self.phase is LIVE and job is not None and job.resolves(future)
            loan = self.loans.lend(self.process.worker if is_running else None)
        if loan is None:
            return

        try:
            until = loan.until if until is None else min(until, loan.until)
            spins = self.spin.caller_spins
            while self.loans.current is loan and not future.done() and loan.worker.wait_for_reply(until, spins=spins):
                self.on_frames(loan.worker)
                spins = False
        except RecursionError:
            # It may have ended a change in `on_frames`, and then the exit of its context, before scheduling a repair.
            # Here the stack has room to schedule one: `loans.lend` was deeper.
            self.runtime.loop.call_soon(self.lock.repair_if_interrupted)
            raise
        finally:
            with self.lock:
                if self.loans.current is loan:
                    self.loans.end()

    # Events of the worker, and of its timer ---------------------------------------------------------------

    def on_frames(self, worker: Worker) -> None:
        """Receive and handle frames, unless another thread has borrowed the channel."""
        with self.lock, self.lock.change(self):
            is_current = worker is self.process.worker and not worker.at_end
            if is_current and (self.loans.current is None or self.loans.is_borrowed_here):
                self._handle_frames(worker, worker.receive() or [])

    def _check_deadlines(self) -> None:
        """Report the running activity if it is slow, and end the process if it is late."""
        activity = self.collect_and_verify()
        worker = self.process.worker
        if activity is None or worker is None:
            return
        if time.monotonic() >= activity.late_at:
            if self.jobs.running is not None:
                self.jobs.running.on_late(activity)
            self.end_after_stacks()
        elif self.deadline_watch.check_again(activity):
            read_stacks = functools.partial(worker.ask_stacks(may_interrupt=False).wait, STACKS_PATIENCE)
            warn_of_slow(self, activity, time.monotonic() - activity.started_at, read_stacks)

    def collect_and_verify(self) -> Activity | None:
        """Process results, and kill the worker if it has corrupted the memory that it shares with this process.

        Returns:
            The activity that is still running; None if there is none, or the process is ending.
        """
        worker = self.process.worker
        if self.phase is not LIVE or worker is None:
            return None

        # The worker writes its results before it counts a call as finished. So if a call is counted here, but its
        # result is not found when the results are processed below, the result was never written.
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
            self._kill_later(_EXIT_GRACE)  # without a channel the worker is useless; its exit leads to `on_exit`

    def on_frame(self, frame: Frame) -> None:
        """Handle a frame. If its content is impossible, env code has written into the channel: kill the worker."""
        kind, incarnation, call_id, payload = frame
        job = self.jobs.running
        is_of_job = job is not None and call_id == job.call_id
        try:
            if kind == Kind.LOGGED:
                self.runtime.log(functools.partial(handle_record, payload))
            elif incarnation != self.process.incarnation:
                self.jobs.stale += 1
            elif kind in _REPLIES and self.phase is LIVE and is_of_job:
                self.spin.complete(time.monotonic())
                self.jobs.on_reply(frame)
            elif kind == Kind.OVERFLOW:
                self.tenant.on_overflow(frame)
            elif kind == Kind.PIECE and job is not None and is_of_job:
                job.on_reply_piece(frame)
            elif call_id == START_CALL_ID and self.phase is Phase.STARTING:
                self._on_start_reply(frame)
            elif call_id != self.process.close_id:  # after the reply to a close, finalizers of the envs may still run
                self.jobs.stale += 1
        except (ChannelCorruptError, struct.error) as error:
            if self.process.worker is not None:
                self.process.worker.kill_corrupted(f"in its channel {error}")

    # Messages --------------------------------------------------------------------------------------------

    def send(self, kind: Kind, call_id: int, payload: Any) -> None:
        """Send a message to the worker."""
        worker = self.process.worker
        assert worker is not None, "jobs start in a live process"
        worker.send(Frame(kind, self.process.incarnation, call_id, payload), self.spin.record_start(time.monotonic()))

    # The start of a process ------------------------------------------------------------------------------

    def _start_next_process(self) -> None:
        """Start the next process: that of a ready standby, else a new one."""
        self._start_process(self.process.incarnation + 1, self.starter.take_standby(0.0))

    def _start_process(self, incarnation: int, standby: Worker | None = None) -> None:
        """Start a process, or take that of a standby."""
        self.timers.cancel("start", "read", "kill", "backoff")  # timers of the last process
        self.phase = Phase.STARTING
        self.process: ActorProcess = ActorProcess(incarnation, standby, was_standby=standby is not None)
        self.starter.begin(self.process)

    def on_certain_end(self, worker: Worker) -> None:
        self.run_as_change(self.starter.on_certain_end, worker)

    def give_process(self, delay: float) -> Worker | None:
        """Give the process of this standby away if it is ready, and start another one after a delay, in seconds.

        The actor that takes it has the same lock, and calls this within its own change. A process that must leave its
        node is not given away, but replaced.
        """
        worker = self.process.worker
        if not self.is_idle or worker is None or worker.at_end:
            return None
        self.lock.include(self)
        if reason := self.reason_to_move:
            self.jobs.enqueue(Renewal(why=reason))
            return None
        self.deadline_watch.stop()
        self.process.worker = None
        self._back_off(delay)
        return worker

    def _on_start_reply(self, frame: Frame) -> None:
        """Handle the reply to the first message, or, before it, the count of the envs made so far."""
        process = self.process
        if frame.kind == Kind.ENV_MADE:
            # `index` returns a count from 0 to `env_count`, and raises ValueError for others.
            process.envs_made = load_message(range(self.config.env_count + 1).index, frame.payload)
        elif frame.kind == Kind.FAILED:
            process.failure = load_message(Failure, frame.payload)
            process.failed_at = time.monotonic()
            self._end_after_reading(EndReason.FACTORY_RAISED, functools.partial(unpack_failure, process.failure))
        else:
            self._on_started(process)

    def _on_started(self, process: ActorProcess) -> None:
        self.starter.end_start()
        self.phase = LIVE
        process.has_started = True
        self.started_in = time.monotonic() - process.launched_at
        self.log.write_start(self.started_in)
        is_renewal = self.jobs.end_renewal(process.incarnation)
        self.jobs.start_in_process(self.tenant.on_started(process, is_renewal=is_renewal))

    # The end of a process --------------------------------------------------------------------------------
    #
    # There are four ways to end one; the exit of the worker, or of its launch, then leads to `finish_process`:
    #
    # end_now               kill it                                              ENDING
    # end_after_stacks      ask for its stacks, and kill it a moment later       STOPPING
    # end_by_closing        have it close its envs and exit, or kill it later    STOPPING
    # _end_after_reading    unpickle an exception, then close its envs           STOPPING

    def replace_after_raise(self, incarnation: int, make_error: Callable[[], ActorError]) -> None:
        if incarnation == self.process.incarnation and self.phase is LIVE:
            self._end_after_reading(EndReason.ENV_RAISED, make_error)

    def end_now(self, reason: EndReason) -> None:
        """Kill the process: its exit leads on. Without a worker, `_proceed` does, and withdraws a pending launch."""
        if self.phase is Phase.CLOSED:
            return
        self.phase = Phase.ENDING
        self.process.record_end_reason(reason)
        self.process.kill()
        self.proceed_soon()
        worker = self.process.worker
        if reason is EndReason.CLOSE and worker is not None and not self.config.backend.traits.can_kill:
            # It may hang, so the actor closes as if the worker had ended.
            self.runtime.loop.call_soon(functools.partial(self.on_exit, worker))

    def end_after_stacks(self) -> None:
        """Ask a late worker for its stacks, and kill it once it has had time to write them."""
        self.process.request_stacks()
        self._enter_stopping(EndReason.TIMEOUT)
        self._kill_later(_STACKS_GRACE)

    def end_by_closing(self, call_id: int, reason: EndReason) -> None:
        """Have the worker close its envs and exit, and kill it if that takes too long.

        Args:
            call_id: The call id of the request to close.
            reason: Why the process ends. If the actor closes, its timer "close" kills.
        """
        self._enter_stopping(reason)
        if reason is not EndReason.CLOSE and self.config.deadlines.close is not None:
            self._kill_later(self.config.deadlines.close)
        self.process.close_id = call_id
        self.send(Kind.CLOSE, call_id, dumps(()))

    def _end_after_reading(self, reason: EndReason, read_cause: Callable[[], BaseException | None]) -> None:
        """Have the process close its envs once the exception of its factory or of an env was read.

        Unpickling runs code of users, so a callback thread does it. The process is killed if that takes too long, or if
        other envs still run in it: nobody watches their deadlines any more.
        """
        process = self.process
        self._enter_stopping(reason)
        self.timers.set("read", time.monotonic() + _READ_PATIENCE, process.kill)
        self.runtime.callbacks.submit(lambda: self.run_as_change(self._on_cause_read, process, reason, read_cause()))

    def _on_cause_read(self, process: ActorProcess, reason: EndReason, cause: BaseException | None) -> None:
        """Have the process close its envs, or kill it, unless it has ended meanwhile."""
        process.cause = cause
        if process is not self.process or process.worker is None or self.phase is not Phase.STOPPING:
            return
        self.timers.cancel("read")
        if self.jobs.running is None or self.jobs.running.activity() is None:
            self.end_by_closing(self.lock.next_call_id(), reason)
        else:
            process.kill()

    def _enter_stopping(self, reason: EndReason) -> None:
        """Send the process no more requests: it is about to end."""
        self.phase = Phase.STOPPING
        self.process.record_end_reason(reason)

    def _kill_later(self, seconds: float) -> None:
        """Kill the process unless it ends by itself within this time."""
        self.timers.set_earliest("kill", time.monotonic() + seconds, self.process.kill)

    def on_exit(self, worker: Worker) -> None:
        """Read the last frames of the process, reap it, and record its end, on which the next start depends."""
        with self.lock, self.lock.change(self):
            process = self.process
            if worker is not process.worker:
                return
            self.loans.end()
            for frame in worker.drain():
                self.on_frame(frame)
            process.reap(worker)
            self.starter.record_end(worker, is_certain=process.status.is_certain)
            has_not_served = process.was_standby and not process.has_started
            if has_not_served and is_crash(process.end_reason) and not self.is_closing:
                self._start_process(process.incarnation)  # launch one: the standby crashed before it served this actor
            else:
                self.finish_process()

    def finish_process(self) -> None:
        """Handle the end of the process, or of a launch that has failed or was withdrawn.

        1. *End the start*: no timer, launch, or deadline of the process is left, and nothing starts any more (ENDING).
        2. *Collect*: the results that the worker has completed go to their envs. The other requests of the worker are
           lost.
        3. *Detach the jobs*: those that end with the process are dropped, and the rest of the running job is known.
        4. *Decide*: the error of the exit needs that rest, and the decision needs the error. From here on,
           `last_exit_error` is the reason why episodes were lost.
        5. *Apply*: each unfinished request and job ends with the error, or waits for the next process.
        6. *Continue*: the worker is gone, so another process may start. The decision is carried out.
        """
        process = self.process
        self.phase = Phase.ENDING
        process.has_ended = True
        process.is_launching = False
        self.starter.end_start()
        self.deadline_watch.stop()

        self.tenant.collect_completed()

        self.jobs.drop_with_process()
        uncompleted = Uncompleted() if self.jobs.running is None else self.jobs.running.settle_uncompleted(process)

        process_exit = self._plan_exit(uncompleted)
        if process.has_started:
            self.last_exit_error: ActorError | None = process_exit.error
        self.log.write_exit(process_exit)

        self.tenant.handle_exit(process_exit)
        self.jobs.handle_exit(process_exit)

        process.worker = None
        self._carry_out(process_exit)

    def _plan_exit(self, uncompleted: Uncompleted) -> ProcessExit:
        """Make the error of an exit, and decide what comes next, given what the process has not completed."""
        process, job, culprit = self.process, self.jobs.running, uncompleted.culprit
        error = self.errors.process_ended(culprit, process)
        if self.config.crashes is not None and is_crash(process.end_reason) and process.pid is not None:
            get_inputs = Inputs if job is None or culprit is None else functools.partial(job.inputs, culprit)
            error.bundle = self.config.crashes.report(error, get_inputs, process.failure)

        # A closing actor first runs the jobs that were queued before the close. If such a job is a renewal, the jobs
        # behind it need the next process.
        closes = self.is_closing and not (process.end_reason is EndReason.RENEW and self.jobs.has_jobs_before_close)
        is_first = self.started_in is None and (self.config.is_on_demand or self.restart_tracker.failed_starts == 0)
        delay = None if closes else self.restart_tracker.delay_after(process, error, is_first=is_first)
        return ProcessExit(process, job, uncompleted, error, closes, delay)

    # What comes next -------------------------------------------------------------------------------------

    def proceed_soon(self) -> None:
        """Have the loop continue after a change: start jobs or a process, fail the queue, or close the actor."""
        self.runtime.loop.call_soon(functools.partial(self.run_as_change, self._proceed))

    @property
    def _needs_no_process(self) -> bool:
        """Whether the actor is closing, and needs no process: no job waits before the close, or all fail with it."""
        # In ENDING and DEAD, the jobs that wait fail with the close.
        return self.is_closing and (self.phase in (Phase.ENDING, Phase.DEAD) or not self.jobs.has_jobs_before_close)

    def _proceed(self) -> None:
        """Continue in the loop. The next action depends first on whether there is a worker, a launch, or neither."""
        phase = self.phase
        if self.process.worker is not None:
            self.jobs.dispatch()  # in LIVE only; otherwise a reply or the exit of the worker leads on
        elif self.process.is_launching:
            if (phase is not Phase.STARTING or self._needs_no_process) and self.starter.withdraw():
                self.finish_process()
        elif phase is Phase.CLOSED:
            self.jobs.fail_all(self.errors.actor_closed)
        elif self._needs_no_process:
            self._close()
        elif phase is Phase.NEW:
            self._start_process(self.process.incarnation)
        elif phase is Phase.BACKOFF and self.jobs.try_begin_renewal():
            self._start_next_process()
        elif phase is Phase.ENDING:
            # Only `abort` and `kill` lead here with a renewal. The process before it may have ended for another reason.
            self.jobs.fail_renewal(functools.partial(self.errors.not_run, reason=EndReason.ABORT))
            self._start_next_process()
        elif phase is Phase.DEAD:
            self._fail_jobs_of_dead()

    def _carry_out(self, process_exit: ProcessExit) -> None:
        """Do what was decided after an exit: close the actor, stay dead, or start the next process, now or later."""
        process, delay = process_exit.process, process_exit.delay
        if process_exit.closes:
            # If the process ended by itself, the jobs that wait fail because of that, else because of the close.
            if process.end_reason in (None, EndReason.FACTORY_RAISED):
                self.jobs.fail_all(functools.partial(self.errors.exit_during, process=process))
            self._close()
        elif delay is None:
            self.phase = Phase.DEAD
            if self.config.is_standby:
                self.log.write_end_of_standby(self.errors.restarts_exhausted(self.restart_tracker))
            self._fail_jobs_of_dead()
        elif not process.counts:
            self._start_next_process()
        # The standby waits for the delay in place of the actor, so that processes start no more often.
        elif process.has_started and (standby := self.starter.take_standby(delay)) is not None:
            self.restarts += 1
            self._start_process(process.incarnation + 1, standby)
        else:
            self._back_off(delay)
            if delay > 0:
                self.log.write(logging.WARNING, f"actor {self.name!r}: {self.restart_tracker.describe(delay)}")

    def _back_off(self, delay: float) -> None:
        """Start the next process after a delay, in seconds."""
        self.phase = Phase.BACKOFF
        self.restart_at = time.monotonic() + delay
        self.timers.set("backoff", self.restart_at, self._restart)

    def _restart(self) -> None:
        """Start the next process once the backoff is over. It is a restart, if the last one has ended."""
        if self.phase is Phase.BACKOFF:
            if self.process.has_ended:  # else another actor has taken the process of this standby
                self.restarts += 1
            self._start_next_process()

    def _fail_jobs_of_dead(self) -> None:
        """Fail the jobs of a dead actor, up to a renewal, which starts a process."""
        final = self.errors.restarts_exhausted(self.restart_tracker)
        if self.jobs.fail_all(functools.partial(self.errors.actor_dead, final=final)):
            self._start_next_process()

    def _close(self) -> None:
        """Fail all jobs that are left, and free the resources of the actor."""
        self.process.worker = None
        self.jobs.drop_with_process()  # `finish_process` has done so, unless a bug has ended it before that
        self.jobs.fail_all(functools.partial(self.errors.not_run, reason=EndReason.CLOSE))
        self.timers.cancel("check", "start", "read", "kill", "backoff", "close")
        self.tenant = NO_TENANT  # frees the memory of the vector
        self.runtime.callbacks.submit(self._release)  # which may run again
        self.phase = Phase.CLOSED  # last: the repair of a bug in this method closes the actor again

    def _release(self) -> None:
        """Leave the backend and the runtime, in a thread where that may take long."""
        self.starter.close()
        self.runtime.leave(self)
        self.closed.set()

    def repair(self, bug: BaseException | None) -> None:
        """Establish the invariant from any state; see `envactors.actor.change`.

        Args:
            bug: The error of this library that has ended the change; it closes the actor. None if the change was
                interrupted: then the process is replaced, if there is one.
        """
        reason = EndReason.INTERRUPT if bug is None else EndReason.CLOSE
        if bug is None:
            text = f"actor {self.name!r} gets another process: a change of its state was interrupted"
            error_of = functools.partial(self.errors.not_run, reason=reason)
        else:
            text = f"actor {self.name!r} is closed by an internal error of envactors; please report it"
            error_of = functools.partial(self.errors.closed_by_bug, bug=bug)
        self.log.write(logging.WARNING if bug is None else logging.ERROR, text, bug)

        self.is_closing |= bug is not None
        if self.phase not in (Phase.ASLEEP, Phase.DEAD):
            self.end_now(reason)  # from here on, the process runs nothing that the repair queues
        self.jobs.repair(error_of, fails_all=bug is not None)
        self.tenant.repair(error_of)

        if bug is not None and self.process.has_ended and self.phase is not Phase.CLOSED:
            self._close()  # the exit was handled already, perhaps by the code with the bug
        else:
            self.proceed_soon()
