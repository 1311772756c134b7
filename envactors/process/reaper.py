"""The reaper: a program that ends the processes which a caller and its workers leave behind.

It outlives its caller by a moment. It uses only a few modules of the standard library, so its system calls are here and
not in `envactors.system`. Through descriptor 0 the caller reports, one per line, workers that have started ("7 4711":
the worker's tag and process id) and workers that have ended ("7"). The reaper itself waits for the end of the caller.
Every caller has a second reaper, the keeper (`envactors.process.keeper`), so that nothing is missed while one of them
is being replaced. If the caller is the agent of a node, both also kill it when its lease is over. Starting and
replacing reapers is up to `envactors.process.reaping`.

A process belongs to a worker if its limit of file locks is the worker's tag. Linux does not enforce this limit and
programs do not set it, but everything that a worker starts inherits it, whatever its environment, session, or parent.
A process keeps its tag after it has ended. Where the caller is the parent of all orphans (as process 1 of a container
is), the reaper sends it the ids of those that have ended ("4712"), and the caller reaps them. When a fork server has
ended, the caller reports "0", the tag of no process: what the server had not reaped is the caller's now.

Where tags are unknown, only process groups tell. There the caller itself ends the group of a worker that has ended,
while no other process can have its id, and the reaper ends the groups of all workers with the caller.
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

# Has the tag of a worker, or of a fork server.
VARIABLE = "ENVACTORS_WORKER"

# The lease of a node in the file that its agent shares: until when workers may run, a time of `LEASE_CLOCK`.
LEASE_FORMAT = struct.Struct("<d")
LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

# A tag has this many bits for the worker, after those for its caller. The first tag of a caller is its fork servers'.
WORKER_BITS = 22
CALLER_BITS = 40
# What the command line of a process contains that cleans up by itself once all others have ended, such as the reapers
# of nested callers.
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 # importing pathlib takes time
_SPARED = (b"resource_tracker", *(os.fsencode(f"{_HERE}/{name}.py") for name in ("reaper", "keeper")))
# All times are in seconds. How long to search for processes after a worker's end:
_PATIENCE = 4.0
# How long to wait for killed processes before the next search:
_WAIT = 0.25
# How long a process may take to clean up by itself:
_GRACE = 2.0
# How often to check whether the caller has ended, where the system does not wake the reaper:
_BEAT = 0.5
# How long to wait for the end of a caller whose lease is over before it is killed again:
_KILL_BEAT = 0.1
# The limit of file locks, which Python has no name for.
_LOCKS = 10


def read_tag(pid: int) -> int:
    """Return the tag of a process; 0 if it has none.

    Raises:
        OSError: There is no such process.
    """
    try:
        return max(0, resource.prlimit(pid, _LOCKS)[0])
    except PermissionError:  # it runs as another user or group, but everyone may read its limits
        with io.FileIO(f"/proc/{pid}/limits") as file:
            limit = file.readall().partition(b"Max file locks")[2].split(None, 1)[:1]
        return int(limit[0]) if limit and limit[0].isdigit() else 0


def is_tag_of(caller_tag: int, tag: int) -> bool:
    """Return whether a tag is that of a worker or fork server of a caller, given the first tag of that caller."""
    return tag >> WORKER_BITS == caller_tag >> WORKER_BITS


class Reaper:
    """Waits until a worker or the caller ends, and then ends the processes that it has started.

    Args:
        caller_pid: The caller's process id.
        caller_tag: The first of the caller's tags.
        has_tags: Whether workers have tags.
        lease: The file that holds the lease of a caller that is the agent of a node; negative for others.
    """

    def __init__(self, caller_pid: int, caller_tag: int, has_tags: bool, lease: int) -> None:
        self._caller_pid = caller_pid
        self._caller_tag = caller_tag
        self._has_tags = has_tags
        self._lease = lease
        # By tag of a running worker, the process group that it leads.
        self._groups: dict[int, int] = {}
        # The tags of ended workers whose processes may still run.
        self._ended: set[int] = set()
        # The beginning of a report whose end has not come yet.
        self._rest = b""
        os.set_blocking(0, False)
        # The descriptors to wait for: that of the reports, and a pidfd of the caller, since forked children of the
        # caller may have copies of the other end of the reports.
        self._sources = [0]
        if has_tags:
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
            self._wait(None if self._has_tags else _BEAT)

    def _wait(self, seconds: float | None) -> bool:
        """Wait until the caller reports or ends, at most ``seconds``; return whether it has."""
        ready = select.select(self._sources, [], [], seconds if self._lease < 0 else self._enforce_lease(seconds))[0]
        if 0 in ready:
            self._read_reports()
        self._caller_ended |= os.getppid() != self._caller_pid
        if self._caller_ended:
            self._sources = []  # nothing more will come
        return bool(ready)

    def _enforce_lease(self, seconds: float | None) -> float:
        """Kill the caller if its lease is over; return how long to wait for the next check, at most ``seconds``."""
        # Read twice, since the caller may be writing it.
        until = max(LEASE_FORMAT.unpack(os.pread(self._lease, LEASE_FORMAT.size, 0))[0] for _ in range(2))
        left = float(until - time.clock_gettime(LEASE_CLOCK))
        if left <= 0:
            if os.getppid() == self._caller_pid:  # so its process id is still its own
                os.kill(self._caller_pid, signal.SIGKILL)
            left = _KILL_BEAT
        return left if seconds is None else min(left, seconds)

    def _read_reports(self) -> None:
        try:
            while data := os.read(0, 1 << 12):
                self._rest += data
            self._caller_ended = True
        except BlockingIOError:
            pass
        except ConnectionResetError:  # the caller has ended before it had read what was sent to it
            self._caller_ended = True
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            tag, _, pid = line.partition(b" ")
            if pid:
                self._groups[int(tag)] = int(pid)
            else:
                self._groups.pop(int(tag), None)
                self._ended.add(int(tag))

    def _end_processes(self) -> None:
        """Kill the processes of ended workers until a search finds no more of them or `_PATIENCE` is over."""
        end_worker = os.kill if self._has_tags else os.killpg
        for pid in self._groups.values() if self._caller_ended else ():
            with contextlib.suppress(OSError):
                end_worker(pid, signal.SIGKILL)  # at once: on another node its successor may be about to start
        begun = time.monotonic()
        while self._has_tags and time.monotonic() < begun + _PATIENCE:
            # importing pathlib takes time
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
            ending = [fd for pid in pids if (fd := self._end(pid, begun)) is not None]
            until = time.monotonic() + _WAIT
            for fd in ending:
                _await_end(fd, until)
                os.close(fd)
            if self._wait(0.0):
                begun = time.monotonic()
            elif not ending:
                break
        self._ended.clear()

    def _end(self, pid: int, begun: float) -> int | None:
        """Kill a process of an ended worker, unless it may still clean up by itself, and return its pidfd.

        Args:
            pid: Any process id.
            begun: When the search has begun.
        """
        fd = None
        with contextlib.suppress(OSError):  # it has ended meanwhile, or runs as another user
            if not is_tag_of(self._caller_tag, read_tag(pid)):
                return None
            fd = os.pidfd_open(pid)
            tag = read_tag(pid)  # again: another process may have got the id before the pidfd was opened
            if not is_tag_of(self._caller_tag, tag):
                pass
            elif _await_end(fd, 0.0):
                os.write(0, b"%d\n" % pid)
            elif self._caller_ended or tag in self._ended:
                with io.FileIO(f"/proc/{pid}/cmdline") as file:
                    command = file.readall()
                if time.monotonic() > begun + _GRACE or not any(name in command for name in _SPARED):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                return fd
        if fd is not None:
            os.close(fd)
        return None


def _await_end(fd: int, until: float) -> bool:
    """Wait for the end of the process of a pidfd, until a time of `time.monotonic`; return whether it has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))


def main() -> None:
    """Run a reaper or a keeper with the arguments of the command line."""
    os.chdir("/")
    caller_pid, caller_tag, has_tags, lease = map(int, sys.argv[1:])
    Reaper(caller_pid, caller_tag, bool(has_tags), lease).run()
    os._exit(0)


if __name__ == "__main__":
    main()
