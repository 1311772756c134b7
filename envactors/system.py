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
import mmap
import os
import platform
import select
import signal
import termios
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
WRITABLE = select.EPOLLOUT

# A real-time signal, so that SIGUSR1 and SIGUSR2 stay the env's own.
STACKS_SIGNAL = signal.SIGRTMIN + 9

SIGKILL = signal.SIGKILL

# The system's calls refuse much longer waits; who wants one waits again. In seconds.
LONGEST_WAIT = 1e6

# No random addresses, and libraries from the first third of the address space up. Where they are by default without
# random addresses, the same work has been seen to take half as long again: there others' branches may be in the way.
_ONE_LAYOUT = 0x0040000 | 0x0200000
_PERSONALITY_ASKED = 0xFFFFFFFF
_PR_SET_PDEATHSIG = 1
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_PR_SET_CHILD_SUBREAPER = 36

# Python has no memory barriers. Where the processor keeps stores in order, a number that is written last is seen
# last; elsewhere only the system calls of ringing and waking put things in order, and nobody looks before them.
STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")

# How long a look is: in rounds of about a microsecond, and in seconds at most, where others take the core each time.
_LOOK_ROUNDS, _LOOK_SECONDS = 150, 1e-3


class Poller:
    """Waits for many descriptors at once; can itself be waited for in another poller."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, fd: int, *, edges: bool = False) -> None:
        """Watches a descriptor; with ``edges`` it is told of once each time that something new comes."""
        self._epoll.register(fd, select.EPOLLIN | (select.EPOLLET if edges else 0))

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
    """Wakes whoever polls it; rings add up to one, and after `close` they do nothing.

    Args:
        fd: The descriptor of a doorbell that another process made; None makes one.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if fd is None else fd
        self._closed = False
        self._listeners: list[Poller] = []
        # A closed descriptor's number may soon be another's. Reentrant, since finalizers ring too.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def ring_open(self) -> None:
        """Rings a bell of which the caller knows that nobody closes it meanwhile."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def tell(self, poller: Poller) -> None:
        """Has a poller told of each ring until the bell is closed; it need not be cleared for that."""
        with self._lock:
            if not self._closed:
                poller.add(self._fd, edges=True)
                self._listeners.append(poller)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for poller in self._listeners:
                with contextlib.suppress(ValueError):  # itself closed meanwhile
                    poller.remove(self._fd)
            os.close(self._fd)


def give_way() -> None:
    """Lets others that wait for this core have it first."""
    os.sched_yield()


def look_out(ready: Callable[[], bool]) -> bool:
    """Looks with open eyes for ``ready()``, for some tens of microseconds of this thread's own time.

    The core is given away before each round, so that who is looked out for may use it.
    """
    end = time.monotonic() + _LOOK_SECONDS
    for _ in range(_LOOK_ROUNDS):
        give_way()
        if ready() or ready() or ready() or ready():
            return True
        if time.monotonic() > end:
            break
    return False


@contextlib.contextmanager
def woken_on(number: int) -> Iterator[None]:
    """Has this thread, if it falls asleep in the context, wake on one of its cores, and go on on any of them.

    Some schedulers wake several sleepers on one core, one after the other, while another stands idle.

    Args:
        number: Which core; numbers go round.
    """
    cores = os.sched_getaffinity(0)
    one = {sorted(cores)[number % len(cores)]}
    try:
        with contextlib.suppress(OSError):  # a sandbox forbids it
            os.sched_setaffinity(0, one)
        yield
    finally:
        if os.sched_getaffinity(0) == one:  # nobody else has moved it meanwhile
            os.sched_setaffinity(0, cores)


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

    def wait(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds for its end; whether it has ended."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def reap(self) -> int | None:
        """Takes leave of a process that has ended; gives its exit code, minus the signal's number, or None."""
        os.close(self._fd)
        return self._exit_code()


def await_exit(pid: int) -> int | None:
    """Waits for the end of a child and reaps it; gives its exit code, minus the signal's number, or None."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def kill_group(leader: int) -> None:
    """Ends all processes of the group that a process leads; it must not have been reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def start_detached(command: list[str], stdin: int) -> int:
    """Starts a program in a session of its own, deaf to all signals but SIGKILL; gives its process id.

    Args:
        command: What to run: the path of a program and its arguments.
        stdin: The one descriptor that it gets.
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


@contextlib.contextmanager
def one_layout() -> Iterator[None]:
    """Has the programs that this thread starts meanwhile keep the same code at the same addresses.

    Processors predict branches by address. Interpreters that take turns on a core, each with its code somewhere else,
    push each other's branches out and step at half the speed. Where the kernel refuses (in some containers), layouts
    stay as random as they are.
    """
    before = _personality(_PERSONALITY_ASKED)
    changed = before >= 0 and _personality(before | _ONE_LAYOUT) >= 0
    try:
        yield
    finally:
        if changed:
            _personality(before)


def own_layout() -> None:
    """Has the programs that this process starts get random layouts again, after `one_layout`."""
    now = _personality(_PERSONALITY_ASKED)
    if now >= 0:
        _personality(now & ~_ONE_LAYOUT)


def _personality(wanted: int) -> int:
    """Sets the kernel's flags for this thread and what it starts; gives those before, -1 where it may not."""
    return int(ctypes.CDLL(None).personality(ctypes.c_ulong(wanted)))


def leave_terminal() -> None:
    """Makes this process, and those that it starts, have no terminal, as in a session of its own.

    Who is in the background of a terminal and reads from it, or changes its settings, is stopped.
    """
    try:
        fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return  # it has none
    with contextlib.suppress(OSError):  # it was hung up just now
        fcntl.ioctl(fd, termios.TIOCNOTTY)
    os.close(fd)


def anonymous_file(name: str) -> int:
    """Makes a file that has no name and lives in memory; returns its descriptor."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


class SharedFile:
    """A file without a name, in memory, to be mapped here and in other processes; what is mapped outlives it."""

    def __init__(self, name: str) -> None:
        self._file = os.fdopen(anonymous_file(name), "r+b", buffering=0)

    def fileno(self) -> int:
        return self._file.fileno()

    def allocate(self, size: int) -> mmap.mmap:
        """Gives it this size, memory and all, and maps it.

        Raises:
            OSError: There is not enough memory.
        """
        os.posix_fallocate(self.fileno(), 0, size)
        return map_file(self.fileno(), size)

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        self.close()


def map_file(fd: int, size: int) -> mmap.mmap:
    """Maps a file into memory that is shared with whoever else maps it."""
    return mmap.mmap(fd, size)


def resident_memory(pid: int) -> int:
    """How many bytes of memory a process occupies; 0 when it has ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * mmap.PAGESIZE


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


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


class _MemoryMap(ctypes.Structure):
    """The kernel's ``struct prctl_mm_map``: where the parts of a process's memory are."""

    _fields_ = (
        *((f"{part}_{end}", ctypes.c_uint64) for part in ("code", "data") for end in ("start", "end")),
        *((name, ctypes.c_uint64) for name in ("brk_start", "brk", "stack_start")),
        *((f"{part}_{end}", ctypes.c_uint64) for part in ("arguments", "environment") for end in ("start", "end")),
        *(("auxiliary", ctypes.c_uint64), ("auxiliary_size", ctypes.c_uint32), ("executable", ctypes.c_uint32)),
    )


# What others see of this process's environment; a forked copy has a copy of it.
_shown: Any = None


def show_environment() -> None:
    """Has ``/proc/<pid>/environ`` show what `os.environ` has now, for this process and those it will fork.

    A forked process shows what its original was started with. Where the kernel does not let this be changed
    (it was built without CONFIG_CHECKPOINT_RESTORE), it stays so.
    """
    global _shown
    content = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    _shown = ctypes.create_string_buffer(content, len(content))
    start = ctypes.addressof(_shown)
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 # by bytes: its name may be anything
        fields = file.read().rpartition(b")")[2].split()
    # Counted as in proc(5), whose third field comes first here.
    code_start, code_end, stack, data_start, data_end, brk_start, arguments_start, arguments_end = (
        int(fields[number - 3]) for number in (26, 27, 28, 45, 46, 47, 48, 49)
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    memory = _MemoryMap(
        *(code_start, code_end, data_start, data_end),
        *(brk_start, libc.sbrk(0), stack),
        *(arguments_start, arguments_end, start, start + len(content)),
        *(0, 0, 0xFFFFFFFF),  # these stay as they are
    )
    size = ctypes.c_ulong(ctypes.sizeof(memory))
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(memory), size, 0)


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
