"""Fork servers: processes that have imported what workers need, and fork a worker in milliseconds.

    launcher's thread ──request, descriptors──▶ fork server ──fork──▶ worker
                      ◀──process id, pidfd────       │
    reactor's thread  ◀──exit codes, by a pipe───────┘

A server is a fresh interpreter, never a copy of the caller, and is replaced when it ends. Its workers outlive it: what
ends them with the caller is the reaper (`envactors.backends.reaping`).
"""

from __future__ import annotations

import functools
import os
import pickle
import socket
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from envactors.backends.base import LaunchRefusedError
from envactors.backends.helper import Helper, HelperProcess
from envactors.backends.reaping import REAPER
from envactors.backends.starting import THREAD_CAPS, start_python, working_directory
from envactors.mailbox.control_page import PagePlace
from envactors.system.polling import packet_pair, wait_readable
from envactors.system.processes import Process, await_exit
from envactors.worker.bootstrap import Descriptors
from envactors.worker.fork_server import EXIT_REPORT, Answer, WorkerSetup

# How long a server may take to import what it is to, in seconds, and then to fork. One that takes longer is stopped or
# out of memory; it is killed and replaced.
_IMPORT_PATIENCE: Final = 60.0
_FORK_PATIENCE: Final = 5.0
# How long it may take to report the end of a worker that has ended, in seconds.
_REAP_PATIENCE: Final = 1.0

# A module that workers of a caller that has imported it are likely to need, too.
_LIKELY: Final = "gymnasium"


class Settings(NamedTuple):
    """What actors must agree on to share servers.

    Attributes:
        preload: The modules to preload.
        env_vars: If there are any, or the interpreter is another one: the variables of the environment, which these may
            read.
        python: Another interpreter to run; None for the caller's.
    """

    preload: tuple[str, ...] = ()
    env_vars: frozenset[tuple[str, str]] = frozenset()
    python: str | None = None


_Key: TypeAlias = tuple[Settings, tuple[str | None, ...]]


class ForkServerLostError(ConnectionError):
    """The fork server has ended, or does not answer."""


class ForkServer(HelperProcess):
    """The parent's half of one fork server.

    Workers are forked by one thread at a time, and exit codes are taken by another; neither waits for the other.

    Args:
        preload: Modules that it imports besides NumPy.
        environment: Its environment.
        python: Another interpreter, whose path workers have then; None for the caller's.

    Raises:
        OSError: It could not be started.
    """

    def __init__(self, preload: Sequence[str], environment: dict[str, str], python: str | None) -> None:
        self._environment = environment
        # A packet to the server has room for a short one only.
        self._argv = list(sys.argv)
        self._has_own_path = python is not None
        self._is_ready = False
        # The number of the last request, and so of the last worker.
        self._number = 0
        # By the numbers of workers: the exit codes that were read and not asked for yet. Under the lock.
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        self.sock, requests = packet_pair()
        try:
            with requests:
                self._exits, exits = os.pipe()
                # Not when the server ends: the ends of workers that outlive it are still asked for.
                weakref.finalize(self, os.close, self._exits).atexit = False
                fds = requests.fileno(), exits
                boot = {"requests": fds[0], "exits": fds[1], "parent_pid": os.getpid(), "preload": list(preload)}
                try:
                    process = start_python(
                        "envactors.worker.fork_server", "serve_forks", boot, fds, environment, python
                    )
                finally:
                    os.close(exits)
        except BaseException:
            self.sock.close()
            raise
        super().__init__(process, self.sock)

    def fork(self, descriptors: Descriptors, page: PagePlace, environment: Mapping[str, str]) -> Process:
        """Fork a worker with these descriptors, the page at this place, and this environment.

        Raises:
            ForkServerLostError: The server has ended, or does not answer.
            LaunchRefusedError: It cannot fork, since one of the modules has started threads.
            OSError: The system could not fork.
        """
        if not self._is_ready:
            self._receive(_IMPORT_PATIENCE)
            self._is_ready = True
        before = self._environment
        names = {name for name in (*before, *environment) if before.get(name) != environment.get(name)}
        changes = {name: environment.get(name) for name in names}
        path = None if self._has_own_path else sys.path
        argv = None if sys.argv == self._argv else sys.argv
        setup = WorkerSetup(page, changes, path, argv, working_directory())
        self._number = number = self._number + 1
        try:
            socket.send_fds(self.sock, [pickle.dumps((number, *setup))], descriptors.present())
        except OSError as error:
            raise ForkServerLostError(f"the fork server has ended: {error}") from error
        pid, pidfds = self._receive(_FORK_PATIENCE)
        if not pidfds:  # the kernel drops descriptors that this process may not open
            raise OSError(f"too many open files to watch a worker, pid {pid}, which ends by itself")
        return Process(pid, pidfds[0], lambda: self._take_exit_code(number, pid))

    def _receive(self, patience: float) -> tuple[int, list[int]]:
        """Return the process id of an answer, and the descriptors that have come with it."""
        self.sock.settimeout(patience)
        try:
            content, received, _, _ = socket.recv_fds(self.sock, 1 << 16, 1)
        except OSError as error:
            raise ForkServerLostError(f"the fork server has not answered within {patience} s: {error}") from error
        if not content:
            raise ForkServerLostError("the fork server has ended")
        answer = Answer(*pickle.loads(content))
        if answer.refusal:
            raise LaunchRefusedError(answer.refusal)
        if answer.error:
            raise OSError(*answer.error)
        return answer.pid, received

    def _take_exit_code(self, number: int, pid: int) -> int | None:
        """Return the exit code of a worker that has ended, minus the signal's number; None if the server is gone."""
        with self._lock:
            while number not in self._codes:
                if not wait_readable(self._exits, _REAP_PATIENCE):
                    return None
                reports = os.read(self._exits, 100 * EXIT_REPORT.size)
                if not reports:
                    self.wait()  # it is about to end, and then its workers have another parent:
                    return await_exit(pid)  # this process, if it is the parent of all orphans
                self._codes.update(EXIT_REPORT.iter_unpack(reports))
            return self._codes.pop(number)


class ForkServers:
    """The fork servers of this process, each shared by all actors of equal settings. It is thread-safe."""

    def __init__(self) -> None:
        # Guards everything here.
        self._lock = threading.Lock()
        # How many actors use servers of these settings.
        self._users: Counter[Settings] = Counter()
        # By settings, what else is preloaded, and numbers of threads, which NumPy's libraries read when it is imported.
        self._servers: dict[_Key, Helper[ForkServer]] = {}
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def retain(self, settings: Settings) -> None:
        """Count an actor."""
        with self._lock:
            self._users[settings] += 1

    def release(self, settings: Settings) -> None:
        """Uncount an actor; after the last one of these settings, end their servers."""
        with self._lock:
            self._users[settings] -= 1
            keys = [key for key in self._servers if key[0] == settings and not self._users[settings]]
            unused = [self._servers.pop(key) for key in keys]
        for server in unused:
            server.stop()

    def fork(
        self, settings: Settings, descriptors: Descriptors, page: PagePlace, environment: dict[str, str]
    ) -> Process:
        """Fork a worker from the server of these settings, which is started if there is none; in one thread at a time.

        Raises:
            LaunchRefusedError: A module to preload has started threads.
            OSError: The system could not start it.
        """
        likely = [_LIKELY] if _LIKELY in sys.modules else []
        numbers = {name: environment.get(name) for name in THREAD_CAPS}
        key = settings, (*likely, *numbers.values())
        given = {name: value for name, value in numbers.items() if value is not None}
        with self._lock:
            if key not in self._servers:
                start = functools.partial(_start, settings, likely, given)
                self._servers[key] = Helper("fork-server", start)
            helper = self._servers[key]
        try:
            server = helper.current()
            try:
                return server.fork(descriptors, page, environment)
            except ForkServerLostError:
                return helper.current(lost=server).fork(descriptors, page, environment)
        except (ForkServerLostError, LaunchRefusedError):
            with self._lock:
                self._servers.pop(key, None)
            helper.stop()
            raise

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._users.clear()
        for server in self._servers.values():
            server.forget()
        self._servers.clear()


def _start(settings: Settings, likely: list[str], numbers: Mapping[str, str]) -> ForkServer:
    variables = {**os.environ, **numbers, **dict(settings.env_vars), **REAPER.mark("server")}
    return ForkServer([*likely, *settings.preload], variables, settings.python)


FORK_SERVERS = ForkServers()
