"""The number of open file descriptors, and its limit."""

from __future__ import annotations

import contextlib
import os
import resource

from envactors.system.choice import PORTABLE


def count_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/dev/fd"))  # noqa: PTH208 # there may be thousands, and each start counts them


def descriptor_limits() -> tuple[int, int]:
    """Return the soft and the hard limit of descriptors of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = 1 << 62
    return (unlimited if soft < 0 else soft), (unlimited if hard < 0 else hard)


def limit_descriptors(soft: int, pid: int = 0) -> None:
    """Set the soft limit of a process; 0 means this one.

    Nothing happens if the process has ended, or if the system can limit only the calling process.
    """
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    elif not PORTABLE:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
