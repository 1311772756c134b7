"""Deadlines as time-outs of the system's calls."""

from __future__ import annotations

import time

# The system's calls refuse much longer time-outs; a caller with a later deadline waits again. In seconds.
LONGEST_WAIT = 1e6


def remaining(deadline: float | None) -> float | None:
    """Return the seconds left until a time of `time.monotonic`, from 0 to `LONGEST_WAIT`; None for no deadline."""
    return None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT)
