"""The reaper: a program that ends the processes which a caller and its workers leave behind.

It outlives its caller by a moment. It uses only a few modules of the standard library, so its system calls are here and
not in `envactors.system`. The caller reports workers that start and end through descriptor 0; the reaper itself waits
for the end of the caller. A process belongs to a worker if one of three conditions holds:

- Its environment, as ``/proc/<pid>/environ`` shows it, has the worker's mark in `VARIABLE`. Children inherit it,
  whatever group or session they make for themselves. /proc shows the environment that a program was started with: a
  process that was forked and has executed nothing shows that of its original. So the workers of a fork server, and
  their own forked copies, show the server's mark, which ends them with the caller; those of ``fork`` show no mark.
- It is in the process group that the worker has led.
- Its parent is such a process and still runs.

So a process escapes only if its parent has ended and it has a group of its own and no mark: it was started without that
variable, hides its environment, or is a forked copy of a forked worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

# Has one mark per worker that a process is in, outermost first: the caller's id, a slash, the worker's number, such as
# "9f86d081884c7d65/3".
VARIABLE = "ENVACTORS_WORKER"

_PREFIX = VARIABLE.encode() + b"="
# In the command line of a process that cleans up by itself once all others have ended.
_SPARED = b"resource_tracker"
# In seconds: how long to search for the processes of one worker,
_PATIENCE = 4.0
# how long to wait for killed processes before the next search,
_WAIT = 0.25
# how long a process may take to clean up by itself,
_GRACE = 0.5
# and how long an exec takes at most.
_EXEC = 0.01
# The process id of the parent of all kernel threads, which have no environment.
_KERNEL_THREADS = 2


class ProcessSnapshot:
    """What /proc shows of a process.

    Args:
        pid: Its process id.

    Raises:
        OSError: There is no such process, or it has ended already.
    """

    __slots__ = ("begun", "environment", "group", "parent", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        self.parent, self.group, self.begun = int(fields[1]), int(fields[2]), int(fields[19])
        if fields[0] in b"ZX":
            raise ProcessLookupError(pid)
        self.environment: bytes | None = None  # of a kernel thread, or hidden from this user
        if _KERNEL_THREADS not in (pid, self.parent):
            try:
                self.environment = _read(pid, "environ")
            except PermissionError:
                return

    @property
    def identity(self) -> tuple[int, int]:
        """A value that no other process ever has, even if process ids are reused."""
        return self.pid, self.begun


class Reaper:
    """Waits until workers or the caller end, and then ends the processes that they have started.

    Args:
        caller_pid: The caller's process id.
        caller_id: The first part of its workers' marks.
    """

    def __init__(self, caller_pid: int, caller_id: str) -> None:
        self._prefix = caller_id.encode() + b"/"
        # worker's number: the process group that it leads
        self._groups: dict[bytes, int] = {}
        # number of an ended worker: until when to search for its processes (`time.monotonic`)
        self._until: dict[bytes, float] = {}
        # Until when to search for the processes of all workers; None while the caller runs.
        self._all_until: float | None = None
        # identity of a process that cleans up by itself: until when it may
        self._spared: dict[tuple[int, int], float] = {}
        # The identities of processes that showed an empty environment; see `_find`.
        self._seen_empty: set[tuple[int, int]] = set()
        # Whether the last search asked for an immediate second one.
        self._again = False
        # The identities of processes that this user may not kill.
        self._not_permitted: set[tuple[int, int]] = set()
        # The ids of processes that are never killed.
        self._safe = {os.getpid(), caller_pid}
        os.set_blocking(0, False)
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._caller = _open_pidfd(caller_pid)
        if self._caller is None or os.getppid() != caller_pid:
            self._end_all()
        else:
            self._poll.register(self._caller, select.POLLIN)

    def run(self) -> None:
        """Run until the caller has ended, or has closed descriptor 0, and no process of its workers is left."""
        while True:
            fds, again = self._search_and_kill() if self._until or self._all_until is not None else ([], False)
            if not fds and not again and self._all_until is not None:
                return
            self._wait(fds, _EXEC if again else _WAIT if fds else None)

    def _end_all(self) -> None:
        if self._all_until is None:
            self._all_until = time.monotonic() + _PATIENCE

    def _read_reports(self) -> None:
        """Read the caller's reports of workers that have started or ended."""
        try:
            while message := os.read(0, 64):
                number, _, pid = message[1:].partition(b" ")
                if message[:1] == b"+":
                    self._groups[number] = int(pid)
                else:
                    self._until[number] = time.monotonic() + _PATIENCE
        except BlockingIOError:
            return
        self._poll.unregister(0)
        self._end_all()

    def _wait(self, fds: list[int], seconds: float | None) -> None:
        """Wait until all these processes have ended, ``seconds`` have passed, or the caller reports or ends."""
        deadline = time.monotonic() + (seconds or 0.0)
        left = {*fds}
        for fd in left:
            self._poll.register(fd, select.POLLIN)
        while True:
            timeout = None if seconds is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = {fd for fd, _ in self._poll.poll(timeout)}
            for fd in left & ready:
                self._poll.unregister(fd)
            left -= ready
            if 0 in ready:
                self._read_reports()
            if self._caller in ready:
                self._poll.unregister(self._caller)
                self._end_all()
            if not left or not ready or not ready.isdisjoint((0, self._caller)):
                break
        for fd in left:
            self._poll.unregister(fd)
        for fd in fds:
            os.close(fd)

    def _search_and_kill(self) -> tuple[list[int], bool]:
        """Search once and kill the processes found; return their pidfds, and whether to search again at once."""
        now = time.monotonic()
        self._report_done([number for number, until in self._until.items() if until < now])
        if self._all_until is not None and self._all_until < now:
            return [], False
        found, unclear = self._find()
        fds = [fd for process in found if (fd := self._kill(process, now)) is not None]
        if not fds and not unclear:
            self._report_done(list(self._until))
        return fds, unclear

    def _report_done(self, numbers: list[bytes]) -> None:
        for number in numbers:
            del self._until[number]
            self._groups.pop(number, None)
            with contextlib.suppress(OSError):  # the caller has ended, or reads no reports: it does not need this one
                os.write(0, number)

    def _find(self) -> tuple[list[ProcessSnapshot], bool]:
        """Return the processes of ended workers, and whether a second search may find more."""
        processes: dict[int, ProcessSnapshot] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208 # importing pathlib takes time
            if name.isdigit() and int(name) not in self._safe:
                try:
                    processes[int(name)] = ProcessSnapshot(int(name))
                except OSError:
                    continue
        # The kernel does not reuse the id of a group while there are processes in it.
        groups = {group for number, group in self._groups.items() if self._has_ended(number)}
        found = {pid for pid, process in processes.items() if process.group in groups or self._is_marked(process)}
        added = found
        while added:
            added = {pid for pid, process in processes.items() if process.parent in added} - found
            found |= added
        unclear = False
        for pid in processes.keys() - found:
            process = processes[pid]
            if process.environment == b"" and process.identity not in self._seen_empty:
                # In an exec a process shows no environment for a moment, so search a second time. Not a third time: if
                # the machine starts processes all the time, every search finds one in an exec.
                unclear = not self._again
                self._seen_empty.add(process.identity)
        self._again = unclear
        return [processes[pid] for pid in found if processes[pid].identity not in self._not_permitted], unclear

    def _has_ended(self, number: bytes) -> bool:
        return self._all_until is not None or number in self._until

    def _is_marked(self, process: ProcessSnapshot) -> bool:
        environment = process.environment
        if environment is None or self._prefix not in environment:
            return False
        for entry in environment.split(b"\0"):
            if entry.startswith(_PREFIX):
                marks = entry[len(_PREFIX) :].split()
                return any(
                    mark.startswith(self._prefix) and self._has_ended(mark[len(self._prefix) :]) for mark in marks
                )
        return False

    def _kill(self, process: ProcessSnapshot, now: float) -> int | None:
        """Kill a process, unless it may still clean up by itself; return its pidfd, None if it has ended."""
        fd = _open_pidfd(process.pid)
        if fd is None:
            return None
        try:
            # The pidfd refers to the process that has this pid now, which may be another one.
            if ProcessSnapshot(process.pid).identity == process.identity:
                command = _read(process.pid, "cmdline")
                cleans_up = _SPARED in command or os.fsencode(__file__) in command.split(b"\0")
                if not cleans_up or now > self._spared.setdefault(process.identity, now + _GRACE):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                return fd
        except PermissionError:
            self._not_permitted.add(process.identity)  # it runs as another user
        except OSError:
            pass  # it has ended meanwhile
        os.close(fd)
        return None


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _read(pid: int, name: str) -> bytes:
    fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
    try:
        content = b""
        while part := os.read(fd, 1 << 16):
            content += part
        return content
    finally:
        os.close(fd)


def main() -> None:
    """Run the reaper as a program; the arguments are those of `Reaper`."""
    os.chdir("/")
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > 2:
            try:
                os.close(int(name))  # inherited by accident: another thread of the caller was starting a process, too
            except OSError:
                continue
    Reaper(int(sys.argv[1]), sys.argv[2]).run()
    os._exit(0)


if __name__ == "__main__":
    main()
