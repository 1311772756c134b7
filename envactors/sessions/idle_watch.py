"""The thread that ends sessions whose user has made no call for too long."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from envactors.sessions.session import Session

# How long the thread stays after the last session, in seconds, so that sessions in a row do not each start one.
_LINGER = 1.0


class IdleWatch:
    """Ends idle sessions. Its thread sleeps until the first session may have been idle for too long.

    A session that begins cannot reach its limit before one that runs, so neither calls nor new sessions wake the
    thread while it sleeps for a session.

    Args:
        limit: How long a session may go without a call, in seconds.
        sessions: Returns the sessions that run.
        end: Called with a session that has been idle for longer, and the limit.
    """

    def __init__(
        self, limit: float, sessions: Callable[[], list[Session[Any]]], end: Callable[[Session[Any], float], None]
    ) -> None:
        self._limit = limit
        # Weak, so that the thread does not keep a pool alive that its user has forgotten.
        self._sessions = weakref.WeakMethod(sessions)
        self._end = weakref.WeakMethod(end)
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        # Whether the thread sleeps without a session to watch, and how many sessions have begun.
        self._is_lingering = False
        self._begun = 0
        self._is_stopped = False

    def begin(self) -> None:
        """Watch a session that has begun."""
        with self._changed:
            self._begun += 1
            if self._is_lingering:
                self._changed.notify_all()
            if self._thread is None and not self._is_stopped:
                self._thread = threading.Thread(target=self._watch, name="envactors-sessions", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_stopped = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _watch(self) -> None:
        while True:
            begun = self._begun
            wake_at = self._end_idle_sessions()
            with self._changed:
                if wake_at is not None:
                    if not self._is_stopped:
                        self._changed.wait(max(0.0, wake_at - time.monotonic()))
                elif begun == self._begun and not self._is_stopped:
                    self._is_lingering = True
                    self._changed.wait(_LINGER)
                    self._is_lingering = False
                is_unneeded = wake_at is None and begun == self._begun
                if self._is_stopped or is_unneeded:
                    self._thread = None
                    return

    def _end_idle_sessions(self) -> float | None:
        """End the sessions that are idle too long; return when to look again (`time.monotonic`), None for never."""
        list_sessions, end = self._sessions(), self._end()
        if list_sessions is None or end is None:
            return None
        now = time.monotonic()
        wake_at: float | None = None
        for session in list_sessions():
            since = session.idle_since()
            limit_at = (now if since is None else since) + self._limit
            if limit_at <= now:
                end(session, self._limit)
            elif wake_at is None or limit_at < wake_at:
                wake_at = limit_at
        return wake_at
