"""The processes of one actor: how they start, deadlines, kills, exits, and what follows from each.

    LAUNCHING ──started──▶ LIVE ──CLOSE sent──▶ STOPPING ─┐
        ▲                   │ deadline, abort, kill       │
        │                   ▼                             ▼
     BACKOFF ◀──crash─── ENDING ────────exit───────▶ DEAD, CLOSED or LAUNCHING

`envactors.actor.calls` settles the requests of an ended process.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Callable

from envactors.actor import row_failures
from envactors.actor.calls import Calls, settle_running, take_running
from envactors.actor.core import ActorCore
from envactors.actor.engine import Launcher
from envactors.actor.exit_decision import Next, RestartTracker, decide, decide_call
from envactors.actor.process import ActorProcess, ExitReport
from envactors.actor.requests import CallRequest, Request
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.states import BACKOFF, CLOSED, DEAD, ENDING, LAUNCHING, LIVE, EndReason
from envactors.backends.base import Backend, Worker
from envactors.errors import ActorError, copy_error
from envactors.mailbox.messages import Adopt, Frame, Kind
from envactors.mailbox.pickling import loads

_log = logging.getLogger("envactors")
# How long a standby may take to become this actor's, in seconds; all it does is take note.
_ADOPTION_GRACE = 1.0


class Lifecycle:
    """Starts and ends the processes of one actor, and decides what follows.

    Args:
        core: The actor's state.
        launcher: Starts workers in a thread that outlives them.
        on_closed: Called, without the lock, once nothing of a closed actor is left.

    Attributes:
        calls: The actor's requests.
        launch_due: Whether an in-process worker is to be started by the thread that leaves the lock.
        tracker: The lost processes that count.
    """

    def __init__(self, core: ActorCore, launcher: Launcher, on_closed: Callable[[], None]) -> None:
        self.calls: Calls = Calls(core, self._on_start_reply, self.settle_dead)
        core.discard = self.discard
        self.tracker: RestartTracker = RestartTracker(core.config.restart)
        self._core = core
        self._launcher = launcher
        self._on_closed = on_closed
        self.launch_due: bool = False
        # Of the present start: whether a standby is becoming this actor's, when it began (`time.monotonic`), how many
        # envs were made, and the reply of a worker whose factory raised.
        self._adopting, self._launched, self._envs_made = False, 0.0, 0
        self._failure: Frame | None = None
        # A far worker that counts as ended while its code may still run: no other process takes its place until then.
        self._uncertain: Worker | None = None
        # What an env raised for which a process was discarded last.
        self._discarded_for: ActorError | None = None

    # Starting --------------------------------------------------------------------------------------------

    def begin_launch(self, spare: ActorProcess | None = None) -> None:
        """Start a process for the present incarnation, or make a standby's the actor's own."""
        core, config = self._core, self._core.config
        core.phase, core.started, self._adopting = LAUNCHING, False, spare is not None
        self._launched, self._envs_made = time.monotonic(), 0
        if self._uncertain is not None:
            return  # `_on_certain_end` begins again
        if spare is not None:
            core.use(spare)
            spare.move(config.name, self.calls.on_channel, self.on_exit)
            core.timers.set("start", self._launched + _ADOPTION_GRACE)
            message = Adopt(config.name, config.first_index, len(config.start.factories), core.recovery.attach)
            spare.introduce(Kind.ADOPT, message, core.incarnation)
        elif config.backend.inline:
            self.launch_due = True
        else:
            self._launcher.launch(self.launch, config.backend.max_starting)

    def relaunch(self, spare: ActorProcess | None = None) -> None:
        """Start the next incarnation."""
        self._core.timers.cancel("backoff")
        self._core.incarnation += 1
        self.begin_launch(spare or self._take_standby(0.0))

    def give_process(self, delay: float) -> ActorProcess | None:
        """Return a standby's process if it is ready; another one starts after ``delay`` seconds.

        Called under the taker's lock. From here on nothing that comes from the process changes anything here; its new
        owner gets all of it.
        """
        core = self._core
        with core.lock:
            process = core.process
            if core.phase is not LIVE or process is None or process.at_end:
                return None
            core.process, core.phase = None, BACKOFF
            core.timers.set("backoff", time.monotonic() + delay)
            return process

    def _on_certain_end(self, worker: Worker) -> None:
        """Continue the launch that waited for the certain end of a worker."""
        core = self._core
        with core.change, core.lock:
            if self._uncertain is worker:
                self._uncertain = None
                if core.phase is LAUNCHING:
                    self.begin_launch(self._take_standby(0.0))

    def _take_standby(self, delay: float) -> ActorProcess | None:
        if self._uncertain is not None:
            return None
        offers = (give(delay) for give in self._core.config.standbys)
        return next((process for process in offers if process is not None), None)

    def launch(self) -> None:
        """Start a worker, once per `begin_launch`: in the launcher's thread, or in the caller's if it is in-process."""
        core, config = self._core, self._core.config
        worker, process, refusal = None, None, None
        with defer_signals, core.lock:
            due = core.phase is LAUNCHING
            self._launched = time.monotonic()  # not when it was queued behind others
            if due and config.deadlines.start is not None and config.backend.kills:
                core.timers.set("start", self._launched + config.deadlines.start)
        if due:
            try:
                worker = config.backend.launch(config.name, config.env_vars, config.memory, len(config.start.factories))
            except Exception as error:
                refusal = error
        with core.change, core.lock:
            if worker is not None:
                try:
                    process = ActorProcess(worker, config.name, core.reactor, self.calls.on_channel, self.on_exit)
                except Exception as error:
                    refusal = error
            if process is None:
                self._after_exit(ExitReport(refusal=refusal))
                return
            core.use(process)
            if core.phase is LAUNCHING:
                message = config.start._replace(attach=core.recovery.attach, authkey=_authkey_for(config.backend))
                process.introduce(Kind.START, message, core.incarnation)
            else:
                process.worker.kill()

    def _on_start_reply(self, frame: Frame) -> None:
        core = self._core
        if frame.kind == Kind.ENV_MADE:
            self._envs_made = loads(frame.payload)
            return
        if frame.kind == Kind.FAILED:
            self._failure, core.phase = frame, ENDING
            if core.process is not None:
                core.process.worker.kill()
            return
        core.timers.cancel("start")
        core.phase, core.started = LIVE, True
        core.tell_start(self._launched)
        self._launcher.finish(self.launch)
        if self.calls.rows is not None:
            row_failures.lose_rest(self.calls.rows)
        renewal = core.table.interrupt()
        if renewal is not None:
            self.calls.end(renewal, core.incarnation)
            for journal in core.recovery.journals:
                journal.forget()  # the user wants a fresh process; only attributes are restored
            self.calls.fail_lost()
        for request in reversed(core.recovery.replay_requests()):
            core.add(request, at_front=True)
        self.calls.dispatch()

    # Ending ----------------------------------------------------------------------------------------------

    def end(self, reason: EndReason) -> None:
        """End the process, or what is about to become one, for a reason of the parent's own."""
        core, process = self._core, self._core.process
        coming = core.phase in (LAUNCHING, ENDING) and process is None and not self._launcher.withdraw(self.launch)
        core.phase, core.reason = ENDING, reason
        if process is not None:
            process.worker.kill()
            if core.config.backend.kills or not self.calls.is_busy:
                return
            # It runs until its call ends; nobody waits for it.
            core.process = None
            core.let_go(process)
            self._after_exit(process.reap())
        elif not coming or self._uncertain is not None:
            self._after_exit(ExitReport())

    def replace(self) -> None:
        """End the process and start another one; not counted."""
        core = self._core
        if core.phase is DEAD:
            self.relaunch()
        elif core.phase is not CLOSED and core.reason is not EndReason.CLOSE:
            self.end(EndReason.ABORT)

    def discard(self, incarnation: int | None, request: Request, error: BaseException) -> None:
        """End the process of an env that is not fit to be used any more; counts as a restart. Under the lock.

        Args:
            incarnation: The process; another one is left alone.
            request: What the env was running.
            error: What it raised.
        """
        core = self._core
        if incarnation == core.incarnation and core.phase is LIVE:
            self._discarded_for = core.errors.discarded(request, core.incarnation, core.pid, error)
            self.end(EndReason.DISCARDED)

    def on_exit(self, process: ActorProcess) -> None:
        """Act on the end of a process."""
        with self._core.change, self._core.lock:
            if self._core.process is process:
                self._core.let_go(process)
                for frame in process.drain():
                    self.calls.on_frame(frame)  # which may post what is queued, so the doorbells must still be open
                self._after_exit(process.reap(), process)

    def _after_exit(self, report: ExitReport, process: ActorProcess | None = None) -> None:
        core, reason = self._core, self._core.reason
        report = report._replace(reason=EndReason.TIMEOUT if core.is_late else reason)
        self._launcher.finish(self.launch)
        core.timers.cancel("start", "call", "kill", "backoff")
        call, rows = take_running(self.calls, process), self.calls.rows
        begun: list[int] = []
        running: Request | None = call
        if rows is not None and process is not None:
            handed = [] if call is None else call.hand_over(rows, process)
            begun = handed or row_failures.begun(rows, reason)
            running = rows.request(begun[0]) if begun and not handed else call
            rows.keep_complete()
        if running is not None and running.started:
            core.record_span(f"{running.method} (lost)", running.started)
        # A factory would raise again; later, when it has made an env before, it may be the machine's fault.
        is_refused = report.is_refused or (self._failure is not None and core.incarnation == 0)
        is_adopting = self._adopting and not core.started
        following = decide(reason, is_closing=core.closing, is_adopting=is_adopting, is_refused=is_refused)
        core.process, core.reason, core.is_late = None, None, False
        if process is not None and not process.worker.is_over:
            self._uncertain = worker = process.worker
            worker.when_over(lambda: core.reactor.post(lambda: self._on_certain_end(worker)))
        error = self._exit_error(report, running)
        if core.started:
            core.loss = error
        if following is Next.CLOSED:
            self._finish(call, report)
        else:
            core.tell_end(reason, error)
            if call is not None:
                blame = core.loss_of(call) if reason is EndReason.DISCARDED else error
                fate = decide_call(following, reason, call.kind, call.retries)
                settle_running(self.calls, fate, call, blame)
            self._go_on(following, error)
        if rows is not None:
            row_failures.lose(rows, begun, error, reason)
        self.calls.fail_lost()

    def _exit_error(self, report: ExitReport, running: Request | None) -> ActorError:
        """Return the error that says how the process ended."""
        errors, incarnation = self._core.errors, self._core.incarnation
        if report.reason is EndReason.DISCARDED and self._discarded_for is not None:
            return self._discarded_for
        if self._core.started:
            return errors.death(report, incarnation, running)
        at = Request("", self._core.config.first_index + self._envs_made, started=self._launched)
        failure, self._failure = self._failure, None
        return errors.start(report, incarnation, at, failure)

    def _go_on(self, then: Next, error: ActorError) -> None:
        """Start the next process, now or later, or find that there is none."""
        core, now = self._core, time.monotonic()
        if then is Next.LAUNCH:
            self.relaunch()
        elif then is Next.LAUNCH_AGAIN:
            self.begin_launch()
        elif (delay := self.tracker.add(error, now)) is None or then is Next.DEAD:
            self._die()
        elif core.started and (spare := self._take_standby(delay)) is not None:
            # The wait goes over to the standby: however often processes are lost, they start no faster.
            core.restarts += 1
            self.relaunch(spare)
        else:
            core.phase = BACKOFF
            core.timers.set("backoff", now + delay)

    def _final_error(self) -> ActorError:
        """Return the error of all that comes after the last process that was allowed."""
        return self._core.errors.exhausted(self.tracker.errors, self._core.incarnation)

    def _die(self) -> None:
        core, name, final = self._core, self._core.config.name, self._final_error()
        core.phase = DEAD
        if (renewal := core.table.interrupt()) is not None:
            self.calls.end(renewal, None, copy_error(final))
        if core.config.is_standby:
            # Under the lock, so that a log handler must not run here: it may block.
            text = "%s cannot be restarted; the actors that it served continue: %s"
            core.reactor.logs.notices.add(lambda: _log.warning(text, name, final))
        self.settle_dead()

    def settle_dead(self) -> None:
        """Fail the requests that wait for a dead actor, up to a renewal, which revives it."""
        core, final = self._core, self._final_error()
        while core.phase is DEAD and core.queue:
            first = core.queue[0]
            if first.is_call and first.kind is None:
                core.table.start_call(first).started = time.monotonic()
                self.relaunch()
            else:
                self._fail_first(lambda request: core.errors.after_all(final, request))

    def _finish(self, running: CallRequest | None, report: ExitReport) -> None:
        """End a closed actor: fail whatever is left, free everything."""
        core, incarnation = self._core, self._core.incarnation
        rest = report if report.reason is None else report._replace(reason=EndReason.CLOSE)
        if running is not None and running.kind != Kind.CLOSE:
            self.calls.end(running, None, core.errors.death(report if core.started else rest, incarnation, running))
        while core.queue:
            self._fail_first(lambda request: core.errors.death(rest, incarnation, request))
        core.timers.cancel("close")
        core.phase = CLOSED
        core.deferred.waiting.append(self._on_closed)

    def _fail_first(self, error: Callable[[Request], ActorError]) -> None:
        """Fail the first request of the queue and remove it; closing the env does not fail."""
        queue, rows = self._core.queue, self.calls.rows
        first = queue[0]
        if first.is_call:
            self.calls.end(first, None, None if first.kind == Kind.CLOSE else error(first))
        elif rows is not None:
            row_failures.fail_group(rows, first, error)
        queue.popleft()


def _authkey_for(backend: Backend) -> bytes | None:
    """Return what workers need to talk to managers of the caller; None for those of other machines."""
    return None if backend.is_far else bytes(multiprocessing.current_process().authkey)
