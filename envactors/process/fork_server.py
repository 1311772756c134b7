"""Fork servers: processes that have imported what workers need, and fork a worker in milliseconds.

    launcher's thread ──request, descriptors──▶ fork server ──fork──▶ worker
                      ◀──process id, pidfd────       │
    reactor's thread  ◀──exit codes──────────────────┘

A server is a fresh interpreter, never a copy of the caller, and is replaced when it ends. Its workers outlive it: the
reaper (`envactors.process.reaping`) ends them with the caller.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from envactors.process import reaper
from envactors.process.bootstrap import Descriptors
from envactors.process.fork_server_program import EXIT_REPORT
from envactors.process.helper import Helper, HelperProcess
from envactors.process.reaping import REAPER
from envactors.process.refusal import LaunchRefusedError
from envactors.process.starting import THREAD_CAPS, start_python, working_directory
from envactors.system.processes import Process, await_exit
from envactors.system.sockets import open_pair

# How long a server may take to import its modules, and then to fork, in seconds. One that takes longer is stopped or
# out of memory; it is killed and replaced.
_IMPORT_PATIENCE: Final = 60.0
_FORK_PATIENCE: Final = 5.0
# How long it may take to report the exit code of a worker that has ended, in seconds.
_REPORT_PATIENCE: Final = 1.0

# If the caller has imported this module, its workers are likely to need it, too.
_LIKELY: Final = "gymnasium"


class Settings(NamedTuple):
    """The settings that actors must have in common to share a server.

    Attributes:
        preload: The modules to preload.
        env_vars: The environment variables of the actors, if ``preload`` or ``python`` may read them.
        python: Another interpreter to run; None for the caller's.
    """

    preload: tuple[str, ...] = ()
    env_vars: frozenset[tuple[str, str]] = frozenset()
    python: str | None = None


_Key: TypeAlias = tuple[Settings, tuple[object, ...]]


class ForkServerLostError(ConnectionError):
    """The fork server has ended or does not answer."""


class ForkServer(HelperProcess):
    """The parent's half of one fork server.

    One thread at a time forks workers, and another one takes exit codes; neither waits for the other.

    Args:
        preload: Modules that it imports besides NumPy.
        environment: Its environment.
        python: Another interpreter, whose path workers have then; None for the caller's.

    Raises:
        OSError: The server could not be started.
    """

    def __init__(self, preload: Sequence[str], environment: dict[str, str], python: str | None) -> None:
        super().__init__()
        self._environment = environment
        # A packet to the server has no room for a long one, so it is sent only if it has changed.
        self._argv = list(sys.argv)
        self._has_own_path = python is not None
        self._is_ready = False
        self._worker_ids = itertools.count(1)
        # The exit codes that were read but not yet taken, by the ids of the workers; guarded by the lock.
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        with contextlib.ExitStack() as theirs:
            ours, requests = open_pair(self._sockets, theirs, socket.SOCK_SEQPACKET)
            self.sock: socket.socket = ours
            self._exits, exits = open_pair(self._sockets, theirs)
            self._exits.settimeout(_REPORT_PATIENCE)
            boot = {"requests": requests, "exits": exits, "parent_pid": os.getpid(), "preload": list(preload)}
            fds = requests, exits
            self.process: subprocess.Popen[bytes] = start_python(
                "envactors.process.fork_server_program", "serve_forks", boot, fds, environment, python
            )

    def fork(self, descriptors: Descriptors, environment: Mapping[str, str]) -> Process:
        """Fork a worker with these descriptors and this environment.

        Raises:
            ForkServerLostError: The server has ended or does not answer.
            LaunchRefusedError: The server cannot fork, since one of its modules has started threads.
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
        worker_id = next(self._worker_ids)
        request = worker_id, changes, path, argv, working_directory()
        try:
            socket.send_fds(self.sock, [pickle.dumps(request)], descriptors.present())
        except OSError as error:
            raise ForkServerLostError(f"the fork server has ended: {error}") from error
        pid, pidfds = self._receive(_FORK_PATIENCE)
        if not pidfds:  # the kernel drops descriptors that this process may not open
            raise OSError(f"too many open files: the new worker (pid {pid}) cannot be watched, and ends by itself")
        return Process(pid, pidfds[0], lambda: self._take_exit_code(worker_id, pid))

    def wait(self) -> None:
        super().wait()
        REAPER.adopt()

    def _receive(self, patience: float) -> tuple[int, list[int]]:
        """Return the process id of an answer, and the descriptors that have come with it."""
        self.sock.settimeout(patience)
        try:
            content, received, _, _ = socket.recv_fds(self.sock, 1 << 16, 1)
        except OSError as error:
            raise ForkServerLostError(f"the fork server has not answered within {patience} s: {error}") from error
        if not content:
            raise ForkServerLostError("the fork server has ended")
        answer: int | OSError = pickle.loads(content)
        if isinstance(answer, OSError):
            raise answer
        return answer, received

    def _take_exit_code(self, worker_id: int, pid: int) -> int | None:
        """Return the exit code of a worker that has ended, minus the signal's number; None if nobody knows it."""
        with self._lock:
            while worker_id not in self._codes:
                try:
                    reports = self._exits.recv(100 * EXIT_REPORT.size)
                except TimeoutError:
                    return None
                if not reports:
                    self.wait()  # it is about to end, and then its workers have another parent:
                    return await_exit(pid)  # this process, if it is the parent of all orphans
                self._codes.update(EXIT_REPORT.iter_unpack(reports))
            return self._codes.pop(worker_id)


class ForkServers:
    """The fork servers of this process, each shared by all actors of equal settings. It is thread-safe."""

    def __init__(self) -> None:
        # Guards everything here.
        self._lock = threading.Lock()
        # The settings of each user.
        self._users: dict[object, Settings] = {}
        # By settings, what else is preloaded, and the limits of threads, which NumPy reads when it is imported.
        self._servers: dict[_Key, Helper[ForkServer]] = {}
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def retain(self, settings: Settings, user: object) -> None:
        """Keep the servers of these settings for an actor."""
        with self._lock:
            self._users[user] = settings

    def release(self, user: object) -> None:
        """Forget an actor, if it is known; end the servers that no other one uses."""
        with self._lock:
            self._users.pop(user, None)
            used = set(self._users.values())
            unused = [self._servers.pop(key) for key in tuple(self._servers) if key[0] not in used]
        for server in unused:
            server.stop()

    def fork(self, settings: Settings, descriptors: Descriptors, environment: dict[str, str]) -> Process:
        """Fork a worker from the server of these settings, and start that first if necessary; in one thread at a time.

        Raises:
            LaunchRefusedError: A module to preload has started threads.
            OSError: The system could not start the worker.
        """
        likely = [_LIKELY] if _LIKELY in sys.modules else []
        caps = {name: environment[name] for name in THREAD_CAPS if name in environment}
        key = settings, (*likely, *caps.items())
        with self._lock:
            if key not in self._servers:
                start = functools.partial(_start, settings, likely, caps)
                self._servers[key] = Helper("fork-server", start)
            helper = self._servers[key]
        try:
            server = helper.current()
            try:
                return server.fork(descriptors, environment)
            except ForkServerLostError:
                return helper.current(lost=server).fork(descriptors, environment)
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


def _start(settings: Settings, likely: list[str], caps: Mapping[str, str]) -> ForkServer:
    variables = {**os.environ, **caps, **dict(settings.env_vars), reaper.VARIABLE: str(REAPER.tag)}
    return ForkServer([*likely, *settings.preload], variables, settings.python)


FORK_SERVERS = ForkServers()
