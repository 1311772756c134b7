"""The helper process: it forks workers, and kills the processes that they leave behind.

It is a fresh interpreter with one thread. As a subreaper, it becomes the parent of every process that a worker leaves.
When a worker ends, the helper kills the worker's process group. When the caller ends or hangs up, the helper kills all
of the helper's descendants. If the helper itself is killed, the kernel kills its workers.

Workers that the caller has started through loky are not descendants of the helper, so it kills only their groups.

The caller's half is `envactors.process.helper`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import math
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
from typing import Final, NoReturn

from envactors.system import processes
from envactors.system.clocks import boot_clock

# A request: its kind, and the process id of a worker that the caller has started through loky; 0 for FORK.
REQUEST: Final = struct.Struct("<cq")
FORK, STARTED, ENDED = b"f", b"s", b"e"
# The first message of a helper that may fork. Another message in its place says why the helper must not.
READY: Final = b"ready"
# The answer to FORK: the worker's process id and 0, along with the worker's pidfd; or 0 and an error number.
ANSWER: Final = struct.Struct("<qq")
# The end of a forked worker: its process id, and its exit code, which is negative for a signal.
EXIT: Final = struct.Struct("<qq")
# The content of the file with the caller's lease: until when the caller and its workers may run (`boot_clock`).
LEASE: Final = struct.Struct("<d")

# The most descriptors that a request may carry.
_MOST_FDS: Final = 16
# How long threads that an import has started may take to end, in seconds.
_THREAD_GRACE: Final = 1.0
# How long resource trackers may take to clean up after a worker, in seconds.
TRACKER_GRACE: Final = 2.0
# How long, and how often, to try to kill processes that do not end, such as those of another user, in seconds.
_KILL_PATIENCE: Final = 4.0
_KILL_POLL: Final = 0.02
# How often to check whether the caller runs where no descriptor reports its end, in seconds.
_CALLER_POLL: Final = 0.5
# The longest wait, in seconds; in milliseconds it must fit into an int of C.
_LONGEST_WAIT: Final = 1e6


def main(requests: int, exits: int, lease: int | None, caller_pid: int, preload: list[str] | None) -> NoReturn:
    """Serve the caller until it hangs up or ends.

    Args:
        requests: The descriptor of the socket for requests and answers.
        exits: The descriptor of the pipe for exit codes.
        lease: The descriptor of the file with the caller's lease; None if it has none.
        caller_pid: The process id of the caller.
        preload: The modules to import; None if the caller starts the workers through loky.
    """
    server = HelperServer(requests, exits, Caller(caller_pid, lease))
    processes.exit_after(lambda: server.run(preload))


class Caller:
    """The process that the helper serves.

    Args:
        pid: Its process id.
        lease: The descriptor of the file with its lease; None if it has none.

    Attributes:
        pid: As above.
        sentinel: A descriptor that becomes readable when it ends; None where there is none.
        lease: As above.
    """

    def __init__(self, pid: int, lease: int | None) -> None:
        self.pid = pid
        self.sentinel: int | None = processes.watch_parent(pid)
        self.lease = lease

    def may_run(self) -> bool:
        """Return whether it runs; kill it if its lease is over."""
        if os.getppid() != self.pid:
            return False
        if self._lease_left() <= 0:
            os.kill(self.pid, signal.SIGKILL)
            return False
        return True

    def seconds_to_check(self) -> float:
        """Return the seconds after which `may_run` must be called again."""
        return max(0.0, min(self._lease_left(), _CALLER_POLL if self.sentinel is None else math.inf))

    def _lease_left(self) -> float:
        if self.lease is None:
            return math.inf
        # The later of two reads: a read while the caller writes may return a torn value.
        until = max(LEASE.unpack(os.pread(self.lease, LEASE.size, 0))[0] for _ in range(2))
        return float(until - boot_clock())


class Workers:
    """The workers of the caller, and the processes that they leave.

    Args:
        exits: The descriptor of the pipe for exit codes.
    """

    def __init__(self, exits: int) -> None:
        self._exits = exits
        os.set_blocking(exits, False)
        # The running workers: those that the helper has forked, or those that the caller has started.
        self._running: set[int] = set()
        # The workers whose process groups may still have members, and when they have ended (`time.monotonic`).
        self._ended: dict[int, float] = {}

    def add(self, pid: int) -> None:
        """Add a worker, which leads a process group."""
        self._running.add(pid)

    def record_end(self, pid: int) -> None:
        """Record the end of a worker, whose group `kill_groups` then kills."""
        self._running.discard(pid)
        self._ended[pid] = time.monotonic()

    def reap(self) -> bool:
        """Reap children that have ended, and report the exit codes of workers; return whether any children run."""
        with contextlib.suppress(ChildProcessError):
            while (exited := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = exited
                if pid in self._running:
                    self.record_end(pid)
                    with contextlib.suppress(OSError):  # the caller has ended, or the pipe is full
                        os.write(self._exits, EXIT.pack(pid, os.waitstatus_to_exitcode(status)))
            return True
        return False

    def kill_groups(self) -> bool:
        """Kill the groups of workers that have ended; return whether any group may still have members."""
        # While a group has members, no other group can have its id.
        occupied = processes.kill_groups({pid: ended + TRACKER_GRACE for pid, ended in self._ended.items()})
        oldest = time.monotonic() - _KILL_PATIENCE
        self._ended = {pid: ended for pid, ended in self._ended.items() if pid in occupied and ended > oldest}
        return bool(self._ended)

    def kill_all(self) -> None:
        """Kill the groups of all workers, and all descendants of the helper."""
        begun = time.monotonic()
        for pid in tuple(self._running):
            self.record_end(pid)
        while (self.reap() or self._ended) and time.monotonic() < begun + _KILL_PATIENCE:
            processes.kill_descendants(begun + TRACKER_GRACE)
            self.kill_groups()
            time.sleep(_KILL_POLL)


class HelperServer:
    """Handles requests, the ends of children, and the end of the caller.

    Args:
        requests: The descriptor of the socket for requests and answers.
        exits: The descriptor of the pipe for exit codes.
        caller: The caller.
    """

    def __init__(self, requests: int, exits: int, caller: Caller) -> None:
        self._requests = socket.socket(fileno=requests)
        self._caller = caller
        self._workers = Workers(exits)
        # A batch system sends these signals to all processes, for the caller to handle.
        ignored = (signal.SIGHUP, signal.SIGTERM)
        self._original_handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in ignored}
        processes.detach()  # unblocks signals, which must be ignored by now
        # The end of a child writes a byte to this pipe, which ends `poll`.
        self._original_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._signals, signaled = os.pipe()
        for fd in (self._signals, signaled):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(signaled, warn_on_full_buffer=False)
        self._poll = select.poll()  # descriptors may be too high for `select`
        for source in (requests, self._signals, caller.sentinel):
            if source is not None:
                self._poll.register(source, select.POLLIN)
        # The descriptors that workers must not have, beside that of the socket.
        self._own_fds = [fd for fd in (exits, self._signals, signaled, caller.sentinel, caller.lease) if fd is not None]

    def run(self, preload: list[str] | None) -> None:
        """Import modules, serve the caller, and kill everything that is left."""
        if preload is not None:
            processes.adopt_orphans()
            processes.end_with_parent(self._caller.pid)  # imports may never return
            self._requests.send(_import_all(preload).encode() or READY)
        processes.wake_with_parent()
        try:
            while self._caller.may_run() and self._serve_once():
                pass
        finally:
            self._workers.kill_all()
        signal.alarm(int(_KILL_PATIENCE))  # exit handlers of preloaded modules may never return
        atexit._run_exitfuncs()  # noqa: SLF001 # nothing public runs them

    def _serve_once(self) -> bool:
        """Wait, and handle what has happened; return False if the caller has hung up."""
        must_kill_again = self._workers.kill_groups()
        seconds = min(self._caller.seconds_to_check(), _KILL_POLL if must_kill_again else math.inf)
        ready = dict(self._poll.poll(1000 * min(seconds, _LONGEST_WAIT)))
        with contextlib.suppress(BlockingIOError):
            os.read(self._signals, 1 << 12)
        self._workers.reap()
        if self._requests.fileno() not in ready:
            return True
        try:
            return self._handle_request()
        except OSError:
            return False

    def _handle_request(self) -> bool:
        """Handle a request; return False if the caller has hung up."""
        request, fds, _, _ = socket.recv_fds(self._requests, REQUEST.size, _MOST_FDS)
        if not request:
            return False
        kind, pid = REQUEST.unpack(request)
        if kind == FORK:
            self._fork(fds)
        elif kind == STARTED:
            self._workers.add(pid)
        else:
            self._workers.record_end(pid)
        return True

    def _fork(self, fds: list[int]) -> None:
        """Fork a worker. The first descriptor is a file with its setup, and the others are the worker's own."""
        helper_pid = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                processes.exit_after(lambda: self._become_worker(fds, helper_pid))
            self._workers.add(pid)
            fds.append(processes.open_sentinel(pid))  # only this thread reaps it, so the id is still valid
            socket.send_fds(self._requests, [ANSWER.pack(pid, 0)], fds[-1:])
        except OSError as error:
            self._requests.send(ANSWER.pack(0, error.errno or 0))
        finally:
            for fd in fds:
                os.close(fd)

    def _become_worker(self, fds: list[int], helper_pid: int) -> NoReturn:
        from envactors.process import bootstrap  # imports NumPy, which only helpers that fork need

        signal.set_wakeup_fd(-1)
        for signum, handler in self._original_handlers.items():
            signal.signal(signum, handler)
        self._requests.close()
        for fd in self._own_fds:
            os.close(fd)
        with os.fdopen(fds[0], "rb") as file:
            setup = pickle.load(file)
        bootstrap.run(bootstrap.Descriptors(*fds[1:]), helper_pid, setup)


def _import_all(preload: list[str]) -> str:
    """Import modules; if one of them leaves threads running, return why this process must not fork."""
    gc.disable()  # imports are faster
    importlib.import_module("envactors.process.bootstrap")
    before = processes.count_threads()  # those of NumPy's libraries tolerate a fork
    for name in preload:
        with contextlib.suppress(Exception):  # an env that needs the module will raise the error
            importlib.import_module(name)
        end = time.monotonic() + _THREAD_GRACE
        while processes.count_threads() > before and time.monotonic() < end:
            time.sleep(0.01)
        if processes.count_threads() > before:
            others = {*threading.enumerate()} - {threading.main_thread()}
            names = ", ".join(thread.name for thread in others) or "not of Python"
            return (
                f"importing {name!r} leaves threads running ({names}), which a forked worker would not have: "
                f"leave {name!r} out of preload, so that each worker imports it"
            )
    gc.freeze()  # a collection in a worker would write to these objects, and so copy them
    gc.collect()  # likewise: it frees what Python has kept for new tuples and the like
    gc.enable()
    return ""
