"""What the parts of one actor share, all of it under one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable

from envactors.actor.callbacks import DeferredCalls
from envactors.actor.config import ActorConfig
from envactors.actor.error_factory import ErrorFactory
from envactors.actor.journal import Journals
from envactors.actor.process import ActorProcess
from envactors.actor.reactor import Reactor
from envactors.actor.requests import RequestTable, first_look
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.states import LAUNCHING, EndReason, Phase
from envactors.actor.timers import Timers
from envactors.errors import ActorError


class ActorCore:
    """The state of one actor: what it was asked, which process it has, what follows.

    Events come from callers' threads, the launcher's, the one that reads replies, and the reactor's. Each enters
    `change`, changes the state, and leaves what follows to ``deferred``, which runs once the lock is released.

    Args:
        config: What the actor is made of.
        reactor: Watches its descriptors and deadlines.
    """

    def __init__(self, config: ActorConfig, reactor: Reactor) -> None:
        self.config = config
        self.reactor = reactor
        self.lock = threading.RLock()
        # Runs what an in-line worker was asked, once the lock is released; None for other backends.
        self.run_inline: Callable[[], None] | None = None
        self.deferred = DeferredCalls(reactor.post)
        self.change = StateChange(self)
        self.timers = Timers(reactor.note_timer)
        self.errors = ErrorFactory(config)
        self.table = RequestTable()
        self.recovery = Journals(config.first_index, len(config.start.factories), config.max_journal)
        self.phase: Phase = LAUNCHING
        # The number of the present process, or of the one that is being started.
        self.incarnation = 0
        # The present process; None between two.
        self.process: ActorProcess | None = None
        # Whether the present process has made its envs.
        self.started = False
        # Why the parent is ending the present process, if it is.
        self.reason: EndReason | None = None
        # Whether the actor is being closed, or is.
        self.closing = False
        # Why the last process ended: the error of what was bound to it.
        self.loss: ActorError | None = None
        # The first time to look at the deadline of a request that has none of its own, such as a batch step, in seconds
        # after its start; None without deadlines.
        limit = first_look(config.deadlines)
        self.step_limit = limit if limit != float("inf") and config.backend.kills else None
        self.completed = self.failed = self.restarts = self.stale = 0

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        process = self.process
        return None if process is None else process.pid

    def kill_inconsistent(self) -> None:
        """Kill the process after an error in the middle of a change: what it was told is unknown."""
        if self.process is not None:
            self.process.worker.kill()


class StateChange:
    """A change of an actor's state: under its lock, with signals deferred; what follows from it runs afterwards."""

    def __init__(self, core: ActorCore) -> None:
        self._core = core

    def __enter__(self) -> None:
        defer_signals.__enter__()
        self._core.lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        core = self._core
        try:
            if kind is not None and not issubclass(kind, ActorError):
                core.kill_inconsistent()
        finally:
            core.lock.release()
            try:
                if core.deferred:
                    core.deferred.run()
            finally:
                defer_signals.__exit__()
        if core.run_inline is not None:
            core.run_inline()
