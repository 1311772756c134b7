"""Whether and when a lost process is replaced: a pure function of what happened and a clock."""

from __future__ import annotations

from collections.abc import Sequence

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
