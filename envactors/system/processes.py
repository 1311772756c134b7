"""Processes: watching, ending and starting them, their memory layout, and what they know of parent and terminal."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import signal
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

# Asks a worker for the stacks of its threads. A real-time signal, so that SIGUSR1 and SIGUSR2 stay the env's own.
STACKS_SIGNAL = signal.SIGRTMIN + 9
SIGKILL = signal.SIGKILL

_PR_SET_PDEATHSIG = 1
# Flags of `personality`: no random addresses;
_NO_RANDOMIZE = 0x0040000
# libraries from the first third of the address space up. At the addresses that programs without random ones have by
# default, the same work has been seen to take half as long again.
_COMPAT_LAYOUT = 0x0200000
_QUERY = 0xFFFFFFFF  # changes nothing


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

    def fileno(self) -> int:
        return self._fd

    def send_signal(self, signum: int) -> None:
        """Send a signal; nothing happens if the process has ended already."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signum)

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


def detach(parent_pid: int | None) -> None:
    """Make this process end with its parent, and detach it, and those that it starts, from the parent's terminal.

    The kernel ends it as soon as the *thread* that started it has ended.

    Args:
        parent_pid: The parent's process id; None for a process that is to outlive its parent.

    Raises:
        OSError: The kernel refused.
    """
    if parent_pid is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), signal.SIGKILL)
    # A process group of its own: Ctrl-C in the caller's terminal reaches the caller alone. Not a session of its own:
    # with schedulers that divide a core by sessions, a worker could not yield the core to the caller.
    os.setpgid(0, 0)
    # A background process that reads from its terminal, or changes the terminal's settings, is stopped.
    with contextlib.suppress(OSError), open("/dev/tty", "rb", 0) as terminal:  # noqa: PTH123 # it may have none
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


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
