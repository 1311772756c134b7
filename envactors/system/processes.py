"""Processes: watching, ending and starting them, and what they know of their parent and terminal."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import signal
import termios
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


class Process:
    """A process that cannot be mistaken for another: its descriptor becomes readable when it ends.

    Args:
        pid: Its process id.
        fd: A pidfd of it.
        exit_code: Reaps it once it has ended; returns its exit code, minus the signal's number, or None.
    """

    def __init__(self, pid: int, fd: int, exit_code: Callable[[], int | None]) -> None:
        self.pid = pid
        self._fd = fd
        self._exit_code = exit_code

    @classmethod
    def open(cls, pid: int, exit_code: Callable[[], int | None]) -> Process:
        """Return the process of a child that has not been reaped."""
        return cls(pid, open_sentinel(pid), exit_code)

    def fileno(self) -> int:
        return self._fd

    def send_signal(self, signum: int) -> None:
        """Send a signal; nothing happens if the process has ended already."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signum)

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for its end; return whether it has ended."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def reap(self) -> int | None:
        """Reap the ended process and return its exit code, minus the signal's number, or None if nobody can tell."""
        os.close(self._fd)
        return self._exit_code()


def open_sentinel(pid: int) -> int:
    """Return a descriptor that becomes readable when a child ends, which must not have been reaped yet."""
    return os.pidfd_open(pid)


def await_exit(pid: int) -> int | None:
    """Wait for the end of a child and reap it; return its exit code, minus the signal's number, or None."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def kill_group(leader: int) -> None:
    """End all processes of the group that a process leads; it must not have been reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def start_detached(command: list[str], stdin: int) -> int:
    """Start a program in a session of its own that ignores all signals but SIGKILL; return its process id.

    Args:
        command: The path of a program and its arguments.
        stdin: The only descriptor that it gets.
    """
    return os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, stdin, 0),
            *((os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)),
        ],
        setsid=True,
        setsigmask=signal.valid_signals(),
    )


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel end this process as soon as the thread that started it has ended.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def leave_terminal() -> None:
    """Detach this process, and those that it starts, from the terminal, as a session of its own would.

    A background process that reads from its terminal, or changes the terminal's settings, is stopped.
    """
    try:
        fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return  # it has none
    with contextlib.suppress(OSError):  # it was hung up just now
        fcntl.ioctl(fd, termios.TIOCNOTTY)
    os.close(fd)


def resident_memory(pid: int) -> int:
    """Return how many bytes of memory a process occupies; 0 if it has ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * mmap.PAGESIZE
