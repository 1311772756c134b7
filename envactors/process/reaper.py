"""The reaper: a program that ends the processes which a caller and its workers leave behind.

It outlives its caller by a moment. It uses only a few modules of the standard library, so its system calls are here and
not in `envactors.system`. Through descriptor 0 the caller reports, one per line, workers that have started ("3 4711":
the worker's id and process id) and workers that have ended ("3"). The reaper itself waits for the end of the caller.
Every caller has a second reaper, the keeper (`envactors.process.keeper`), so that nothing is missed while one of them
is being replaced. If the caller is the agent of a node, both also kill it when its lease is over. Starting and
replacing reapers is up to `envactors.process.reaping`.

On Linux, a process belongs to a worker if one of four conditions holds:

- Its limit of file locks is the worker's tag (`tag_of`). The kernel does not enforce this limit and programs do not set
  it, but everything that a worker starts inherits it, whatever its environment, session, or parent.
- Its environment, as ``/proc/<pid>/environ`` shows it, has the worker's mark in `VARIABLE`. Children inherit it,
  whatever their group or session. /proc shows the environment that a program was started with, so a process that was
  forked and has not executed a program shows the environment of its original: workers of a fork server, and their
  forked copies, show the server's mark, which ends them with the caller; those of ``fork`` show no mark.
- It is in the process group that the worker has led.
- Its parent is such a process and still runs.

The last three are for systems that refuse to set the limit. There a process escapes if its parent has ended, it leads
another group, and it shows no mark: it was started without that variable, hides its environment, or is a forked copy
of a forked worker. Where the limit can be set, processes that have removed their tag are searched for only once the
caller has ended.

A process keeps its tag after it has ended. Where the caller is the parent of all orphans (as process 1 of a container
is), the reaper sends it the ids of those that have ended ("4712"), and the caller reaps them.

On other systems (`GroupReaper`) only the third condition is known. There the caller itself ends the group of a worker
that has ended, while no other process can have its id, and the reaper ends the groups of all workers with the caller.
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

# Has one mark per worker that a process belongs to, outermost first: the caller's id, a slash, and the worker's id, for
# example "9f86d081884c7d65/3".
VARIABLE = "ENVACTORS_WORKER"

# The lease of a node in the file that its agent shares: until when workers may run, a time of `LEASE_CLOCK`.
LEASE_FORMAT = struct.Struct("<d")
LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

_PREFIX = b"\0%s=" % VARIABLE.encode()
# What the command line of a process contains that cleans up by itself once all others have ended, such as the reapers
# of nested callers.
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 # importing pathlib takes time
_SPARED = (b"resource_tracker", *(os.fsencode(f"{_HERE}/{name}.py") for name in ("reaper", "keeper")))
# A tag has this many bits of the caller's id, and then this many of the worker's id.
_CALLER_BITS = 40
_WORKER_BITS = 22
# All times are in seconds. How long to search for processes after a worker's end:
_PATIENCE = 4.0
# How long to wait for killed processes before the next search:
_WAIT = 0.25
# How long a process may take to clean up by itself:
_GRACE = 0.5
# How long an exec takes at most:
_EXEC = 0.01
# How often to check whether the caller has ended without closing descriptor 0, which forked children may have copied:
_BEAT = 0.5
# How long to wait for the end of a caller whose lease is over before it is killed again:
_KILL_BEAT = 0.1
# The flag of the kernel's own threads, which have no environment.
_KERNEL_THREAD = 0x00200000
# The limit of file locks, which Python has no name for.
_LOCKS = 10


def tag_of(mark: str) -> int:
    """Return the tag of a worker, which is the limit of file locks of the worker and of everything that it starts.

    Args:
        mark: The worker's own mark.
    """
    caller, _, worker = mark.partition("/")
    return _short(caller) << _WORKER_BITS | int(worker) % (1 << _WORKER_BITS)


def _tag(pid: int) -> int:
    """Return the tag of a process; 0 if it has none.

    Raises:
        OSError: There is no such process.
    """
    try:
        return max(0, resource.prlimit(pid, _LOCKS)[0])
    except PermissionError:  # it runs as another user or group, but everyone may read its limits
        limit = _read(pid, "limits").partition(b"Max file locks")[2].split(None, 1)[:1]
        return int(limit[0]) if limit and limit[0].isdigit() else 0


def _tags_are_refused(tag: int) -> bool:
    """Return whether this system refuses to set a tag, by trying in this process, which starts no other meanwhile."""
    soft, hard = resource.getrlimit(_LOCKS)
    try:
        resource.setrlimit(_LOCKS, (tag, hard))
        resource.setrlimit(_LOCKS, (soft, hard))
    except (OSError, ValueError):
        return True
    return False


def _short(caller_id: str) -> int:
    return int(caller_id, 16) % (1 << _CALLER_BITS)


class ProcessSnapshot:
    """The facts about a process in /proc.

    Args:
        pid: Its process id.

    Raises:
        OSError: There is no such process.

    Attributes:
        has_ended: Whether it has ended and only waits for its parent to reap it.
        identity: A value that no other process ever has, even if process ids are reused.
        tag: Its limit of file locks; 0 if there is none.
        environment: None if it is hidden from this user, or that of a kernel thread, or if the process has ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        self.has_ended: bool = fields[0] in b"ZX"
        self.parent: int = int(fields[1])
        self.group: int = int(fields[2])
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
        """Return whether a worker of this caller has started it and it waits for the caller to reap it."""
        return self.has_ended and self.parent == caller_pid and self.tag >> _WORKER_BITS == _short(caller_id)


class Reports:
    """The reports of the caller, which come through descriptor 0.

    Attributes:
        is_open: False once the caller has closed it.
        groups: By worker's id, the process group that it leads.
        ended: The ids of ended workers that have not been forgotten.
    """

    def __init__(self) -> None:
        os.set_blocking(0, False)
        self.is_open: bool = True
        self.groups: dict[bytes, int] = {}
        self.ended: set[bytes] = set()
        # The beginning of a line whose end has not come yet.
        self._rest = b""

    def read(self) -> None:
        """Read the reports that have come."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(0, 1 << 12):
                self._rest += data
            self.is_open = False
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            worker, _, pid = line.partition(b" ")
            if pid:
                self.groups[worker] = int(pid)
            else:
                self.ended.add(worker)

    def forget_ended(self) -> None:
        """Forget the workers that have ended."""
        for worker in self.ended:
            self.groups.pop(worker, None)
        self.ended.clear()


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
        """Kill the caller if its lease is over; return how long to wait for the next check, at most ``seconds``."""
        if self._fd < 0:
            return seconds
        # Read twice, since the caller may be writing it.
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
        reports = Reports()
        while reports.is_open and os.getppid() == self._caller:
            select.select([0], [], [], self._lease.enforce(_BEAT))
            reports.read()
            reports.forget_ended()
        for group in reports.groups.values():
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)


class Reaper:
    """Waits until a worker or the caller ends, and then ends the processes that it has started.

    Args:
        caller_pid: The caller's process id.
        caller_id: The first part of its workers' marks.
        lease: Its lease.
    """

    def __init__(self, caller_pid: int, caller_id: str, lease: Lease) -> None:
        self._caller_pid = caller_pid
        self._caller_id = caller_id
        self._lease = lease
        # What its workers' marks begin with.
        self._id = caller_id.encode() + b"/"
        # By identity of a process that cleans up by itself, until when it may (`time.monotonic`).
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
            if self._reports.ended or self._caller_ended:
                self._end_processes()
            if self._caller_ended:
                return
            self._read_reports(None)

    def _read_reports(self, seconds: float | None) -> bool:
        """Wait until the caller reports or ends, at most ``seconds``; return whether it has."""
        ready = select.select(self._sources, [], [], self._lease.enforce(seconds))[0]
        self._caller_ended |= any(fd > 0 for fd in ready)
        if 0 in ready:
            self._reports.read()
            self._caller_ended |= not self._reports.is_open
        if self._caller_ended:
            self._sources = []  # nothing more will come
        return bool(ready)

    def _end_processes(self) -> None:
        """Kill the processes of ended workers until a search finds no more of them or `_PATIENCE` is over."""
        for pid in self._reports.groups.values() if self._caller_ended else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # at once, since on another node its successor may be about to start
        until = time.monotonic() + _PATIENCE
        searches_in_vain = 0
        while searches_in_vain < 2 and time.monotonic() < until:
            found, in_exec = self._find()
            killed = [fd for process in found if (fd := self._kill(process)) is not None]
            _await_end(killed)
            # During an exec a process shows no environment, so search a second time. Not a third time: if the machine
            # keeps starting processes, every search finds one in an exec.
            searches_in_vain = 0 if killed else searches_in_vain + (1 if in_exec else 2)
            if self._read_reports(0.0 if killed or not in_exec else _EXEC):
                until = time.monotonic() + _PATIENCE
                searches_in_vain = 0
        self._reports.forget_ended()

    def _find(self) -> tuple[list[ProcessSnapshot], bool]:
        """Return the processes of ended workers, and whether any other process shows an empty environment."""
        processes: dict[int, ProcessSnapshot] = {}
        # Reading /proc takes a hundred times as long as reading a tag, and while the caller runs, this happens at the
        # end of each worker. So then only tagged processes are read.
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
        groups = {group for worker, group in self._reports.groups.items() if self._has_ended(worker)}
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

    def _has_ended(self, worker: bytes) -> bool:
        return self._caller_ended or worker in self._reports.ended

    def _is_tagged(self, tag: int) -> bool:
        """Return whether a tag is that of an ended worker."""
        worker = b"%d" % (tag % (1 << _WORKER_BITS))
        return tag >> _WORKER_BITS == _short(self._caller_id) and self._has_ended(worker)

    def _is_marked(self, environment: bytes) -> bool:
        """Return whether an environment has the mark of an ended worker."""
        marks = (b"\0" + environment).partition(_PREFIX)[2].partition(b"\0")[0].split()
        return any(mark.startswith(self._id) and self._has_ended(mark[len(self._id) :]) for mark in marks)

    def _kill(self, process: ProcessSnapshot) -> int | None:
        """Kill a process unless it may still clean up by itself; return its pidfd, None if it cannot be killed."""
        try:
            fd = os.pidfd_open(process.pid)
        except OSError:
            return None  # it has ended
        try:
            # Another process may have got the pid before the pidfd was opened.
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
    """Wait until the processes of these pidfds have ended, at most `_WAIT`, and close the pidfds."""
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
    """Run a reaper or a keeper with the arguments of the command line."""
    os.chdir("/")
    caller, mark, system, fd = sys.argv[1:]
    lease = Lease(int(caller), int(fd))
    (GroupReaper(int(caller), lease) if system == "portable" else Reaper(int(caller), mark, lease)).run()
    os._exit(0)


if __name__ == "__main__":
    main()
