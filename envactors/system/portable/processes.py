"""Processes by threads that wait for them, signals, and ``ps``."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Final

# Asks a worker for the stacks of its threads. Ignored by default, and env code hardly ever uses it.
STACKS_SIGNAL: Final[int] = signal.SIGURG

# How long ``ps`` may take, in seconds.
_PATIENCE = 2.0


# By the descriptor: the thread that waits for the end of a child.
_threads: dict[int, threading.Thread] = {}


def open_sentinel(pid: int) -> int:
    """Return a descriptor that becomes readable when a child ends, which must not have been reaped yet."""
    ended, ends = os.pipe()
    thread = threading.Thread(target=_tell_end, args=(pid, ends), name=f"envactors-end-of-{pid}", daemon=True)
    thread.start()
    _threads[ended] = thread
    return ended


def close_sentinel(sentinel: int) -> None:
    """Close what `open_sentinel` has returned, once the child has ended."""
    # The thread has told so, and is about to end: nothing of it is to be left.
    _threads.pop(sentinel).join()
    os.close(sentinel)


def _tell_end(pid: int, ends: int) -> None:
    _await_end(pid)
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
        os.write(ends, b"!")  # closing is not enough: forked children may have copies of the descriptor
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
    """Send a signal to a process that was not reaped yet, or that waits for nobody to reap it."""
    del sentinel
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def end_with_parent(parent_pid: int) -> None:
    """Do nothing, unless the parent has ended already: the reaper ends this process with its parent.

    Args:
        parent_pid: The parent's process id.
    """
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def volunteer_for_oom() -> None:
    """Do nothing: there is no common way to tell a system whom to end when memory runs out."""


def adopt_orphans() -> None:
    """Do nothing: orphans are the system's."""


def tag_descendants(tag: int) -> None:
    """Do nothing: the reaper knows processes by their groups alone."""


def count_threads() -> int:
    """Return how many threads of Python this process has."""
    return threading.active_count()


def describe_state(pid: int) -> str:
    """Return a few words on why a process may not answer."""
    state = _ps(pid, "state")
    if not state:
        return "has ended" if _has_ended(pid) else "does not answer"
    return {
        "T": "is stopped (by SIGSTOP, Ctrl-Z or a debugger)",
        "t": "is stopped (by a debugger)",
        "D": "waits in the kernel and cannot be interrupted",
        "U": "waits in the kernel and cannot be interrupted",
        "Z": "has ended",
    }.get(state[0], "does not answer")


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def resident_memory(pid: int) -> int:
    """Return how many bytes of memory a process occupies; 0 if it has ended or ``ps`` is missing."""
    kibibytes = _ps(pid, "rss")
    return int(kibibytes) << 10 if kibibytes.isdigit() else 0


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command line, as far as ``ps`` tells; none if it has ended."""
    line = _ps(pid, "args")
    try:
        return shlex.split(line)
    except ValueError:  # a quote in it
        return line.split()


def _ps(pid: int, what: str) -> str:
    """Return what ``ps`` says of a process; empty if it says nothing."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["ps", "-o", f"{what}=", "-p", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)  # noqa: S603 # numbers
        return done.stdout.strip()
    return ""


@contextlib.contextmanager
def fixed_layout() -> Iterator[bool]:
    """Do nothing: layouts stay random."""
    yield False


def restore_random_layout() -> None:
    """Do nothing: layouts are random."""
