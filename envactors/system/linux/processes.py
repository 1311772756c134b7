"""Processes by pidfd, prctl, personality and /proc."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Asks a worker for the stacks of its threads. A real-time signal, so that SIGUSR1 and SIGUSR2 stay the env's own.
STACKS_SIGNAL: Final[int] = signal.SIGRTMIN + 9

# How far workers are above their caller when the kernel chooses whom to end, in thousandths of all memory; and the top.
_OOM_MARGIN, _OOM_MOST = 500, 1000
# A limit that the kernel has not enforced since version 2.4.25, but still passes on to all descendants.
_RLIMIT_LOCKS = 10
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Flags of `personality`: no random addresses;
_NO_RANDOMIZE = 0x0040000
# libraries from the first third of the address space up. At the addresses that programs without random ones have by
# default, the same work has been seen to take half as long again.
_COMPAT_LAYOUT = 0x0200000
_QUERY = 0xFFFFFFFF  # changes nothing


def open_sentinel(pid: int) -> int:
    """Return a descriptor that becomes readable when a child ends, which must not have been reaped yet."""
    return os.pidfd_open(pid)


def close_sentinel(sentinel: int) -> None:
    """Close what `open_sentinel` has returned."""
    os.close(sentinel)


def send_signal(pid: int, sentinel: int, signum: int) -> None:
    """Send a signal to the process of a sentinel; nothing happens if it has ended."""
    del pid
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(sentinel, signum)


def end_with_parent(parent_pid: int) -> None:
    """Make this process end with its parent.

    The kernel ends it as soon as the *thread* that started it has ended.

    Args:
        parent_pid: The parent's process id.

    Raises:
        OSError: The kernel refused.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def volunteer_for_oom() -> None:
    """Have the kernel, when memory runs out, end this process and its children before the one that started it."""
    with contextlib.suppress(OSError):  # /proc is not there, or read-only
        file = Path("/proc/self/oom_score_adj")
        file.write_text(str(min(int(file.read_text()) + _OOM_MARGIN, _OOM_MOST)))


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends.

    Raises:
        OSError: The kernel refused.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def tag_descendants(tag: int) -> None:
    """Give this process, and all that it starts, a number that the reaper knows them by, if the system allows it."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(_RLIMIT_LOCKS, (tag, resource.getrlimit(_RLIMIT_LOCKS)[1]))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def count_threads() -> int:
    """Return how many threads this process has, those that are not Python's included."""
    return len(list(Path("/proc/self/task").iterdir()))


def describe_state(pid: int) -> str:
    """Return a few words on why a process may not answer."""
    try:
        # The name before it, in parentheses, may contain anything.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        state = "X"
    return {
        "T": "is stopped (by SIGSTOP, Ctrl-Z or a debugger)",
        "t": "is stopped (by a debugger)",
        "D": "waits in the kernel and cannot be interrupted",
        "Z": "has ended",
        "X": "has ended",
    }.get(state, "does not answer")


def resident_memory(pid: int) -> int:
    """Return how many bytes of memory a process occupies; 0 if it has ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * mmap.PAGESIZE


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command line; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


@contextlib.contextmanager
def fixed_layout() -> Iterator[bool]:
    """Start the programs that this thread starts in the context at one and the same addresses.

    Processors predict branches by address. Interpreters that take turns on a core, each with its code somewhere else,
    evict each other's predictions and step at half the speed. If the kernel refuses (in some containers), layouts stay
    random.

    Yields:
        Whether the layout was random before and is fixed now: started programs then call `restore_random_layout`.
    """
    before, fixed = _personality(_QUERY), _NO_RANDOMIZE | _COMPAT_LAYOUT
    changed = before >= 0 and not before & _NO_RANDOMIZE and _personality(before | fixed) >= 0
    try:
        yield changed
    finally:
        if changed:
            _personality(before)


def restore_random_layout() -> None:
    """Give the programs that this process starts random layouts again, after `fixed_layout`."""
    now = _personality(_QUERY)
    if now >= 0:
        _personality(now & ~(_NO_RANDOMIZE | _COMPAT_LAYOUT))


def _personality(wanted: int) -> int:
    """Set the kernel's flags for this thread and what it starts; return the flags before, or -1 if it refuses."""
    return int(ctypes.CDLL(None).personality(ctypes.c_ulong(wanted)))
