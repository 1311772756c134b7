"""Four ways to start a worker process."""

from __future__ import annotations

import json
import multiprocessing.process
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from envactors.backends.reaping import REAPER
from envactors.system import SIGKILL, Process, await_exit, one_layout
from envactors.worker.bootstrap import Descriptors, Passage, run, run_forked

StartMethod = Literal["loky", "spawn", "forkserver", "fork"]

# How long the fork server may take over an answer, in seconds; the first one includes its imports.
_FORK_SERVER_PATIENCE = 60.0
_REAP_PATIENCE = 1.0
_children: set[object] = getattr(multiprocessing.process, "_children", set())


class Starter(Protocol):
    """A way to start a worker process."""

    def start(self, name: str, descriptors: Descriptors, environment: Mapping[str, str]) -> Process:
        """Starts a worker with these descriptors and these additions to the environment."""

    def retain(self) -> None:
        """An actor has begun to use it."""

    def release(self) -> None:
        """An actor uses it no more."""


def make_starter(method: StartMethod, preload: Sequence[str] = ()) -> Starter:
    """Gives the starter of a start method; see `ProcessBackend`."""
    if method == "forkserver":
        return ForkServerStarter(preload)
    starters: dict[str, type[Starter]] = {"loky": LokyStarter, "spawn": SpawnStarter, "fork": ForkStarter}
    return starters[method]()


class _Stateless:
    def retain(self) -> None:
        """Nothing to keep."""

    def release(self) -> None:
        """Nothing to let go."""


class LokyStarter(_Stateless):
    """A fresh interpreter by loky's process context."""

    def start(self, name: str, descriptors: Descriptors, environment: Mapping[str, str]) -> Process:
        from multiprocessing import resource_tracker

        from loky.backend.context import get_context

        # Where it has to be started, by the first worker, SIGINT is unblocked in this thread behind our back; Ctrl-C
        # would then reach workers that are still starting.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        process = get_context("loky").Process(
            target=run, name=name, args=(Passage(descriptors), os.getpid()), env=dict(environment)
        )
        with one_layout():
            process.start()
        # This backend reaps its processes itself; multiprocessing's own clean-up must not come in between.
        _children.discard(process)
        return _watched(process.pid, lambda: process.exitcode)


class SpawnStarter(_Stateless):
    """A fresh interpreter, directly."""

    def start(self, name: str, descriptors: Descriptors, environment: Mapping[str, str]) -> Process:
        boot = {"descriptors": descriptors, "parent_pid": os.getpid()}
        with one_layout():
            process = _python("bootstrap", "run_fresh", boot, descriptors.present(), environment)
        del name  # only loky's processes have one
        return _watched(process.pid, process.poll)


class ForkStarter(_Stateless):
    """A copy of the caller."""

    def start(self, name: str, descriptors: Descriptors, environment: Mapping[str, str]) -> Process:
        del name
        parent_pid = os.getpid()
        with warnings.catch_warnings():
            # Python warns of forking a process with threads; who asks for it has been told.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            run_forked(descriptors, parent_pid, environment)
        return _watched(pid, lambda: await_exit(pid))


class ForkServerStarter:
    """A copy of a fresh process that has imported what envs need; it ends with the last actor that uses it.

    Args:
        preload: What it imports besides.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = list(preload)
        self._lock = threading.RLock()
        self._users = 0
        self._number = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def retain(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stop()

    def start(self, name: str, descriptors: Descriptors, environment: Mapping[str, str]) -> Process:
        del name
        request = "fork", (os.getpid(), dict(environment))
        with self._lock:
            try:
                pid, fds = self._ask(request, descriptors.present(), environment)
            except OSError:
                self._stop()  # the server was lost, and its workers with it: another one
                pid, fds = self._ask(request, descriptors.present(), environment)
        return Process(pid, fds[0], lambda: self._reap(pid))

    def _reap(self, pid: int) -> int | None:
        with self._lock:
            try:
                return None if self._socket is None else self._ask(("reap", pid), (), {}, _REAP_PATIENCE)[0]
            except OSError:
                return None

    def _ask(
        self,
        request: tuple[str, Any],
        fds: Sequence[int],
        environment: Mapping[str, str],
        patience: float = _FORK_SERVER_PATIENCE,
    ) -> tuple[Any, list[int]]:
        if self._socket is None:
            self._start(environment)
        assert self._socket is not None, "just started"
        self._socket.settimeout(patience)
        self._number += 1
        socket.send_fds(self._socket, [pickle.dumps((self._number, *request))], list(fds))
        while True:
            answer, received, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
            if not answer:
                raise ConnectionResetError("the fork server is gone")
            number, content = pickle.loads(answer)
            if number == self._number:
                return content, received

    def _start(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            boot = {"channel": theirs.fileno(), "parent_pid": os.getpid(), "preload": self._preload}
            # The thread caps of the first worker: what the server imports reads them once, for all. But its own mark.
            environment = {**environment, **REAPER.mark("server")}
            self._server = _python("forkserver", "serve_forks", boot, (theirs.fileno(),), environment)
        self._socket = ours

    def _stop(self) -> None:
        server, sock = self._server, self._socket
        self._server = self._socket = None
        if sock is not None:
            sock.close()
        if server is not None:
            try:
                server.wait(_REAP_PATIENCE)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _python(
    module: str, function: str, boot: dict[str, Any], fds: Sequence[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a fresh interpreter that runs a function of one of the worker's modules."""
    boot = {**boot, "path": [entry or os.getcwd() for entry in sys.path], "argv": sys.argv}  # noqa: PTH109
    code = (
        "import json, sys; boot = json.loads(sys.argv.pop()); sys.path[:] = boot.pop('path'); "
        f"sys.argv[:] = boot.pop('argv'); from envactors.worker.{module} import {function}; {function}(**boot)"
    )
    return subprocess.Popen(  # noqa: S603 # its own interpreter and code
        [sys.executable, "-c", code, json.dumps(boot)],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        env={**os.environ, **environment},
    )


def _watched(pid: int, exit_code: Callable[[], int | None]) -> Process:
    try:
        return Process.open(pid, exit_code)
    except BaseException:
        os.kill(pid, SIGKILL)
        os.waitpid(pid, 0)
        raise
