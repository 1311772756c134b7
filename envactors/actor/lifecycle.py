"""The end of the processes of one actor: deadlines, kills, deaths, and what follows from each.

    LAUNCHING ──started──▶ LIVE ──CLOSE sent──▶ STOPPING ─┐
        ▲                   │ deadline, abort, kill       │
        │                   ▼                             ▼
     BACKOFF ◀──crash─── ENDING ────────exit───────▶ DEAD, CLOSED or LAUNCHING

How a process starts is `envactors.actor.launching`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from envactors.actor.batch_step import StepRequest
from envactors.actor.calls import Calls
from envactors.actor.core import ActorCore
from envactors.actor.exit_decision import ExitDecision, ExitFacts, Fate, Next, Running, decide
from envactors.actor.future import ActorFuture
from envactors.actor.launcher import Launcher
from envactors.actor.launching import Launching
from envactors.actor.process import ActorProcess, ExitReport
from envactors.actor.requests import CallRequest, Entry, Request
from envactors.actor.restarts import RestartTracker
from envactors.actor.shm_batch_step import SharedMemoryBatchStep
from envactors.actor.states import BACKOFF, CLOSED, DEAD, ENDING, LAUNCHING, LIVE, EndReason
from envactors.errors import ActorError, copy_error
from envactors.system import READABLE
from envactors.wire.messages import Kind

_log = logging.getLogger("envactors")
# How long a worker may take to write its stacks before it is killed for a deadline, in seconds.
_STACKS_GRACE = 0.2


class Lifecycle:
    """Ends the processes of one actor, and decides what follows.

    Args:
        core: The actor's state.
        launcher: Starts workers in a thread that outlives them.
        make_future: Makes a future for what the actor asks of itself.
        on_closed: Called, without the lock, once nothing of a closed actor is left.
    """

    def __init__(
        self,
        core: ActorCore,
        launcher: Launcher,
        make_future: Callable[[], ActorFuture],
        on_closed: Callable[[], None],
    ) -> None:
        self.launching = launching = Launching(core, launcher, make_future)
        self.calls = calls = Calls(core, launching.on_start_reply)
        launching.on_channel, launching.on_exit, launching.on_refused = self.on_channel, self.on_exit, self._after_exit
        launching.dispatch, launching.answer = calls.dispatch, calls.answer
        self.tracker = RestartTracker(core.config.restart)
        self._core = core
        self._on_closed = on_closed
        # What an env raised for which the present process is being discarded.
        self._discarded_for: ActorError | None = None
        # The error of all that comes after the last process that was allowed.
        self._final: ActorError | None = None

    # Ending ----------------------------------------------------------------------------------------------

    def end(self, reason: EndReason) -> None:
        """End the process, or what is about to become one, for a reason of the parent's own."""
        core = self._core
        coming = core.phase in (LAUNCHING, ENDING) and core.process is None
        if coming and self.launching.withdraw():
            coming = False
        core.phase, core.reason = ENDING, reason
        if core.process is None:
            if not coming:
                self._after_exit(ExitReport())
            return
        core.process.kill()
        if not core.config.backend.kills and core.table.running:
            # It goes on until its call ends, and nobody waits for it.
            process, core.process = core.process, None
            self._after_exit(process.drain_and_reap()[1])

    def replace(self) -> None:
        """End the process and start another one; not counted."""
        core = self._core
        if core.phase is DEAD:
            self.launching.relaunch()
        elif core.phase is not CLOSED and core.reason is not EndReason.CLOSE:
            self.end(EndReason.ABORT)

    def discard(self, incarnation: int | None, index: int, method: str, error: BaseException) -> None:
        """End a process one of whose envs is not fit to be used any more; counts as a restart.

        Args:
            incarnation: Which one; another one is left alone.
            index: The env's index.
            method: What it was asked.
            error: What it raised.
        """
        core = self._core
        if incarnation == core.incarnation and core.phase is LIVE:
            self._discarded_for = core.errors.discarded((index, method), core.incarnation, core.pid, error)
            self.end(EndReason.DISCARDED)

    def on_timer(self, now: float) -> None:
        """Act on the deadlines that have passed."""
        core = self._core
        with core.change:
            # A caller that was stopped itself finds both at once: replies that came in time, and deadlines.
            self.calls.receive(READABLE)
            self.calls.steps.wake_waiters()
            for timer in core.timers.pop_due(now):
                if timer == "backoff":
                    core.restarts += 1
                    self.launching.relaunch()
                elif timer == "close":
                    self.end(EndReason.CLOSE)
                elif timer == "kill" and core.process is not None:
                    core.process.kill()
                elif timer == "call" and core.phase in (LAUNCHING, LIVE):
                    self._on_call_timer(now)

    def _on_call_timer(self, now: float) -> None:
        core = self._core
        if core.phase is LIVE and core.table.running and core.process is not None:
            later = core.table.running[0].next_look(core.process.page, core.config.deadlines, now)
            if later is not None:
                core.timers.set("call", later)
                return
        core.phase, core.reason = ENDING, EndReason.TIMEOUT
        if core.process is not None:
            core.process.ask_stacks()
            core.timers.set("kill", now + _STACKS_GRACE)

    def on_channel(self, mask: int) -> None:
        """Read what has come."""
        with self._core.change:
            self.calls.receive(mask)

    def on_exit(self, process: ActorProcess) -> None:
        """Act on the end of a process."""
        with self._core.change:
            if self._core.process is not process:
                return
            frames, report = process.drain_and_reap()
            for frame in frames:
                self.calls.on_frame(frame)
            self._after_exit(report, process)

    def _after_exit(self, report: ExitReport, process: ActorProcess | None = None) -> None:
        core = self._core
        reason = core.reason
        self.launching.finish()
        core.timers.cancel("call", "kill", "backoff")
        timed_out = reason is EndReason.TIMEOUT
        running = self._interrupt(process, blame=timed_out or reason is EndReason.ABORT)
        core.process, core.reason = None, None
        core.table.withdraw_all(_is_replay)  # the next process is asked anew
        decision = decide(self._facts(reason, running))
        lost = core.incarnation
        error = self._exit_error(report, reason, running)
        if core.started:
            core.loss = error
        discarded, self._discarded_for = self._discarded_for is not None, None
        if decision.next is Next.CLOSED:
            self._finish(running, report, aborted=decision.aborted)
        else:
            if running is not None:
                self._settle_running(decision, running, self.calls.loss_error(running) if discarded else error)
            self._go_on(decision, error)
        self.calls.fail_bound(lost)

    def _interrupt(self, process: ActorProcess | None, *, blame: bool) -> Request | None:
        """Take out what runs: return the request that was running, queue what had not begun."""
        core = self._core
        current: Request | None = None
        waiting: list[Request] = []
        for entry in core.table.interrupt():
            one, others = entry.split(None if process is None else process.page, blame=blame)
            if current is None:
                current = one
            elif one is not None:
                waiting.append(one)  # it had begun after the deadline of the first had passed
            waiting += others
            if isinstance(entry, SharedMemoryBatchStep):
                core.completed += len(entry.envs) - len(entry.failed_envs)
                kept = [index for index in entry.envs if index not in entry.failed_envs]
                entry.record(core.recovery, kept)
                core.reactor.wake(entry.waiter)
        if isinstance(current, StepRequest):
            current.timeout = core.config.deadlines.of(current.method)
        for request in reversed(waiting):
            core.table.put_back(self.calls.as_entry(request))
        return current

    def _facts(self, reason: EndReason | None, running: Request | None) -> ExitFacts:
        core, recovery = self._core, self._core.recovery
        can_retry = isinstance(running, StepRequest) and recovery.can_retry(
            running.index, seeded=running.is_seeded_reset
        )
        return ExitFacts(
            reason=reason,
            closing=core.closing,
            started=core.started,
            adopting=self.launching.adopting,
            running=_what_runs(running),
            retries=0 if running is None else running.retries,
            replays=recovery.replays,
            can_retry=can_retry,
        )

    def _exit_error(self, report: ExitReport, reason: EndReason | None, running: Request | None) -> ActorError:
        """Return the error that says how the process ended."""
        core = self._core
        timed_out = reason is EndReason.TIMEOUT
        if self._discarded_for is not None:
            return self._discarded_for
        if core.started:
            deliberate = reason not in (None, EndReason.TIMEOUT)
            return core.errors.death(report, core.incarnation, running, aborted=deliberate, timed_out=timed_out)
        begun, failure = (self.launching.envs_made, self.launching.launched), self.launching.failure
        self.launching.failure = None
        if failure is not None:
            return core.errors.factory(failure, report, begun)
        return core.errors.start(report, core.incarnation, begun, timed_out=timed_out)

    def _settle_running(self, decision: ExitDecision, running: Request, error: ActorError) -> None:
        """Do with the request that was running what was decided."""
        core = self._core
        if decision.fate is Fate.HOLD:
            core.table.running = [self._entry_again(running)]
        elif decision.fate is Fate.AGAIN:
            running.retries -= decision.spends_retry
            if decision.counts_against_inputs:
                core.recovery.count_failure(running.index)
            core.table.put_back(self._entry_again(running))
        elif decision.fate is Fate.FAIL:
            if isinstance(running, StepRequest) and not decision.aborted:
                inputs = core.recovery.inputs(running)
                error = error if inputs is None else core.errors.poison(error, inputs)
            if decision.forgets_env:
                core.recovery.forget(running.index)
            self.calls.fail(running, error)

    def _entry_again(self, running: Request) -> Entry:
        entry = self.calls.as_entry(running)
        entry.started = running.started
        return entry

    def _go_on(self, decision: ExitDecision, error: ActorError) -> None:
        """Start the next process, now or later, or find that there is none."""
        core, now = self._core, time.monotonic()
        if decision.next is Next.LAUNCH:
            self.launching.relaunch()
            return
        if decision.next is Next.LAUNCH_AGAIN:
            self.launching.begin_launch()
            return
        delay = self.tracker.add(error, now)
        if delay is None:
            self._die()
            return
        spare = self.launching.take_standby(delay) if core.started else None
        if spare is not None:
            # The wait goes over to the standby: however often processes are lost, they start no faster.
            core.restarts += 1
            self.launching.relaunch(spare)
            return
        core.phase = BACKOFF
        core.timers.set("backoff", now + delay)

    def _die(self) -> None:
        core = self._core
        self._final = core.errors.exhausted(self.tracker.errors, core.incarnation)
        core.phase = DEAD
        for entry in core.table.interrupt():
            for request in entry.parts:
                self.calls.fail(request, copy_error(self._final))
        if core.config.is_standby:
            name, final = core.config.name, self._final
            # A log handler may block, and this is no place for it.
            core.reactor.printing.submit(
                lambda: _log.warning("%s is given up, what it was for goes on: %s", name, final)
            )
        self.settle_dead()

    def settle_dead(self) -> None:
        """Fail what waits for a dead actor, up to a renewal, which revives it."""
        core = self._core
        assert self._final is not None, "a dead actor has a reason"
        self.calls.separate_waiting_steps()
        for entry in core.table.drain():
            if core.phase is not DEAD:
                core.table.queue.append(entry)
            elif isinstance(entry, CallRequest) and entry.kind is None:
                entry.started = time.monotonic()
                entry.mark_running()
                core.table.running = [entry]
                self.launching.relaunch()
            else:
                for request in entry.parts:
                    self.calls.fail(request, core.errors.after_all(self._final, request))

    def _finish(self, running: Request | None, report: ExitReport, *, aborted: bool) -> None:
        """End a closed actor: fail whatever is left, free everything."""
        core = self._core
        self.calls.separate_waiting_steps()
        left = [request for entry in core.table.drain() for request in entry.parts]
        for request in left if running is None else [running, *left]:
            if isinstance(request, CallRequest) and request.kind == Kind.CLOSE:
                self.calls.answer(request, None)
            else:
                self.calls.fail(request, core.errors.death(report, core.incarnation, request, aborted=aborted))
        core.timers.cancel_all()
        core.phase = CLOSED
        core.deferred.add(self._on_closed)


def _is_replay(entry: Entry) -> bool:
    return isinstance(entry, CallRequest) and entry.kind == Kind.REPLAY


def _what_runs(running: Request | None) -> Running:
    if running is None:
        return Running.NOTHING
    if isinstance(running, StepRequest):
        return Running.STEP
    assert isinstance(running, CallRequest), "there are calls and steps"
    if running.kind is None:
        return Running.RENEWAL
    return Running.REPLAY if running.kind == Kind.REPLAY else Running.CALL
