"""What the operating system lends: waiting, waking, watching and ending processes, memory without a name.

Everything that only Linux has stands here and nowhere else, so that a stand-in for another platform is a
change of this module alone.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import termios
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
WRITABLE = select.EPOLLOUT

# A real-time signal, so that SIGUSR1 and SIGUSR2 stay the env's own.
STACKS_SIGNAL = signal.SIGRTMIN + 9

SIGKILL = signal.SIGKILL

# The system's calls refuse much longer waits; who wants one waits again. In seconds.
LONGEST_WAIT = 1e6

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Poller:
    """Waits for many descriptors at once; can itself be waited for in another poller."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN)

    def watch(self, fd: int, *, readable: bool = True, writable: bool = False) -> None:
        """Changes what a descriptor is watched for; neither means that it stays silent."""
        self._epoll.modify(fd, (select.EPOLLIN if readable else 0) | (select.EPOLLOUT if writable else 0))

    def remove(self, fd: int) -> None:
        self._epoll.unregister(fd)

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        """Waits up to ``timeout`` seconds (None: for ever) and gives (descriptor, READABLE | WRITABLE) pairs."""
        return self._epoll.poll(timeout)

    def close(self) -> None:
        self._epoll.close()


class Doorbell:
    """Wakes whoever polls it; rings add up to one, and after `close` they do nothing."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False
        # A closed descriptor's number may soon be another's. Reentrant, since finalizers ring too.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._fd)


class Process:
    """A process that cannot be mistaken for another: its descriptor becomes readable when it ends.

    Args:
        pid: Its process id.
        fd: A pidfd of it.
        exit_code: Reaps it once it has ended; gives its exit code, minus the signal's number, or None.
    """

    def __init__(self, pid: int, fd: int, exit_code: Callable[[], int | None]) -> None:
        self.pid = pid
        self._fd = fd
        self._exit_code = exit_code

    @classmethod
    def open(cls, pid: int, exit_code: Callable[[], int | None]) -> Process:
        """Takes hold of a child that has not been reaped."""
        return cls(pid, os.pidfd_open(pid), exit_code)

    def fileno(self) -> int:
        return self._fd

    def send(self, signum: int) -> None:
        """Sends a signal; nothing happens when the process has ended already."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signum)

    def reap(self) -> int | None:
        """Takes leave of a process that has ended; gives its exit code, minus the signal's number, or None."""
        os.close(self._fd)
        return self._exit_code()


def kill_session(leader: int) -> None:
    """Ends all processes of the group that a process leads; it must not have been reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def anonymous_file(name: str) -> int:
    """Makes a file that has no name and lives in memory; returns its descriptor."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def unread_by_peer(sock: socket.socket) -> bool:
    """Whether something that was sent through a local socket still waits to be read at its other end."""
    unread = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, unread)
    except OSError:
        return False
    return unread[0] > 0


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel end this process as soon as the thread that started it has ended.

    Raises:
        OSError: The kernel refused.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, "PR_SET_PDEATHSIG")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends, so that none gets out of sight.

    Raises:
        OSError: The kernel refused.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")


def _prctl(option: int, value: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({name}) failed")


def is_disconnect(error: OSError) -> bool:
    """Whether an error only says that the other end is gone."""
    return error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)


def remaining(deadline: float | None) -> float | None:
    """The seconds left until a time of `time.monotonic`, from 0 to `LONGEST_WAIT`; None for no deadline."""
    return None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT)
