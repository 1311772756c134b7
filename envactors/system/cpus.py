"""Cores: counting and yielding them."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable

from envactors.system.choice import PORTABLE

# Python has no memory barriers. If the processor keeps stores in order, a number that is written last is seen last.
# Otherwise only the system calls that ring and wake keep them in order, and neither side may spin.
STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")

# Lets other threads that are waiting for this core run first.
yield_cpu: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


def cores() -> int:
    """Return how many cores this process may use, or how many the machine has if the system does not tell."""
    return os.cpu_count() or 1 if PORTABLE else len(os.sched_getaffinity(0))


def usable_cores() -> int:
    """Return how many cores this process can keep busy: `cores`, limited by a container's quota."""
    import loky

    return int(loky.cpu_count())
