"""Find sessions whose user makes no call for too long. The reactor calls this module; the pool ends the sessions."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from envactors.actor.reactor import Reactor
from envactors.sessions.session import Session


class IdleWatch:
    """Reports idle sessions; used in the reactor's thread.

    A new session cannot exceed the limit before the current ones do, and calls only extend the time that is left.
    Therefore neither of them has to wake the reactor. The watch is registered there only while there are sessions.

    Args:
        limit: How long a session may go without a call, in seconds.
        sessions: Returns the current sessions.
        report: Called with each session that exceeded the limit; must not block.
    """

    def __init__(
        self, limit: float, sessions: Callable[[], list[Session[Any]]], report: Callable[[Session[Any]], None]
    ) -> None:
        self._limit = limit
        # Weak references, so that the reactor does not keep a pool alive that nobody refers to any more.
        self._sessions = weakref.WeakMethod(sessions)
        self._report = weakref.WeakMethod(report)
        self._reactor: Reactor | None = None
        # When to check for idle sessions (`time.monotonic`).
        self._look_at = float("inf")

    def begin(self, reactor: Reactor) -> None:
        """Watch a session that has begun."""
        if self._reactor is None:
            self._reactor = reactor
            self._look_at = time.monotonic() + self._limit
            reactor.watch_timers(self)

    def next_timer(self) -> float:
        """Return when to check for idle sessions (`time.monotonic`)."""
        return self._look_at

    def on_timer(self, now: float) -> None:
        """Report the sessions that exceeded the limit."""
        if now < self._look_at:
            return
        list_sessions, report = self._sessions(), self._report()
        sessions = [] if list_sessions is None else list_sessions()
        limits_at = []
        for session in sessions:
            since = session.idle_since()
            limit_at = now + self._limit if since is None else since + self._limit
            if limit_at <= now and report is not None:
                report(session)
                limit_at = now + self._limit
            limits_at.append(limit_at)
        self._look_at = min(limits_at, default=float("inf"))
        if not sessions and self._reactor is not None:
            self._reactor.unwatch_timers(self)
            self._reactor = None
