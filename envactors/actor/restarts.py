"""Whether and when a lost process is replaced: a pure function of what happened and a clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from envactors.errors import ActorError, copy_error
from envactors.options import RestartPolicy


def restart_delay(policy: RestartPolicy, restarts: Sequence[float], now: float) -> float | None:
    """Decide whether and when one lost process is replaced.

    Args:
        policy: The policy.
        restarts: When earlier restarts were granted, in seconds of the same clock as ``now``, oldest first. Those
            before the window may be left out if the policy has no lifetime limit.
        now: When the process was lost.

    Returns:
        The seconds to wait before the restart, or None if no more restarts are allowed.
    """
    recent = sum(1 for time in restarts if now - time < policy.window)
    if recent >= policy.max_restarts or len(restarts) >= policy.max_lifetime_restarts:
        return None
    doublings = min(recent, 64)  # beyond that any backoff but 0 is above its bound
    return float(min(policy.backoff_max, policy.backoff * 2.0**doublings))


class RestartTracker:
    """The lost processes of an actor that count against its restart limits."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        # (when a process was lost, its error), oldest first.
        self._lost: deque[tuple[float, ActorError]] = deque()
        # When restarts were granted, oldest first.
        self._granted: deque[float] = deque()

    @property
    def errors(self) -> list[ActorError]:
        """The errors of the lost processes, oldest first."""
        return [error for _, error in self._lost]

    @property
    def last(self) -> ActorError | None:
        """The last of these errors, None if there is none."""
        return self._lost[-1][1] if self._lost else None

    def add(self, error: ActorError, now: float) -> float | None:
        """Count a lost process; return the result of `restart_delay`."""
        policy = self._policy
        # With a lifetime limit older entries are needed, and their number is bounded by that limit.
        if policy.max_lifetime_restarts == math.inf:
            while self._lost and now - self._lost[0][0] >= policy.window:
                self._lost.popleft()
            while self._granted and now - self._granted[0] >= policy.window:
                self._granted.popleft()
        delay = restart_delay(policy, self._granted, now)
        # A copy: once raised, the error refers to the frames on its way and to the handles in them. An actor that
        # stored the error itself would never be collected.
        self._lost.append((now, copy_error(error)))
        if delay is not None:
            self._granted.append(now)
        return delay
