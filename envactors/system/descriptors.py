"""How many file descriptors processes have and may have."""

from __future__ import annotations

import contextlib
import os
import resource

from envactors.system.choice import PORTABLE


def count_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/dev/fd"))  # noqa: PTH208 # called for each start, perhaps with thousands of them


def descriptor_limits() -> tuple[int, int]:
    """Return how many descriptors this process may have: its soft and its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = 1 << 62
    return (unlimited if soft < 0 else soft), (unlimited if hard < 0 else hard)


def limit_descriptors(soft: int, pid: int = 0) -> None:
    """Set the soft limit of a process, this one if it is 0.

    Nothing happens if it has ended, or if the system limits no other process.
    """
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    elif not PORTABLE:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
