"""Processes: watching and ending them, and detaching them from the parent's terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import termios
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

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


# Held while `subprocess.Popen` starts a process: it waits for the end of a pipe. A child that another thread forks
# meanwhile would have a copy of the pipe, and `Popen` would not return before that child has ended. Reentrant, since a
# signal handler may fork, too.
no_fork: threading.RLock = threading.RLock()
os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)


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


def interpreter_options() -> list[str]:
    """Return the options that this interpreter was started with, such as ``-I``, ``-P``, and ``-X``.

    Options for warnings (``-W``) are left out: warnings that are errors would end helper processes.
    """
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001
    return [option for option in options if not option.startswith("-W")]


def await_exit(pid: int) -> int | None:
    """Wait for the end of a child, reap it, and return its exit code, minus the signal's number.

    Returns:
        None if the code is not known, because SIGCHLD is ignored and so the kernel has reaped the child.
    """
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def kill_group(leader: int) -> None:
    """Kill the process group of a leader that was not reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


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
