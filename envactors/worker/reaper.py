"""Ends what a caller and its workers leave behind: a program that outlives its caller by a moment.

It runs with the standard library alone and few of its modules (so what it asks of Linux stands here and not in
`envactors.system`), hears of workers that begin and end through descriptor 0, and waits for the caller's end itself.
Whose a process is shows in three ways, of which one is enough:

- Its environment, as ``/proc/<pid>/environ`` shows it, has the worker's mark in `VARIABLE`. Children inherit it,
  whatever group or session they make for themselves.
- It is in the process group that the worker has led.
- It was started by such a process, which still runs.

So a process gets away only if it has a group of its own, was started without that variable or keeps its environment
secret, and whoever has started it has ended before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

# Has a mark for each worker that a process is in, outermost first: the caller's id, a slash, the worker's number.
VARIABLE = "ENVACTORS_WORKER"

_PREFIX = VARIABLE.encode() + b"="
_SPARED = b"resource_tracker"
# How long to try, how long to wait for what was killed before looking again, how long helpers that put things in order
# by themselves once everybody else has ended may take for that, and how long an exec may; in seconds.
_PATIENCE = 4.0
_WAIT = 0.25
_GRACE = 0.5
_EXEC = 0.01
_KERNEL_THREADS = 2


class Sight:
    """What /proc shows of a process.

    Args:
        pid: Its process id.

    Raises:
        OSError: There is none, or it has ended already.
    """

    __slots__ = ("begun", "environment", "group", "parent", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        self.parent, self.group, self.begun = int(fields[1]), int(fields[2]), int(fields[19])
        if fields[0] in b"ZX":
            raise ProcessLookupError(pid)
        self.environment: bytes | None = None  # the kernel's own, or one that does not show it
        if _KERNEL_THREADS not in (pid, self.parent):
            try:
                self.environment = _read(pid, "environ")
            except PermissionError:
                return

    @property
    def identity(self) -> tuple[int, int]:
        """What no other process ever has."""
        return self.pid, self.begun


class Reaper:
    """Waits for workers to end, and for the caller, and then for the end of what they have started.

    Args:
        caller_pid: The caller's process id.
        caller_id: What the marks of its workers begin with.
    """

    def __init__(self, caller_pid: int, caller_id: str) -> None:
        self._prefix = caller_id.encode() + b"/"
        self._groups: dict[bytes, int] = {}
        self._until: dict[bytes, float] = {}
        self._over: float | None = None
        self._spared: dict[tuple[int, int], float] = {}
        self._seen_empty: set[tuple[int, int]] = set()
        self._again = False
        self._beyond_reach: set[tuple[int, int]] = set()
        self._safe = {os.getpid(), caller_pid}
        os.set_blocking(0, False)
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._caller = _hold(caller_pid)
        if self._caller is None or os.getppid() != caller_pid:
            self._end()
        else:
            self._poll.register(self._caller, select.POLLIN)

    def run(self) -> None:
        """Returns once the caller has ended, or says that it has no more workers, and nothing of them is left."""
        while True:
            fds, again = self._hunt() if self._until or self._over is not None else ([], False)
            if not fds and not again and self._over is not None:
                return
            self._wait(fds, _EXEC if again else _WAIT if fds else None)

    def _end(self) -> None:
        if self._over is None:
            self._over = time.monotonic() + _PATIENCE

    def _hear(self) -> None:
        """Takes in what the caller has said so far."""
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
        self._end()

    def _wait(self, fds: list[int], seconds: float | None) -> None:
        """Waits until all these processes have ended, for ``seconds`` at most, or for news."""
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
                self._hear()
            if self._caller in ready:
                self._poll.unregister(self._caller)
                self._end()
            if not left or not ready or not ready.isdisjoint((0, self._caller)):
                break
        for fd in left:
            self._poll.unregister(fd)
        for fd in fds:
            os.close(fd)

    def _hunt(self) -> tuple[list[int], bool]:
        """Looks once, and kills what it finds; gives pidfds of that, and whether another look is due at once."""
        now = time.monotonic()
        self._forget([number for number, until in self._until.items() if until < now])
        if self._over is not None and self._over < now:
            return [], False
        found, unclear = self._find()
        fds = [fd for sight in found if (fd := self._kill(sight, now)) is not None]
        if not fds and not unclear:
            self._forget(list(self._until))
        return fds, unclear

    def _forget(self, numbers: list[bytes]) -> None:
        for number in numbers:
            del self._until[number]
            self._groups.pop(number, None)
            with contextlib.suppress(OSError):  # the caller has ended, or does not listen: it has no need to know
                os.write(0, number)

    def _find(self) -> tuple[list[Sight], bool]:
        sights: dict[int, Sight] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208 # a Path costs an import
            if name.isdigit() and int(name) not in self._safe:
                try:
                    sights[int(name)] = Sight(int(name))
                except OSError:
                    continue
        # The ids of groups are not given to new processes as long as there is anybody in them.
        groups = {group for number, group in self._groups.items() if self._is_over(number)}
        found = {pid for pid, sight in sights.items() if sight.group in groups or self._is_marked(sight)}
        added = found
        while added:
            added = {pid for pid, sight in sights.items() if sight.parent in added} - found
            found |= added
        unclear = False
        for pid in sights.keys() - found:
            sight = sights[pid]
            if sight.environment == b"" and sight.identity not in self._seen_empty:
                # Perhaps in the middle of an exec: shows none for a moment. One more look tells; on a machine that
                # starts processes all the time there is one such in every look.
                unclear = not self._again
                self._seen_empty.add(sight.identity)
        self._again = unclear
        return [sights[pid] for pid in found if sights[pid].identity not in self._beyond_reach], unclear

    def _is_over(self, number: bytes) -> bool:
        return self._over is not None or number in self._until

    def _is_marked(self, sight: Sight) -> bool:
        environment = sight.environment
        if environment is None or self._prefix not in environment:
            return False
        for entry in environment.split(b"\0"):
            if entry.startswith(_PREFIX):
                marks = entry[len(_PREFIX) :].split()
                return any(mark.startswith(self._prefix) and self._is_over(mark[len(self._prefix) :]) for mark in marks)
        return False

    def _kill(self, sight: Sight, now: float) -> int | None:
        """Kills a process, unless it puts things in order itself and still has time for that; gives a pidfd of it."""
        fd = _hold(sight.pid)
        if fd is None:
            return None
        try:
            # From here on the pidfd stands for the process that has this pid now: is it still the same one?
            if Sight(sight.pid).identity == sight.identity:
                command = _read(sight.pid, "cmdline")
                cleans_up = _SPARED in command or os.fsencode(__file__) in command.split(b"\0")
                if not cleans_up or now > self._spared.setdefault(sight.identity, now + _GRACE):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                return fd
        except PermissionError:
            self._beyond_reach.add(sight.identity)  # runs as another user, who is not ours to end
        except OSError:
            pass  # it has ended meanwhile
        os.close(fd)
        return None


def _hold(pid: int) -> int | None:
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
    """Runs as a program: the arguments are those of `Reaper`."""
    os.chdir("/")
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > 2:
            try:
                os.close(int(name))  # what somebody else was passing on to a child of theirs
            except OSError:
                continue
    Reaper(int(sys.argv[1]), sys.argv[2]).run()
    os._exit(0)


if __name__ == "__main__":
    main()
