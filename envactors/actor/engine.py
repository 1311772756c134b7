"""The reactor and the launcher that all actors of a process share; their threads run while there are actors."""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import Protocol

from envactors.actor.launcher import Launcher
from envactors.actor.reactor import Reactor, Timed

# How long the workers may take to close when the interpreter exits, in seconds: it must exit within five seconds even
# if workers hang.
_EXIT_PATIENCE = 3.0
# How long to wait for the engine's threads, in seconds: a callback that never returns occupies its thread for ever.
_JOIN_PATIENCE = 1.0


class Member(Timed, Protocol):
    """What the engine needs of an actor."""

    def begin_close(self, timeout: float | None) -> None:
        """Start closing the actor; do not wait for it."""

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
        self.reactor = Reactor(lambda: tuple(self.members))
        self.launcher = Launcher()
        self.ended = False

    def release(self, member: Member) -> None:
        """Remove an actor that has ended; after the last one, stop the engine."""
        global _engine
        with _lock:
            self.members.discard(member)
            if self.members:
                return
            self.ended = True
            if _engine is self:
                _engine = None
        self.launcher.stop()
        self.reactor.stop()

    def linger(self) -> None:
        """If the last actor has ended, wait until the engine's threads have ended too."""
        if self.ended:
            self.launcher.join(_JOIN_PATIENCE)
            self.reactor.join(_JOIN_PATIENCE)


_lock = threading.Lock()
_engine: Engine | None = None
_exit_registered = False
# How many forks lie between this process and the one that imported this module; an actor compares it with its own copy.
forks = 0


def join(member: Member) -> Engine:
    """Add an actor to this process's engine and return the engine, which is started for the first actor."""
    global _engine, _exit_registered
    with _lock:
        if not _exit_registered:
            atexit.register(_close_all)
            _exit_registered = True
        if _engine is None:
            _engine = Engine()
        _engine.members.add(member)
        return _engine


def _close_all() -> None:
    engine = _engine
    if engine is None:
        return
    deadline = time.monotonic() + _EXIT_PATIENCE
    members = list(engine.members)
    for member in members:
        member.begin_close(_EXIT_PATIENCE)
    for member in members:
        member.wait_closed(max(0.0, deadline - time.monotonic()) + 1.0)
    engine.linger()


def _reset_after_fork() -> None:
    # A forked child has none of the threads, and the descriptors are its parent's.
    global _engine, _lock, forks
    _engine = None
    forks += 1
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
