"""Whether and when another process follows the exit of one, and the count of restarts.

`RestartTracker.delay_after` decides that, after each exit of an actor that is not closing. With ``max_restarts=1`` and
``backoff=0.5``, the delay after the first crash is 0.5, and always 0.0 after a renewal. After a second crash soon after
the first one, it is None: no process follows.

For each reason why a process has ended, the table tells whether another one comes, and how the running call continues.
`is_counted` and `ProcessExit.allows_retry` state its two columns. A call that had not begun runs in the next process,
if one comes.

===============================  ===================================================  ==================================
reason                           next process                                         running call
===============================  ===================================================  ==================================
closing                          none, and the actor is closed; after a renewal, one  fails
                                 for the calls that were queued before the close
renewal, abort, interrupt        at once, not counted as a restart                    fails
its helper process was lost      at once, not counted as a restart                    runs again if it has retries, and
                                                                                      keeps all of them
an env raised (``ENV_RAISED``)   counted as a restart, after the backoff              has got the exception
crash, failed start, deadline    counted as a restart, after the backoff              runs again if it has retries, and
                                                                                      uses up one of them; else fails
===============================  ===================================================  ==================================

If several reasons came together, one uncounted reason makes the exit uncounted: a user may kill or renew a process
that is about to end for another reason. If the restart policy allows no more restarts, no process follows one that
counts, and the actor is dead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from envactors.actor.actor_process import ActorProcess
from envactors.actor.states import EndReason
from envactors.backends.base import LaunchRefusedError
from envactors.errors import ActorError, copy_error
from envactors.options import RestartPolicy

# How many failed starts or resets in a row are repeated without a backoff, which would start processes all the time.
_MOST_WITHOUT_BACKOFF: Final = 10


def most_failures(policy: RestartPolicy, *, waits: bool = True) -> float:
    """Return how many failed starts or resets in a row may be repeated, besides the limits on restarts.

    Args:
        policy: The policy.
        waits: Whether restarts wait for the backoff of the policy.
    """
    return math.inf if waits and 0 not in (policy.backoff, policy.backoff_max) else _MOST_WITHOUT_BACKOFF


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
    if is_spent or failed_starts >= most_failures(policy):
        return None
    return float(min(policy.backoff_max, policy.backoff * 2.0 ** min(recent, 64)))  # 2.0 ** 1024 would overflow


class _CountedExit(NamedTuple):
    """A counted exit: when it was (`time.monotonic`), its error, and whether a restart was granted after it."""

    when: float
    error: ActorError
    is_granted: bool


class RestartTracker:
    """The exits of an actor's processes that count against its restart policy.

    These are crashes, missed deadlines, and replacements because an env raised.

    Args:
        policy: The policy.

    Attributes:
        last: The error of the last one; None if there was none.
        failed_starts: How many of the last ones in a row ended a process before its envs were made.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        # Oldest first. Only the last one may have no restart: such an exit counts against no limit on later ones.
        self._exits: list[_CountedExit] = []
        self.last: ActorError | None = None
        self.failed_starts: int = 0

    @property
    def errors(self) -> list[ActorError]:
        """The errors of the exits that count against the nearest limit, oldest first."""
        _, since = self.nearest_limit()
        return [counted.error for counted in self._exits if counted.when >= since]

    def nearest_limit(self) -> tuple[str, float]:
        """Return the limit that allows the fewest further restarts, and since when it counts exits."""
        since = max((counted.when for counted in self._exits), default=0.0) - self._policy.window
        left_in_window = self._policy.max_restarts - len(self._granted(since))
        if self._policy.max_lifetime_restarts - len(self._granted(-math.inf)) <= left_in_window:
            return "max_lifetime_restarts", -math.inf
        return "max_restarts", since

    def _granted(self, since: float) -> list[float]:
        """Return when restarts were granted since a time (`time.monotonic`), oldest first."""
        return [counted.when for counted in self._exits if counted.is_granted and counted.when >= since]

    def describe(self, delay: float) -> str:
        """Return which restart of how many the last granted one is, and when it comes."""
        name, since = self.nearest_limit()
        limit = getattr(self._policy, name)
        of_how_many = "" if limit == math.inf else f" of {limit:g}"
        return f"restart {len(self._granted(since))}{of_how_many} in {round(delay, 3):g} s"

    def delay_after(self, process: ActorProcess, error: ActorError, *, is_first: bool) -> float | None:
        """Decide whether and when another process follows an ended one, and count the exit if that must count.

        Args:
            process: The ended process.
            error: The error of its exit.
            is_first: Whether no start of the actor has succeeded before, nor has one failed and counted. For an actor
                on demand, failed ones do not matter: each time that it is woken is a first try.

        Returns:
            The delay in seconds; None if no process follows.
        """
        if not process.counts:
            return 0.0

        now = time.monotonic()
        memory = self._policy.window if self._policy.max_lifetime_restarts == math.inf else math.inf
        self._exits = [counted for counted in self._exits if counted.is_granted and now - counted.when < memory]
        self.failed_starts = 0 if process.has_started else self.failed_starts + 1
        # The policy is not asked if no process can be started, or if the first one had no place or its factory raised.
        refusal = process.status.refusal
        had_no_place = refusal is not None and process.end_reason is EndReason.TIMEOUT
        fails_again = is_first and (had_no_place or process.failure is not None)
        is_hopeless = fails_again or isinstance(refusal, LaunchRefusedError)
        delay = None if is_hopeless else restart_delay(self._policy, self._granted(-math.inf), now, self.failed_starts)

        # A copy, since the traceback of a raised error refers to the handles in its frames, and the actor would never
        # be garbage-collected.
        self.last = copy_error(error)
        self._exits.append(_CountedExit(now, self.last, delay is not None))
        return delay
