"""What all actors of a process share, from the first to the last of them: a few threads and no state."""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import TYPE_CHECKING

from envactors.actor.launcher import Launcher
from envactors.actor.reactor import Reactor

if TYPE_CHECKING:
    from envactors.actor.supervisor import Supervisor

# A caller that ends shall be gone within five seconds, hung workers or not.
_EXIT_PATIENCE = 3.0
# A callback that never ends keeps its thread; nobody waits longer for it than this, in seconds.
_LINGERING = 1.0


class Engine:
    """The reactor and the launcher of one process."""

    def __init__(self) -> None:
        self.supervisors: set[Supervisor] = set()
        self.reactor = Reactor(lambda: tuple(self.supervisors))
        self.launcher = Launcher()
        self.ended = False

    def release(self, supervisor: Supervisor) -> None:
        """Lets go of an actor that has ended; the last one ends the engine."""
        global _engine
        with _lock:
            self.supervisors.discard(supervisor)
            if self.supervisors:
                return
            self.ended = True
            if _engine is self:
                _engine = None
        self.launcher.stop()
        self.reactor.stop()

    def linger(self) -> None:
        """After the last actor's end: waits until the engine's threads have ended too."""
        if self.ended:
            self.launcher.join(_LINGERING)
            self.reactor.join(_LINGERING)


_lock = threading.Lock()
_engine: Engine | None = None
_exit_registered = False
# How many forks lie between this process and the one that has loaded this module: tells whose an actor is at once.
forks = 0


def join(supervisor: Supervisor) -> Engine:
    """Adds an actor to this process's engine, which starts with the first."""
    global _engine, _exit_registered
    with _lock:
        if not _exit_registered:
            atexit.register(_close_all)
            _exit_registered = True
        if _engine is None:
            _engine = Engine()
        _engine.supervisors.add(supervisor)
        return _engine


def _close_all() -> None:
    engine = _engine
    if engine is None:
        return
    deadline = time.monotonic() + _EXIT_PATIENCE
    supervisors = list(engine.supervisors)
    for supervisor in supervisors:
        supervisor.begin_close(_EXIT_PATIENCE)
    for supervisor in supervisors:
        supervisor.wait_closed(max(0.0, deadline - time.monotonic()) + 1.0)
    engine.linger()


def _forget() -> None:
    # A forked child has none of the threads, and the descriptors are its parent's.
    global _engine, _lock, forks
    _engine = None
    forks += 1
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
