"""The reaper: a program that ends the processes which a caller and its workers leave behind.

It outlives its caller by a moment. It uses only a few modules of the standard library, so its system calls are here and
not in `envactors.system`. Through descriptor 0 the caller reports, a line each, workers that have started ("3 4711":
the worker's number and process id) and that have ended ("3"); the reaper itself waits for the end of the caller. Every
caller has a second reaper, the keeper (`envactors.worker.keeper`), so that nothing is missed while one of them is being
replaced. If the caller is the agent of a node, both also kill it when its lease is over.

On Linux, a process belongs to a worker if one of four conditions holds:

- Its limit of file locks is the worker's tag (`tag_of`). The kernel enforces no such limit, and programs do not set it,
  but everything that a worker starts inherits it, whatever environment, session, or parent it gives itself.
- Its environment, as ``/proc/<pid>/environ`` shows it, has the worker's mark in `VARIABLE`. Children inherit it,
  whatever group or session they make for themselves. /proc shows the environment that a program was started with: a
  process that was forked and has executed nothing shows that of its original. So the workers of a fork server, and
  their own forked copies, show the server's mark, which ends them with the caller; those of ``fork`` show no mark.
- It is in the process group that the worker has led.
- Its parent is such a process and still runs.

The last three are for systems that refuse to set the limit. There a process escapes if its parent has ended and it has
a group of its own and no mark: it was started without that variable, hides its environment, or is a forked copy of a
forked worker. Where the limit can be set, what has removed it from itself is looked for only once the caller has ended.

The tag also outlasts the process. Where the caller is the parent of all orphans (as process 1 of a container is), the
reaper sends it the ids of those that have ended ("4712"), and the caller reaps them.

Elsewhere (`GroupReaper`) only the second condition is known. There the caller itself ends the group of a worker that
has ended, while no other process can have its id, and the reaper ends the groups of all workers with the caller.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import select
import signal
import struct
import sys
import time

# Has one mark per worker that a process is in, outermost first: the caller's id, a slash, the worker's number, such as
# "9f86d081884c7d65/3".
VARIABLE = "ENVACTORS_WORKER"

# The lease of a node in the file that its agent shares: until when workers may run, a time of `LEASE_CLOCK`.
LEASE_FORMAT = struct.Struct("<d")
LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

_PREFIX = b"\0%s=" % VARIABLE.encode()
# In the command line of a process that cleans up by itself once all others have ended, the inner reapers among them.
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 # importing pathlib takes time
_SPARED = (b"resource_tracker", *(os.fsencode(f"{_HERE}/{name}.py") for name in ("reaper", "keeper")))
# A tag is this many bits of the caller's id, and then this many of the worker's number.
_ID_BITS, _NUMBER_BITS = 40, 22
# In seconds: how long to search for processes after a worker's end,
_PATIENCE = 4.0
# how long to wait for killed processes before the next search,
_WAIT = 0.25
# how long a process may take to clean up by itself,
_GRACE = 0.5
# and how long an exec takes at most.
_EXEC = 0.01
# How often to look whether the caller has ended without closing descriptor 0, of which forked children have copies.
_BEAT = 0.5
# How long a caller whose lease is over may take to end before it is killed again.
_KILL_BEAT = 0.1
# The flag of the kernel's own threads, which have no environment.
_KERNEL_THREAD = 0x00200000
# The limit of file locks, which Python has no name for.
_LOCKS = 10


def tag_of(mark: str) -> int:
    """Return the tag of a worker: what it and all that it starts have as the limit of file locks.

    Args:
        mark: The worker's own mark.
    """
    caller, _, number = mark.partition("/")
    return _short(caller) << _NUMBER_BITS | int(number) % (1 << _NUMBER_BITS)


def _tag(pid: int) -> int:
    """Return the tag of a process; 0 if it has none.

    Raises:
        OSError: There is no such process.
    """
    try:
        return max(0, resource.prlimit(pid, _LOCKS)[0])
    except PermissionError:  # it runs as another user or group, but its limits are there for all to read
        limit = _read(pid, "limits").partition(b"Max file locks")[2].split(None, 1)[:1]
        return int(limit[0]) if limit and limit[0].isdigit() else 0


def _tags_are_refused(tag: int) -> bool:
    """Return whether this system refuses to set a tag: try it in this process, which starts no other meanwhile."""
    soft, hard = resource.getrlimit(_LOCKS)
    try:
        resource.setrlimit(_LOCKS, (tag, hard))
        resource.setrlimit(_LOCKS, (soft, hard))
    except (OSError, ValueError):
        return True
    return False


def _short(caller_id: str) -> int:
    return int(caller_id, 16) % (1 << _ID_BITS)


class ProcessSnapshot:
    """What /proc shows of a process.

    Args:
        pid: Its process id.

    Raises:
        OSError: There is no such process.

    Attributes:
        has_ended: Whether it only waits for its parent to reap it.
        identity: A value that no other process ever has, even if process ids are reused.
        tag: Its limit of file locks; 0 if there is none.
        environment: None if it is hidden from this user, or that of a kernel thread, or if the process has ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        self.has_ended: bool = fields[0] in b"ZX"
        self.parent, self.group = int(fields[1]), int(fields[2])
        self.identity: tuple[int, int] = pid, int(fields[19])
        self.tag: int = 0
        self.environment: bytes | None = None
        if int(fields[6]) & _KERNEL_THREAD:
            return
        self.tag = _tag(pid)
        if not self.has_ended:
            with contextlib.suppress(PermissionError):
                self.environment = _read(pid, "environ")

    def is_orphan_of(self, caller_id: str, caller_pid: int) -> bool:
        """Return whether it was started by a worker of this caller, and waits for the caller to reap it."""
        return self.has_ended and self.parent == caller_pid and self.tag >> _NUMBER_BITS == _short(caller_id)


class Reports:
    """What the caller reports through descriptor 0.

    Attributes:
        is_open: False once the caller has closed it.
    """

    def __init__(self) -> None:
        os.set_blocking(0, False)
        self.is_open: bool = True
        # The beginning of a line whose end has not come yet.
        self._rest = b""

    def read(self) -> list[tuple[bytes, int | None]]:
        """Return what has come: the numbers of workers, and their process ids if they have started."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(0, 1 << 12):
                self._rest += data
            self.is_open = False
        *lines, self._rest = self._rest.split(b"\n")
        return [(number, int(pid) if pid else None) for number, _, pid in (line.partition(b" ") for line in lines)]


class Lease:
    """The lease of a caller that is the agent of a node.

    Args:
        caller_pid: The caller's process id.
        fd: The file that holds it; negative if the caller has none.
    """

    def __init__(self, caller_pid: int, fd: int) -> None:
        self._caller = caller_pid
        self._fd = fd

    def enforce(self, seconds: float | None) -> float | None:
        """Kill the caller if its lease is over; return how long to wait, at most so long, until the next look."""
        if self._fd < 0:
            return seconds
        # Read twice: the caller may be in the middle of writing it.
        until = max(LEASE_FORMAT.unpack(os.pread(self._fd, LEASE_FORMAT.size, 0))[0] for _ in range(2))
        left = float(until - time.clock_gettime(LEASE_CLOCK))
        if left <= 0:
            if os.getppid() == self._caller:  # so its process id is still its own
                os.kill(self._caller, signal.SIGKILL)
            left = _KILL_BEAT
        return left if seconds is None else min(left, seconds)


class GroupReaper:
    """Waits until the caller ends, and then ends the process groups of its workers.

    Args:
        caller_pid: The caller's process id.
        lease: Its lease.
    """

    def __init__(self, caller_pid: int, lease: Lease) -> None:
        self._caller = caller_pid
        self._lease = lease

    def run(self) -> None:
        """Run until the caller has ended, or has closed descriptor 0."""
        groups: dict[bytes, int] = {}
        reports = Reports()
        while reports.is_open and os.getppid() == self._caller:
            select.select([0], [], [], self._lease.enforce(_BEAT))
            for number, pid in reports.read():
                if pid is None:
                    groups.pop(number, None)
                else:
                    groups[number] = pid
        for group in groups.values():
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)


class Reaper:
    """Waits until workers or the caller end, and then ends the processes that they have started.

    Args:
        caller_pid: The caller's process id.
        caller_id: The first part of its workers' marks.
        lease: Its lease.
    """

    def __init__(self, caller_pid: int, caller_id: str, lease: Lease) -> None:
        self._caller_pid, self._caller_id, self._lease = caller_pid, caller_id, lease
        # What its workers' marks begin with.
        self._id = caller_id.encode() + b"/"
        # worker's number: the process group that it leads
        self._groups: dict[bytes, int] = {}
        # The numbers of ended workers whose processes are to be searched for.
        self._ended: set[bytes] = set()
        # identity of a process that cleans up by itself: until when it may (`time.monotonic`)
        self._spared: dict[tuple[int, int], float] = {}
        # The ids of processes that are never killed.
        self._safe = {os.getpid(), caller_pid}
        # The descriptors to wait for: that of the reports, and a pidfd of the caller.
        self._sources = [0]
        self._reports = Reports()
        with contextlib.suppress(OSError):  # it has ended already
            self._sources.append(os.pidfd_open(caller_pid))
        self._caller_ended = os.getppid() != caller_pid
        self._refuses_tags = _tags_are_refused(tag_of(f"{caller_id}/1"))

    def run(self) -> None:
        """Run until the caller has ended, or has closed descriptor 0, and no process of its workers is left."""
        while True:
            if self._ended or self._caller_ended:
                self._end_processes()
            if self._caller_ended:
                return
            self._read_reports(None)

    def _read_reports(self, seconds: float | None) -> bool:
        """Wait so long (None: for ever) until the caller reports or ends; return whether it has."""
        ready = select.select(self._sources, [], [], self._lease.enforce(seconds))[0]
        self._caller_ended |= any(fd > 0 for fd in ready)
        if 0 in ready:
            for number, pid in self._reports.read():
                if pid is None:
                    self._ended.add(number)
                else:
                    self._groups[number] = pid
            self._caller_ended |= not self._reports.is_open
        if self._caller_ended:
            self._sources = []  # there is nothing more to wait for
        return bool(ready)

    def _end_processes(self) -> None:
        """Search for the processes of ended workers, and kill them, until there are none or the time is over."""
        for worker in self._groups.values() if self._caller_ended else ():
            with contextlib.suppress(OSError):
                os.kill(worker, signal.SIGKILL)  # a search takes its time, and on another node the next one may begin
        until, searches_in_vain = time.monotonic() + _PATIENCE, 0
        while searches_in_vain < 2 and time.monotonic() < until:
            found, in_exec = self._find()
            killed = [fd for process in found if (fd := self._kill(process)) is not None]
            _await_end(killed)
            # In an exec a process shows no environment for a moment, so search a second time. Not a third time: if the
            # machine starts processes all the time, every search finds one in an exec.
            searches_in_vain = 0 if killed else searches_in_vain + (1 if in_exec else 2)
            if self._read_reports(0.0 if killed or not in_exec else _EXEC):
                until, searches_in_vain = time.monotonic() + _PATIENCE, 0
        for number in self._ended:
            self._groups.pop(number, None)
        self._ended.clear()

    def _find(self) -> tuple[list[ProcessSnapshot], bool]:
        """Return the processes of ended workers, and whether there are any that show an empty environment."""
        processes: dict[int, ProcessSnapshot] = {}
        # What /proc says takes a hundred times as long to read as a tag. While the caller runs, this happens at the end
        # of each worker: then only those are looked at that some caller has tagged.
        looks_at_all = self._caller_ended or self._refuses_tags
        for name in os.listdir("/proc"):  # noqa: PTH208 # importing pathlib takes time
            if name.isdigit() and int(name) not in self._safe:
                with contextlib.suppress(OSError):
                    if looks_at_all or _tag(int(name)):
                        processes[int(name)] = ProcessSnapshot(int(name))
        ended = {pid: processes.pop(pid) for pid, process in tuple(processes.items()) if process.has_ended}
        for pid, process in ended.items():
            if process.is_orphan_of(self._caller_id, self._caller_pid):
                with contextlib.suppress(OSError):  # it has ended, or has a thousand more to reap
                    os.write(0, b"%d\n" % pid)
        # The kernel does not reuse the id of a group while there are processes in it.
        groups = {group for number, group in self._groups.items() if self._has_ended(number)}
        found = {
            pid
            for pid, process in processes.items()
            if process.group in groups or self._is_tagged(process.tag) or self._is_marked(process.environment or b"")
        }
        added = found
        while added:
            added = {pid for pid, process in processes.items() if process.parent in added} - found
            found |= added
        in_exec = any(process.environment == b"" for pid, process in processes.items() if pid not in found)
        return [processes[pid] for pid in found], in_exec

    def _has_ended(self, number: bytes) -> bool:
        return self._caller_ended or number in self._ended

    def _is_tagged(self, tag: int) -> bool:
        """Return whether a tag is that of an ended worker."""
        number = b"%d" % (tag % (1 << _NUMBER_BITS))
        return tag >> _NUMBER_BITS == _short(self._caller_id) and self._has_ended(number)

    def _is_marked(self, environment: bytes) -> bool:
        """Return whether an environment has the mark of an ended worker."""
        marks = (b"\0" + environment).partition(_PREFIX)[2].partition(b"\0")[0].split()
        return any(mark.startswith(self._id) and self._has_ended(mark[len(self._id) :]) for mark in marks)

    def _kill(self, process: ProcessSnapshot) -> int | None:
        """Kill a process, unless it may still clean up by itself; return its pidfd, None if that is not possible."""
        try:
            fd = os.pidfd_open(process.pid)
        except OSError:
            return None  # it has ended
        try:
            # The pidfd refers to the process that has this pid now, which may be another one.
            now_there = ProcessSnapshot(process.pid)
            if now_there.identity == process.identity and not now_there.has_ended:
                command, now = _read(process.pid, "cmdline"), time.monotonic()
                cleans_up = any(name in command for name in _SPARED)
                if not cleans_up or now > self._spared.setdefault(process.identity, now + _GRACE):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                return fd
        except OSError:
            pass  # it has ended meanwhile, or runs as another user
        os.close(fd)
        return None


def _await_end(fds: list[int]) -> None:
    """Wait until the processes of these pidfds have ended, but not for long, and close them."""
    until = time.monotonic() + _WAIT
    for fd in fds:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(max(0.0, until - time.monotonic()) * 1000)
        os.close(fd)


def _read(pid: int, name: str) -> bytes:
    with io.FileIO(f"/proc/{pid}/{name}") as file:
        return file.readall()


def main() -> None:
    """Run a reaper or a keeper: see the module."""
    os.chdir("/")
    caller, mark, system, fd = sys.argv[1:]
    lease = Lease(int(caller), int(fd))
    (GroupReaper(int(caller), lease) if system == "portable" else Reaper(int(caller), mark, lease)).run()
    os._exit(0)


if __name__ == "__main__":
    main()
