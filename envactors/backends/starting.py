"""Four ways to start a worker process, and the environment it starts with."""

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
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

from envactors.backends.reaping import REAPER, end_helper
from envactors.system.polling import packet_pair
from envactors.system.processes import SIGKILL, Process, await_exit, fixed_layout, open_sentinel
from envactors.worker.bootstrap import Descriptors, run, run_forked

StartMethod = Literal["loky", "spawn", "forkserver", "fork"]

# The variables that set the number of threads of numerical libraries, which read them once, when they are imported.
THREAD_CAPS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
# How long the fork server may take to answer, in seconds; the first answer includes its imports.
_FORK_SERVER_PATIENCE = 60.0
# How long it may take to reap a worker, in seconds.
_REAP_PATIENCE = 1.0
# The processes that multiprocessing reaps by itself.
_children: set[object] = getattr(multiprocessing.process, "_children", set())


class Starter:
    """A way to start a worker process; see `ProcessBackend`.

    Args:
        preload: Further modules that fork servers import.
        randomize_layout: Whether fresh interpreters have random addresses.
    """

    def __init__(self, preload: Sequence[str], randomize_layout: bool) -> None:
        self._preload = list(preload)
        self._randomize_layout = randomize_layout

    def start(self, name: str, descriptors: Descriptors, environment: Mapping[str, str]) -> Process:
        """Start a worker with these descriptors and these additions to the environment."""
        raise NotImplementedError

    def retain(self) -> None:
        """Count an actor that uses the starter."""

    def release(self) -> None:
        """Uncount an actor; after the last one, end what the starter has started."""

    def _layout(self) -> AbstractContextManager[bool]:
        """Return the context to start a worker in; its value says whether the worker must restore a random layout."""
        return nullcontext(False) if self._randomize_layout else fixed_layout()


class LokyStarter(Starter):
    """Starts a fresh interpreter by loky's process context."""

    def start(self, name: str, descriptors: Descriptors, environment: Mapping[str, str]) -> Process:
        from multiprocessing import resource_tracker

        from loky.backend.context import get_context

        # `ensure_running` starts the tracker for the first worker, and then unblocks SIGINT in this thread; Ctrl-C
        # would reach workers that are still starting.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with self._layout() as fixed:
            process = get_context("loky").Process(
                target=run, name=name, args=(descriptors, os.getpid(), fixed), env=dict(environment)
            )
            process.start()
        # This backend reaps its processes itself: multiprocessing must not do it before.
        _children.discard(process)
        return _watched(process.pid, lambda: process.exitcode)


class SpawnStarter(Starter):
    """Starts a fresh interpreter directly."""

    def start(self, name: str, descriptors: Descriptors, environment: Mapping[str, str]) -> Process:
        with self._layout() as fixed:
            boot = {"descriptors": descriptors, "parent_pid": os.getpid(), "fixed_layout": fixed}
            process = _python("run", boot, descriptors.present(), {**os.environ, **environment})
        del name  # only loky's processes have one
        return _watched(process.pid, process.poll)


class ForkStarter(Starter):
    """Forks the caller."""

    def start(self, name: str, descriptors: Descriptors, environment: Mapping[str, str]) -> Process:
        del name
        parent_pid = os.getpid()
        with warnings.catch_warnings():
            # Python warns of forking a process with threads; the documentation of this start method says so already.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            run_forked(descriptors, parent_pid, environment)
        return _watched(pid, lambda: await_exit(pid))


class ForkServerStarter(Starter):
    """Forks a fresh process that has imported what envs need, and that ends with the last actor.

    Numerical libraries read their number of threads when they are imported, so there is one server for each choice of
    these numbers; usually there is only one.
    """

    def __init__(self, preload: Sequence[str], randomize_layout: bool) -> None:
        super().__init__(preload, randomize_layout)
        self._lock = threading.RLock()
        # How many actors use it.
        self._users = 0
        # The servers by the values of the variables of `THREAD_CAPS`, such as ("1", "1", None, ...).
        self._servers: dict[tuple[str | None, ...], ForkServer] = {}

    def retain(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                while self._servers:
                    self._servers.popitem()[1].stop()

    def start(self, name: str, descriptors: Descriptors, environment: Mapping[str, str]) -> Process:
        del name
        wanted = {**os.environ, **environment}
        with self._lock:
            try:
                return self._fork(descriptors, wanted)
            except OSError:
                lost = self._servers.pop(_thread_numbers(wanted), None)
                if lost is not None:
                    lost.stop()  # its workers end with it
                return self._fork(descriptors, wanted)

    def _fork(self, descriptors: Descriptors, wanted: Mapping[str, str]) -> Process:
        numbers = _thread_numbers(wanted)
        server = self._servers.get(numbers)
        if server is None:
            server = self._servers[numbers] = ForkServer(self._preload, wanted)
        pid, fd = server.fork(descriptors, wanted)
        return Process(pid, fd, lambda: self._reap(server, pid))

    def _reap(self, server: ForkServer, pid: int) -> int | None:
        with self._lock:
            return server.reap(pid)


class ForkServer:
    """The parent's half of one fork server. It is not thread-safe.

    The server's environment is the caller's, except for the numbers of threads and its own mark. The variables of the
    first actor are not in it, since the server outlives that actor.

    Args:
        preload: Modules that it imports besides NumPy and Gymnasium.
        wanted: The environment of its first worker, from which it gets the numbers of threads.

    Raises:
        OSError: The server could not be started.
    """

    def __init__(self, preload: Sequence[str], wanted: Mapping[str, str]) -> None:
        own = {name: value for name, value in os.environ.items() if name not in THREAD_CAPS}
        own.update((name, wanted[name]) for name in THREAD_CAPS if name in wanted)
        own.update(REAPER.mark("server"))
        self._environment = own
        self._number = 0  # of the last request
        with ExitStack() as undo:
            self._socket, theirs = packet_pair()
            undo.enter_context(self._socket)
            with theirs:
                boot = {"channel": theirs.fileno(), "parent_pid": os.getpid(), "preload": list(preload)}
                self.process = _python("serve_forks", boot, (theirs.fileno(),), own)
            undo.pop_all()

    def fork(self, descriptors: Descriptors, wanted: Mapping[str, str]) -> tuple[int, int]:
        """Fork a worker with these descriptors and this environment; return its process id and a pidfd of it.

        Raises:
            OSError: The server has ended, or does not answer.
        """
        changes = _difference(self._environment, wanted)
        pid, fds = self._request("fork", changes, descriptors.present(), _FORK_SERVER_PATIENCE)
        return pid, fds[0]

    def reap(self, pid: int) -> int | None:
        """Reap an ended worker; return its exit code, or minus the signal's number, or None if neither is known."""
        try:
            code: int | None = self._request("reap", pid, (), _REAP_PATIENCE)[0]
        except OSError:
            return None
        return code

    def stop(self) -> None:
        end_helper(self.process, self._socket)

    def _request(self, kind: str, content: object, fds: Sequence[int], patience: float) -> tuple[Any, list[int]]:
        self._socket.settimeout(patience)
        self._number += 1
        socket.send_fds(self._socket, [pickle.dumps((self._number, kind, content))], list(fds))
        while True:
            answer, received, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
            if not answer:
                raise ConnectionResetError("the fork server is gone")
            number, content = pickle.loads(answer)
            if number == self._number:
                return content, received


def thread_caps(env_vars: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that limit numerical libraries to one thread each.

    Variables that the caller's environment sets are left out. If it or ``env_vars`` sets ``OMP_NUM_THREADS``, all are.
    """
    if "OMP_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in env_vars:
        return {}
    return {name: "1" for name in THREAD_CAPS if name not in os.environ}


def _difference(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes from one environment to another: variables to set, and with None to unset."""
    changes: dict[str, str | None] = {name: None for name in before if name not in after}
    changes.update((name, value) for name, value in after.items() if before.get(name) != value)
    return changes


STARTERS: dict[str, type[Starter]] = {
    "loky": LokyStarter,
    "spawn": SpawnStarter,
    "forkserver": ForkServerStarter,
    "fork": ForkStarter,
}


def _thread_numbers(environment: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(environment.get(name) for name in THREAD_CAPS)


def _python(
    function: str, boot: dict[str, Any], fds: Sequence[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter with this environment; it runs a function of `envactors.worker.bootstrap`."""
    boot = {**boot, "path": [entry or os.getcwd() for entry in sys.path], "argv": sys.argv}  # noqa: PTH109
    code = (
        "import json, sys; boot = json.loads(sys.argv.pop()); sys.path[:] = boot.pop('path'); "
        f"sys.argv[:] = boot.pop('argv'); from envactors.worker.bootstrap import {function}; {function}(**boot)"
    )
    return subprocess.Popen(  # noqa: S603 # its own interpreter and code
        [sys.executable, "-c", code, json.dumps(boot)],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        env=environment,
    )


def _watched(pid: int, exit_code: Callable[[], int | None]) -> Process:
    try:
        return Process(pid, open_sentinel(pid), exit_code)
    except BaseException:
        os.kill(pid, SIGKILL)
        os.waitpid(pid, 0)
        raise
