"""One actor, as handles and vectors use it: requests, state, and deadlines.

Its calls are in `envactors.actor.calls`, its processes in `envactors.actor.lifecycle`, and the state that both share in
`envactors.actor.core`.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from envactors.actor import engine as engines
from envactors.actor.calls import Calls
from envactors.actor.config import ActorConfig
from envactors.actor.core import ActorCore
from envactors.actor.future import ActorFuture
from envactors.actor.lifecycle import Lifecycle
from envactors.actor.process import ExitReport
from envactors.actor.reactor import Reactor
from envactors.actor.requests import CallRequest, Request
from envactors.actor.rows import ActorRows
from envactors.actor.signal_deferral import defer_signals, is_on_stack
from envactors.actor.slots import Op, Slots
from envactors.actor.states import BACKOFF, CLOSED, DEAD, ENDING, LAUNCHING, ActorState, ActorStats, EndReason
from envactors.actor.watch import is_overdue, look_unread, what_runs
from envactors.mailbox.control_page import FINISHED
from envactors.mailbox.messages import Attach, Kind
from envactors.system.polling import LONGEST_WAIT, READABLE

# How long a killed worker may take to be gone, in seconds.
_KILL_GRACE = 0.9
# How long a worker may take to write its stacks before it is killed for a deadline, in seconds.
_STACKS_GRACE = 0.2
_serials = itertools.count()


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
        serial: A number that no other actor of this process has.
    """

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.closed: threading.Event = threading.Event()
        self.serial: int = next(_serials)
        # The threads in `_run_inline`. They come and go in any order: each takes out what it has put in, and nothing
        # else.
        self._threads: dict[int, FrameType] = {}
        engines.join(self, self._assemble)
        if config.backend.inline:
            self.core.run_inline = self._run_inline
        with self.core.change, self.core.lock:
            self.lifecycle.begin_launch()

    def _assemble(self, engine: engines.Engine) -> None:
        self._engine = engine
        self.reactor: Reactor = engine.reactor
        self.config.backend.retain(self.config.env_vars, engine.reactor)
        self.core: ActorCore = ActorCore(self.config, engine.reactor)
        self.lifecycle: Lifecycle = Lifecycle(self.core, engine.launcher, self._release)
        self.calls: Calls = self.lifecycle.calls
        # Bound here, and not a method: futures wait in it.
        self.wait: Callable[[ActorFuture, Callable[[], bool], float | None], None] = self.calls.wait

    # State -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> ActorState:
        """Its state. Reading it has no side effects, since debuggers do so at any moment."""
        core = self.core
        with defer_signals, core.lock:
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

    @property
    def is_usable(self) -> bool:
        """Whether it can run calls; takes no lock."""
        return not self.core.closing and self.core.lives

    def stats(self) -> ActorStats:
        """Return counts over the actor's life and its present activity; its env and worker notice nothing."""
        core = self.core
        process = core.process
        # Not under the lock: it may take seconds, where ``ps`` has to tell.
        rss = 0 if process is None else process.worker.resident_memory()
        with core.change, core.lock:
            self._is_busy()
            queued, last = len(core.table.queue), self.lifecycle.tracker.last
            counts = core.completed, core.failed, core.restarts, core.stale, queued, last
            node = None if core.process is None else core.process.worker.node
            now = self.state, core.pid, node, core.incarnation, *self._under_way()
            rss = rss if core.process is process else 0
            return ActorStats(*counts, *now, rss, core.started_in, core.replays, core.longest_replay)

    def _under_way(self) -> tuple[str | None, float]:
        """Return the method that runs, and for how long, in seconds."""
        process, call = self.core.process, self.core.table.running
        if process is None or not self.calls.is_busy:
            return None, 0.0
        running = call or what_runs(self.calls, process)
        return running.method, time.monotonic() - running.started

    def stacks(self, timeout: float) -> str:
        """Return the stacks of the worker's threads, or a line that says why there are none."""
        with defer_signals, self.core.lock:
            process = self.core.process
            asked = None if process is None or process.at_end else process.worker.ask_stacks()
        if asked is None:
            return f"actor {self.config.name!r} has no process now: it is {self.state.value}\n"
        return asked.wait(timeout)

    def last_output(self) -> dict[str, str]:
        """Return the last lines of each output stream of the present process, by stream; nothing if there is none."""
        process = self.core.process
        return {} if process is None else process.last_output

    # Requests --------------------------------------------------------------------------------------------

    def renew(self, future: ActorFuture) -> None:
        """Queue the replacement of the process; the future gets the new incarnation."""
        self.core.check_owner()
        with self.core.change, self.core.lock:
            self.calls.queue_renewal(future)

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
        self.calls.submit(CallRequest("attach", index, future=future, retries=retries, kind=Kind.ATTACH), attach)
        return future

    def _run_inline(self) -> None:
        """Run the posted requests of an in-process worker, unless an outer call in this thread is already doing so.

        Called without the lock, since env code runs in here, and therefore never in the reactor's thread.
        """
        if self.reactor.is_current_thread():
            self.reactor.callbacks.submit(self._run_inline)
            return
        me, core, lifecycle = threading.get_ident(), self.core, self.lifecycle
        if self._threads and is_on_stack(self._threads.get(me), sys._getframe()):
            return
        process = core.process
        finished = 0 if process is None else process.page.counters[FINISHED]
        try:
            self._threads[me] = sys._getframe()
            if lifecycle.launch_due:
                with defer_signals, core.lock:
                    due, lifecycle.launch_due = lifecycle.launch_due, False
                if due:
                    lifecycle.launch()
            for _ in range(2):  # a call that has waited for the end of rows runs in the second turn
                while (process := core.process) is not None and process.worker.work():
                    self.calls.on_channel(READABLE)
                if process is None or process.on_ring is None:
                    break
                process.on_ring()
            # Another thread may wait for rows that this one has run. If it has run none, it may be waiting itself.
            if self.calls.rows is not None and process is not None and process.page.counters[FINISHED] != finished:
                core.reactor.wake(self.calls.rows.waiter)
        except BaseException:  # of the library's own lines: what env code raises is the outcome of its request
            with defer_signals, core.lock:
                if core.process is process:  # else the change that was interrupted has replaced it
                    core.kill_inconsistent()
            raise
        finally:
            self._threads.pop(me, None)

    # What futures ask ------------------------------------------------------------------------------------

    def cancel(self, future: ActorFuture) -> bool:
        self.core.check_owner()
        core = self.core
        with core.change, core.lock:
            if not future.has_run and self._withdraw(future) is not None:
                future.mark_cancelled()
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
            if self.calls.runs(future):
                self._check_kills("abort a running call")
                self.lifecycle.replace()
            elif (waiting := self._withdraw(future)) is not None:  # it waits to run again
                error = core.errors.death(ExitReport(reason=EndReason.ABORT), core.incarnation, waiting)
                core.deferred.waiting.append(functools.partial(future.settle, None, error, core.incarnation))
            else:
                return False
        return True

    # Ending ----------------------------------------------------------------------------------------------

    def kill(self, restart: bool) -> None:
        """End the process now; see `envactors.actor.handle.ActorHandle.kill`."""
        self.core.check_owner()
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

    def begin_close(self, timeout: float | None, began: float) -> None:
        """Let what is queued run and the env close; then end the process.

        Args:
            timeout: How long that may take, in seconds; None: the close deadline.
            began: When closing began (`time.monotonic`), the same for all actors that are closed side by side.
        """
        core = self.core
        with core.change, core.lock:
            if not core.closing:
                self._ask_to_close()
            # Not before the env was asked to close: once the deadline has passed, nothing is begun any more.
            patience = self._close_patience(timeout)
            if patience is not None and core.phase is not CLOSED:
                core.timers.set_earlier("close", began + patience)

    def _ask_to_close(self) -> None:
        """Queue the end of the env, or end the process where there is nothing to wait for; under the lock."""
        core = self.core
        core.closing = True
        idle = not self._is_busy() and not core.table.queue
        waits = self.lifecycle.launch in self._engine.launcher.queued
        unneeded = self.config.is_standby and core.phase is LAUNCHING  # nobody waits for its process
        if unneeded or (idle and waits) or core.phase in (DEAD, BACKOFF):
            self.lifecycle.end(EndReason.CLOSE)
            return
        self.calls.queue(CallRequest("close", self.config.first_index, kind=Kind.CLOSE))

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
        self.post(lambda: self.begin_close(None, time.monotonic()))

    def post(self, job: Callable[[], None]) -> None:
        """Run a function in the reactor's thread soon; do nothing in a fork, or after the last actor has ended."""
        if engines.forks == self.core.forks and not self._engine.ended:
            self.reactor.post(job)

    def _release(self) -> None:
        with defer_signals, self.core.lock:
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

    # Deadlines -------------------------------------------------------------------------------------------

    def next_timer(self) -> float:
        """Return the next deadline (`time.monotonic`), infinity for none."""
        return 0.0 if self.core.is_inconsistent else self.core.timers.next()

    def on_timer(self, now: float) -> None:
        """Act on the deadlines that have passed."""
        core, lifecycle = self.core, self.lifecycle
        if not self.config.backend.kills:
            look_unread(self.calls, now)
            if self.next_timer() > now:
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
                elif (core.phase is LAUNCHING) if timer == "start" else is_overdue(self.calls, now):
                    core.phase, core.reason, core.is_late = ENDING, EndReason.TIMEOUT, True
                    if core.process is not None:
                        core.process.ask_stacks()
                        core.timers.set("kill", now + _STACKS_GRACE)
