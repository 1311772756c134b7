"""What the parts of one actor share, all of it under one lock."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from threading import get_ident

import numpy as np

from envactors.actor import engine, recording
from envactors.actor.config import ActorConfig
from envactors.actor.error_factory import ErrorFactory
from envactors.actor.journal import Journals
from envactors.actor.permits import Permits
from envactors.actor.process import ActorProcess, ExitReport
from envactors.actor.reactor import Reactor
from envactors.actor.requests import CallRequest, Entry, Group, Request, RequestTable, shortest_deadline
from envactors.actor.signal_deferral import DeferredCalls, StateChange, defer_signals
from envactors.actor.states import CLOSED, DEAD, ENDING, LAUNCHING, LIVE, EndReason, Phase
from envactors.actor.timers import Timers
from envactors.errors import ActorClosedError, ActorError, copy_error
from envactors.mailbox.durations import HISTOGRAM, Histograms, merge
from envactors.mailbox.messages import Kind, Save
from envactors.mailbox.pickling import dumps

# What it says reaches users as errors and results, too: nothing is printed where nobody has set up any logging.
_log = logging.getLogger("envactors.actors")
_log.addHandler(logging.NullHandler())
# How often the state of an env is saved again in the next process, if one ends meanwhile.
_SAVE_RETRIES = 3


class ActorCore:
    """The state of one actor: its requests, its process, and the functions to run once the lock is released.

    Events come from callers' threads, the launcher's, the one that reads replies, and the reactor's. Each enters
    `change`, acquires the lock, changes the state, and leaves what follows to ``deferred``, which runs once the lock is
    released.

    Args:
        config: What the actor is made of.
        reactor: Watches its descriptors and deadlines.
    """

    def __init__(self, config: ActorConfig, reactor: Reactor) -> None:
        self.config = config
        self.reactor = reactor
        self.permits: Permits | None = config.permits
        self.lock: threading.RLock = threading.RLock() if config.lock is None else config.lock
        # Runs the requests of an in-process worker, once the lock is released; None for other backends.
        self.run_inline: Callable[[], None] | None = None
        self.deferred: DeferredCalls = DeferredCalls(reactor.post, reactor.is_current_thread, reactor.logs.report)
        self.change: StateChange = StateChange(self)
        self.timers: Timers = Timers(reactor.note_timer)
        self.errors: ErrorFactory = ErrorFactory(config)
        self.table: RequestTable = RequestTable(config.ids)
        # The waiting requests, the next one first.
        self.queue: deque[Entry] = self.table.queue
        # Sends what heads the queue, as far as the worker is free for it; set by `envactors.actor.calls`.
        self.send_waiting: Callable[[], None] = lambda: None
        # Ends the process of an env that is not fit to be used any more; set by `envactors.actor.lifecycle`.
        self.discard: Callable[[int | None, Request, BaseException], None] = lambda _incarnation, _request, _error: None
        # The process that made the actor, and what `engine.forks` was there.
        self._owner_pid = os.getpid()
        self.forks: int = engine.forks
        self._has_warned = False
        count = len(config.start.factories)
        self.recovery: Journals = Journals(
            config.first_index, count, config.max_journal, config.save_every, self._save_state
        )
        self.phase: Phase = LAUNCHING
        # The number of the present process, or of the one that is being started.
        self.incarnation = 0
        # The present process; None between two.
        self.process: ActorProcess | None = None
        # Whether the present process has made its envs.
        self.started = False
        # Whether an exception has fallen into the middle of a change, and the process is to be replaced.
        self.is_inconsistent: bool = False
        # Why the parent is ending the present process, if it is.
        self.reason: EndReason | None = None
        # Whether what the present process runs has passed its deadline, whatever else ends the process meanwhile.
        self.is_late = False
        # Whether the actor is being closed, or is.
        self.closing = False
        # Why the last process ended: the error of what was bound to it.
        self.loss: ActorError | None = None
        # How long after its start whatever the worker runs may be slow, or have passed its deadline, in seconds at the
        # least; infinity for never.
        self.first_look: float = float("inf") if config.deadlines.slow is None else config.deadlines.slow
        if config.backend.kills:
            self.first_look = min(self.first_look, shortest_deadline(config.deadlines))
        self.completed = self.failed = self.restarts = self.stale = self.replays = 0
        # How long the longest replay of an env took, in seconds.
        self.longest_replay: float = 0.0
        # How long the last start took, in seconds; None before the first.
        self.started_in: float | None = None
        # Durations of steps and resets in earlier processes; None until somebody reads them.
        self._times: Histograms | None = None

    @property
    def pid(self) -> int | None:
        """The process id, None between two processes."""
        process = self.process
        return None if process is None else process.pid

    @property
    def runs_here(self) -> bool:
        """Whether code of its envs runs in this thread: its worker runs nothing else before that ends."""
        process = self.process
        return process is not None and process.worker.find_thread() == get_ident()

    @property
    def lives(self) -> bool:
        """Whether it can have another process."""
        return self.phase not in (DEAD, CLOSED)

    def check_owner(self) -> None:
        """Raise in a forked process that inherited the actor.

        Raises:
            ActorClosedError: This is not the process that made the actor.
        """
        if engine.forks != self.forks:
            name, where = self.config.name, f"process {self._owner_pid} and this is its fork {os.getpid()}"
            raise ActorClosedError(
                f"actor {name!r} belongs to {where}: make an actor here, or call it there", actor=name
            )

    def warn_of_deadline(self, timeout: float | None) -> None:
        """Warn, once, of a deadline in seconds that the backend does not enforce."""
        if timeout is not None and not self.config.backend.kills and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"actor {self.config.name!r} lives in {self.config.backend!r}, where deadlines are not enforced",
                stacklevel=5,
            )

    def add(self, entry: Entry, *, at_front: bool = False) -> None:
        """Queue a call, or envs that are to be posted."""
        if self.permits is not None:
            entry.age = 0 if at_front else self.permits.next_age()
        self.table.add(entry, at_front=at_front)

    def add_first(self, indices: list[int]) -> None:
        """Queue envs before all that waits but replays."""
        if indices:
            replays = sum(entry.is_call and entry.kind == Kind.REPLAY for entry in self.queue)
            self.queue.insert(replays, Group(indices))

    def watch(self, began: float, limit: float | None = None) -> None:
        """Have what the worker runs looked at in time; steps do this themselves, where no look is due yet.

        The look stays due when that has ended. If nothing runs then, it is the last one until something begins.

        Args:
            began: When it began (`time.monotonic`).
            limit: Its own deadline, in seconds; None for that of `Deadlines`.
        """
        if limit is not None and self.config.backend.kills:
            self.timers.set_earlier("call", began + min(limit, self.first_look))
        elif "call" not in self.timers.when:
            self.timers.set("call", began + self.first_look)

    def dispatch(self) -> None:
        """Send waiting requests. Called by another actor, so an error stays with this one."""
        try:
            self.send_waiting()
        except Exception as error:
            text = "the queued requests of actor %r could not be sent: %s"
            self.reactor.logs.notices.add(functools.partial(_log.error, text, self.config.name, repr(error)))
            self.kill_inconsistent()

    def on_idle(self) -> None:
        """Send waiting requests: nothing is running any more."""
        if self.permits is not None:
            self.permits.release(self)
        if self.queue:
            self.send_waiting()

    def loss_of(self, request: Request) -> ActorError:
        """Return the error of a request that was lost with its process before it could run."""
        loss = self.loss
        if loss is None:
            return self.errors.death(ExitReport(reason=EndReason.ABORT), self.incarnation, request)
        if (loss.call_id, loss.index) == (request.call_id, request.index):
            return copy_error(loss)
        return self.errors.loss(request, loss)

    def _save_state(self, index: int) -> None:
        """Queue a request that saves the state of an env; under the lock."""
        payload, timeout = dumps(tuple(Save(index - self.config.first_index))), self.config.deadlines.of("snapshot")
        self.add(CallRequest("snapshot", index, timeout, retries=_SAVE_RETRIES, kind=Kind.SAVE, payload=payload))

    def use(self, process: ActorProcess) -> None:
        """Make it the present process."""
        self.process = process
        if self._times is not None or recording.recorder is not None:
            self.begin_timing()

    def begin_timing(self) -> None:
        """Have steps and resets timed from now on, if they are not."""
        if self.process is not None:
            self.process.worker.begin_timing(recording.recorder is not None)
        if self._times is None:
            self._times = np.zeros((len(self.config.start.factories), 2), HISTOGRAM)

    def let_go(self, process: ActorProcess) -> None:
        """Keep what its envs took: the process is about to be reaped."""
        if self._times is not None:
            merge(self._times, process.page.histograms(len(self._times)))
        if recording.recorder is not None:
            recording.recorder.on_process_end(self, process)

    def histograms(self) -> Histograms:
        """Return how long steps and resets have taken since the first call of this, which begins to count."""
        with defer_signals, self.lock:
            if self._times is None:
                self.begin_timing()
            assert self._times is not None, "just set"
            times: Histograms = self._times.copy()
            if self.process is not None:
                merge(times, self.process.page.histograms(len(times)))
            return times

    def tell(self, level: int, text: str, *args: object) -> None:
        """Log something about the actor, in a thread where handlers may block."""
        if _log.isEnabledFor(level):
            where = {"actor": self.config.name, "incarnation": self.incarnation, "env_id": self.config.first_index}
            self.reactor.logs.notices.add(functools.partial(_log.log, level, text, *args, extra=where))
        if recording.recorder is not None:
            recording.recorder.on_notice(self, text % args)

    def record_span(self, name: str, begin: float) -> None:
        """Have what has ended now recorded, if a trace runs; it began at ``begin`` (`time.monotonic`)."""
        if recording.recorder is not None:
            recording.recorder.on_span(self, name, begin, time.monotonic())

    def tell_start(self, launched: float) -> None:
        """Log that a process has started that was launched at this time (`time.monotonic`)."""
        self.started_in = time.monotonic() - launched
        self.record_span("start", launched)
        self.tell(logging.INFO, "actor %r has started in %.3g s, pid %s", self.config.name, self.started_in, self.pid)

    def tell_end(self, reason: EndReason | None, error: ActorError) -> None:
        """Log the end of a process."""
        if reason in (EndReason.ABORT, EndReason.RENEW):
            self.tell(logging.INFO, "actor %r gets a new process, on request", self.config.name)
        else:
            self.tell(logging.WARNING, "%s", str(error).partition("\n")[0])

    def forget_uncertain(self) -> None:
        """Clear the journals: after an error in the middle of a change they may lack a step, or have it twice."""
        for journal in self.recovery.journals:
            journal.forget()
        self.is_inconsistent = False

    def kill_inconsistent(self, *, was_left: bool = False) -> None:
        """Replace the process after an error in the middle of a change: what it was told is unknown.

        In a thread of the user's that is an interrupt, such as an asynchronous exception, for which the actor is not to
        blame: it is not counted as a restart.

        Args:
            was_left: Whether it was an interrupt, perhaps in another thread, that kept this from being done at once.
        """
        self.is_inconsistent = True  # until all of this is done
        self.reactor.note_timer(0.0)  # its thread does all of this if an interrupt, or a lack of stack, ends this
        with defer_signals, self.lock:
            if not self.is_inconsistent:
                return  # another thread has done it, and there may be another process by now
            process = self.process
            was_interrupted = self.phase is LIVE and (was_left or not self.reactor.owns_current_thread())
            if process is not None:
                if was_interrupted:
                    self.phase, self.reason = ENDING, EndReason.ABORT
                process.worker.kill()
            self.forget_uncertain()  # not before: another interrupt has all of this done once more
            if process is not None and was_interrupted:
                text = "actor %r gets another process: an exception fell into the middle of a request"
                self.tell(logging.WARNING, text, self.config.name)
