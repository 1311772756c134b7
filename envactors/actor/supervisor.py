"""One actor, as handles and vectors use it: requests, state, and deadlines.

Its calls are in `envactors.actor.calls`, its processes in `envactors.actor.lifecycle`, and the state that both share in
`envactors.actor.core`.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from envactors.actor import engine as engines
from envactors.actor.calls import Calls
from envactors.actor.config import ActorConfig
from envactors.actor.core import ActorCore
from envactors.actor.future import ActorFuture
from envactors.actor.journal import Journal, SavedJournal
from envactors.actor.lifecycle import Lifecycle
from envactors.actor.process import ExitReport
from envactors.actor.reactor import Reactor
from envactors.actor.requests import CallRequest, Entry, Request, shortest_deadline
from envactors.actor.rows import ActorRows
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.slots import Op, Slots
from envactors.actor.states import BACKOFF, CLOSED, DEAD, ENDING, LAUNCHING, ActorState, EndReason
from envactors.actor.watch import Watch
from envactors.errors import ActorClosedError
from envactors.mailbox.messages import Attach, Kind
from envactors.mailbox.pickling import dumps
from envactors.system.polling import LONGEST_WAIT, READABLE

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
        self.closed: threading.Event = threading.Event()
        self._owner_pid, self._forks = os.getpid(), engines.forks
        self._has_warned = False
        engines.join(self, self._assemble)
        if config.backend.inline:
            self.core.run_inline = self.lifecycle.inline.run
        with self.core.change, self.core.lock:
            self.lifecycle.begin_launch()

    def _assemble(self, engine: engines.Engine) -> None:
        self._engine = engine
        self.reactor: Reactor = engine.reactor
        self._has_deadlines = shortest_deadline(self.config.deadlines) != float("inf")
        self.config.backend.retain(self.config.env_vars, engine.reactor)
        self.core: ActorCore = ActorCore(self.config, engine.reactor)
        self.lifecycle: Lifecycle = Lifecycle(self.core, engine.launcher, self._release)
        self.calls: Calls = self.lifecycle.calls
        self._watch = Watch(self.core, self.calls)

    # State -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> ActorState:
        """Its state. Reading it has no side effects, since debuggers do so at any moment."""
        with self.core.lock:
            return self.current_state()

    @property
    def is_usable(self) -> bool:
        """Whether it can run calls; takes no lock."""
        return not self.core.closing and self.core.phase not in (DEAD, CLOSED)

    def current_state(self) -> ActorState:
        """Return its state; under the lock."""
        core = self.core
        phase, call = core.phase, core.table.running
        if phase is CLOSED or (phase is ENDING and core.reason is EndReason.CLOSE):
            return ActorState.CLOSED
        if phase is DEAD:
            return ActorState.DEAD
        if phase is LAUNCHING and core.incarnation == 0:
            return ActorState.STARTING
        if phase in (LAUNCHING, BACKOFF) or (call is not None and call.kind is None):
            return ActorState.RENEWING
        return ActorState.BUSY if self.calls.is_busy else ActorState.IDLE

    def check_owner(self) -> None:
        """Raise in a forked process that inherited the actor.

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
            message: One of `envactors.mailbox.messages`, which becomes its payload.

        Raises:
            ActorClosedError: The actor was closed, or belongs to another process.
        """
        if engines.forks != self._forks:
            self.check_owner()
        if request.timeout is None and self._has_deadlines:
            request.timeout = self.config.deadlines.of(request.method)
        if request.timeout is not None:
            self.warn_of_deadline(request.timeout)
        with defer_signals:  # pickle takes what a handler raises for a value that cannot be pickled
            try:
                request.payload = dumps(tuple(message))
            except Exception as error:
                incarnation = self.core.incarnation
                request.settle(None, self.core.errors.unpicklable(request, incarnation, error), incarnation)
                return
            if not self.config.backend.inline:
                if not self.calls.send_at_once(request):
                    self._submit(request)
                return
        self._submit(request)  # in-process env code runs in here, and Ctrl-C must reach it

    def renew(self, future: ActorFuture) -> None:
        """Queue the replacement of the process; the future gets the new incarnation."""
        self.check_owner()
        with self.core.change, self.core.lock:
            self.queue_renewal(future)

    def queue_renewal(self, future: ActorFuture) -> None:
        """Queue the replacement of the process; under the lock."""
        call = CallRequest("renew", self.config.first_index, future=future)
        if self.core.closing:
            raise self.core.errors.closed(call, self.core.incarnation)
        self.queue(call)

    def attach(self, attach: Attach, slots: Slots, waiter: object, read: Callable[[int, Op], None]) -> ActorFuture:
        """Have the present process, and each one that follows it, use the rows of its envs.

        Args:
            attach: What the worker is told.
            slots: All envs of the vector.
            waiter: What `Reactor.wake` is given when an outcome is there.
            read: Reads an outcome that a future waits for, and settles the future.
        """
        core = self.core
        core.recovery.attach = attach
        self.calls.rows = ActorRows(core, slots, waiter, self.calls.receive, read)
        future = ActorFuture(self, None)
        # As often as it takes: what limits that is the restart policy.
        index, retries = self.config.first_index, sys.maxsize
        self.submit_call(CallRequest("attach", index, future=future, retries=retries, kind=Kind.ATTACH), attach)
        return future

    def journal(self, index: int) -> Journal:
        """Return the journal of an env, up to its last completed request."""
        core = self.core
        with core.change, core.lock:
            if self.calls.rows is not None:
                self.calls.rows.arrive_for_others()
            return core.recovery.journal(index)

    def bring_back(self, journals: Sequence[SavedJournal]) -> None:
        """Have the envs brought to where saved journals end, in this process and in those after it."""
        core = self.core
        with core.change, core.lock:
            core.recovery.load(journals)
            for request in core.recovery.replay_requests(core.config.deadlines):
                core.add(request)
            self.calls.dispatch()

    def _submit(self, call: CallRequest) -> None:
        core = self.core
        with core.change, core.lock:
            if core.closing:
                raise core.errors.closed(call, core.incarnation)
            self.queue(call)

    def queue(self, entry: Entry) -> None:
        """Queue a call, or envs that are to be posted, and send what can be sent; under the lock."""
        core = self.core
        core.add(entry)
        if core.incarnation > 0 or core.phase in (BACKOFF, DEAD):
            self.calls.fail_lost()
        if core.phase is DEAD:
            self.lifecycle.settle_dead()
        else:
            self.calls.dispatch()

    # What futures ask ------------------------------------------------------------------------------------

    def cancel(self, future: ActorFuture) -> bool:
        self.check_owner()
        core = self.core
        with core.change, core.lock:
            if not future.has_run and self._withdraw(future) is not None:
                future.mark_cancelled()
                self.reactor.wake(future)
        return future.cancelled()

    def _withdraw(self, future: ActorFuture) -> Request | None:
        """Take out what a future waits for, if it waits itself; under the lock."""
        core = self.core
        call = core.table.withdraw(future)
        return call if call is not None or self.calls.rows is None else self.calls.rows.withdraw(future)

    def abort(self, future: ActorFuture) -> bool:
        if self.cancel(future):
            return True
        core = self.core
        with core.change, core.lock:
            if future.settled():
                return False
            call = core.table.running
            runs_call = call is not None and call.future is future
            if runs_call or (self.calls.rows is not None and self.calls.rows.is_posted(future)):
                self._check_kills("abort a running call")
                if call is not None:
                    call.retries = 0
                self.lifecycle.replace()
            elif (waiting := self._withdraw(future)) is not None:  # it waits to run again
                error = core.errors.death(ExitReport(), core.incarnation, waiting, aborted=True)
                core.deferred.waiting.append(functools.partial(future.settle, None, error, core.incarnation))
            else:
                return False
        return True

    def wait(self, future: ActorFuture, done: Callable[[], bool], deadline: float | None) -> None:
        if engines.forks != self._forks or self.core.run_inline is not None or self.core.deferred.waiting:
            self.resume_inline()
        if not self.calls.spin_for(future):
            self.reactor.wait(done, future, deadline)

    def resume_inline(self) -> None:
        """Complete what an interrupt has left: undelivered results, and requests of an in-process worker."""
        self.check_owner()
        if self.core.deferred.waiting:
            self.core.deferred.run()
        if self.core.run_inline is not None:
            self.lifecycle.on_channel(READABLE)  # at its end it runs posted requests

    # Ending ----------------------------------------------------------------------------------------------

    def kill(self, restart: bool) -> None:
        """End the process now; see `envactors.actor.handle.ActorHandle.kill`."""
        self.check_owner()
        core = self.core
        with core.change, core.lock:
            if core.phase is CLOSED:
                return
            if self._is_busy():
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
            idle = not self._is_busy() and not table.queue
            waits = self.lifecycle.launch in self._engine.launcher.queued
            unneeded = self.config.is_standby and core.phase is LAUNCHING  # nobody waits for its process
            if unneeded or (idle and waits) or core.phase in (DEAD, BACKOFF):
                self.lifecycle.end(EndReason.CLOSE)
                return
            core.add(CallRequest("close", self.config.first_index, kind=Kind.CLOSE))
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
        self.post(lambda: self.begin_close(None))

    def post(self, job: Callable[[], None]) -> None:
        """Run a function in the reactor's thread soon; do nothing in a fork, or after the last actor has ended."""
        if engines.forks == self._forks and not self._engine.ended:
            self.reactor.post(job)

    def _release(self) -> None:
        with self.core.lock:
            self.calls.rows = None  # with the memory of its vector
        self.config.backend.release(self.config.env_vars)
        self.closed.set()
        self._engine.release(self)

    def _is_busy(self) -> bool:
        """Return whether the worker is at anything, once what has come was taken into account; under the lock."""
        if self.calls.rows is not None:
            self.calls.rows.arrive_for_others()
        return self.calls.is_busy

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
        if not self.config.backend.kills:
            self._watch.look_unread(now)
            if core.timers.next() > now:
                return
        with core.change, core.lock:
            # A caller that was stopped itself finds both at once: replies that came in time, and deadlines.
            self.calls.receive(READABLE)
            self._is_busy()
            for timer in core.timers.pop_due(now):
                if timer == "backoff":
                    core.restarts += 1
                    lifecycle.relaunch()
                elif timer == "close":
                    lifecycle.end(EndReason.CLOSE)
                elif timer == "kill" and core.process is not None:
                    core.process.worker.kill()
                elif (timer == "start" and core.phase is LAUNCHING) or (
                    timer == "call" and self._watch.is_overdue(now)
                ):
                    core.phase, core.reason = ENDING, EndReason.TIMEOUT
                    if core.process is not None:
                        core.process.ask_stacks()
                        core.timers.set("kill", now + _STACKS_GRACE)
