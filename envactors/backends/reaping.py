"""The parent's half of the reaper and the keeper, the processes that end whatever workers leave behind."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

from envactors.backends.helper import Helper, HelperProcess
from envactors.system.choice import PORTABLE, SYSTEM
from envactors.system.processes import kill_group
from envactors.system.sockets import SEND_FLAGS, prevent_sigpipe
from envactors.worker import keeper, reaper

# A new reaper is told of so many workers that have ended: the old one may have been lost before it searched.
_RECENT = 100


class Guard(HelperProcess):
    """A reaper or a keeper that runs.

    Args:
        process: The process.
        sock: The socket that it reads reports from.
        reap: Called with the ids of processes that this one may have to reap.
    """

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, reap: Callable[[int], None]) -> None:
        super().__init__(process, sock)
        self._reap = reap

    def wait(self) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while data := self.sock.recv(1 << 12):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._reap(int(line))
        super().wait()

    def report(self, line: str) -> bool:
        """Send a line; return whether it will be read."""
        try:
            self.sock.sendall(line.encode() + b"\n", socket.MSG_DONTWAIT | SEND_FLAGS)
        except OSError:
            self.kill()  # if it has not ended, it is stopped; the next one is told everything
            return False
        return True


class Reaper:
    """Starts a reaper and a keeper with the first worker of this process and reports each worker to them.

    The kernel, where it can, ends workers with their caller (`end_with_parent`). The processes that they have started
    end neither with the caller nor with the worker: the reaper ends them, and where the kernel cannot, the workers
    too. It is a process of its own so that it survives the caller's SIGKILL, and so that searching all processes of a
    machine delays no thread here. The keeper does the same, so that losing one of them, and the caller before there is
    another, leaves nothing behind. Both are replaced when they end, and the next one continues with the same workers.

    It is thread-safe.
    """

    def __init__(self) -> None:
        # Guards everything here.
        self._lock = threading.Lock()
        # How many actors use it.
        self._users = 0
        # The file with the lease of this process; negative if it has none.
        self._lease = -1
        self._reset()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def _reset(self) -> None:
        # What the marks of this process's workers begin with, such as "9f86d081884c7d65".
        self._id = os.urandom(8).hex()
        self._numbers = itertools.count()
        # By number, the process ids of workers, which are also those of their groups: of those that run, and of those
        # that are not reaped yet.
        self._workers: dict[int, int] = {}
        self._unreaped: dict[int, int] = {}
        # The numbers of the workers that ended last.
        self._ended: deque[int] = deque(maxlen=_RECENT)
        self._helpers: list[Helper[Guard]] = []
        # By program, those that reports go to.
        self._guards: dict[str, Guard] = {}

    def _reset_after_fork(self) -> None:
        for guard in self._guards.values():
            guard.forget()
        self._lock = threading.Lock()
        self._users = 0
        self._lease = -1
        self._reset()

    def retain(self) -> None:
        """Count an actor that uses the reaper."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Uncount an actor; after the last one, end the reaper."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            helpers = self._helpers
        for helper in helpers if self._ended else ():
            with contextlib.suppress(OSError):
                helper.current()  # it has to be told of those that have ended
        with self._lock:
            self._reset()
        for helper in helpers:
            helper.hang_up()
        for helper in helpers:
            helper.stop()

    def enforce_lease(self, fd: int) -> None:
        """Have this process, which counts as an actor, killed when its lease is over, whose file this is."""
        self._lease = fd
        self.retain()
        self._ensure_running()

    def _ensure_running(self) -> None:
        with self._lock:
            programs = () if self._helpers else (reaper.__file__, keeper.__file__)
            for program in programs:
                start = functools.partial(self._start, program, self._id)
                self._helpers.append(Helper(os.path.basename(program).removesuffix(".py"), start))  # noqa: PTH119
            helpers = self._helpers
        for helper in helpers:
            helper.current()

    def enlist(self) -> tuple[int, dict[str, str]]:
        """Return the next worker's number, and the environment variables that mark it.

        Raises:
            OSError: The reaper could not be started.
        """
        self._ensure_running()
        with self._lock:
            number = next(self._numbers)
        return number, self.mark(str(number))

    def mark(self, suffix: str) -> dict[str, str]:
        """Return the environment variable that marks a process.

        Its value ends with this process's id and ``suffix``, after the marks of the workers that this process itself is
        in, such as "9f86d081884c7d65/3".
        """
        marks = *os.environ.get(reaper.VARIABLE, "").split(), f"{self._id}/{suffix}"
        return {reaper.VARIABLE: " ".join(marks)}

    def watch(self, number: int, pid: int) -> None:
        """Report a worker that has started; it leads a process group."""
        with self._lock:
            self._workers[number] = self._unreaped[number] = pid
            self._report(f"{number} {pid}")

    @contextlib.contextmanager
    def dismiss(self, number: int) -> Iterator[None]:
        """Report a worker that has ended and is reaped in the context; the reaper ends whatever it has started."""
        with self._lock:
            pid = self._workers.pop(number)
            self._ended.append(number)
            if not self._report(str(number)) or PORTABLE:
                kill_group(pid)  # it is still its own
        try:
            yield
        finally:
            with self._lock:
                self._unreaped.pop(number, None)

    def _report(self, line: str) -> bool:
        """Report to all that run; return whether there are any."""
        return True in [guard.report(line) for guard in self._guards.values()]

    def _start(self, program: str, caller_id: str) -> Guard:
        """Start a reaper or a keeper, without waiting until it is ready."""
        with self._lock:
            if caller_id != self._id:
                raise ConnectionError("the last actor has ended")
            ours, theirs = socket.socketpair()
            prevent_sigpipe(ours)
            args = str(os.getpid()), caller_id, SYSTEM, str(self._lease)
            command = [sys.executable, "-I", "-S", program, *args]
            fds, null = (() if self._lease < 0 else (self._lease,)), subprocess.DEVNULL
            with contextlib.ExitStack() as undo, theirs:
                undo.callback(ours.close)
                # It has a session of its own, and inherits that all signals are blocked.
                process = subprocess.Popen(  # noqa: S603
                    command, stdin=theirs.fileno(), stdout=null, stderr=null, pass_fds=fds, start_new_session=True
                )
                undo.pop_all()
            guard = self._guards[program] = Guard(process, ours, functools.partial(self._reap_orphan, caller_id))
            # Those that have ended without their groups, whose ids may be reused by now.
            for report in (*(f"{number} {pid}" for number, pid in self._workers.items()), *map(str, self._ended)):
                guard.report(report)
            return guard

    def _reap_orphan(self, caller_id: str, pid: int) -> None:
        """Reap a process that a worker has left, unless somebody else's has the id by now."""
        with self._lock, contextlib.suppress(OSError):
            is_ours = pid not in self._unreaped.values()
            if is_ours and reaper.ProcessSnapshot(pid).is_orphan_of(caller_id, os.getpid()):
                os.waitpid(pid, os.WNOHANG)


REAPER = Reaper()
