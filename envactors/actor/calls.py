"""What an actor is asked: queued, sent, answered; how replies find their requests; what its lost process leaves.

At most one call runs at a time. Batch steps in shared memory pipeline: the next one is posted while the worker is
still at the one before.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

from envactors.actor import recording
from envactors.actor.batch_step import FrameBatchStep, StepRequest
from envactors.actor.core import ActorCore
from envactors.actor.env_records import handle_record
from envactors.actor.exit_decision import ExitDecision, Fate, Running
from envactors.actor.permits import LimitedTable
from envactors.actor.process import START_CALL_ID, ActorProcess, ExitReport
from envactors.actor.requests import Answer, CallRequest, Entry, Request
from envactors.actor.shm_batch_step import LimitedSteps, SharedMemoryBatchStep, SharedMemorySteps
from envactors.actor.states import ENDING, LAUNCHING, LIVE, STOPPING, EndReason
from envactors.actor.wait_tuner import SHORT_PAUSE, WaitTuner
from envactors.errors import ActorError, copy_error
from envactors.wire.control_page import ASLEEP, SPINNING
from envactors.wire.messages import Frame, Kind
from envactors.wire.pickling import reads_at_once
from envactors.wire.steps import pack_steps

_log = logging.getLogger("envactors")
# How long a worker that has closed its env, or its channel, may take to end by itself, in seconds.
EXIT_GRACE = 1.0
# Before Python 3.12 looking up a member of an enum takes as long as a function call.
_LOGGED = Kind.LOGGED


class Calls:
    """The requests of one actor on their way to the worker and back.

    Args:
        core: The actor's state.
        on_start_reply: Called with the reply to START or ADOPT.

    Attributes:
        tuner: Chooses how caller and worker wait for each other between calls.
        steps: The batch steps in shared memory.
    """

    def __init__(self, core: ActorCore, on_start_reply: Callable[[Frame], None]) -> None:
        self._core = core
        self._on_start_reply = on_start_reply
        self.tuner = WaitTuner(core.config.spin)
        kind = SharedMemorySteps
        if isinstance(core.table, LimitedTable):
            kind, core.table.dispatch = LimitedSteps, self._dispatch_or_kill
        self.steps = kind(core, self.receive, self.dispatch)
        # When the last reply came (`time.monotonic`).
        self._answered = 0.0

    # Sending ---------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Send what heads the queue, as far as the worker is free for it."""
        core = self._core
        if core.phase is not LIVE or core.process is None:
            return
        while core.table.queue and (entry := core.table.start_next()) is not None:
            self._post(entry)
            if core.phase is not LIVE:
                return
        table = core.table
        if table.running and table.running[0].pipelines and (table.queue or table.is_limited):
            self.steps.watch_end()  # the thread that waits for the step need not be awake

    def _dispatch_or_kill(self) -> None:
        """Send what waits, for another actor that must not suffer for an error of this one."""
        try:
            self.dispatch()
        except Exception as error:
            core, text = self._core, "what actor %r was asked could not be sent: %s"
            core.reactor.logs.notices.add(functools.partial(_log.error, text, core.config.name, repr(error)))
            core.kill_inconsistent()

    def _post(self, entry: Entry) -> None:
        core, now = self._core, time.monotonic()
        if isinstance(entry, SharedMemoryBatchStep):
            if core.step_limit is not None and len(core.table.running) == 1:
                core.timers.set("call", now + core.step_limit)
            core.table.last_id += 1
            entry.start(core.table.last_id, now, ASLEEP)
            return
        entry.started = now
        if isinstance(entry, FrameBatchStep):
            self._send(Kind.STEPS, entry, pack_steps(entry.message, core.config.backend.pickles))
        elif isinstance(entry, CallRequest) and entry.kind not in (None, Kind.CLOSE):
            self._send(entry.kind, entry, entry.payload)
        elif isinstance(entry, CallRequest):
            core.phase = STOPPING
            core.reason = EndReason.RENEW if entry.kind is None else EndReason.CLOSE
            if entry.kind is None and core.config.deadlines.close is not None:
                core.timers.set("kill", now + core.config.deadlines.close)
            self._send(Kind.CLOSE, entry, entry.payload)

    def _send(self, kind: Kind | None, entry: Entry, payload: object) -> None:
        core = self._core
        assert core.process is not None, "a live actor has a process"
        assert kind is not None, "a renewal sends CLOSE"
        limit = core.step_limit if entry.timeout is None else entry.timeout
        if limit is not None and core.phase is LIVE and core.config.backend.kills:
            core.timers.set("call", entry.started + limit)
        spins = self.tuner.strategy.workers_spin and entry.started - self._answered < SHORT_PAUSE
        core.process.send(Frame(kind, core.incarnation, entry.call_id, payload), SPINNING if spins else ASLEEP)

    # Replies ---------------------------------------------------------------------------------------------

    def receive(self, mask: int) -> bool:
        """Handle what has come; return False if nothing had. Under the lock."""
        core = self._core
        process = core.process
        if process is None or process.at_end:
            return False
        frames = process.advance(mask)
        for frame in frames or ():
            self.on_frame(frame)
        if process.at_end and core.phase is not STOPPING:
            # Only the sentinel tells of a death; but a worker that cannot be asked is of no use any more.
            core.timers.set("kill", time.monotonic() + EXIT_GRACE)
        return frames is not None

    def on_frame(self, frame: Frame) -> None:
        """Find the request that a frame belongs to; a frame that belongs to none is dropped and counted."""
        core = self._core
        if frame.kind == _LOGGED:
            core.reactor.logs.records.add(functools.partial(handle_record, frame.payload), len(frame.payload))
            return
        entry = core.table.find_running(frame.call_id)
        if frame.incarnation != core.incarnation:
            core.stale += 1
        elif frame.call_id == START_CALL_ID and core.phase is LAUNCHING:
            self._on_start_reply(frame)
        elif core.phase is ENDING:
            core.stale += 1
        elif frame.kind == Kind.OVERFLOW:
            self.steps.on_overflow(frame)
        elif entry is None:
            core.stale += 1
        elif core.phase is STOPPING:
            # The env is closed. What may still keep its process, such as a thread that never ends, gets a moment.
            core.timers.set_earlier("kill", time.monotonic() + EXIT_GRACE)
        elif core.phase is LIVE:
            self._on_reply(entry, frame)

    def _on_reply(self, entry: Entry, frame: Frame) -> None:
        core = self._core
        answers, ended = entry.answers(frame)
        for answer in answers:
            core.completed += 1
            if core.recovery.replays and not core.recovery.record(answer, frame.incarnation):
                self.fail_bound(core.incarnation - 1)
            self._hand_out(answer, frame.incarnation)
        if not ended:
            entry.discard(answers)
        else:
            core.table.running.remove(entry)
            core.timers.cancel("call")
            self._answered = now = time.monotonic()
            self.tuner.record(now - entry.started, now)
            if isinstance(entry, CallRequest):
                if recording.recorder is not None:
                    core.record_span(entry.method, entry.started)
                if entry.kind == Kind.REPLAY:
                    core.replays, core.longest_replay = core.replays + 1, max(core.longest_replay, now - entry.started)
        if ended and (core.table.queue or core.table.is_limited):
            core.table.end_running()
            self.dispatch()

    # Outcomes --------------------------------------------------------------------------------------------

    def answer(self, request: Request, value: object) -> None:
        """End a request with a value of the parent's own."""
        self._core.deferred.waiting.append(
            functools.partial(self._settle, request, value, None, self._core.incarnation)
        )

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error of the parent's own."""
        self._core.failed += 1
        self._core.deferred.waiting.append(
            functools.partial(self._settle, request, None, error, self._core.incarnation)
        )

    def _hand_out(self, answer: Answer, incarnation: int) -> None:
        """Have an answer read and handed out: at once, or in another thread if code of users runs for that."""
        core, content = self._core, answer.content
        settle = functools.partial(self._settle_answer, answer, incarnation, core.pid)
        if core.config.backend.inline or (isinstance(answer.request, CallRequest) and reads_at_once(content)):
            core.deferred.waiting.append(settle)
        else:
            answer.request.arrive(settle, core.reactor)

    def _settle_answer(self, answer: Answer, incarnation: int, pid: int | None) -> None:
        value, error = self._core.errors.outcome(answer, incarnation, pid)
        self._settle(answer.request, value, error, incarnation)

    def _settle(self, request: Request, value: object, error: BaseException | None, incarnation: int) -> None:
        try:
            request.settle(value, error, incarnation)
        except Exception as failure:
            # In threads of users it may be an interrupt: then this runs once more, in another one.
            if not self._core.reactor.owns_current_thread():
                raise
            request.settle(None, failure, incarnation)
        if request.future is not None:
            self._core.reactor.wake(request.future)

    def fail_bound(self, incarnation: int) -> None:
        """Fail what waits and was meant for a lost process, as far as no other can take its place."""
        core = self._core

        def is_lost(entry: Entry) -> bool:
            return any(core.recovery.journal(part.index).loses(part, incarnation) for part in entry.parts)

        self.separate_waiting_steps()
        for entry in core.table.withdraw_all(is_lost):
            for request in entry.parts:
                self.fail(request, self.loss_error(request))

    def separate_waiting_steps(self) -> None:
        """Make waiting batch steps into one per env: after the end of a process their envs may fare differently."""
        queue = self._core.table.queue
        for _ in range(len(queue)):
            entry = queue.popleft()
            if len(entry.parts) == 1:
                queue.append(entry)
            else:
                _, requests = entry.split(None, blame=False)
                queue.extend(self.as_entry(request, entry.number) for request in requests)

    def as_entry(self, request: Request, number: int = 0) -> Entry:
        """Return what the table holds for a request that is asked by itself."""
        if isinstance(request, CallRequest):
            return request
        assert isinstance(request, StepRequest), "there are calls and steps"
        entry, table = FrameBatchStep([request], stream=True), self._core.table
        table.last_id += 1
        entry.call_id, entry.number = table.last_id, number
        return entry

    def loss_error(self, request: Request) -> ActorError:
        """Return the error of a request that was lost with its process before it could run."""
        core = self._core
        loss = core.loss
        if loss is None:
            return core.errors.death(ExitReport(), core.incarnation, request, aborted=True)
        if (loss.call_id, loss.index) == (request.call_id, request.index):
            return copy_error(loss)
        return core.errors.loss(request, loss)

    # What a process that has ended leaves ----------------------------------------------------------------

    def interrupt(self, process: ActorProcess | None) -> Request | None:
        """Take out what runs: return the request that was running, queue what had not begun."""
        core = self._core
        if core.is_inconsistent:
            core.forget_uncertain()
        page = None if process is None else process.page
        blame = core.reason in (EndReason.TIMEOUT, EndReason.ABORT)
        current: Request | None = None
        waiting: list[Request] = []
        for entry in core.table.interrupt():
            one, others = entry.split(page, blame=blame)
            if current is None:
                current = one
            elif one is not None:
                waiting.append(one)  # it had begun after the deadline of the first had passed
            waiting += others
            if isinstance(entry, SharedMemoryBatchStep):
                kept = [index for index in entry.envs if index not in entry.failed_envs]
                core.completed += len(kept)
                entry.record(core.recovery, kept)
                core.reactor.wake(entry.waiter)
        if isinstance(current, StepRequest):
            current.timeout = core.config.deadlines.of(current.method)
        if current is not None and current.started:
            core.record_span(f"{current.method} (lost)", current.started)
        core.table.queue.extendleft(self.as_entry(request) for request in reversed(waiting))
        core.table.withdraw_all(lambda entry: what_runs(entry) is Running.REPLAY)  # the next process is asked anew
        return current

    def settle_running(self, decision: ExitDecision, running: Request, error: ActorError) -> None:
        """Do with the request that was running what was decided; the error is what it fails with, if it does."""
        core, journal = self._core, self._core.recovery.journal(running.index)
        if decision.fate in (Fate.HOLD, Fate.AGAIN):
            entry = self.as_entry(running)
            entry.started = running.started
            if decision.fate is Fate.HOLD:
                core.table.running = [entry]
                return
            running.retries -= decision.spends_retry
            if decision.counts_against_inputs:
                journal.count_failure()
            core.table.queue.appendleft(entry)
        elif decision.fate is Fate.FAIL:
            inputs = None
            if isinstance(running, StepRequest) and core.recovery.replays and not decision.aborted:
                inputs = journal.inputs(core.recovery.attach, running)
            if decision.forgets_env:
                journal.forget()
            self.fail(running, error if inputs is None else core.errors.poison(error, inputs))


def what_runs(running: Entry | Request | None) -> Running:
    """Return the kind of what a process runs."""
    if running is None:
        return Running.NOTHING
    if not isinstance(running, CallRequest):
        return Running.STEP
    special = {None: Running.RENEWAL, Kind.REPLAY: Running.REPLAY}
    return special.get(running.kind, Running.CALL)
