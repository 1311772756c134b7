"""Whether and when a lost process is replaced: a pure function of what happened and a clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from envactors.errors import ActorError, twin
from envactors.options import RestartPolicy


def restart_delay(policy: RestartPolicy, restarts: Sequence[float], now: float) -> float | None:
    """Decides over one lost process.

    Args:
        policy: The policy.
        restarts: When earlier restarts were granted, in seconds of the same clock, oldest first; those before the
            window may be left out where the policy has no limit for the lifetime.
        now: The time of the loss.

    Returns:
        The seconds to wait before the restart, or None when the allowance is spent.
    """
    recent = sum(1 for time in restarts if now - time < policy.window)
    if recent >= policy.max_restarts or len(restarts) >= policy.max_lifetime_restarts:
        return None
    doublings = min(recent, 64)  # beyond that any backoff but 0 is above its bound
    return float(min(policy.backoff_max, policy.backoff * 2.0**doublings))


class Losses:
    """The processes that an actor has lost, as far as they count against its allowance."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._lost: deque[tuple[float, ActorError]] = deque()
        self._granted: deque[float] = deque()

    @property
    def errors(self) -> list[ActorError]:
        """What the losses were, oldest first."""
        return [error for _, error in self._lost]

    @property
    def last(self) -> ActorError | None:
        """The last one."""
        return self._lost[-1][1] if self._lost else None

    def add(self, error: ActorError, now: float) -> float | None:
        """Counts a loss; gives what `restart_delay` gives."""
        policy = self._policy
        # Where a limit for the lifetime looks further back, it also bounds how many there are.
        if policy.max_lifetime_restarts == math.inf:
            while self._lost and now - self._lost[0][0] >= policy.window:
                self._lost.popleft()
            while self._granted and now - self._granted[0] >= policy.window:
                self._granted.popleft()
        delay = restart_delay(policy, self._granted, now)
        # A copy: raised, the error itself holds the frames that it goes through, and their handles with them, so that
        # an actor that holds it would keep itself alive.
        self._lost.append((now, twin(error)))
        if delay is not None:
            self._granted.append(now)
        return delay
