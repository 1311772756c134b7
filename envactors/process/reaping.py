"""The parent's half of the reaper and the keeper, the helper processes that end what workers leave behind."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

from envactors.process import keeper, reaper
from envactors.process.helper import Helper, HelperProcess
from envactors.system.processes import has_tags, kill_group, no_fork
from envactors.system.sockets import SEND_FLAGS, open_pair, prevent_sigpipe

# How many ended workers a new reaper is told about: the old one may have been lost before it searched.
_RECENT = 100
# What no process has as its tag: reported as a worker that has ended, it starts a search that ends nothing.
_NO_TAG = "0"


class Guard(HelperProcess):
    """A running reaper or keeper.

    Args:
        program: The file with its program.
        caller_tag: The first of the tags of this process.
        lease: The descriptor of the file with the lease of this process; negative if it has none.
        reap: Called with the ids of processes that this process may have to reap.

    Raises:
        OSError: The process could not be started.
    """

    def __init__(self, program: str, caller_tag: int, lease: int, reap: Callable[[int], None]) -> None:
        super().__init__()
        self._reap = reap
        with contextlib.ExitStack() as theirs:
            ours, reports = open_pair(self._sockets, theirs)
            self.sock: socket.socket = ours
            prevent_sigpipe(self.sock)
            with no_fork:
                self.process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 # its own code
                    [sys.executable, "-I", "-S", program, *map(str, (os.getpid(), caller_tag, int(has_tags()), lease))],
                    stdin=reports,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=() if lease < 0 else (lease,),
                    start_new_session=True,
                )

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
            self.kill()  # it has ended or is stopped; the next one gets all reports
            return False
        return True


class Reaper:
    """Starts a reaper and a keeper with the first worker of this process, and reports each worker to them.

    Where the kernel can, it ends workers with their caller (`end_with_parent`). The processes that workers have started
    end neither with the caller nor with the worker: the reaper ends them. Where the kernel cannot, the reaper ends the
    workers too. It is a separate process so that it survives the caller's SIGKILL, and so that searching all processes
    of a machine delays no thread here. The keeper does the same: even if one of the two is killed, and then the caller
    before a replacement runs, nothing is left behind. A replacement is told about all workers.

    This class is thread-safe.

    Attributes:
        tag: The first of the tags of this process, which is that of its fork servers.
    """

    def __init__(self) -> None:
        # The processes that get reports, by program.
        self._guards: dict[str, Guard] = {}
        self._reset_after_fork()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        for guard in self._guards.values():
            guard.forget()
        # Guards everything below.
        self._lock = threading.Lock()
        # The actors that use it.
        self._users: set[object] = set()
        # The descriptor of the file with the lease of this process; negative if it has none.
        self._lease = -1
        self._reset()

    def _reset(self) -> None:
        self.tag: int = random.SystemRandom().randrange(1, 1 << reaper.CALLER_BITS) << reaper.WORKER_BITS
        # The tags of its workers.
        self._worker_tags = itertools.count(self.tag + 1)
        # The process ids of the workers that are not reaped yet, which are also the ids of their groups, by tag.
        self._workers: dict[int, int] = {}
        # The tags of the workers that ended last.
        self._ended: deque[int] = deque(maxlen=_RECENT)
        self._helpers: list[Helper[Guard]] = []
        self._guards = {}

    def retain(self, user: object) -> None:
        """Keep the reaper for an actor."""
        with self._lock:
            self._users.add(user)

    def release(self, user: object) -> None:
        """Forget an actor, if it is known; after the last one, end the reaper."""
        with self._lock:
            self._users.discard(user)
            if self._users:
                return
            helpers = self._helpers
        for helper in helpers if self._ended else ():
            with contextlib.suppress(OSError):
                helper.current()  # a replacement has to be told which workers have ended
        with self._lock:
            if self._users:
                return  # another actor has begun meanwhile
            self._reset()
        for helper in helpers:
            helper.hang_up()
        for helper in helpers:
            helper.stop()

    def enforce_lease(self, fd: int) -> None:
        """Have this process killed when its lease is over. The reaper lives until `release` of the descriptor.

        Args:
            fd: The file that holds the lease; see `envactors.process.reaper.LEASE_FORMAT`.
        """
        self._lease = fd
        self.retain(fd)
        self._ensure_running()

    def _ensure_running(self) -> None:
        with self._lock:
            programs = () if self._helpers else (reaper.__file__, keeper.__file__)
            for program in programs:
                start = functools.partial(self._start, program, self.tag)
                self._helpers.append(Helper(os.path.basename(program).removesuffix(".py"), start))  # noqa: PTH119
            helpers = self._helpers
        for helper in helpers:
            helper.current()

    def enlist(self) -> int:
        """Return the tag of the next worker.

        Raises:
            OSError: The reaper could not be started.
        """
        self._ensure_running()
        with self._lock:
            return next(self._worker_tags)

    def watch(self, tag: int, pid: int) -> None:
        """Report a worker that has started and leads a process group."""
        with self._lock:
            self._workers[tag] = pid
            self._report(f"{tag} {pid}")

    @contextlib.contextmanager
    def dismiss(self, tag: int) -> Iterator[None]:
        """Report a worker that has ended and is reaped in the context; the reaper ends what it has started."""
        with self._lock:
            self._ended.append(tag)
            if not self._report(str(tag)) or not has_tags():
                kill_group(self._workers[tag])  # before the worker is reaped, no other group can have this id
        try:
            yield
        finally:
            with self._lock:
                self._workers.pop(tag, None)

    def adopt(self) -> None:
        """Reap the processes that this process may have become the parent of, since a fork server has ended.

        Those that had ended before were reported while the server was still their parent.
        """
        with self._lock:
            self._report(_NO_TAG)

    def _report(self, line: str) -> bool:
        """Report to the reaper and the keeper; return whether any of them runs."""
        return True in [guard.report(line) for guard in self._guards.values()]

    def _start(self, program: str, caller_tag: int) -> Guard:
        """Start a reaper or a keeper, without waiting until it is ready."""
        with self._lock:
            if caller_tag != self.tag:
                raise ConnectionError("the last actor has ended")
            reap = functools.partial(self._reap_orphan, caller_tag)
            guard = self._guards[program] = Guard(program, caller_tag, self._lease, reap)
            for tag, pid in self._workers.items():
                guard.report(f"{tag} {pid}")
            for tag in self._ended:  # without process ids, which may be reused by now
                guard.report(str(tag))
            return guard

    def _reap_orphan(self, caller_tag: int, pid: int) -> None:
        """Reap a process that a worker has left behind, unless another process has its id by now.

        The last ones are reported after the last actor has ended, when this process has another first tag.
        """
        with self._lock, contextlib.suppress(OSError):
            if pid not in self._workers.values() and reaper.is_tag_of(caller_tag, reaper.read_tag(pid)):
                os.waitpid(pid, os.WNOHANG)


REAPER = Reaper()
