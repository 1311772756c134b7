"""Processes: watching and ending them, and detaching them from the parent's terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import termios
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from envactors.system.choice import PORTABLE

if TYPE_CHECKING or not PORTABLE:
    from envactors.system.linux.processes import *
else:
    from envactors.system.portable.processes import *

SIGKILL = signal.SIGKILL
_STATES = {
    "T": "is stopped (by SIGSTOP, Ctrl-Z or a debugger)",
    "t": "is stopped (by a debugger)",
    "D": "waits in the kernel and cannot be interrupted",
    "U": "waits in the kernel and cannot be interrupted",
    "Z": "has ended",
    "X": "has ended",
}


class Process:
    """A process that cannot be mistaken for another one: its descriptor becomes readable when it ends.

    Args:
        pid: The process id.
        sentinel: The descriptor.
        exit_code: Reaps the ended process; returns its exit code, minus the signal's number, or None.
    """

    def __init__(self, pid: int, sentinel: int, exit_code: Callable[[], int | None]) -> None:
        self.pid = pid
        self._sentinel = sentinel
        self._exit_code = exit_code
        # Once it was reaped, its descriptor and process id may be reused.
        self._is_reaped = False
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._sentinel

    def send_signal(self, signum: int) -> None:
        """Send a signal; nothing happens if the process has ended already."""
        with self._lock:
            if not self._is_reaped:
                send_signal(self.pid, self._sentinel, signum)

    def reap(self) -> int | None:
        """Reap the ended process and return its exit code, minus the signal's number, or None if nobody can tell."""
        with self._lock:
            self._is_reaped = True
            close_sentinel(self._sentinel)
        return self._exit_code()


def describe_state(pid: int) -> str:
    """Return a few words that say why a process may not answer."""
    return _STATES.get(process_state(pid), "does not answer")


def is_asleep(pid: int) -> bool:
    """Return whether the main thread of a process sleeps in a system call."""
    return process_state(pid) in ("S", "D", "I")


def await_exit(pid: int) -> int | None:
    """Wait for the end of a child, reap it, and return its exit code, minus the signal's number.

    Returns:
        None if the code is not known, because SIGCHLD is ignored and so the kernel has reaped the child.
    """
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def become_worker(parent_pid: int) -> None:
    """Turn this process into a worker: it ends with its parent, and leads a process group without a terminal.

    Args:
        parent_pid: The parent's process id.
    """
    detach()
    end_with_parent(parent_pid)
    volunteer_for_oom()


def detach() -> None:
    """Detach this process and its future children from the parent's terminal."""
    # In a separate process group, Ctrl-C in the caller's terminal reaches only the caller. A separate session would be
    # wrong: where the scheduler divides a core by sessions, a worker could not yield the core to the caller.
    os.setpgid(0, 0)
    # A background process that reads from its terminal, or changes the terminal's settings, is stopped.
    with contextlib.suppress(OSError), open("/dev/tty", "rb", 0) as terminal:  # noqa: PTH123 # there may be none
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited; the ends of children would go unnoticed
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def exit_after(work: Callable[[], object]) -> NoReturn:
    """Do the work of this process, and exit without finalizing the interpreter, which takes tens of milliseconds."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # it is None, or nobody reads it
                stream.flush()
        os._exit(code)
