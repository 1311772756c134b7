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

from envactors.actor import engine, recording, row_failures
from envactors.actor.containment import handle_record
from envactors.actor.core import ActorCore
from envactors.actor.decide import Fate
from envactors.actor.future import ActorFuture
from envactors.actor.process import START_CALL_ID, ActorProcess
from envactors.actor.reactor import Reactor
from envactors.actor.requests import CallRequest, Entry, shortest_deadline
from envactors.actor.rows import ActorRows
from envactors.actor.slots import POSTED
from envactors.actor.states import BACKOFF, DEAD, LAUNCHING, LIVE, STOPPING, EndReason
from envactors.actor.wait_tuner import SHORT_PAUSE, WaitTuner
from envactors.errors import ActorError
from envactors.mailbox import bundle
from envactors.mailbox.control_page import ASLEEP, FINISHED, SPINNING, spin_until_all
from envactors.mailbox.messages import Failure, Frame, Kind
from envactors.mailbox.pickling import UNREAD, dumps, load_plain, loads
from envactors.system.polling import READABLE, WRITABLE

# How long a worker that has closed its env, or its channel, may take to end by itself, in seconds.
EXIT_GRACE = 1.0
# Before Python 3.12 looking up a member of an enum takes as long as a function call.
_EXTEND, _REPLAY, _FAILED = Kind.EXTEND, Kind.REPLAY, Kind.FAILED
_REPLIES, _BRINGS_BACK = (Kind.RESULT, Kind.FAILED), (Kind.REPLAY, Kind.RESTORE)


class Calls:
    """The requests of one actor on their way to the worker and back.

    Args:
        core: The actor's state.
        on_start_reply: Called with the reply to START or ADOPT.
        settle_dead: Called when something was queued at a dead actor.

    Attributes:
        core: The actor's state.
        rows: The rows of the actor's envs; None for an actor that is in no vector.
        tuner: Chooses how caller and worker wait for each other between calls.
        reported: When that began which the last warning about a slow call was about (`time.monotonic`).
    """

    def __init__(
        self, core: ActorCore, on_start_reply: Callable[[Frame], None], settle_dead: Callable[[], None]
    ) -> None:
        self.core = core
        self.rows: ActorRows | None = None
        self._on_start_reply = on_start_reply
        self._settle_dead = settle_dead
        self._has_deadlines = shortest_deadline(core.config.deadlines) != float("inf")
        self.tuner: WaitTuner = WaitTuner(core.config.spin)
        core.send_waiting = self.dispatch
        self.reported: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether the worker has anything that it has not completed."""
        return self.core.table.running is not None or (self.rows is not None and self.rows.is_in_flight())

    # Sending ---------------------------------------------------------------------------------------------

    def submit(self, call: CallRequest, message: tuple[Any, ...]) -> None:
        """Send a call, or queue it.

        Args:
            call: The call. If it is bound to an incarnation and that is lost, the call is too, unless a new process
                can be brought to the same point.
            message: One of `envactors.mailbox.messages`, which becomes its payload.

        Raises:
            ActorClosedError: The actor was closed, or belongs to another process.
        """
        core, table, rows = self.core, self.core.table, self.rows
        if engine.forks != core.forks:
            core.check_owner()
        if call.timeout is None and self._has_deadlines:
            call.timeout = core.config.deadlines.of(call.method)
        if call.timeout is not None:
            core.warn_of_deadline(call.timeout)
        with core.change:  # pickle takes what a handler raises for a value that cannot be pickled
            try:
                call.payload = dumps(tuple(message))
            except Exception as error:
                call.settle(None, core.errors.unpicklable(call, core.incarnation, error), core.incarnation)
                return
            with core.lock:
                if core.closing:
                    raise core.errors.closed(call, core.incarnation)
                # Not in a function of its own: that would be one more call on the way of each.
                is_live = core.phase is LIVE and core.process is not None and core.permits is None
                is_live &= not core.is_inconsistent
                is_busy = table.running is not None or table.queue or (rows is not None and rows.has_posted())
                if not is_live or is_busy or call.bound not in (None, core.incarnation):
                    self.queue(call)
                    return
                table.ids.last = call.call_id = table.ids.last + 1
                table.running = call
                if call.future is not None:
                    call.future.mark_running()
                call.started = time.monotonic()
                self._send(call)

    def queue_renewal(self, future: ActorFuture | None = None) -> None:
        """Queue the replacement of the process, whose incarnation a future gets; under the lock."""
        core = self.core
        call = CallRequest("renew", core.config.first_index, future=future)
        if core.closing:
            raise core.errors.closed(call, core.incarnation)
        self.queue(call)

    def queue(self, entry: Entry) -> None:
        """Queue a call, or envs that are to be posted, and send what can be sent; under the lock."""
        core = self.core
        core.add(entry)
        if core.incarnation > 0 or core.phase in (BACKOFF, DEAD):
            self.fail_lost()
        if core.phase is DEAD:
            self._settle_dead()
        else:
            self.dispatch()

    def dispatch(self) -> None:
        """Send what heads the queue, as far as the worker is free for it."""
        core, table, rows, permits = self.core, self.core.table, self.rows, self.core.permits
        if core.is_inconsistent or (core.closing and core.timers.is_due("close", time.monotonic())):
            return  # the process is about to be killed: nothing of what is queued may begin before
        while table.queue and core.phase is LIVE and core.process is not None and table.running is None:
            head = table.queue[0]
            if not head.is_call and (rows is None or not any(map(rows.is_asked, head.indices))):
                table.queue.popleft()  # what it had was withdrawn
                continue
            if rows is not None and (head.is_call or permits is not None) and rows.has_posted():
                rows.watch_end()  # the thread that waits for them need not be awake
                if rows.has_posted():
                    return
                continue
            if permits is not None and head.needs_permit and not permits.acquire(core, head.age):
                return
            if head.is_call:
                self._send_call(table.start_call(head))
                continue
            assert rows is not None, "only envs of a vector are posted"
            rows.post_waiting(head)
            table.queue.popleft()  # not before: an interrupt in between must not lose it
            if permits is not None:
                rows.watch_end()

    def _send_call(self, call: CallRequest) -> None:
        core, patience = self.core, self.core.config.deadlines.close
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
        core, kind = self.core, Kind.CLOSE if call.kind is None else call.kind
        assert core.process is not None, "a live actor has a process"
        if core.phase is LIVE and (call.timeout is not None or "call" not in core.timers.when):
            core.watch(call.started, call.timeout)
        spins = self.tuner.strategy.workers_spin and call.started - self.tuner.recorded < SHORT_PAUSE
        core.process.send(Frame(kind, core.incarnation, call.call_id, call.payload), SPINNING if spins else ASLEEP)

    # Replies ---------------------------------------------------------------------------------------------

    def wait(self, future: ActorFuture, done: Callable[[], bool], deadline: float | None) -> None:
        """Wait until ``done()``, which says something about a future, or the deadline (`time.monotonic`)."""
        core = self.core
        if engine.forks != core.forks or core.run_inline is not None or core.deferred.waiting:
            self.resume()
        if deadline is None and not core.config.backend.kills and core.runs_here and self._follows(future):
            raise core.errors.endless()
        call, may_spin = core.table.running, self.tuner.strategy.both_spin
        if call is None or call.future is not future or not may_spin or not self._spin_for(call):
            core.reactor.wait(done, future, deadline)

    def _follows(self, future: ActorFuture) -> bool:
        """Return whether the request of a future is queued, or has not completed."""
        with self.core.change, self.core.lock:
            if self.rows is not None:
                self.rows.arrive_for_others()
            return not future.settled() and (not future.has_run or self.runs(future))

    def runs(self, future: ActorFuture) -> bool:
        """Return whether the worker was sent the request of a future, and has not completed it; under the lock."""
        rows = self.rows
        return self.core.table.runs(future) or (rows is not None and rows.index_of(future, POSTED) is not None)

    def spin(self) -> None:
        """Spin for the end of the running call, unless nobody may."""
        call = self.core.table.running
        if call is not None and self.core.config.spin:
            self._spin_for(call)

    def _spin_for(self, call: CallRequest) -> bool:
        """Spin until the running call has ended, and read its reply; return whether it is there."""
        core, process = self.core, self.core.process
        if process is None:
            return False
        reactor, counters = core.reactor, process.page.counters
        with core.change:  # entered before the reply is there, while there is time
            reactor.is_spinning = True
            if counters[FINISHED] >= call.call_id or spin_until_all([(counters, call.call_id)], FINISHED):
                with core.lock:
                    self.receive(READABLE)
            reactor.is_spinning = False
            reactor.read_at = time.monotonic()
        return core.table.running is not call

    def resume(self) -> None:
        """Complete what an interrupt has left: undelivered results, and requests of an in-process worker."""
        core = self.core
        core.check_owner()
        if core.deferred.waiting:
            core.deferred.run()
        if core.run_inline is not None:
            self.on_channel(READABLE)  # at its end it runs posted requests

    def on_channel(self, mask: int) -> None:
        """Handle what has come."""
        with self.core.change, self.core.lock:
            self.receive(mask)

    def receive(self, mask: int) -> bool:
        """Handle what has come; return False if nothing had. Under the lock."""
        core = self.core
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

    def on_frame(self, frame: Frame) -> None:
        """Settle the running call, if a frame is the reply to it; most are."""
        core, call = self.core, self.core.table.running
        kind, incarnation, call_id, content = frame
        is_present = incarnation == core.incarnation and core.phase is LIVE
        if call is None or call_id != call.call_id or kind not in _REPLIES or not is_present:
            self._on_special(frame)
            return
        core.completed += 1
        failed = kind == _FAILED
        if core.recovery.replays:
            self._record(call, frame)
        if self.rows is not None and call.kind in _BRINGS_BACK:
            self.rows.on_brought_back(call.index)
        if call.kind == _EXTEND:
            call.on_reply(frame)
        value = UNREAD if failed or core.run_inline is not None else load_plain(content)
        if value is UNREAD:
            self._have_read(call, frame)
        else:
            self._settle(call, value)
        core.table.running = None  # not before: an interrupt in between must not lose it
        now = time.monotonic()
        self.tuner.record(now - call.started, now)
        if recording.recorder is not None:
            core.record_span(call.method, call.started)
        if call.kind == _REPLAY:
            core.replays, core.longest_replay = core.replays + 1, max(core.longest_replay, now - call.started)
        if core.table.queue or core.permits is not None:
            core.on_idle()

    def _settle(self, call: CallRequest, value: Any) -> None:
        """Hand out the value of a call: at once if that takes no lock, since little else is left to do then."""
        core, future = self.core, call.future
        is_done = False
        try:
            if type(future) is ActorFuture and not core.deferred.waiting and future.claim(value, core.incarnation):
                future.settle(value, None, core.incarnation)
                is_done = True
        finally:
            if not is_done:  # also after an interrupt, which may have come before threads that wait were woken
                self.end(call, value)

    def _have_read(self, call: CallRequest, frame: Frame) -> None:
        """Have an outcome that may run code of users read where that may take long, and delivered."""
        core = self.core
        read = functools.partial(core.errors.outcome, call, frame, core.pid)
        settle = functools.partial(_read_and_settle, call, read, frame.incarnation, core.reactor)
        if core.run_inline is not None:
            core.deferred.waiting.append(settle)
        else:
            call.arrive(settle, core.reactor)

    def _record(self, call: CallRequest, frame: Frame) -> None:
        """Record the reply to the running call in its env's journal."""
        core = self.core
        # A journal that began with the state of such an env would hide what has happened to it.
        is_elsewhere = self.rows is not None and call.kind == Kind.SAVE and self.rows.has_strayed(call.index)
        if not is_elsewhere and not core.recovery.journal(call.index).record(call, frame):
            self.fail_lost()
        if call.kind == Kind.SAVE and frame.kind == Kind.FAILED and call.future is None:
            failure = Failure(*loads(frame.payload))
            core.tell(logging.WARNING, "the state of env %s cannot be saved: %s", call.index, failure.text)

    def _on_special(self, frame: Frame) -> None:
        """Handle a frame that does not end the running call; one that belongs to no request is dropped and counted."""
        core, running = self.core, self.core.table.running
        if frame.kind == Kind.LOGGED:
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
        elif core.phase is STOPPING and running is not None and frame.call_id == running.call_id:
            # The env is closed. What may still keep its process, such as a thread that never ends, gets a moment.
            core.timers.set_earlier("kill", time.monotonic() + EXIT_GRACE)
        else:
            core.stale += 1

    # Outcomes --------------------------------------------------------------------------------------------

    def end(self, call: CallRequest, value: object, error: BaseException | None = None) -> None:
        """End a call with a value or an error of the parent's own."""
        core = self.core
        core.failed += error is not None
        core.deferred.waiting.append(functools.partial(call.settle, value, error, core.incarnation))

    def fail_lost(self) -> None:
        """Fail queued requests that only a lost process could have run."""
        core = self.core
        lost = core.incarnation if not core.lives or core.process is None else core.incarnation - 1
        for call in core.table.withdraw_calls(lambda call: call.bound is not None and call.bound <= lost):
            self.end(call, None, core.loss_of(call))
        if self.rows is not None:
            row_failures.fail_lost(self.rows)


def take_running(calls: Calls, process: ActorProcess | None) -> CallRequest | None:
    """Take out the call that runs; it is queued again if it had not begun."""
    core, table = calls.core, calls.core.table
    if core.is_inconsistent:
        core.forget_uncertain()
    if core.permits is not None:
        core.permits.withdraw(core)
    call = table.interrupt()
    blames = core.is_late or core.reason is EndReason.ABORT
    if call is not None and call.kind is not None and process is not None and not blames:
        began = process.page.progress().call_id == call.call_id
        if not began:
            table.queue.appendleft(call)
            call = None
    table.withdraw_calls(lambda waiting: waiting.kind == Kind.REPLAY)  # the next process gets its own
    return call


def settle_running(calls: Calls, fate: Fate, call: CallRequest, error: ActorError) -> None:
    """Do with the call that was running what was decided; the error is what it fails with, if it does."""
    table = calls.core.table
    if fate is Fate.HOLD:
        table.running = call
    elif fate is Fate.REDO:
        call.retries -= 1
        table.queue.appendleft(call)
    elif fate is Fate.FAIL:
        calls.end(call, None, error)


def _read_and_settle(
    call: CallRequest, read: Callable[[], tuple[Any, BaseException | None]], incarnation: int, reactor: Reactor
) -> None:
    """Read the outcome of a call, and deliver it."""
    value, error = read()
    try:
        call.settle(value, error, incarnation)
    except Exception as failure:
        # In threads of users it may be an interrupt: then this runs once more, in another one.
        if not reactor.owns_current_thread():
            raise
        call.settle(None, failure, incarnation)
