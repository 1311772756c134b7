"""The life of an actor's process: how it starts and ends, and what comes next.

Its jobs are in `envactors.actor.job_queue`. What callers do, and the frames of the worker, are in
`envactors.actor.actor`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from envactors import runtime as runtimes
from envactors.actor.actor_process import START_CALL_ID, ActorProcess, ExitReport
from envactors.actor.base import ActorBase
from envactors.actor.config import ActorConfig
from envactors.actor.exits import Next, Plan, RestartTracker
from envactors.actor.job import ErrorOf, ProcessExit, Remainder
from envactors.actor.job_queue import JobQueue
from envactors.actor.loan import ChannelLoans
from envactors.actor.log import ActorLog
from envactors.actor.spinning import SpinPolicy
from envactors.actor.states import LIVE, EndReason, Phase, is_crash
from envactors.actor.tenant import NO_TENANT, Tenant
from envactors.actor.timers import DeadlineWatch, Timers
from envactors.backends.base import Use, Worker
from envactors.crashes.inputs import Inputs
from envactors.errors import ActorError
from envactors.mailbox.messages import Adopt, Failure, Frame, Kind
from envactors.mailbox.pickling import dumps, load_plain, loads, unpack_failure

# How long a worker may take to write its stacks before it is killed for a deadline, in seconds.
_STACKS_GRACE = 0.2
# How long unpickling an exception may delay the end of the process that raised it, in seconds.
_READ_PATIENCE = 10.0
# How long a standby may take to switch to another actor, in seconds. It only records its new identity.
_ADOPTION_GRACE = 1.0


class Supervisor(ActorBase):
    """Starts the processes of one actor, one after another, and handles their exits.

    Between two changes, something is under way that leads out of each `phase`:

    - NEW: the loop is about to call `_proceed`.
    - STARTING: a launch, the worker, or, before the launch, the wait for the certain end of the last worker.
    - LIVE: the worker.
    - STOPPING: the worker, or a launch that has missed the start deadline.
    - ENDING: the worker or a launch; without either, the loop is about to call `_proceed`.
    - BACKOFF: a timer.
    - ASLEEP, DEAD: nothing, until a caller wakes, renews, kills, or closes the actor.
    - CLOSED: nothing; this phase is final.

    Args:
        config: The settings of the actor.

    Attributes:
        phase: The phase of the current process.
        is_closing: Whether the actor accepts no more jobs.
        jobs: The jobs that wait for the process, and the one that it runs.
        tenant: Keeps track of the envs in the process; `NO_TENANT` for a lone actor.
        timers: The timers of the actor.
        deadline_watch: Checks whether the running job is late or slow.
        loans: Lends the channel of the process to waiting threads.
        spin: Decides whether callers and the worker spin before they sleep.
        log: The log of the actor.
        restart_tracker: Decides about restarts.
        restarts: How many there were.
        restart_at: When the last backoff ends (`time.monotonic`).
        started_in: How long the last start took, in seconds; None before the first.
    """

    process: ActorProcess
    last_exit_error: ActorError | None

    def __init__(self, config: ActorConfig) -> None:
        super().__init__(config)
        self.phase: Phase = Phase.NEW
        self.is_closing: bool = False
        self.jobs: JobQueue = JobQueue(self)
        self.tenant: Tenant = NO_TENANT
        self.timers: Timers = Timers(lambda: self.runtime.loop, self.make_change)
        self.deadline_watch: DeadlineWatch = DeadlineWatch(config.deadlines, self.timers, self.check_deadlines)
        self.loans: ChannelLoans = ChannelLoans(lambda: self.runtime.loop, self.lock)
        self.spin: SpinPolicy = SpinPolicy(config.backend.traits.may_spin)
        self.log: ActorLog = ActorLog(self)
        self.restart_tracker: RestartTracker = RestartTracker(config.restart)
        self.restarts: int = 0
        self.restart_at: float = 0.0
        self.started_in: float | None = None
        self._use: Use | None = None
        # The last worker, if it counts as ended while its code may still be running, as on a node that is unreachable.
        self._unconfirmed: Worker | None = None

    @abstractmethod
    def on_frames(self, worker: Worker) -> None:
        """Receive and handle frames."""

    @abstractmethod
    def on_frame(self, frame: Frame) -> None:
        """Handle a frame."""

    @abstractmethod
    def check_deadlines(self) -> None:
        """Report the running job if it is slow, and end the process if it is late."""

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
                if self.phase is Phase.DEAD:
                    self.process = ActorProcess(self.process.incarnation + 1)
                self.phase = Phase.NEW
                self.proceed_soon()

    def make_change(self, event: Callable[..., object], *args: object) -> None:
        with self.lock, self.lock.change(self):
            event(*args)

    # Messages --------------------------------------------------------------------------------------------

    def send(self, kind: Kind, call_id: int, payload: Any) -> None:
        """Send a message to the worker."""
        worker = self.process.worker
        assert worker is not None, "jobs start in a live process"
        worker.send(Frame(kind, self.process.incarnation, call_id, payload), self.spin.start(time.monotonic()))

    def ask_to_close(self, call_id: int, reason: EndReason, *, kill_in: float | None) -> None:
        """Ask the worker to close its envs and to exit; kill it after ``kill_in`` seconds, or never if that is None."""
        self._stop_process(reason, kill_in)
        self.send(Kind.CLOSE, call_id, dumps(()))

    # Starting --------------------------------------------------------------------------------------------

    def _start_next_process(self, standby: Worker | None = None) -> None:
        """Start the next process: that of the given standby, else that of any ready standby, else a new one."""
        self._start_process(ActorProcess(self.process.incarnation + 1), standby or self._take_standby(0.0))

    def _start_process(self, process: ActorProcess, standby: Worker | None = None) -> None:
        """Start a process, or take that of a standby.

        A new process waits until the last one has certainly ended.
        """
        self.timers.cancel("start", "kill", "backoff")  # timers of the last process
        self.phase = Phase.STARTING
        self.process = process
        process.launched = time.monotonic()
        process.awaits_worker = standby is None
        if standby is not None:
            self._adopt(standby)
        elif self._unconfirmed is None:
            self._submit_launch()

    def on_certain_end(self, worker: Worker) -> None:
        """Launch the next process if it has waited for the certain end of the last one."""
        with self.lock, self.lock.change(self):
            if worker is self._unconfirmed:
                self._unconfirmed = None
                if self.process.awaits_worker:
                    self._submit_launch()

    def _submit_launch(self) -> None:
        self.runtime.launcher.submit(self._launch, self.config.backend.traits.max_starting)

    def _launch(self) -> None:
        """Launch a worker, in the launcher's thread."""
        config, process = self.config, self.process
        with self.lock, self.lock.change(self):
            is_wanted = self.phase is Phase.STARTING
            process.launched = time.monotonic()
            if is_wanted and config.deadlines.start is not None:
                self._watch_start(config.deadlines.start)
        worker: Worker | None = None
        refusal: BaseException | None = None
        if is_wanted and self._use is not None:
            try:
                worker = self._use.start(config.name, config.memory, config.env_count)
            except Exception as error:
                refusal = error
        self.make_change(self._on_launched, process, worker, refusal)

    def _on_launched(self, process: ActorProcess, worker: Worker | None, refusal: BaseException | None) -> None:
        """Send the worker its first message, kill it if nobody needs it now, or handle the failure of its launch."""
        process.awaits_worker = False
        if worker is not None:
            try:
                worker.report_to(self)
            except Exception as error:
                worker, refusal = None, error
        process.worker = worker
        if worker is None:
            self._after_exit(process.report_without_worker(refusal))
        elif self.phase is Phase.STARTING:
            # The key is for managers of `multiprocessing`, which workers on other machines cannot reach.
            key = None if self.config.backend.traits.is_remote else bytes(multiprocessing.current_process().authkey)
            start = self.config.start._replace(attach=self.tenant.attach, authkey=key)
            worker.send(Frame(Kind.START, process.incarnation, START_CALL_ID, dumps(tuple(start))))
        else:
            worker.kill()  # the actor has ended the process during its launch

    def _take_standby(self, delay: float) -> Worker | None:
        """Take the process of the first ready standby; that standby starts another one after a delay, in seconds.

        Return None if none is ready, or while code of the last process may still be running.
        """
        standbys = self.config.standbys if self._unconfirmed is None else ()
        return next(filter(None, (give_process(delay) for give_process in standbys)), None)

    def give_process(self, delay: float) -> Worker | None:
        """Give the process of this standby away if it is ready, and start another one after a delay, in seconds.

        The taker has the same lock, and calls this within its own change.
        """
        worker = self.process.worker
        if not self.is_idle or worker is None or worker.at_end:
            return None
        self.lock.include(self)
        self.deadline_watch.stop()
        self.process.worker = None
        self._back_off(delay)
        return worker

    def _adopt(self, worker: Worker) -> None:
        """Take over the process of a standby."""
        config, process = self.config, self.process
        process.was_standby = True
        process.worker = worker
        worker.report_to(self)
        self._watch_start(_ADOPTION_GRACE)
        message = Adopt(config.name, config.first_index, config.env_count, self.tenant.attach)
        worker.send(Frame(Kind.ADOPT, process.incarnation, START_CALL_ID, dumps(tuple(message))))

    def _watch_start(self, seconds: float) -> None:
        """End the process if it does not start in time. The time in which it waits on its node does not count."""
        worker = self.process.worker
        due = max(self.process.launched, 0.0 if worker is None else worker.launched) + seconds
        if due > time.monotonic():
            self.timers.set("start", due, functools.partial(self._watch_start, seconds))
        elif self.phase is Phase.STARTING:
            self.kill_after_stacks()

    def on_start_reply(self, frame: Frame) -> None:
        """Handle the reply to the first message, or the news before it that another env was made."""
        process = self.process
        if frame.kind == Kind.ENV_MADE:
            process.envs_made = load_plain(frame.payload)
        elif frame.kind == Kind.FAILED:
            process.failure = Failure(*loads(frame.payload))
            self._kill_once_read(functools.partial(unpack_failure, process.failure))
        else:
            self._on_started()

    def _on_started(self) -> None:
        process = self.process
        self.timers.cancel("start")
        self.runtime.launcher.finish(self._launch)
        self.phase = LIVE
        process.has_started = True
        self.started_in = time.monotonic() - process.launched
        self.log.write_start(self.started_in)
        is_renewal = self.jobs.end_renewal(process.incarnation)
        self.jobs.start_in_process(self.tenant.on_started(process, is_renewal=is_renewal))

    # Ending ----------------------------------------------------------------------------------------------

    def discard(self, incarnation: int, make_error: Callable[[], ActorError]) -> None:
        if incarnation == self.process.incarnation and self.phase is LIVE:
            self.phase = Phase.ENDING  # so it gets no more requests until it is killed
            self.process.record_end_reason(EndReason.DISCARD)
            self._kill_once_read(make_error)

    def kill_and_proceed(self, reason: EndReason) -> None:
        """Kill the process. Its exit leads on; without a worker, `_proceed` does, which also withdraws a launch."""
        if self.phase is Phase.CLOSED:
            return
        self.phase = Phase.ENDING
        self.process.record_end_reason(reason)
        self.process.kill()
        self.proceed_soon()
        if reason is EndReason.CLOSE and not self.config.backend.traits.can_kill:
            self.runtime.loop.call_soon(functools.partial(self.make_change, self._leave_running))

    def kill_after_stacks(self) -> None:
        """Ask a late worker for its stacks, and kill it once it has had time to write them."""
        self.process.request_stacks()
        self._stop_process(EndReason.TIMEOUT, _STACKS_GRACE)

    def _stop_process(self, reason: EndReason, kill_in: float | None) -> None:
        """Have the process get no more requests, and kill it unless it ends within this time; None for no limit."""
        self.phase = Phase.STOPPING
        self.process.record_end_reason(reason)
        if kill_in is not None:
            self.kill_in(kill_in)

    def kill_in(self, seconds: float) -> None:
        """Kill the process unless it ends by itself within this time."""
        self.timers.set_earliest("kill", time.monotonic() + seconds, self.process.kill)

    def _kill_once_read(self, read_cause: Callable[[], BaseException | None]) -> None:
        """Kill the process once the exception of its factory or of an env was read, or if reading takes too long.

        Unpickling runs code of users, so a callback thread does it.
        """
        process = self.process
        self.kill_in(_READ_PATIENCE)
        self.runtime.callbacks.submit(lambda: self.make_change(self._on_cause, process, read_cause()))

    def _on_cause(self, process: ActorProcess, cause: BaseException | None) -> None:
        process.cause = cause
        if process is self.process and self.phase in (Phase.STARTING, Phase.ENDING):
            self.phase = Phase.ENDING
            process.kill()

    def on_exit(self, worker: Worker) -> None:
        """Handle the exit of the process."""
        with self.lock, self.lock.change(self):
            process = self.process
            if worker is not process.worker:
                return
            self.loans.end()
            for frame in worker.drain():
                self.on_frame(frame)
            report = process.reap(worker)
            self._unconfirmed = None if report.status.is_certain else worker
            if process.was_standby and not process.has_started and is_crash(report.reason) and not self.is_closing:
                # Not a crash of this actor, which the standby has not served yet: launch a process instead.
                self._start_process(ActorProcess(process.incarnation))
            else:
                self._after_exit(report)

    def _leave_running(self) -> None:
        """Close the actor without waiting for its worker, which may hang, and which the backend cannot kill."""
        worker = self.process.worker
        if worker is not None and self.phase is Phase.ENDING:
            self.loans.end()
            self._after_exit(self.process.reap(worker))

    def _after_exit(self, report: ExitReport) -> None:
        """Handle the exit of the process, or a launch that has failed or was withdrawn."""
        process = self.process
        self.phase = Phase.ENDING
        process.report = report
        process.awaits_worker = False
        self.runtime.launcher.finish(self._launch)
        self.deadline_watch.stop()
        # 1. Collect the results that the process has completed.
        self.tenant.collect_completed()
        self.jobs.detach_process()
        # 2. Describe the exit, and decide what comes next.
        ended = self._judge(report)
        if process.has_started:
            self.last_exit_error = ended.error
        self.log.write_exit(ended)
        # 3. End or repeat what it has lost.
        self.tenant.on_exit(ended)
        self.jobs.on_exit(ended)
        # 4. Continue.
        process.worker = None
        self._carry_out(ended)

    def _judge(self, report: ExitReport) -> ProcessExit:
        """Find out what the ended process was running, make the error, and decide what comes next."""
        process, job, crashes = self.process, self.jobs.running, self.config.crashes
        remainder = Remainder() if job is None else job.remainder(process)
        culprit = remainder.culprit
        error = self.errors.exit_error(culprit, process, report)
        if crashes is not None and is_crash(report.reason) and report.pid is not None:
            find_inputs = Inputs if job is None or culprit is None else functools.partial(job.inputs, culprit)
            error.bundle = crashes.report(error, find_inputs, process.failure)
        # An actor that is closed in the middle of a renewal runs the calls behind that in the next process.
        closes = self.is_closing and not (report.reason is EndReason.RENEW and self.jobs.has_jobs_before_close)
        is_first = process.incarnation == 0 or self.config.is_on_demand
        plan = Plan(Next.CLOSE) if closes else self.restart_tracker.plan(process, error, is_first=is_first)
        return ProcessExit(process, report, job, remainder, error, plan)

    # What comes next -------------------------------------------------------------------------------------

    def proceed_soon(self) -> None:
        """Have the loop continue after a change: start jobs or a process, fail the queue, or close the actor."""
        self.runtime.loop.call_soon(functools.partial(self.make_change, self._proceed))

    def _proceed(self) -> None:
        """Continue in the loop: start jobs or a process, withdraw a launch, fail jobs, or close the actor."""
        process, phase = self.process, self.phase
        is_needed = not self.is_closing or self.jobs.has_jobs_before_close
        if process.worker is not None:
            self.jobs.dispatch()  # starts nothing if the process is ending: `on_exit` continues
        elif process.awaits_worker:
            is_wanted = is_needed and phase is Phase.STARTING
            if not is_wanted and (self._unconfirmed is not None or self.runtime.launcher.withdraw(self._launch)):
                self._after_exit(process.report_without_worker())
        elif phase is Phase.CLOSED:
            self.jobs.fail_all(self.errors.closed)
        elif phase is Phase.DEAD and not self.is_closing:
            self._fail_jobs_of_dead()
        elif phase is Phase.NEW and is_needed:
            self._start_process(process)
        elif phase in (Phase.ENDING, Phase.DEAD) or not is_needed:
            reason = EndReason.CLOSE if self.is_closing else process.end_reason
            error_of = functools.partial(self.errors.ended_because, reason=reason)
            self.jobs.fail_renewal(error_of)
            if self.is_closing:
                self._close(error_of)
            else:
                self._start_next_process()

    def _carry_out(self, ended: ProcessExit) -> None:
        """Do what the plan of an exit says: start the next process, now or later, stay dead, or close the actor."""
        chosen, delay = ended.plan
        if chosen is Next.START:
            self._start_next_process()
        elif chosen is Next.RESTART:
            # The standby waits for the delay in place of the actor, so that processes start no more often.
            standby = self._take_standby(delay) if ended.process.has_started else None
            if standby is not None:
                self.restarts += 1
                self._start_next_process(standby)
            else:
                self._back_off(delay)
                if delay > 0:
                    self.log.write(logging.WARNING, f"actor {self.name!r}: {self.restart_tracker.describe(delay)}")
        elif chosen is Next.DIE:
            self.phase = Phase.DEAD
            if self.config.is_standby:
                self.log.write_end_of_standby(self.errors.exhausted(self.restart_tracker))
            if not self._fail_jobs_of_dead():
                self.jobs.fail_shared()
        else:
            report = ended.report if ended.reason is None else ended.report._replace(reason=EndReason.CLOSE)
            self._close(functools.partial(self.errors.ended, report=report))

    def _back_off(self, delay: float) -> None:
        """Start the next process after a delay, in seconds."""
        self.phase = Phase.BACKOFF
        self.restart_at = time.monotonic() + delay
        self.timers.set("backoff", self.restart_at, self._restart)

    def _restart(self) -> None:
        """Start the next process, and count it as a restart, unless the backoff was ended by something else."""
        if self.phase is Phase.BACKOFF:
            self.restarts += 1
            self._start_next_process()

    def _fail_jobs_of_dead(self) -> bool:
        """Fail the jobs of a dead actor, up to a renewal, which starts a process; return whether there is one."""
        error = self.errors.exhausted(self.restart_tracker)
        is_renewed = self.jobs.fail_until_renewal(functools.partial(self.errors.after_last, final=error))
        if is_renewed:
            self._start_next_process()
        return is_renewed

    def _close(self, error_of: ErrorOf) -> None:
        """Fail all jobs that are left, and free the resources of the actor."""
        self.phase = Phase.CLOSED
        self.process.worker = None
        self.jobs.fail_all(error_of)
        self.timers.cancel()
        self.tenant = NO_TENANT  # frees the memory of the vector
        self.runtime.callbacks.submit(self._release)

    def _release(self) -> None:
        """Free the backend, which may take long, and leave the runtime."""
        if self._use is not None:
            with contextlib.suppress(OSError):
                self._use.close()
        self.runtime.leave(self)
        self.closed.open()

    def repair(self, bug: BaseException | None) -> None:
        """Establish the invariant from any state; see `envactors.actor.change`.

        Args:
            bug: The error of this library that has ended the change; it closes the actor. None if the change was
                interrupted: then the process is replaced, but a dead actor stays dead.
        """
        reason = EndReason.INTERRUPT if bug is None else EndReason.CLOSE
        if bug is None:
            text = f"actor {self.name!r} gets another process: a change of its state was interrupted"
            error_of = functools.partial(self.errors.ended_because, reason=reason)
        else:
            text = f"actor {self.name!r} is closed by an internal error of envactors; please report it"
            error_of = functools.partial(self.errors.broken, bug=bug)
        self.log.write(logging.WARNING if bug is None else logging.ERROR, text, bug)
        self.is_closing |= bug is not None
        if self.phase not in (Phase.DEAD, Phase.CLOSED):
            self.phase = Phase.ENDING  # the process runs nothing more, also of what the lines below queue
        self.jobs.repair(error_of, fails_all=bug is not None)
        self.tenant.repair(error_of)
        if self.phase is Phase.DEAD and bug is None:
            self.proceed_soon()
        elif bug is not None and self.process.report is not None and self.phase is not Phase.CLOSED:
            self._close(error_of)  # the exit was handled already, perhaps by the code with the bug
        else:
            self.kill_and_proceed(reason)
