"""A clock that keeps running while the machine sleeps."""

from __future__ import annotations

import time
from typing import Final

# Where this clock is missing, the monotonic clock keeps running.
_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_clock() -> float:
    """Return the seconds since the machine was started, including those that it slept."""
    return time.clock_gettime(_CLOCK)
