"""One actor as the parent sees it: what can be asked of it, how it stands, and its deadlines.

What it was asked is `envactors.actor.calls`; the processes that answer, `envactors.actor.lifecycle`; the state that
both share, `envactors.actor.core`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from envactors.actor import engine as engines
from envactors.actor.batch_step import FrameBatchStep, StepRequest
from envactors.actor.config import ActorConfig
from envactors.actor.core import ActorCore
from envactors.actor.future import ActorFuture
from envactors.actor.journal import Journal, SavedJournal
from envactors.actor.lifecycle import Lifecycle
from envactors.actor.process import ExitReport
from envactors.actor.requests import CallRequest, Entry
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.states import BACKOFF, CLOSED, DEAD, ENDING, LAUNCHING, LIVE, ActorState, EndReason
from envactors.errors import ActorClosedError
from envactors.system.cpus import spin_until_all
from envactors.system.polling import LONGEST_WAIT, READABLE
from envactors.wire.control_page import FINISHED
from envactors.wire.messages import Attach, Kind
from envactors.wire.pickling import dumps

# How long a killed worker may take to be gone, in seconds.
_KILL_GRACE = 0.9
# How long a worker may take to write its stacks before it is killed for a deadline, in seconds.
_STACKS_GRACE = 0.2


class Supervisor:
    """The parent's half of one actor.

    Args:
        config: What the actor is made of.

    Attributes:
        core: Its state.
        reactor: Waits for its worker.
        lifecycle: Its processes.
        calls: Its requests.
        closed: Set once nothing of the actor is left.
    """

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.closed = threading.Event()
        self._owner_pid, self._forks = os.getpid(), engines.forks
        self._has_warned = False
        engines.join(self, self._assemble)
        if config.backend.inline:
            self.core.run_inline = self.lifecycle.run_inline
        with self.core.change, self.core.lock:
            self.lifecycle.begin_launch()

    def _assemble(self, engine: engines.Engine) -> None:
        self._engine = engine
        self.reactor = engine.reactor
        self.config.backend.retain(self.config.env_vars, engine.reactor)
        self.core = ActorCore(self.config, engine.reactor)
        self.lifecycle = Lifecycle(self.core, engine.launcher, self._release)
        self.calls = self.lifecycle.calls

    # State -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> ActorState:
        """What it is doing. Nothing follows from reading it: debuggers do so at any moment."""
        with self.core.lock:
            return self.current_state()

    @property
    def is_usable(self) -> bool:
        """Whether it can run calls; takes no lock."""
        return not self.core.closing and self.core.phase not in (DEAD, CLOSED)

    def current_state(self) -> ActorState:
        """Return what it is doing; under the lock."""
        core = self.core
        phase, running = core.phase, self.calls.steps.unfinished()
        if phase is CLOSED or (phase is ENDING and core.reason is EndReason.CLOSE):
            return ActorState.CLOSED
        if phase is DEAD:
            return ActorState.DEAD
        if phase is LAUNCHING and core.incarnation == 0:
            return ActorState.STARTING
        renews = any(isinstance(entry, CallRequest) and entry.kind is None for entry in running)
        if phase in (LAUNCHING, BACKOFF) or renews:
            return ActorState.RENEWING
        return ActorState.BUSY if running else ActorState.IDLE

    def check_owner(self) -> None:
        """Refuse to go on in a process that inherited the actor by a fork.

        Raises:
            ActorClosedError: This is not the process that made the actor.
        """
        if engines.forks != self._forks:
            name, where = self.config.name, f"process {self._owner_pid} and this is its fork {os.getpid()}"
            raise ActorClosedError(
                f"actor {name!r} belongs to {where}: make an actor here, or call it there", actor=name
            )

    # Requests --------------------------------------------------------------------------------------------

    def submit_call(self, request: CallRequest, message: tuple[Any, ...]) -> None:
        """Queue a call.

        Args:
            request: The call. If it is bound to an incarnation and that is lost, the call is too, unless a new process
                can be brought to the same point.
            message: One of `envactors.wire.messages`, which becomes its payload.

        Raises:
            ActorClosedError: The actor was closed, or belongs to another process.
        """
        self.check_owner()
        if request.timeout is None:
            request.timeout = self.config.deadlines.of(request.method)
        self.warn_of_deadline(request.timeout)
        with defer_signals:  # pickle takes what a handler raises for a value that cannot be pickled
            try:
                request.payload = dumps(tuple(message))
            except Exception as error:
                incarnation = self.core.incarnation
                request.settle(None, self.core.errors.unpicklable(request, incarnation, error), incarnation)
                return
            if not self.config.backend.inline:
                self._submit(request)
                return
        self._submit(request)  # in line env code runs in here, and Ctrl-C shall reach it

    def submit_steps(self, requests: list[StepRequest], *, stream: bool, at_front: bool = False) -> None:
        """Queue a batch step in a frame.

        Args:
            requests: What each env is asked, in the order in which they run.
            stream: Whether each result is sent as soon as it is there; where processes may end it always is.
            at_front: Whether it comes before all that waits.

        Raises:
            ActorClosedError: The actor was closed, or belongs to another process.
        """
        self.check_owner()
        if not self.config.backend.kills:
            for request in requests:
                self.warn_of_deadline(self.config.deadlines.of(request.method))
        self._submit(FrameBatchStep(requests, stream=stream), at_front=at_front)

    def renew(self, future: ActorFuture) -> None:
        """Queue the replacement of the process; the future gets the new incarnation."""
        self.check_owner()
        self._submit(CallRequest("renew", self.config.first_index, future=future))

    def attach(self, attach: Attach) -> ActorFuture:
        """Have the present process, and each one that follows it, step through the shared memory."""
        self.core.recovery.attach = attach
        future = ActorFuture(self, None)
        # As often as it takes: what limits that is the restart policy.
        index, retries = self.config.first_index, sys.maxsize
        self.submit_call(CallRequest("attach", index, future=future, retries=retries, kind=Kind.ATTACH), attach)
        return future

    def journal(self, index: int) -> Journal:
        """Return what an env was asked, up to what has ended."""
        with self.core.change, self.core.lock:
            self.calls.steps.retire()
            return self.core.recovery.journal(index)

    def bring_back(self, journals: Sequence[SavedJournal]) -> None:
        """Have the envs brought to where saved journals end, in this process and in those after it."""
        core = self.core
        with core.change, core.lock:
            core.recovery.load(journals, core.incarnation)
            for request in core.recovery.replay_requests(core.config.deadlines):
                core.table.add(request)
            self.calls.dispatch()

    def _submit(self, entry: Entry, *, at_front: bool = False) -> None:
        core = self.core
        with core.change, core.lock:
            if core.closing:
                raise core.errors.closed(entry.parts[0], core.incarnation)
            if core.table.running:
                self.calls.steps.retire()
            core.table.add(entry, at_front=at_front)
            # The envs of one entry may be bound to different processes.
            lost = core.incarnation if core.phase in (BACKOFF, DEAD) else core.incarnation - 1
            if lost >= 0 and any(request.bound is not None and request.bound <= lost for request in entry.parts):
                self.calls.fail_bound(lost)
            if core.phase is DEAD:
                self.lifecycle.settle_dead()
            else:
                self.calls.dispatch()

    def may_retry(self, request: StepRequest, error: BaseException) -> bool:
        """Return whether a step that has raised is worth another try in a process that is brought to the same point.

        If it is not, the env is not brought back at all.
        """
        with self.core.lock:
            journal = self.core.recovery.journal(request.index)
            worth = journal.can_retry(request, error)
            if worth:
                journal.count_failure()
            else:
                journal.forget()
            return worth

    # What futures ask ------------------------------------------------------------------------------------

    def cancel(self, future: ActorFuture) -> bool:
        self.check_owner()
        with self.core.change, self.core.lock:
            if self.core.table.withdraw(future) is not None:
                future.mark_cancelled()
                self.reactor.wake(future)
        return future.cancelled()

    def abort(self, future: ActorFuture) -> bool:
        if self.cancel(future):
            return True
        core = self.core
        with core.change, core.lock:
            if future.settled():
                return False
            running = [part for entry in core.table.running for part in entry.parts if part.future is future]
            if running:
                self._check_kills("abort a running call")
                running[0].retries = 0
                self.lifecycle.replace()
            elif (waiting := core.table.withdraw(future, retry=True)) is not None:
                self.calls.fail(waiting, core.errors.death(ExitReport(), core.incarnation, waiting, aborted=True))
            else:
                return False
        return True

    def wait(self, future: ActorFuture, done: Callable[[], bool], deadline: float | None) -> None:
        if engines.forks != self._forks or self.core.run_inline is not None or self.core.deferred.waiting:
            self.resume_inline()
        if not (self._spin_for(future) and done()):
            self.reactor.wait(done, future, deadline)

    def resume_inline(self) -> None:
        """Have done what an interrupt has left: results that are not handed out, requests of an in-line worker."""
        self.check_owner()
        if self.core.deferred.waiting:
            self.core.deferred.run()
        if self.core.run_inline is not None:
            self.lifecycle.on_channel(READABLE)  # on its way out it runs what was asked

    def _spin_for(self, future: ActorFuture) -> bool:
        """Spin until the running call has ended, and read its reply; return whether there was one."""
        running, process = self.core.table.running, self.core.process
        if process is None or not running or not self.calls.tuner.strategy.both_spin:
            return False
        entry = running[0]
        if not isinstance(entry, CallRequest) or entry.future is not future:
            return False
        self.reactor.count_wait()
        counters = process.page.counters
        ended = counters[FINISHED]
        if ended != entry.call_id and not spin_until_all([(counters, ended + 1)], FINISHED):
            return False
        self.lifecycle.on_channel(READABLE)
        return True

    # Ending ----------------------------------------------------------------------------------------------

    def kill(self, restart: bool) -> None:
        """End the process now; see `envactors.actor.handle.ActorHandle.kill`."""
        self.check_owner()
        core = self.core
        with core.change, core.lock:
            if core.phase is CLOSED:
                return
            self.calls.steps.wake_waiters()
            if core.table.running:
                self._check_kills("kill it in the middle of a call")
            if not restart:
                core.closing = True
                self.lifecycle.end(EndReason.CLOSE)
            elif not core.closing:
                self.lifecycle.replace()

    def begin_close(self, timeout: float | None) -> None:
        """Let what is queued run and the env close, for ``timeout`` seconds; then end the process."""
        core, table = self.core, self.core.table
        with core.change, core.lock:
            patience = self._close_patience(timeout)
            if patience is not None and core.phase is not CLOSED:
                core.timers.set_earlier("close", time.monotonic() + patience)
            if core.closing:
                return
            core.closing = True
            self.calls.steps.wake_waiters()
            idle = not table.running and not table.queue
            waits = self.lifecycle.launch in self._engine.launcher.queued
            unneeded = self.config.is_standby and core.phase is LAUNCHING  # nobody waits for its process
            if unneeded or (idle and waits) or core.phase in (DEAD, BACKOFF):
                self.lifecycle.end(EndReason.CLOSE)
                return
            table.add(CallRequest("close", self.config.first_index, kind=Kind.CLOSE))
            self.calls.dispatch()

    def wait_closed(self, timeout: float | None) -> None:
        """Wait until the process has ended; not in the reactor's thread, which is what ends it."""
        if self.reactor.is_current_thread():
            return
        patience = self._close_patience(timeout)
        self.closed.wait(None if patience is None else min(patience + _KILL_GRACE, LONGEST_WAIT))
        self._engine.linger()

    def _close_patience(self, timeout: float | None) -> float | None:
        return self.config.deadlines.close if timeout is None else timeout

    def abandon(self) -> None:
        """Close without waiting; for finalizers: takes no lock."""
        if engines.forks == self._forks and not self._engine.ended:
            self.reactor.post(lambda: self.begin_close(None))

    def _release(self) -> None:
        self.config.backend.release(self.config.env_vars)
        self.closed.set()
        self._engine.release(self)

    def _check_kills(self, what: str) -> None:
        if not self.config.backend.kills:
            raise self.core.errors.cannot(what, self.core.incarnation)

    def warn_of_deadline(self, timeout: float | None) -> None:
        """Warn, once, of a deadline in seconds that the backend does not enforce."""
        if timeout is not None and not self.config.backend.kills and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"actor {self.config.name!r} lives in {self.config.backend!r}, where deadlines are not enforced",
                stacklevel=5,
            )

    # Deadlines -------------------------------------------------------------------------------------------

    def next_timer(self) -> float:
        """Return the next deadline (`time.monotonic`), infinity for none."""
        return self.core.timers.next()

    def on_timer(self, now: float) -> None:
        """Act on the deadlines that have passed."""
        core, lifecycle = self.core, self.lifecycle
        with core.change, core.lock:
            # A caller that was stopped itself finds both at once: replies that came in time, and deadlines.
            self.calls.receive(READABLE)
            self.calls.steps.wake_waiters()
            for timer in core.timers.pop_due(now):
                if timer == "backoff":
                    core.restarts += 1
                    lifecycle.relaunch()
                elif timer == "close":
                    lifecycle.end(EndReason.CLOSE)
                elif timer == "kill" and core.process is not None:
                    core.process.worker.kill()
                elif timer == "call" and core.phase in (LAUNCHING, LIVE):
                    self._on_call_timer(now)

    def _on_call_timer(self, now: float) -> None:
        core, process = self.core, self.core.process
        if core.phase is LIVE and not core.table.running:
            return  # an interrupt has kept it from being cancelled
        if core.phase is LIVE and process is not None:
            if untrue := process.page.find_untrue(len(self.config.start.factories)):
                process.distrust(f"{untrue} on its control page cannot be true")
            if process.untrue:
                return
            later = core.table.running[0].next_look(process.page, self.config.deadlines, now)
            if later is not None:
                core.timers.set("call", later)
                return
        core.phase, core.reason = ENDING, EndReason.TIMEOUT
        if process is not None:
            process.ask_stacks()
            core.timers.set("kill", now + _STACKS_GRACE)
