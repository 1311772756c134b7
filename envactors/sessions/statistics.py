"""Counts and durations of a pool's sessions. The pool records them here while it holds its lock."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from envactors.pools.failure_kinds import KINDS
from envactors.pools.shared_calls import Counts
from envactors.sessions.outcomes import Completed, Failed

# How many of the most recent starts and sessions the percentiles cover.
_KEPT = 10_000


@dataclasses.dataclass(frozen=True)
class SessionStats:
    """The state of an `envactors.SessionPool`, and statistics of its sessions.

    Attributes:
        outcomes: How many sessions ended as ``"completed"``, and as each kind of `envactors.Failed`.
        waiting: How many requests wait for an actor.
        leased: How many actors are in use.
        idle: How many actors are ready for a session.
        start_p50: The median time from the request of a session to its beginning, in seconds; NaN before the first.
        start_p99: The 99th percentile of that time, in seconds.
        session_p50: The median duration of a session, in seconds; NaN before the first has ended.
        session_p99: The 99th percentile of that duration, in seconds.
    """

    outcomes: dict[str, int]
    waiting: int
    leased: int
    idle: int
    start_p50: float
    start_p99: float
    session_p50: float
    session_p99: float


class SessionBooks:
    """The counts behind `SessionStats`; guarded by the pool's lock.

    Attributes:
        start_seconds: How long the most recent sessions waited for their actor.
    """

    def __init__(self) -> None:
        self._counts = Counts()
        self.start_seconds: deque[float] = deque(maxlen=_KEPT)
        self._session_seconds: deque[float] = deque(maxlen=_KEPT)

    def count(self, outcome: Completed | Failed) -> None:
        """Count a session that has ended."""
        self._counts.on_end(None if isinstance(outcome, Completed) else outcome.kind)
        self._session_seconds.append(outcome.seconds)

    def stats(self, waiting: int, leased: int, idle: int) -> SessionStats:
        """Return the statistics, together with the state of the pool."""
        counts = self._counts
        outcomes: dict[str, int] = {"completed": counts.completed}
        outcomes.update((kind, counts.failed.get(kind, 0)) for kind in KINDS)
        starts = _percentiles(self.start_seconds)
        sessions = _percentiles(self._session_seconds)
        return SessionStats(outcomes, waiting, leased, idle, *starts, *sessions)


def _percentiles(seconds: deque[float]) -> tuple[float, float]:
    if not seconds:
        return float("nan"), float("nan")
    p50, p99 = np.percentile(seconds, (50, 99))
    return float(p50), float(p99)
