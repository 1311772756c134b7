"""A clock that also runs while the machine sleeps."""

from __future__ import annotations

import time


def boot_clock() -> float:
    """Return the seconds since the machine was started, those that it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
