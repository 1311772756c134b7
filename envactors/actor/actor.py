"""The parent's half of one actor: its phase, its queue of jobs, the running job, and its process.

Every method is an event: callers submit, cancel, and close; the loop reports frames, exits, and timers. Each event is a
change under the lock, as `envactors.actor.change` describes. Threads of callers send jobs to an idle worker, and kill
the process; processes are started, and their exits are handled, by the threads of this library alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import multiprocessing
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from typing import Any

from envactors import runtime as runtimes
from envactors.actor import recording, slow_calls
from envactors.actor.base import ActorBase
from envactors.actor.change import ChangeLock
from envactors.actor.config import ActorConfig
from envactors.actor.exits import Exit, Next, Plan, RestartTracker, Step, decide_next
from envactors.actor.future import ActorFuture
from envactors.actor.incarnation import START_CALL_ID, ExitReport, Incarnation
from envactors.actor.job import Close, ErrorOf, Job, Renewal, SharedQueue
from envactors.actor.loan import ChannelLoan
from envactors.actor.permits import Permits
from envactors.actor.spinning import SpinPolicy
from envactors.actor.states import ActorState, ActorStats, EndReason, Phase
from envactors.actor.tenant import NO_TENANT, Tenant
from envactors.actor.timers import DeadlineWatch, Judgment, Timers
from envactors.backends.base import ExitStatus, LendingWorker, Use, Worker
from envactors.errors import ActorError
from envactors.loop import Loop
from envactors.mailbox.control_page import FINISHED, ControlPage
from envactors.mailbox.messages import Adopt, Failure, Frame, Kind
from envactors.mailbox.pickling import dumps, load_plain, loads, unpack_failure
from envactors.system.polling import remaining

# Its messages also reach users as errors and results, so nothing is printed if they have not set up logging.
_log = logging.getLogger("envactors.actors")
_log.addHandler(logging.NullHandler())
# Its messages reach users in no other way.
_notices = logging.getLogger("envactors")

# How long a worker that has closed its envs, or its channel, may take to exit, in seconds.
_EXIT_GRACE = 1.0
# How long a worker may take to write its stacks before it is killed for a deadline, in seconds.
_STACKS_GRACE = 0.2
# How long a standby may take to begin its work for another actor, in seconds. It only records whose it is now.
_ADOPTION_GRACE = 1.0
# How long a killed worker may take to exit, in seconds.
_KILL_GRACE = 0.9
# Before Python 3.12 looking up a member of an enum takes as long as a function call.
_LIVE, _FAILED, _REPLIES = Phase.LIVE, Kind.FAILED, (Kind.RESULT, Kind.FAILED)


class Actor(ActorBase):
    """The parent's half of one actor.

    Args:
        config: The settings of the actor.

    Attributes:
        lock: Its lock, which all actors of a vector share.
        tenant: Lives in its processes.
        phase: What it is doing with its process.
        queue: The jobs that wait, the next one first.
        shared: The jobs that wait for any actor of a pool; None outside of pools.
        running: The job that the worker runs.
        renewal: The renewal that ends the process, or waits for the next one.
        unfinished: All jobs that were accepted and have not ended. Each is queued, the running one, or the renewal.
        is_closing: Whether it accepts no more jobs.
        timers: Its timers.
        deadline_watch: Checks whether the running job is late.
        permits: The permits that steps and resets need; None if any number of actors may run.
        spin: Decides who spins.
        completed, replays: How many requests have returned or raised, and how many of them were replays.
        longest_replay: How long the longest replay took, in seconds.
    """

    incarnation: Incarnation
    last_crash: ActorError | None

    def __init__(self, config: ActorConfig) -> None:
        super().__init__(config)
        self.lock: ChangeLock = config.lock
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
        self._failed = self._restarts = self._stale = 0
        self._started_in: float | None = None
        self._restart_tracker = RestartTracker(config.restart)
        self.timers: Timers = Timers(self._find_loop, self.run)
        self.deadline_watch: DeadlineWatch = DeadlineWatch(config.deadlines, self.timers, self._check_deadlines)
        self.permits: Permits | None = config.permits
        self.spin: SpinPolicy = SpinPolicy(config.backend.traits.may_spin)
        self._loan = ChannelLoan(self._find_loop, self.lock)
        # The last worker, as long as its code may still be running although it counts as ended.
        self._uncertain: Worker | None = None
        self._use: Use | None = None  # its use of the backend

    def begin(self) -> None:
        """Join the runtime, whose loop then starts the first process.

        Its handle exists already: if an exception interrupts this, `abandon` closes the actor, however far it has come.

        Raises:
            Exception: The backend cannot be used.
        """
        runtimes.join(self)
        self._use = self.config.backend.use(self.config.env_vars, self.runtime)
        self._use.open()
        self.proceed_soon()

    def _find_loop(self) -> Loop:
        return self.runtime.loop

    # State, whose reading changes nothing ----------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        worker = self.incarnation.worker
        return None if worker is None else worker.pid

    @property
    def node(self) -> str | None:
        """The node that runs the process; None on this machine."""
        worker = self.incarnation.worker
        return None if worker is None or worker.node is None else worker.node.name

    @property
    def page(self) -> ControlPage | None:
        """The control page of the process; None while there is no process."""
        worker = self.incarnation.worker
        return None if worker is None else worker.page

    @property
    def state(self) -> ActorState:
        """The state of the actor."""
        with self.lock:
            phase, incarnation = self.phase, self.incarnation
            if phase is Phase.CLOSED or (self.is_closing and phase in (Phase.ENDING, Phase.BACKOFF, Phase.DEAD)):
                return ActorState.CLOSED
            if phase is Phase.DEAD:
                return ActorState.DEAD
            if phase is Phase.NEW or (phase is Phase.STARTING and incarnation.index == 0):
                return ActorState.STARTING
            if phase in (Phase.STARTING, Phase.BACKOFF) or incarnation.end_reason is EndReason.RENEW:
                return ActorState.RENEWING
            return ActorState.IDLE if self._current_step() is None else ActorState.BUSY

    @property
    def is_usable(self) -> bool:
        """Whether it can run calls, now or once a process has started. Takes no lock."""
        return not self.is_closing and self.phase not in (Phase.DEAD, Phase.CLOSED)

    @property
    def is_idle(self) -> bool:
        """Whether its process has nothing to do, once it has started. Takes no lock."""
        has_process = self.phase in (_LIVE, Phase.STARTING, Phase.NEW)
        return has_process and self.running is None and not self.queue and not self.is_closing

    def stats(self) -> ActorStats:
        """Return counts over the actor's lifetime. The worker notices nothing."""
        worker = self.incarnation.worker
        rss = 0 if worker is None else worker.resident_memory()  # may take long, so not under the lock
        with self.lock:
            step = self._current_step()
            return ActorStats(
                completed=self.completed,
                failed=self._failed,
                restarts=self._restarts,
                stale=self._stale,
                queued=len(self.queue),
                last_failure=self._restart_tracker.last,
                state=self.state,
                pid=self.pid,
                node=self.node,
                incarnation=self.incarnation.index,
                method=None if step is None else step.method,
                elapsed=0.0 if step is None else time.monotonic() - step.started,
                rss=rss,
                started_in=self._started_in,
                replays=self.replays,
                longest_replay=self.longest_replay,
            )

    def stacks(self, timeout: float) -> str:
        """Return the stacks of the worker's threads, or a line that says why there are none."""
        with self.lock:
            worker = self.incarnation.worker
            stacks = None if worker is None or worker.at_end else worker.ask_stacks()
        if stacks is None:
            return f"actor {self.name!r} has no process now: it is {self.state.value}\n"
        return stacks.wait(timeout)

    def stderr_tail(self) -> str:
        """Return the last lines that the process has printed to stderr; empty if there is no process."""
        worker = self.incarnation.worker
        return "" if worker is None else worker.stderr_tail

    def _current_step(self) -> Step | None:
        job = self.running or self.renewal
        return None if job is None else job.step()

    # Events of callers -----------------------------------------------------------------------------------

    def accept(self, job: Job) -> None:
        """Send a job, or queue it.

        Raises:
            ActorClosedError: The actor was closed.
        """
        with self.lock, self.lock.change(self):
            is_refused = self.is_closing
            if not is_refused:
                self.enqueue(job)
        if is_refused:
            job.actor = self
            step = job.step() or Step("", self.config.first_index)
            raise self.errors.closed(step, self.incarnation.index)

    def renew(self, future: ActorFuture | None) -> None:
        """Queue the replacement of the process; the future gets the new incarnation."""
        self.check_owner()
        self.accept(Renewal(self.config.first_index, future))

    def cancel(self, future: ActorFuture) -> bool:
        """Cancel a queued call; return whether it is canceled."""
        self.check_owner()
        with self.lock, self.lock.change(self):
            if not future.running() and self._withdraw(future) is not None:
                future.set_canceled()
        return future.cancelled()

    def abort(self, future: ActorFuture) -> bool:
        """Cancel a queued call, or end a running one by replacing its process.

        Raises:
            ActorError: The call is running, and the backend cannot kill.
        """
        if self.cancel(future):
            return True
        step: Step | None = None
        with self.lock, self.lock.change(self):
            self._process_results()
            jobs = [job for job in (self.running, self.renewal) if job is not None]
            is_running = any(job.future is future for job in jobs) or self.tenant.is_running(future)
            is_refused = is_running and not self.config.backend.traits.can_kill
            if is_running and not is_refused:
                self._end(EndReason.ABORT)
            elif not is_running and not future.done():
                step = self._withdraw(future)  # it waits to run again
            if step is not None:
                report = ExitReport(reason=EndReason.ABORT)
                future.set_error(self.errors.exit(report, self.incarnation.index, step))
        if is_refused:
            raise self.errors.unsupported("abort a running call", self.incarnation.index)
        return is_running or step is not None

    def kill(self, restart: bool) -> None:
        """Kill the process; without ``restart`` the actor is closed.

        Raises:
            ActorError: A call is running, and the backend cannot kill.
        """
        self.check_owner()
        with self.lock, self.lock.change(self):
            is_refused = not self.config.backend.traits.can_kill and self._current_step() is not None
            if not restart and not is_refused:
                self.is_closing = True
                self._end(EndReason.CLOSE)
            elif not self.is_closing and not is_refused:
                self._end(EndReason.ABORT)
        if is_refused:
            raise self.errors.unsupported("kill it in the middle of a call", self.incarnation.index)

    def begin_close(self, timeout: float | None, began: float | None = None) -> None:
        """Let queued jobs run and the envs close, then end the process.

        Args:
            timeout: When the process is killed, in seconds; None for the close deadline.
            began: When that time began (`time.monotonic`), the same for actors that are closed together: their jobs
                may wait for one another. None for now.
        """
        began = time.monotonic() if began is None else began
        if self.lock.is_changing_below():
            self.runtime.loop.call_soon(functools.partial(self.begin_close, timeout, began))
            return
        with self.lock, self.lock.change(self):
            if not self.is_closing:
                self.is_closing = True
                close = Close(self.config.first_index)
                self.unfinished[close] = None
                self.queue.append(close)
            if self.config.is_standby and self.phase in (Phase.NEW, Phase.STARTING):
                self._end(EndReason.CLOSE)  # nobody waits for its process
            patience = self._close_patience(timeout)
            if patience is not None and self.phase is not Phase.CLOSED:
                end = functools.partial(self._end, EndReason.CLOSE)
                self.timers.set_earliest("close", began + patience, end)
            self.proceed_soon()

    def wait_closed(self, timeout: float | None, began: float | None = None) -> None:
        """Wait until nothing of the actor is left; return at once where the loop, which ends it, waits for this.

        For the arguments see `begin_close`.
        """
        if self.runtime.loop.is_current_thread() or self.lock.is_held_here():
            return
        patience = self._close_patience(timeout)
        began = time.monotonic() if began is None else began
        self.closed.wait(remaining(None if patience is None else began + patience + _KILL_GRACE))
        self.runtime.join_if_ended()

    def abandon(self) -> None:
        """Close the actor without waiting. Takes no lock, so finalizers may call it."""
        runtime = runtimes.runtime_of(self)
        if runtime is not None:
            runtime.loop.call_soon(lambda: self.begin_close(None))

    def read_reply(self, future: ActorFuture, deadline: float | None) -> None:
        """Read the reply to the running call in the thread that waits for it; see `ChannelLoan`.

        Args:
            future: The future of the call. If that is not running, do nothing.
            deadline: When to stop (`time.monotonic`); None for no limit.

        Raises:
            RuntimeError: The thread runs code of an env of this actor, and would wait without a limit.
        """
        self.lock.reset_if_interrupted()
        if self.runs_this_thread:
            self._check_not_within(future, deadline)
            return
        held = allocate_lock()
        with held:
            try:
                with self.lock:
                    worker = self._find_lender(future)
                    if worker is None:
                        return
                    self._loan.begin(held, worker)
                spins = self.spin.caller_spins
                while not future.done() and worker.wait_for_reply(deadline, spins=spins) and self._loan.is_held(held):
                    self.on_frames(worker)
                    spins = False
            finally:
                if self._loan.is_held(held):
                    with self.lock:
                        self._loan.end()

    @property
    def runs_this_thread(self) -> bool:
        """Whether the calling thread runs code of an env of this actor."""
        worker = self.incarnation.worker
        return worker is not None and worker.is_current_thread()

    def _check_not_within(self, future: ActorFuture, deadline: float | None) -> None:
        """Raise if an env of this actor would wait, without a limit, for a call that can only run after it."""
        self.run(self.tenant.collect_completed)  # env code may wait for an env that has stepped before
        if deadline is None and not future.done():
            raise self.errors.within_envs()

    def _find_lender(self, future: ActorFuture) -> LendingWorker | None:
        """Return the worker whose channel the thread that waits for a future may read; None if it may not."""
        worker = self.incarnation.worker
        if self._loan.is_mine and worker is not None:
            # A signal handler waits in the thread that reads. The loop reads from now on, also for the outer wait.
            self._loan.end()
        is_running = self.phase is _LIVE and self.running is not None and self.running.future is future
        if not is_running or worker is None or self._loan.is_active:
            return None
        return worker.as_lender()

    def _withdraw(self, future: ActorFuture) -> Step | None:
        """Take the request of a future out of the queue; return its step, or None if it is not there."""
        job = next((job for job in self.queue if job.future is future), None)
        if job is None:
            return self.tenant.withdraw(future)
        self.queue.remove(job)
        self.unfinished.pop(job, None)
        return job.step()

    def _close_patience(self, timeout: float | None) -> float | None:
        return self.config.deadlines.close if timeout is None else timeout

    # For jobs and tenants, under the lock ----------------------------------------------------------------

    def enqueue(self, job: Job, *, first: bool = False) -> None:
        """Queue a job, and start it if the worker is free.

        Args:
            job: The job.
            first: Whether it runs ahead of all others but the replays that prepare the process.
        """
        job.actor = self
        job.call_id, job.age = 0, 0 if first or self.permits is None else self.permits.next_age()
        self.unfinished[job] = None
        if first:
            replays = sum(1 for _ in itertools.takewhile(lambda queued: queued.is_of_process, self.queue))
            self.queue.insert(replays, job)
        else:
            self.queue.append(job)
        if self.phase is _LIVE:
            self.dispatch()
        elif self.phase in (Phase.DEAD, Phase.CLOSED):
            self.proceed_soon()

    def dispatch(self) -> None:
        """Start queued jobs that the worker can accept."""
        waits_for_permit = self._start_jobs()
        is_limited = self.running is not None and self.running.needs_permit
        if self.permits is not None and not waits_for_permit and not is_limited:
            self.permits.give_back(self)

    def _start_jobs(self) -> bool:
        """Start queued jobs that the worker can accept; return whether the next one waits for a permit."""
        while self.queue and self.phase is _LIVE:
            job, running = self.queue[0], self.running
            # With permits, a job of another actor may be older than the next one of this actor.
            if running is not None and (self.permits is not None or not job.can_join(running)):
                if not running.is_finished():
                    running.call_when_finished()
                    return False
                if self.running is running:
                    self.running = None
                continue  # that may have queued another job, or started one
            if self.permits is not None and job.needs_permit and not self.permits.may_start(self, job.age):
                return True
            self.queue.popleft()
            job.call_id, job.started, self.running = self.lock.next_call_id(), time.monotonic(), job
            if isinstance(job, Close):
                self._ask_to_close(job)
            elif not job.start():
                self.unfinished.pop(job, None)
                if self.running is job:
                    self.running = None
        return False

    def end_job(self, job: Job) -> None:
        """Forget a job that has ended without a reply, and start the next one."""
        self.unfinished.pop(job, None)
        if self.running is job:
            self.running = None
        self.dispatch()

    def can_post(self, rows: Job) -> bool:
        """Return whether rows may be posted now: nothing runs but earlier rows, and nothing waits."""
        is_free = self.running is None or (self.running is rows and self.permits is None)
        if not is_free or self.phase is not _LIVE or self.queue or self.is_closing:
            return False
        return self.permits is None or self.permits.may_start(self, self.permits.next_age())

    def send(self, kind: Kind, call_id: int, payload: Any) -> None:
        """Send a message to the worker."""
        worker = self.incarnation.worker
        assert worker is not None, "jobs start in a live process"
        worker.send(Frame(kind, self.incarnation.index, call_id, payload), self.spin.start(time.monotonic()))

    def _ask_to_close(self, job: Close) -> None:
        """Ask the worker to close its envs and to exit."""
        if isinstance(job, Renewal):
            self._begin_renewal(job)
            self._end_process(EndReason.RENEW, kill_in=self.config.deadlines.close)
        else:
            self._end_process(EndReason.CLOSE, kill_in=None)
        self.send(Kind.CLOSE, job.call_id, dumps(()))

    def _begin_renewal(self, renewal: Renewal) -> None:
        """Remember a renewal until the next process has started."""
        self.renewal = renewal
        if renewal.future is not None:
            renewal.future.set_running()

    def _end_process(self, reason: EndReason | None, *, kill_in: float | None = 0.0) -> None:
        """Send no more requests to the process, and kill it unless it ends by itself in time.

        Args:
            reason: Why it ends; None if it has failed to start.
            kill_in: How long it may take to end, in seconds; None for no limit.
        """
        if reason is not None:
            self.incarnation.blame(reason)
        self.phase = Phase.ENDING if kill_in == 0.0 else Phase.STOPPING
        if kill_in == 0.0:
            self.incarnation.kill()
        elif kill_in is not None:
            self.timers.set_earliest("kill", time.monotonic() + kill_in, self.incarnation.kill)

    def discard(self, incarnation: int, make_error: Callable[[], ActorError]) -> None:
        """Replace a process whose envs are not fit for use any more; this counts as a restart.

        Args:
            incarnation: The process; another one is left alone.
            make_error: Returns the error that says which env raised there. Unpickling the exception of that env may run
                code of users, so another thread calls it, and then kills the process.
        """
        if incarnation == self.incarnation.index and self.phase is _LIVE:
            self.phase = Phase.ENDING
            self.incarnation.blame(EndReason.DISCARD)
            self.runtime.callbacks.submit(functools.partial(self._read_discard_error, self.incarnation, make_error))

    def _read_discard_error(self, incarnation: Incarnation, make_error: Callable[[], ActorError]) -> None:
        self.run(self._on_discard_error, incarnation, make_error())

    def _on_discard_error(self, incarnation: Incarnation, error: ActorError) -> None:
        incarnation.discard_error = error
        incarnation.kill()

    # Events of the loop ----------------------------------------------------------------------------------

    def run(self, event: Callable[..., object], *args: object) -> None:
        """Run an event as a change."""
        with self.lock, self.lock.change(self):
            event(*args)

    def on_frames(self, worker: Worker) -> None:
        """Handle the frames that have come, unless another thread reads them."""
        with self.lock, self.lock.change(self):
            is_current = worker is self.incarnation.worker and not worker.at_end
            if is_current and (not self._loan.is_active or self._loan.is_mine):
                self._take_frames(worker, worker.receive() or [])

    def on_exit(self, worker: Worker) -> None:
        """Handle the exit of the process."""
        with self.lock, self.lock.change(self):
            incarnation = self.incarnation
            if worker is not incarnation.worker:
                return
            if self._loan.is_active:
                self._loan.leave_exit()
                return
            for frame in worker.drain():
                self._on_frame(frame)
            report = incarnation.reap(worker)
            is_unasked = incarnation.end_reason in (None, EndReason.TIMEOUT) and not self.is_closing
            if incarnation.is_standby and not incarnation.has_started and is_unasked:
                self._start(Incarnation(incarnation.index))  # as if there had been no standby
            else:
                self._after_exit(report)

    def on_certain_end(self, worker: Worker) -> None:
        """Start the process that waits until none of the code of the last one can be running."""
        with self.lock, self.lock.change(self):
            if worker is self._uncertain:
                self._uncertain = None
                if self.incarnation.is_launching:
                    self._submit_launch()

    def _check_deadlines(self) -> None:
        """Report the current step if it is slow, and end the process if it is late."""
        step, worker = self.find_current_step(), self.incarnation.worker
        if step is None or worker is None:
            return
        judgment = self.deadline_watch.judge(step)
        if judgment is Judgment.LATE:
            self._on_late(step)
        elif judgment is Judgment.SLOW:
            read_stacks = functools.partial(worker.ask_stacks().wait, slow_calls.STACKS_PATIENCE)
            slow_calls.warn(self, step, time.monotonic() - step.started, read_stacks)

    def find_current_step(self) -> Step | None:
        """Return the step that the worker runs, once its replies were read; None if it runs none, or is ending."""
        worker = self.incarnation.worker
        if self.phase is not _LIVE or worker is None:
            return None
        # By now the results of everything up to this call are in the rows and the channel.
        finished = worker.page.counters[FINISHED]
        # After SIGCONT, replies and expired deadlines are pending together. Replies count first, also those that a
        # thread would read that has borrowed the channel.
        self._process_results()
        step = self._current_step() if self.phase is _LIVE else None
        if step is not None:
            untrue = worker.page.find_untrue(len(self.config.start.factories))
            corruption = (
                f"{untrue} on its control page cannot be true" if untrue else self.tenant.check_memory(finished)
            )
            if corruption:
                worker.kill_corrupted(corruption)
                return None
        return step

    def _on_late(self, step: Step) -> None:
        """End the process because a step has missed its deadline."""
        if self.running is not None:
            self.running.on_late(step)
        self._end_late()

    def _on_start_deadline(self) -> None:
        if self.phase is Phase.STARTING:
            self._end_late()

    def _end_late(self) -> None:
        """Ask the worker for its stacks, and kill it once it may have written them."""
        self.incarnation.request_stacks()
        self._end_process(EndReason.TIMEOUT, kill_in=_STACKS_GRACE)

    def _take_frames(self, worker: Worker, frames: list[Frame]) -> None:
        for frame in frames:
            self._on_frame(frame)
        if worker.at_end and self.incarnation.worker is worker and self.phase is not Phase.STOPPING:
            # Only `on_exit` reports the exit. Until then the worker cannot do any work.
            self.timers.set_earliest("kill", time.monotonic() + _EXIT_GRACE, self.incarnation.kill)

    def _process_results(self) -> None:
        """Process the replies and the rows that the worker has completed, also those that the loop has not seen yet."""
        worker = self.incarnation.worker
        if worker is not None and not worker.at_end:
            self._take_frames(worker, worker.drain())
        self.tenant.collect_completed()

    def _on_frame(self, frame: Frame) -> None:
        kind, incarnation, call_id, payload = frame
        job = self.running
        is_reply = job is not None and call_id == job.call_id and kind in _REPLIES
        if kind == Kind.LOGGED:
            self.runtime.log(functools.partial(slow_calls.handle_record, payload))
        elif incarnation != self.incarnation.index:
            self._stale += 1
        elif is_reply and self.phase is _LIVE:
            self._on_reply(frame)
        elif is_reply and self.phase is Phase.STOPPING and not self.incarnation.is_late:
            # The envs are closed. If something keeps the process alive, such as a thread that never ends, kill it.
            self.timers.set_earliest("kill", time.monotonic() + _EXIT_GRACE, self.incarnation.kill)
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
        if self.queue or self.shared is not None or self.permits is not None:
            if self._loan.is_active:  # the jobs of other threads are not the borrower's work
                self.proceed_soon()
            else:
                self._run_next()

    def _run_next(self) -> None:
        """Start queued jobs, or the next one of the shared queue if there are none. Only the loop takes those."""
        self.dispatch()
        if self.shared is not None and self.running is None and self.phase is _LIVE and not self.is_closing:
            job = self.shared.take()
            if job is not None and job.future is not None:
                job.future.owner = self
                self.enqueue(job)

    # Jobs ------------------------------------------------------------------------------------------------

    def _fail(self, job: Job, error_of: ErrorOf) -> None:
        """End a job that no process will run."""
        self._failed += job.future is not None
        job.fail(error_of)
        self.unfinished.pop(job, None)

    def _fail_queue(self) -> None:
        """Fail the jobs that wait for a dead actor, up to a renewal, which starts a process."""
        error_of = functools.partial(self.errors.after_last, self._final_error())
        self._fail_renewal(error_of)
        while self.queue:
            job = self.queue.popleft()
            if isinstance(job, Renewal):
                job.started = time.monotonic()
                self._begin_renewal(job)
                self._start_next()
                return
            self._fail(job, error_of)
        self._fail_all(error_of)

    def _fail_renewal(self, error_of: ErrorOf) -> None:
        """Fail the renewal that waits for the next process, if there is one."""
        renewal, self.renewal = self.renewal, None
        if renewal is not None:
            self._fail(renewal, error_of)

    def _fail_all(self, error_of: ErrorOf) -> None:
        """Fail the jobs that wait for this actor, and those that wait for any of several if this was the last one."""
        while self.queue:
            self._fail(self.queue.popleft(), error_of)
        while self.shared is not None and not self.shared.is_served and (job := self.shared.take()) is not None:
            self._fail(job, error_of)

    def _final_error(self) -> ActorError:
        """Return the error of everything that comes after the last process that was allowed."""
        return self.errors.exhausted(self._restart_tracker.errors, self.incarnation.index)

    # Starting --------------------------------------------------------------------------------------------

    def _start_next(self, worker: Worker | None = None) -> None:
        """Start the next incarnation, in a process of a standby if there is one."""
        self._start(Incarnation(self.incarnation.index + 1), worker or self._take_standby(0.0))

    def _start(self, incarnation: Incarnation, worker: Worker | None = None) -> None:
        """Start an incarnation: in the process of a standby, or in a new one.

        A new process starts once none of the code of the last one can be running.
        """
        self.timers.cancel("start", "kill", "backoff")  # those of the last process
        self.phase, self.incarnation = Phase.STARTING, incarnation
        incarnation.launched = time.monotonic()
        if worker is not None:
            self._adopt(worker)
            return
        incarnation.is_launching = True
        if self._uncertain is None:
            self._submit_launch()

    def _submit_launch(self) -> None:
        self.runtime.launcher.submit(self._launch, self.config.backend.traits.max_starting)

    def _adopt(self, worker: Worker) -> None:
        """Have the process of a standby work for this actor."""
        config, incarnation = self.config, self.incarnation
        incarnation.is_standby, incarnation.worker = True, worker
        worker.report_to(self)
        self.timers.set("start", incarnation.launched + _ADOPTION_GRACE, self._on_start_deadline)
        message = Adopt(config.name, config.first_index, len(config.start.factories), self.tenant.attach)
        worker.send(Frame(Kind.ADOPT, incarnation.index, START_CALL_ID, dumps(tuple(message))))

    def _take_standby(self, delay: float) -> Worker | None:
        """Return the process of a standby that is ready; the standby starts another one after a delay, in seconds.

        None is taken while code of the last process may still be running.
        """
        if self._uncertain is not None:
            return None
        offers = (standby.give_process(delay) for standby in self.config.standbys)
        return next((worker for worker in offers if worker is not None), None)

    def give_process(self, delay: float) -> Worker | None:
        """Give the process of this standby away if it is ready, and start another one after a delay, in seconds.

        The lock is that of the taker, too, whose change then concerns this standby.
        """
        worker = self.incarnation.worker
        if self.phase is not _LIVE or worker is None or worker.at_end or self.running is not None or self.queue:
            return None
        self.lock.include(self)
        self.deadline_watch.stop()
        self.timers.set("backoff", time.monotonic() + delay, self._on_backoff)
        self.incarnation.worker, self.phase = None, Phase.BACKOFF
        return worker

    def _withdraw_launch(self) -> bool:
        """Return whether a launch that was still waiting will not happen."""
        return self._uncertain is not None or self.runtime.launcher.withdraw(self._launch)

    def _launch(self) -> None:
        """Launch a worker, in the launcher's thread."""
        config, incarnation = self.config, self.incarnation
        with self.lock, self.lock.change(self):
            is_wanted = self.phase is Phase.STARTING
            incarnation.launched = time.monotonic()
            if is_wanted and config.deadlines.start is not None:
                self.timers.set("start", incarnation.launched + config.deadlines.start, self._on_start_deadline)
        worker: Worker | None = None
        refusal: BaseException | None = None
        if is_wanted and self._use is not None:
            try:
                worker = self._use.start(config.name, config.memory, len(config.start.factories))
            except Exception as error:
                refusal = error
        with self.lock, self.lock.change(self):
            incarnation.is_launching = False
            if worker is not None:
                try:
                    worker.report_to(self)
                    incarnation.worker = worker
                except Exception as error:
                    refusal = error
            if incarnation.worker is None:
                self._after_exit(ExitReport(status=ExitStatus(refusal=refusal)))
            elif self.phase is Phase.STARTING:
                # Workers on other machines cannot reach the managers of this process.
                authkey = None if config.backend.traits.is_remote else bytes(multiprocessing.current_process().authkey)
                start = config.start._replace(attach=self.tenant.attach, authkey=authkey)
                incarnation.worker.send(Frame(Kind.START, incarnation.index, START_CALL_ID, dumps(tuple(start))))
            else:
                incarnation.kill()  # it was ended meanwhile

    def _on_start_reply(self, frame: Frame) -> None:
        incarnation = self.incarnation
        if frame.kind == Kind.ENV_MADE:
            incarnation.envs_made = load_plain(frame.payload)
        elif frame.kind == _FAILED:
            incarnation.failure = Failure(*loads(frame.payload))
            self.runtime.callbacks.submit(functools.partial(self._read_start_failure, incarnation, incarnation.failure))
        else:
            self._on_started()

    def _read_start_failure(self, incarnation: Incarnation, failure: Failure) -> None:
        """Unpickle the exception of a factory, in a thread that code of users may block."""
        self.run(self._on_start_failure, incarnation, unpack_failure(failure))

    def _on_start_failure(self, incarnation: Incarnation, cause: BaseException | None) -> None:
        incarnation.failure_cause = cause
        if incarnation is self.incarnation and self.phase is Phase.STARTING:
            self._end_process(None)

    def _on_started(self) -> None:
        incarnation = self.incarnation
        self.timers.cancel("start")
        self.runtime.launcher.finish(self._launch)
        self.phase, incarnation.has_started = _LIVE, True
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
        self._run_next()

    # Ending ----------------------------------------------------------------------------------------------

    def _end(self, reason: EndReason) -> None:
        """Kill the process, or the one that is being launched; start another one if that was the reason."""
        if self.phase is Phase.CLOSED:
            return
        self._end_process(reason)
        self.proceed_soon()
        if reason is EndReason.CLOSE and not self.config.backend.traits.can_kill:
            self.runtime.loop.call_soon(functools.partial(self.run, self._leave_running))

    def proceed_soon(self) -> None:
        """Have the loop continue after a change: start what can start, or end what must end."""
        self.runtime.loop.call_soon(functools.partial(self.run, self._proceed))

    def _proceed(self) -> None:
        """Continue after a change by a caller, in the loop."""
        incarnation = self.incarnation
        is_needed = not self.is_closing or len(self.queue) > 1  # the last job is the closing
        if incarnation.worker is not None:
            self._run_next()  # if it is ending, its exit continues
        elif incarnation.is_launching:
            is_wanted = is_needed and self.phase is Phase.STARTING
            if not is_wanted and self._withdraw_launch():
                self._after_exit(ExitReport())
        elif self.phase is Phase.CLOSED:
            self._fail_all(functools.partial(self.errors.closed, incarnation=incarnation.index))
        elif self.phase is Phase.DEAD and not (self.is_closing or incarnation.is_replaced):
            self._fail_queue()
        elif self.phase is Phase.NEW and is_needed:
            self._start(incarnation)
        elif self.phase is not Phase.BACKOFF or not is_needed:
            self._after_exit(ExitReport())

    def _leave_running(self) -> None:
        """Close the actor without waiting for a worker that may hang, and that the backend cannot kill."""
        worker = self.incarnation.worker
        if worker is not None and self.phase is Phase.ENDING:
            self._after_exit(self.incarnation.reap(worker))

    def _after_exit(self, report: ExitReport) -> None:
        """Handle the exit of the process, or of a launch that has made none, in five steps."""
        incarnation, job, self.phase = self.incarnation, self.running, Phase.ENDING
        incarnation.report = report = report._replace(reason=incarnation.end_reason)
        incarnation.is_launching = False
        self.runtime.launcher.finish(self._launch)
        self.deadline_watch.stop()
        if self.permits is not None:
            self.permits.give_back(self)
        for replay in [queued for queued in self.queue if queued.is_of_process]:
            self.queue.remove(replay)
            del self.unfinished[replay]
        # 1. Settle: record the results that the worker has completed.
        self.tenant.collect_completed()
        if job is not None:
            job.count_completed()
        # 2. Describe: find the step that it was running.
        culprit = None if job is None else job.culprit(incarnation)
        error = self._describe_exit(report, culprit)
        # 3. Decide: another process, now or later, or none.
        plan = self._plan(report, error)
        exit = Exit(incarnation, report.reason, culprit, error, plan)  # noqa: A001
        if incarnation.has_started:
            self.last_crash = error
        if plan.next is not Next.CLOSE:
            self._log_exit(exit)
        recording.recorder.on_exit(self, culprit)
        # 4. Lose: end the episodes and the job that cannot continue in the next process.
        self.tenant.on_exit(exit)
        self._lose(job, exit)
        self.running = None
        # 5. Continue: only this starts a process, fails the queue, or frees anything.
        self._continue(exit, report)

    def _describe_exit(self, report: ExitReport, culprit: Step | None) -> ActorError:
        """Return the error that says how the process ended."""
        incarnation = self.incarnation
        if report.reason is EndReason.DISCARD and incarnation.discard_error is not None:
            return incarnation.discard_error
        if incarnation.has_started:
            return self.errors.exit(report, incarnation.index, culprit)
        return self.errors.start(report, incarnation)

    def _plan(self, report: ExitReport, error: ActorError) -> Plan:
        """Decide whether another process comes; count the exit if it is a crash."""
        incarnation = self.incarnation
        is_hopeless = report.is_refused or (incarnation.failure is not None and incarnation.index == 0)
        chosen = decide_next(is_closing=self.is_closing, is_replaced=incarnation.is_replaced, is_hopeless=is_hopeless)
        if chosen in (Next.CLOSE, Next.START):
            return Plan(chosen)
        delay = self._restart_tracker.add(error, time.monotonic(), may_restart=chosen is Next.RESTART)
        return Plan(Next.DIE) if delay is None else Plan(Next.RESTART, delay)

    def _lose(self, job: Job | None, exit: Exit) -> None:  # noqa: A002
        """End the job that was running, or queue it again. A renewal goes on until the next process has started."""
        is_renewal = job is self.renewal
        if exit.plan.next is Next.CLOSE or exit.reason is EndReason.ABORT:
            self._fail_renewal(lambda _step: exit.error)
        if job is None or is_renewal:
            return
        if job.after_exit(exit):
            job.call_id = 0
            self.queue.appendleft(job)
        else:
            self._failed += job.future is not None
            self.unfinished.pop(job, None)

    def _continue(self, exit: Exit, report: ExitReport) -> None:  # noqa: A002
        """Start the next process, now or later, or fail everything that waits for one."""
        worker, self.incarnation.worker = self.incarnation.worker, None
        if not report.status.is_certain:
            self._uncertain = worker
        chosen, delay = exit.plan
        if chosen is Next.START:
            self._start_next()
        elif chosen is Next.RESTART:
            # A standby waits in place of the actor, so that no more processes start than without standbys.
            standby = self._take_standby(delay) if exit.incarnation.has_started else None
            if standby is not None:
                self._restarts += 1
                self._start_next(standby)
            else:
                self.phase = Phase.BACKOFF
                self.timers.set("backoff", time.monotonic() + delay, self._on_backoff)
        elif chosen is Next.DIE:
            self.phase = Phase.DEAD
            if self.config.is_standby:
                text = f"{self.name} cannot be restarted; the actors that it served continue: {self._final_error()}"
                self.runtime.log(lambda: _notices.warning("%s", text))
            self._fail_queue()
        else:
            closing = report if report.reason is None else report._replace(reason=EndReason.CLOSE)
            self._close(functools.partial(self.errors.exit, closing, exit.incarnation.index))

    def _on_backoff(self) -> None:
        if self.phase is Phase.BACKOFF:
            self._restarts += 1
            self._start_next()

    def _close(self, error_of: ErrorOf) -> None:
        """Fail everything that is left, and free everything that the actor has."""
        self.phase, self.incarnation.worker = Phase.CLOSED, None
        while self.queue:
            self._fail(self.queue.popleft(), error_of)
        self._fail_all(functools.partial(self.errors.closed, incarnation=self.incarnation.index))
        self.timers.cancel_all()
        self.tenant = NO_TENANT  # the other one has the memory of the vector
        self.runtime.callbacks.submit(self._release)

    def _release(self) -> None:
        """Free everything that the actor has of the backend, which may take long."""
        if self._use is not None:
            with contextlib.suppress(OSError):
                self._use.close()
        self.runtime.leave(self)
        self.closed.open()

    # Other -----------------------------------------------------------------------------------------------

    def repair(self, bug: BaseException | None) -> None:
        """Establish the invariant from any state; see `envactors.actor.change`.

        Args:
            bug: The error of this library that has ended the change, which closes the actor; None if the change was
                interrupted, so that a dead actor stays dead, and any other one gets a new process.
        """
        reason = EndReason.INTERRUPT if bug is None else EndReason.CLOSE
        if bug is None:
            text = f"actor {self.name!r} gets another process: a change of its state was interrupted"
            error_of = functools.partial(self.errors.exit, ExitReport(reason=reason), self.incarnation.index)
        else:
            text = f"actor {self.name!r} is closed by an internal error of envactors; please report it"
            error_of = functools.partial(self.errors.broken, bug, self.incarnation.index)
        self.log(logging.WARNING if bug is None else logging.ERROR, text, bug)
        self.is_closing |= bug is not None
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
            self._close(error_of)  # the bug is in the handling of the exit, which would meet it again
        else:
            self._end(reason)

    def _log_exit(self, exit: Exit) -> None:  # noqa: A002
        if exit.reason in (EndReason.ABORT, EndReason.RENEW):
            self.log(logging.INFO, f"actor {self.name!r} gets a new process, on request")
        else:
            self.log(logging.WARNING, str(exit.error).partition("\n")[0])

    def log(self, level: int, text: str, error: BaseException | None = None) -> None:
        """Log a message, with the traceback of an error, in a thread where handlers may block."""
        recording.recorder.on_notice(self, text)
        extra = {"actor": self.name, "incarnation": self.incarnation.index, "env_id": self.config.first_index}
        self.runtime.log(lambda: _log.log(level, "%s", text, exc_info=error, extra=extra))
