"""Processes by pidfd, prctl, and /proc."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import resource
import signal
from pathlib import Path
from typing import Final

# Asks a worker for the stacks of its threads. A real-time signal leaves SIGUSR1 and SIGUSR2 to the env.
STACKS_SIGNAL: Final[int] = signal.SIGRTMIN + 9

# How much likelier than their caller the kernel kills workers when memory runs out, in thousandths of all memory; and
# the highest value.
_OOM_MARGIN, _OOM_MOST = 500, 1000
# A limit that the kernel no longer enforces, but still passes on to all descendants.
_RLIMIT_LOCKS = 10
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def open_sentinel(pid: int) -> int:
    """Return a descriptor that becomes readable when a child ends that was not reaped yet."""
    return os.pidfd_open(pid)


def close_sentinel(sentinel: int) -> None:
    """Close the descriptor from `open_sentinel`."""
    os.close(sentinel)


def send_signal(pid: int, sentinel: int, signum: int) -> None:
    """Send a signal to the process of a sentinel; do nothing if it has ended."""
    del pid
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(sentinel, signum)


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process as soon as the *thread* that started it has ended.

    Args:
        parent_pid: The parent's process id.

    Raises:
        OSError: The kernel refused.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def volunteer_for_oom() -> None:
    """Have the kernel kill this process and its children before its parent when memory runs out."""
    with contextlib.suppress(OSError):  # /proc is missing or read-only
        file = Path("/proc/self/oom_score_adj")
        file.write_text(str(min(int(file.read_text()) + _OOM_MARGIN, _OOM_MOST)))


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends.

    Raises:
        OSError: The kernel refused.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@functools.cache
def has_tags() -> bool:
    """Return whether the system lets processes tag themselves; some sandboxes, and a lower hard limit, do not."""
    limits = resource.getrlimit(_RLIMIT_LOCKS)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(_RLIMIT_LOCKS, limits)
        return limits[1] == resource.RLIM_INFINITY
    return False


def tag_descendants(tag: int) -> None:
    """Tag this process and its descendants, so that the reaper finds them, if the system allows it."""
    if has_tags():
        resource.setrlimit(_RLIMIT_LOCKS, (tag, resource.RLIM_INFINITY))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def count_threads() -> int:
    """Return how many threads this process has, including those that are not Python's."""
    return len(list(Path("/proc/self/task").iterdir()))


def process_state(pid: int) -> str:
    """Return the letter for the state of a process; X if it has ended."""
    try:
        # The name of the program comes before it in parentheses, and may contain anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def resident_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * mmap.PAGESIZE


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; an empty list if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []
