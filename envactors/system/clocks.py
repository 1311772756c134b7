"""A clock that also runs while the machine sleeps."""

from __future__ import annotations

import time
from typing import Final

# Elsewhere the monotonic clock does so.
_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_clock() -> float:
    """Return the seconds since the machine was started, those that it slept included."""
    return time.clock_gettime(_CLOCK)
