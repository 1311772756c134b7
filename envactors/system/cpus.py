"""Cores: how many there are, giving them away, and sleeping on one of them."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Iterator

from envactors.system.choice import PORTABLE

# Python has no memory barriers. If the processor keeps stores in order, a number that is written last is seen last.
# Otherwise only the system calls of ringing and waking put stores in order, and no side may spin.
STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")

# Lets other threads that wait for this core run first.
yield_cpu: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


def cores() -> int:
    """Return how many cores this process may use; all of the machine's where the system does not tell."""
    return os.cpu_count() or 1 if PORTABLE else len(os.sched_getaffinity(0))


def usable_cores() -> int:
    """Return how many cores this process can keep busy: as `cores`, but no more than a container's quota allows."""
    import loky

    return int(loky.cpu_count())


@contextlib.contextmanager
def pinned_while_sleeping(number: int) -> Iterator[None]:
    """Make this thread, if it falls asleep in the context, wake on one of its cores; afterwards it may use all of them.

    Some schedulers wake several sleepers on one core, one after the other, while another core is idle. Where threads
    cannot be bound to cores, nothing happens.

    Args:
        number: Which core; numbers wrap around.
    """
    if PORTABLE:
        yield
        return
    allowed = os.sched_getaffinity(0)
    one = {sorted(allowed)[number % len(allowed)]}
    try:
        with contextlib.suppress(OSError):  # a sandbox forbids it
            os.sched_setaffinity(0, one)
        yield
    finally:
        if os.sched_getaffinity(0) == one:  # nobody else has moved it meanwhile
            os.sched_setaffinity(0, allowed)
