"""The reactor and the launcher, which all actors of a process share; their threads run while there are actors."""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Protocol

from envactors.actor.callbacks import CallbackExecutor
from envactors.actor.reactor import Reactor
from envactors.backends.base import Timed

# How long the workers may take to close when the interpreter exits, in seconds: it must exit within five seconds even
# if workers hang.
_EXIT_PATIENCE = 3.0
# What lets users look at this program. Imported by name, as it stands above this package.
_OBSERVING = "envactors.observe.server"
# How long to wait for the engine's threads, in seconds: a callback that never returns blocks its thread.
_JOIN_PATIENCE = 1.0


class Launcher(CallbackExecutor):
    """Starts workers one after the other, in a thread that outlives all of them.

    A limited number of workers start at a time, from the launch until they are ready; the others are queued. If
    hundreds of interpreters imported side by side, all of them would miss their start deadlines.

    The kernel ends a worker when the *thread* that started it ends, so this thread must outlive all workers. It blocks
    Ctrl-C, and its children inherit that until they join their own process group. So Ctrl-C never interrupts a worker
    in the middle of its imports.

    Attributes:
        queued: The jobs that have not begun, in order, each with its limit.
    """

    def __init__(self) -> None:
        super().__init__("envactors-launcher")
        # Guarded by `_lock`, like the next one.
        self.queued: dict[Callable[[], None], int | None] = {}
        # The jobs whose workers were launched under a limit and are not ready yet.
        self._starting: set[Callable[[], None]] = set()
        self.submit(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}))

    def launch(self, job: Callable[[], None], limit: int | None) -> None:
        """Queue a function that starts a worker and handles its own errors.

        Args:
            job: The function; `finish` must be called for it later.
            limit: How many workers may be starting, this one included; None if it does not count.
        """
        with self._lock:
            self.queued[job] = limit
        self.submit(self._run_queued)

    def withdraw(self, job: Callable[[], None]) -> bool:
        """Take a job out of the queue, if it has not begun; return whether it was there. `finish` is to follow."""
        with self._lock:
            return self.queued.pop(job, self) is not self

    def finish(self, job: Callable[[], None]) -> None:
        """Forget a job: its worker is ready, has ended, or will never be."""
        with self._lock:
            self.queued.pop(job, None)
            self._starting.discard(job)
        self.submit(self._run_queued)

    def _run_queued(self) -> None:
        """Run the first jobs of the queue, as far as they may start now."""
        while True:
            with self._lock:
                job, limit = next(iter(self.queued.items()), (None, None))
                if job is None or (limit is not None and len(self._starting) >= limit):
                    return
                del self.queued[job]
                if limit is not None:
                    self._starting.add(job)
            job()


class Member(Timed, Protocol):
    """The interface of an actor that the engine uses."""

    def begin_close(self, timeout: float | None, began: float) -> None:
        """Start closing the actor, within a time from ``began`` (`time.monotonic`) on; do not wait for it."""

    def wait_closed(self, timeout: float | None) -> None:
        """Wait until the actor is closed."""


class Engine:
    """The reactor and the launcher of one process.

    Attributes:
        members: The actors that have not ended.
        ended: Whether the last actor has ended, so that the threads are stopping.
    """

    def __init__(self) -> None:
        self.members: set[Member] = set()
        self.reactor: Reactor = Reactor()
        self.launcher: Launcher = Launcher()
        self.ended: bool = False
        # Answers `envactors top` and `envactors stacks`; None where there is none.
        self._server = importlib.import_module(_OBSERVING).begin(self.reactor)

    def release(self, member: Member) -> None:
        """Remove an actor that has ended; after the last one, stop the engine."""
        global _engine
        with _lock:
            self.members.discard(member)
            self.reactor.unwatch_timers(member)
            if self.members:
                return
            self.ended = True
            if self._server is not None:
                self._server.close()
            if _engine is self:
                _engine = None
        self.launcher.stop()
        self.reactor.stop()

    def linger(self) -> None:
        """If the last actor has ended, wait until the engine's threads have ended too."""
        if self.ended:
            self.launcher.join(_JOIN_PATIENCE)
            self.reactor.join(_JOIN_PATIENCE)
            if self._server is not None:
                self._server.join(_JOIN_PATIENCE)


_lock = threading.RLock()
_engine: Engine | None = None
# How many forks lie between this process and the one that imported this module; an actor compares it with its own copy.
forks: int = 0


def join(member: Member, assemble: Callable[[Engine], None]) -> None:
    """Add an actor to this process's engine, which is started for the first actor.

    Args:
        member: The actor.
        assemble: Called with the engine first: from then on the reactor's thread may ask the actor for its timers.
    """
    global _engine
    with _lock:
        if _engine is None:
            _engine = Engine()
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        engine = _engine
        try:
            assemble(engine)
            engine.members.add(member)
            engine.reactor.watch_timers(member)
        except BaseException:
            engine.release(member)
            raise


def members() -> list[Member]:
    """Return the actors of this process that have not ended."""
    with _lock:
        return [] if _engine is None else list(_engine.members)


def _close_all() -> None:
    engine = _engine
    if engine is None:
        return
    began = time.monotonic()
    members = list(engine.members)
    for member in members:
        member.begin_close(_EXIT_PATIENCE, began)
    for member in members:
        member.wait_closed(max(0.0, began + _EXIT_PATIENCE - time.monotonic()) + 1.0)
    engine.linger()


def _reset_after_fork() -> None:
    # A forked child has none of the threads, and the descriptors are its parent's.
    global _engine, _lock, forks
    _engine = None
    forks += 1
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_reset_after_fork)
