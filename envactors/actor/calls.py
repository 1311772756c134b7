"""The calls of one actor: queued, sent, matched with their replies, and settled, also when the process is lost.

At most one call runs at a time, and none while rows are in flight. Rows pipeline: the next ones are posted while the
worker is still at those before.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from envactors.actor import recording, row_failures
from envactors.actor.core import ActorCore
from envactors.actor.decide import Cause
from envactors.actor.env_records import handle_record
from envactors.actor.exit_decision import ExitDecision, Fate, Running
from envactors.actor.future import ActorFuture
from envactors.actor.process import START_CALL_ID, ActorProcess
from envactors.actor.requests import Answer, CallRequest, Group, Request
from envactors.actor.rows import ActorRows
from envactors.actor.states import ENDING, LAUNCHING, LIVE, STOPPING, EndReason
from envactors.actor.timers import Turn
from envactors.actor.wait_tuner import SHORT_PAUSE, WaitTuner
from envactors.errors import ActorError
from envactors.mailbox import bundle
from envactors.mailbox.control_page import ASLEEP, FINISHED, SPINNING, ControlPage, spin_until_all
from envactors.mailbox.messages import Failure, Frame, Kind
from envactors.mailbox.pickling import loads, reads_at_once
from envactors.system.polling import READABLE, WRITABLE

_log = logging.getLogger("envactors")
# How long a worker that has closed its env, or its channel, may take to end by itself, in seconds.
EXIT_GRACE = 1.0
# Before Python 3.12 looking up a member of an enum takes as long as a function call.
_LOGGED, _EXTEND = Kind.LOGGED, Kind.EXTEND


class Calls:
    """The requests of one actor on their way to the worker and back.

    Args:
        core: The actor's state.
        on_start_reply: Called with the reply to START or ADOPT.

    Attributes:
        rows: The rows of the actor's envs; None for an actor that is in no vector.
        tuner: Chooses how caller and worker wait for each other between calls.
    """

    def __init__(self, core: ActorCore, on_start_reply: Callable[[Frame], None]) -> None:
        self._core = core
        self.rows: ActorRows | None = None
        self._on_start_reply = on_start_reply
        self.tuner: WaitTuner = WaitTuner(core.config.spin)
        core.send_waiting = self.dispatch
        # When the last reply came (`time.monotonic`).
        self._answered = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether the worker has anything that it has not completed."""
        return self._core.table.running is not None or (self.rows is not None and self.rows.is_in_flight())

    # Sending ---------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Send what heads the queue, as far as the worker is free for it."""
        core, table, rows, permits = self._core, self._core.table, self.rows, self._core.permits
        while table.queue and core.phase is LIVE and core.process is not None and table.running is None:
            head = table.queue[0]
            call, group = head.call, head.group
            if group is not None and (rows is None or not rows.awaits(group)):
                table.queue.popleft()  # what it had was withdrawn
                continue
            if rows is not None and (call is not None or permits is not None) and rows.has_posted():
                rows.watch_end()  # the thread that waits for them need not be awake
                if rows.has_posted():
                    return
                continue
            if permits is not None and head.needs_permit and not permits.acquire(core, head.age):
                return
            if call is not None:
                self._send_call(table.start_call(call))
                continue
            assert rows is not None, "only envs of a vector are posted"
            assert group is not None, "an entry is a call or a group"
            rows.post_waiting(group)
            table.queue.popleft()  # not before: an interrupt in between must not lose it
            if permits is not None:
                rows.watch_end()

    def send_at_once(self, call: CallRequest) -> bool:
        """Send a call that nothing is in the way of; return False if there is; called with signals deferred."""
        core, table, rows = self._core, self._core.table, self.rows
        try:
            with core.lock:
                if not core.is_free() or core.deferred.waiting or call.bound is not None:
                    return False
                if rows is not None and rows.has_posted():
                    return False
                table.last_id = call.call_id = table.last_id + 1
                table.running = call
                if call.future is not None:
                    call.future.mark_running()
                call.started = time.monotonic()
                self._send(call)
        except BaseException:
            core.is_inconsistent = True
            core.kill_inconsistent()
            raise
        return True

    def _send_call(self, call: CallRequest) -> None:
        core, patience = self._core, self._core.config.deadlines.close
        call.started = time.monotonic()
        if call.kind is None or call.kind == Kind.CLOSE:
            core.phase = STOPPING
            core.reason = EndReason.RENEW if call.kind is None else EndReason.CLOSE
            if call.kind is None and patience is not None:
                core.timers.set("kill", call.started + patience)
        else:
            call.prepare(core.incarnation)
        self._send(call)

    def _send(self, call: CallRequest) -> None:
        core, kind = self._core, Kind.CLOSE if call.kind is None else call.kind
        assert core.process is not None, "a live actor has a process"
        if core.phase is LIVE and (call.timeout is not None or "call" not in core.timers.when):
            core.watch(call.started, call.timeout)
        spins = self.tuner.strategy.workers_spin and call.started - self._answered < SHORT_PAUSE
        core.process.send(Frame(kind, core.incarnation, call.call_id, call.payload), SPINNING if spins else ASLEEP)

    # Replies ---------------------------------------------------------------------------------------------

    def receive(self, mask: int) -> bool:
        """Handle what has come; return False if nothing had. Under the lock."""
        core = self._core
        process = core.process
        if process is None or process.at_end:
            return False
        if mask & WRITABLE:
            process.flush()
        frames = process.read() if mask & READABLE else None
        for frame in frames or ():
            self.on_frame(frame)
        if process.at_end and core.phase is not STOPPING:
            # The channel has ended, but only the sentinel reports the exit. Until then the worker cannot do any work.
            core.timers.set("kill", time.monotonic() + EXIT_GRACE)
        return frames is not None

    def spin_for(self, future: ActorFuture) -> bool:
        """Spin until the running call has ended, and read its reply; return whether it is there, and this future's."""
        core, call, process = self._core, self._core.table.running, self._core.process
        if process is None or call is None or not self.tuner.strategy.both_spin:
            return False
        if call.future is not future:
            return False
        core.reactor.count_wait()
        counters = process.page.counters
        ended = counters[FINISHED]
        if ended != call.call_id and not spin_until_all([(counters, ended + 1)], FINISHED):
            return False
        with core.change, core.lock:
            self.receive(READABLE)
        return core.table.running is not call

    def on_frame(self, frame: Frame) -> None:
        """Find the request that a frame belongs to; a frame that belongs to none is dropped and counted."""
        core, running = self._core, self._core.table.running
        if frame.kind == _LOGGED:
            core.reactor.logs.records.add(functools.partial(handle_record, frame.payload), len(frame.payload))
        elif frame.incarnation != core.incarnation:
            core.stale += 1
        elif frame.call_id == START_CALL_ID and core.phase is LAUNCHING:
            self._on_start_reply(frame)
        elif frame.kind == Kind.OVERFLOW and self.rows is not None:
            self.rows.on_overflow(frame)  # also of a process that is being ended: the row that it belongs to counts
        elif frame.kind == Kind.PART and running is not None and frame.call_id == running.call_id:
            for number, content in bundle.unpack(frame.payload):
                running.add_part(number, content)
        elif core.phase is ENDING or running is None or frame.call_id != running.call_id:
            core.stale += 1
        elif core.phase is STOPPING:
            # The env is closed. What may still keep its process, such as a thread that never ends, gets a moment.
            core.timers.set_earlier("kill", time.monotonic() + EXIT_GRACE)
        elif core.phase is LIVE:
            self._on_reply(running, frame)

    def _on_reply(self, call: CallRequest, frame: Frame) -> None:
        core = self._core
        answer = Answer(call, frame.kind == Kind.FAILED, frame.payload)
        core.completed += 1
        if core.recovery.replays:
            # The state of an env that was lost is not where it stood: a journal that begins there would hide the loss.
            was_lost = self.rows is not None and call.kind == Kind.SAVE and self.rows.is_lost(call.index)
            if not was_lost and not core.recovery.journal(call.index).record(answer):
                self.fail_lost()
            if call.kind == Kind.SAVE and answer.failed and call.future is None:
                failure = Failure(*loads(answer.content))
                core.tell(logging.WARNING, "the state of env %s cannot be saved: %s", call.index, failure.text)
        if self.rows is not None and call.kind in (Kind.REPLAY, Kind.RESTORE):
            self.rows.on_brought_back(call.index)
        core.table.running = None
        if call.kind == _EXTEND:
            call.on_reply(answer)
        # Unpickling may run code of users: then in another thread.
        read = functools.partial(core.errors.outcome, answer, frame.incarnation, core.process)
        settle = functools.partial(self._settle, call, read, frame.incarnation)
        if core.config.backend.inline or reads_at_once(answer.content):
            core.deferred.waiting.append(settle)
        else:
            call.arrive(settle, core.reactor)
        self._answered = now = time.monotonic()
        self.tuner.record(now - call.started, now)
        if recording.recorder is not None:
            core.record_span(call.method, call.started)
        if call.kind == Kind.REPLAY:
            core.replays, core.longest_replay = core.replays + 1, max(core.longest_replay, now - call.started)
        if core.table.queue or core.permits is not None:
            if core.table.running is None and not (self.rows is not None and self.rows.has_posted()):
                core.on_idle()
            else:
                self.dispatch()  # taking the reply into account has sent or posted something

    # Outcomes --------------------------------------------------------------------------------------------

    def answer(self, call: CallRequest, value: object) -> None:
        """End a call with a value of the parent's own."""
        self._settle_later(call, value, None)

    def fail(self, call: CallRequest, error: BaseException) -> None:
        """End a call with an error of the parent's own."""
        self._core.failed += 1
        self._settle_later(call, None, error)

    def _settle_later(self, call: CallRequest, value: object, error: BaseException | None) -> None:
        core = self._core
        core.deferred.waiting.append(functools.partial(self._settle, call, lambda: (value, error), core.incarnation))

    def _settle(
        self, call: CallRequest, read: Callable[[], tuple[Any, BaseException | None]], incarnation: int
    ) -> None:
        value, error = read()
        try:
            call.settle(value, error, incarnation)
        except Exception as failure:
            # In threads of users it may be an interrupt: then this runs once more, in another one.
            if not self._core.reactor.owns_current_thread():
                raise
            call.settle(None, failure, incarnation)
        if call.future is not None:
            self._core.reactor.wake(call.future)

    def fail_lost(self) -> None:
        """Fail queued requests that only a lost process could have run."""
        core = self._core
        lost = core.incarnation if not core.lives or core.process is None else core.incarnation - 1
        for call in core.table.withdraw_calls(lambda call: call.bound is not None and call.bound <= lost):
            self.fail(call, core.loss_of(call))
        if self.rows is not None:
            row_failures.fail_lost(self.rows)

    def fail_group(self, group: Group, error: Callable[[Request], ActorError]) -> None:
        """Fail envs that wait to be posted, and that nothing posts any more."""
        rows = self.rows
        for index in group.indices:
            if rows is not None and rows.is_asked(index):
                row_failures.fail(rows, index, Cause.WAITING, error(rows.request(index)))

    def turn(self, page: ControlPage) -> Turn:
        """Return what the worker runs, or begins next; it is busy."""
        call = self._core.table.running
        if call is not None:
            return call.turn(page, self._core.config.deadlines)
        assert self.rows is not None, "rows are in flight"
        return row_failures.turn(self.rows)

    def on_overdue(self, turn: Turn, page: ControlPage) -> None:
        """Note what has passed its deadline: no result of it counts any more."""
        call = self._core.table.running
        if call is not None:
            call.on_overdue(turn, page)
        elif self.rows is not None:
            self.rows.overdue = turn.env_id

    # What a process that has ended leaves ----------------------------------------------------------------

    def interrupt(self, process: ActorProcess | None) -> CallRequest | None:
        """Take out the call that runs; it is queued again if it had not begun."""
        core, table = self._core, self._core.table
        if core.is_inconsistent:
            core.forget_uncertain()
        if core.permits is not None:
            core.permits.withdraw(core)
        call = table.interrupt()
        blames = core.reason in (EndReason.TIMEOUT, EndReason.ABORT)
        if call is None or process is None or blames:
            began = True
        else:
            began = call.kind is None or process.page.progress().call_id == call.call_id
        if call is not None and not began:
            table.queue.appendleft(call)
            call = None
        table.withdraw_calls(lambda waiting: waiting.kind == Kind.REPLAY)  # the next process gets its own
        return call

    def settle_running(self, decision: ExitDecision, call: CallRequest, error: ActorError) -> None:
        """Do with the call that was running what was decided; the error is what it fails with, if it does."""
        table = self._core.table
        if decision.fate is Fate.HOLD:
            table.running = call
        elif decision.fate is Fate.AGAIN:
            call.retries -= decision.spends_retry
            table.queue.appendleft(call)
        elif decision.fate is Fate.FAIL:
            self.fail(call, error)


def what_runs(running: CallRequest | None) -> Running:
    """Return the kind of what a process runs."""
    if running is None:
        return Running.NOTHING
    special = {None: Running.RENEWAL, Kind.REPLAY: Running.REPLAY}
    return special.get(running.kind, Running.CALL)
