"""Processes: threads that wait for them, signals, and ``ps``."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Final

# Asks a worker for the stacks of its threads. It is ignored by default, and env code hardly ever uses it.
STACKS_SIGNAL: Final[int] = signal.SIGURG

# How long ``ps`` may take, in seconds.
_PATIENCE = 2.0

# The threads that wait for the ends of children, by the descriptors that they write to.
_threads: dict[int, threading.Thread] = {}


def open_sentinel(pid: int) -> int:
    """Return a descriptor that becomes readable when a child ends that was not reaped yet."""
    ended, ends = os.pipe()
    thread = threading.Thread(target=_tell_end, args=(pid, ends), name=f"envactors-end-of-{pid}", daemon=True)
    thread.start()
    _threads[ended] = thread
    return ended


def close_sentinel(sentinel: int) -> None:
    """Close the descriptor from `open_sentinel` once the child has ended, and wait for the thread to end."""
    _threads.pop(sentinel).join()
    os.close(sentinel)


def _tell_end(pid: int, ends: int) -> None:
    _await_end(pid)
    with contextlib.suppress(BrokenPipeError):  # nothing waits for it
        os.write(ends, b"!")  # forked children may have copies of the descriptor, so closing it is not enough
    os.close(ends)


if sys.platform == "darwin" and not hasattr(os, "waitid"):  # before Python 3.13

    def _await_end(pid: int) -> None:
        """Wait for the end of a child without reaping it."""
        event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD | select.KQ_EV_ONESHOT, select.KQ_NOTE_EXIT)
        with contextlib.closing(select.kqueue()) as queue, contextlib.suppress(ProcessLookupError):
            queue.control([event], 1)

else:

    def _await_end(pid: int) -> None:
        """Wait for the end of a child without reaping it."""
        with contextlib.suppress(ChildProcessError):  # it was reaped
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def send_signal(pid: int, sentinel: int, signum: int) -> None:
    """Send a signal to a process that was not reaped yet; do nothing if it has ended."""
    del sentinel
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def end_with_parent(parent_pid: int) -> None:
    """End this process if the parent has ended already; later the helper process ends it with its parent.

    Args:
        parent_pid: The parent's process id.
    """
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def volunteer_for_oom() -> None:
    """Do nothing: no portable call tells the system which process to kill when memory runs out."""


def adopt_orphans() -> None:
    """Do nothing: the system adopts orphans."""


def wake_with_parent() -> None:
    """Do nothing: no portable call continues a process."""


def watch_parent(parent_pid: int) -> int | None:
    """Return None: no portable descriptor tells the end of a parent."""
    del parent_pid
    return None


def claim_descendants() -> None:
    """Do nothing: no portable call finds the processes that leave a group."""


def kill_groups(groups: Mapping[int, float]) -> set[int]:
    """Kill process groups.

    Args:
        groups: The process ids of their leaders, as keys.

    Returns:
        An empty set: no portable call lists the processes that are left.
    """
    for leader in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    return set()


def kill_descendants(spare_until: float) -> None:
    """Do nothing: here helper processes have no children."""
    del spare_until


def count_threads() -> int:
    """Return how many Python threads this process has."""
    return threading.active_count()


def process_state(pid: int) -> str:
    """Return the letter for the state of a process; X if it has ended, and nothing if ``ps`` is missing."""
    return _ps(pid, "state")[:1] or ("X" if _has_ended(pid) else "")


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def resident_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended or ``ps`` is missing."""
    kibibytes = _ps(pid, "rss")
    return int(kibibytes) << 10 if kibibytes.isdigit() else 0


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process as far as ``ps`` tells; an empty list if it has ended."""
    line = _ps(pid, "args")
    try:
        return shlex.split(line)
    except ValueError:  # an argument contains a quote
        return line.split()


def _ps(pid: int, column: str) -> str:
    """Return a column of the output of ``ps`` for a process; empty if there is none."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["ps", "-o", f"{column}=", "-p", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)  # noqa: S603 # numbers
        return done.stdout.strip()
    return ""
