"""Cores: how many there are, giving them away, spinning on them, and sleeping on one of them."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence

from envactors.system.choice import PORTABLE

# Python has no memory barriers. If the processor keeps stores in order, a number that is written last is seen last.
# Otherwise only the system calls of ringing and waking put stores in order, and no side may spin.
STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")

# How long a spin lasts: in rounds of about a microsecond, and in seconds at most, for rounds that lose the core to
# others each time.
_SPIN_ROUNDS, _SPIN_SECONDS = 150, 1e-3

# Lets other threads that wait for this core run first.
yield_cpu: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


def cores() -> int:
    """Return how many cores this process may use; all of the machine's where the system does not tell."""
    return os.cpu_count() or 1 if PORTABLE else len(os.sched_getaffinity(0))


def usable_cores() -> int:
    """Return how many cores this process can keep busy: as `cores`, but no more than a container's quota allows."""
    import loky

    return int(loky.cpu_count())


def spin_until_all(pairs: Sequence[tuple[memoryview, int]], index: int) -> bool:
    """Spin until ``counters[index] >= number`` for all pairs (counters, number), and return whether that came true.

    It spins for some tens of microseconds of this thread's own time. Each round gives the core away first, so that the
    other side may use it, and calls no Python function, so that it is short. The counters may only grow: one that has
    reached its number is not read again.
    """
    give_away, monotonic = yield_cpu, time.monotonic
    end = monotonic() + _SPIN_SECONDS
    reached, wanted = 0, len(pairs)  # the first `reached` of the pairs have come true
    for _ in range(_SPIN_ROUNDS):
        give_away()
        while reached < wanted:
            counters, number = pairs[reached]
            if not (
                counters[index] >= number
                or counters[index] >= number
                or counters[index] >= number
                or counters[index] >= number
            ):
                break
            reached += 1
        else:
            return True
        if monotonic() > end:
            break
    return False


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
