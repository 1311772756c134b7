"""The reaper: a program that ends the processes which a caller and its workers leave behind.

It outlives its caller by a moment. It uses only a few modules of the standard library, so its system calls are here and
not in `envactors.system`. Through descriptor 0 the caller reports, a line each, workers that have started ("3 4711":
the worker's number and process id) and that have ended ("3"); the reaper itself waits for the end of the caller.

On Linux, a process belongs to a worker if one of three conditions holds:

- Its environment, as ``/proc/<pid>/environ`` shows it, has the worker's mark in `VARIABLE`. Children inherit it,
  whatever group or session they make for themselves. /proc shows the environment that a program was started with: a
  process that was forked and has executed nothing shows that of its original. So the workers of a fork server, and
  their own forked copies, show the server's mark, which ends them with the caller; those of ``fork`` show no mark.
- It is in the process group that the worker has led.
- Its parent is such a process and still runs.

So a process escapes only if its parent has ended and it has a group of its own and no mark: it was started without that
variable, hides its environment, or is a forked copy of a forked worker.

Elsewhere (`GroupReaper`) only the second condition is known. There the caller itself ends the group of a worker that
has ended, while no other process can have its id, and the reaper ends the groups of all workers with the caller.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import time

# Has one mark per worker that a process is in, outermost first: the caller's id, a slash, the worker's number, such as
# "9f86d081884c7d65/3".
VARIABLE = "ENVACTORS_WORKER"

_PREFIX = b"\0%s=" % VARIABLE.encode()
# In the command line of a process that cleans up by itself once all others have ended.
_SPARED = b"resource_tracker"
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
# The process id of the parent of all kernel threads, which have no environment.
_KERNEL_THREADS = 2


class ProcessSnapshot:
    """What /proc shows of a process.

    Args:
        pid: Its process id.

    Raises:
        OSError: There is no such process, or it has ended already.

    Attributes:
        identity: A value that no other process ever has, even if process ids are reused.
        environment: None if it is hidden from this user, or that of a kernel thread.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        if fields[0] in b"ZX":
            raise ProcessLookupError(pid)
        self.parent, self.group = int(fields[1]), int(fields[2])
        self.identity = pid, int(fields[19])
        self.environment: bytes | None = None
        if _KERNEL_THREADS not in (pid, self.parent):
            with contextlib.suppress(PermissionError):
                self.environment = _read(pid, "environ")


class Reports:
    """What the caller reports through descriptor 0.

    Attributes:
        is_open: False once the caller has closed it.
    """

    def __init__(self) -> None:
        os.set_blocking(0, False)
        self.is_open = True
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


class GroupReaper:
    """Waits until the caller ends, and then ends the process groups of its workers.

    Args:
        caller_pid: The caller's process id.
    """

    def __init__(self, caller_pid: int) -> None:
        self._caller = caller_pid

    def run(self) -> None:
        """Run until the caller has ended, or has closed descriptor 0."""
        groups: dict[bytes, int] = {}
        reports = Reports()
        while reports.is_open and os.getppid() == self._caller:
            select.select([0], [], [], _BEAT)
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
    """

    def __init__(self, caller_pid: int, caller_id: str) -> None:
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
        ready = select.select(self._sources, [], [], seconds)[0]
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
        for name in os.listdir("/proc"):  # noqa: PTH208 # importing pathlib takes time
            if name.isdigit() and int(name) not in self._safe:
                with contextlib.suppress(OSError):
                    processes[int(name)] = ProcessSnapshot(int(name))
        # The kernel does not reuse the id of a group while there are processes in it.
        groups = {group for number, group in self._groups.items() if self._has_ended(number)}
        found = {
            pid
            for pid, process in processes.items()
            if process.group in groups or self._is_marked(process.environment or b"")
        }
        added = found
        while added:
            added = {pid for pid, process in processes.items() if process.parent in added} - found
            found |= added
        in_exec = any(process.environment == b"" for pid, process in processes.items() if pid not in found)
        return [processes[pid] for pid in found], in_exec

    def _has_ended(self, number: bytes) -> bool:
        return self._caller_ended or number in self._ended

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
            if ProcessSnapshot(process.pid).identity == process.identity:
                command, now = _read(process.pid, "cmdline"), time.monotonic()
                cleans_up = _SPARED in command or os.fsencode(__file__) in command.split(b"\0")
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


if __name__ == "__main__":
    os.chdir("/")
    caller, mark, system = sys.argv[1:]
    (GroupReaper(int(caller)) if system == "portable" else Reaper(int(caller), mark)).run()
    os._exit(0)
