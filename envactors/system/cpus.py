"""Cores: counting them, yielding them, and sleeping on one of them."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Iterator

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


@contextlib.contextmanager
def pinned_while_sleeping(core: int) -> Iterator[None]:
    """Bind this thread to one of its cores in the context, so that it wakes there if it falls asleep.

    Some schedulers wake several sleepers on one core, one after the other, while another core is idle. Where threads
    cannot be bound to cores, nothing happens.

    Args:
        core: The index of the core among those that the thread may use; it wraps around.
    """
    if PORTABLE:
        yield
        return
    allowed = os.sched_getaffinity(0)
    one = {sorted(allowed)[core % len(allowed)]}
    try:
        with contextlib.suppress(OSError):  # a sandbox forbids it
            os.sched_setaffinity(0, one)
        yield
    finally:
        if os.sched_getaffinity(0) == one:  # nothing else has moved it meanwhile
            os.sched_setaffinity(0, allowed)
