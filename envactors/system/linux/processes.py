"""Processes by pidfd, prctl, and /proc."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

# Asks a worker for the stacks of its threads. A real-time signal leaves SIGUSR1 and SIGUSR2 to the env.
STACKS_SIGNAL: Final[int] = signal.SIGRTMIN + 9

# How much likelier than their caller the kernel kills workers when memory runs out, in thousandths of all memory; and
# the highest value.
_OOM_MARGIN, _OOM_MOST = 500, 1000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# A resource limit without an effect since Linux 2.4. Descendants inherit it, whatever their group and variables are.
_RLIMIT_LOCKS = 10
_LIBC = ctypes.CDLL(None, use_errno=True)


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


def wake_with_parent() -> None:
    """Have the kernel continue this process, if it is stopped, as soon as the thread that started it has ended.

    This replaces `end_with_parent`.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def watch_parent(parent_pid: int) -> int | None:
    """Return a descriptor that becomes readable when the parent ends; None if it has ended already."""
    with contextlib.suppress(ProcessLookupError):
        return os.pidfd_open(parent_pid)
    return None


def volunteer_for_oom() -> None:
    """Have the kernel kill this process and its children before its parent when memory runs out."""
    # Suppressed where /proc is missing or read-only. `Path` would take most of the time.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+b", 0) as file:  # noqa: PTH123
        file.write(b"%d" % min(int(file.read()) + _OOM_MARGIN, _OOM_MOST))


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends.

    Raises:
        OSError: The kernel refused.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def claim_descendants() -> None:
    """Have the descendants of this process, which leads a group, end with it even if they leave the group."""
    with contextlib.suppress(OSError, ValueError):  # the limit is lower, or the kernel has none
        resource.setrlimit(_RLIMIT_LOCKS, (os.getpid(), resource.getrlimit(_RLIMIT_LOCKS)[1]))


def kill_groups(groups: Mapping[int, float]) -> set[int]:
    """Kill the processes of process groups whose leaders have ended, and the children that these have claimed.

    Args:
        groups: For each group, the time (`time.monotonic`) until which its resource trackers are spared.

    Returns:
        The groups that still had running processes.
    """
    occupied = {group for group in groups if _has_members(group)}
    members = [entry for entry in _list_processes() if entry.group in occupied] if occupied else []
    left = {entry.pid: entry.group for entry in members if not entry.has_ended}
    # Those that the members above have left are children of this process by now.
    left |= {pid: group for pid, group in _list_claimed() if group in groups} if groups else {}
    for pid, group in left.items():
        _kill(pid, groups[group])
    return set(left.values())


def _list_claimed() -> Iterator[tuple[int, int]]:
    """Yield the children of this thread, each with the leader that has claimed it, or with another number."""
    with contextlib.suppress(OSError):  # the kernel does not list them
        for pid in map(int, Path("/proc/thread-self/children").read_text().split()):
            with contextlib.suppress(OSError):  # it belongs to another user
                yield pid, resource.prlimit(pid, _RLIMIT_LOCKS)[0]


def kill_descendants(spare_until: float) -> None:
    """Kill the children of this process, their children, and so on.

    Args:
        spare_until: The time (`time.monotonic`) until which resource trackers are spared.
    """
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in _list_processes():
        children[entry.parent].append(entry.pid)
    found = [os.getpid()]
    for pid in found:  # which grows meanwhile
        found += children.pop(pid, ())
    for pid in found[1:]:
        _kill(pid, spare_until)


class _Entry(NamedTuple):
    """A process of this machine.

    Attributes:
        pid: Its process id.
        parent: The process id of its parent.
        group: Its process group, which has the process id of its leader.
        has_ended: Whether it has ended, and was not reaped yet.
    """

    pid: int
    parent: int
    group: int
    has_ended: bool


def _list_processes() -> list[_Entry]:
    entries = []
    for name in os.listdir("/proc"):  # noqa: PTH208 # there may be thousands
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                # The name of the program comes before these in parentheses, and may contain anything.
                state, parent, group = file.read().rpartition(b")")[2].split()[:3]
                entries.append(_Entry(int(name), int(parent), int(group), state in b"ZX"))
    return entries


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _kill(pid: int, spare_until: float) -> None:
    # The resource trackers of multiprocessing and loky end by themselves once their users have ended. Without them,
    # named shared memory would stay.
    if time.monotonic() >= spare_until or not any("resource_tracker" in argument for argument in command_line(pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
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
