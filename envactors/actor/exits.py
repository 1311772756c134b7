"""What follows from the exit of a process: facts, pure decisions, and the count of restarts.

closing ............................ every request fails, and the actor is closed; calls behind a renewal still run
renewed, aborted, or interrupted ... the next process starts at once, and does not count as a restart
its helper was lost ................ the same, but the running call uses no retry, and fails only if it has none
all else ........................... counts as a restart; the running call fails, or runs again if it has retries
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from envactors.actor.actor_process import ActorProcess, ExitReport
from envactors.errors import ActorError, copy_error
from envactors.options import RestartPolicy

# How many failed starts in a row end an actor without a backoff, which would start processes all the time.
MOST_FAILED_STARTS: Final = 10


class AfterExit(enum.Enum):
    """What the actor does next."""

    CLOSE = enum.auto()
    START = enum.auto()  # start another process at once, without counting it
    RESTART = enum.auto()  # start another process after a delay
    DIE = enum.auto()  # start none


class Plan(NamedTuple):
    """What the actor does next, and the delay of a restart, in seconds."""

    action: AfterExit
    delay: float = 0.0

    @property
    def starts_another(self) -> bool:
        """Whether another process comes."""
        return self.action in (AfterExit.START, AfterExit.RESTART)


def lacks_backoff(policy: RestartPolicy, failed_starts: int) -> bool:
    """Return whether so many starts in a row have failed that another one needs a delay, which the policy rules out."""
    return failed_starts >= MOST_FAILED_STARTS and 0 in (policy.backoff, policy.backoff_max)


def restart_delay(policy: RestartPolicy, granted: Sequence[float], now: float, failed_starts: int = 0) -> float | None:
    """Decide whether a process may be restarted, and when.

    Args:
        policy: The policy.
        granted: When earlier restarts were granted, in seconds of the same clock as ``now``, oldest first.
        now: When the process has ended.
        failed_starts: How many processes in a row have ended before their envs were made.

    Returns:
        The delay in seconds; None if the policy allows no more restarts.
    """
    recent = sum(now - when < policy.window for when in granted)
    is_spent = recent >= policy.max_restarts or len(granted) >= policy.max_lifetime_restarts
    if is_spent or lacks_backoff(policy, failed_starts):
        return None
    return float(min(policy.backoff_max, policy.backoff * 2.0 ** min(recent, 64)))  # 2 ** 64 exceeds every limit


class RestartTracker:
    """The crashes of an actor that count against its restart policy.

    Args:
        policy: The policy.

    Attributes:
        last: The error of the last one; None if there was none.
        failed_starts: How many of the last ones in a row ended a process before its envs were made.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        # (time of a crash, its error, whether a restart was granted), oldest first.
        self._crashes: list[tuple[float, ActorError, bool]] = []
        self.last: ActorError | None = None
        self.failed_starts: int = 0

    @property
    def errors(self) -> list[ActorError]:
        """The errors of the crashes, oldest first."""
        return [error for _, error, _ in self._crashes]

    def describe(self, delay: float) -> str:
        """Return which restart of how many the last granted one is, and when it comes."""
        number = sum(is_granted for _, _, is_granted in self._crashes)
        limit = min(self._policy.max_restarts, self._policy.max_lifetime_restarts)
        return f"restart {number}{'' if limit == math.inf else f' of {limit:g}'} in {delay:.1f} s"

    def plan(self, process: ActorProcess, error: ActorError, *, is_first: bool) -> Plan:
        """Decide whether and when another process replaces an ended one; count the exit if it is a crash.

        Args:
            process: The ended process.
            error: The error of its exit.
            is_first: Whether no earlier process of the actor has shown that its factories can succeed.
        """
        if process.is_uncounted:
            return Plan(AfterExit.START)
        now = time.monotonic()
        if self._policy.max_lifetime_restarts == math.inf:  # otherwise that limit bounds the list
            self._crashes = [crash for crash in self._crashes if now - crash[0] < self._policy.window]
        granted = [when for when, _, is_granted in self._crashes if is_granted]
        self.failed_starts = 0 if process.has_started else self.failed_starts + 1
        # If no process can be started, or the first one had no place or could not make its envs, the policy has no say.
        report = process.report or ExitReport()
        is_hopeless = report.is_refused or (is_first and (report.had_no_place or process.failure is not None))
        delay = None if is_hopeless else restart_delay(self._policy, granted, now, self.failed_starts)
        # A copy, since the traceback of a raised error refers to the handles in its frames, and the actor would never
        # be garbage-collected.
        self.last = copy_error(error)
        self._crashes.append((now, self.last, delay is not None))
        return Plan(AfterExit.DIE) if delay is None else Plan(AfterExit.RESTART, delay)
