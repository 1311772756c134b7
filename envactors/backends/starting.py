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
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, TypeAlias

from envactors.backends.reaping import REAPER, end_helper
from envactors.system.polling import packet_pair
from envactors.system.processes import SIGKILL, Process, await_exit, open_sentinel
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


def thread_caps(env_vars: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that limit numerical libraries to one thread each.

    Variables that the caller's environment sets are left out. If it or ``env_vars`` sets ``OMP_NUM_THREADS``, all are.
    """
    if "OMP_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in env_vars:
        return {}
    return {name: "1" for name in THREAD_CAPS if name not in os.environ}


# A program is started in the context ``layout``, which says whether the layout of its memory is fixed: then the worker
# restores a random one for what it starts.
Layout: TypeAlias = AbstractContextManager[bool]


def start_by_loky(name: str, descriptors: Descriptors, environment: dict[str, str], layout: Layout) -> Process:
    """Start a fresh interpreter by loky's process context."""
    from multiprocessing import resource_tracker

    from loky.backend.context import get_context

    # `ensure_running` starts the tracker for the first worker, and then unblocks SIGINT in this thread; Ctrl-C
    # would reach workers that are still starting.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with layout as fixed:
        args = descriptors, os.getpid(), fixed
        process = get_context("loky").Process(target=run, name=name, args=args, env=environment)
        process.start()
    # This backend reaps its processes itself: multiprocessing must not do it before.
    _children.discard(process)
    return _watched(process.pid, lambda: process.exitcode)


def start_interpreter(descriptors: Descriptors, environment: dict[str, str], layout: Layout) -> Process:
    """Start a fresh interpreter."""
    with layout as fixed:
        boot = {"descriptors": descriptors, "parent_pid": os.getpid(), "fixed_layout": fixed}
        process = _python("run", boot, descriptors.present(), environment)
    return _watched(process.pid, process.poll)


def fork_caller(descriptors: Descriptors, environment: dict[str, str]) -> Process:
    """Fork the caller."""
    parent_pid = os.getpid()
    with warnings.catch_warnings():
        # Python warns of forking a process with threads; the documentation of this start method says so already.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        run_forked(descriptors, parent_pid, environment)
    return _watched(pid, lambda: await_exit(pid))


class ForkServer:
    """The parent's half of one fork server.

    The server's environment is the caller's, except for the numbers of threads and its own mark. The variables of the
    first actor are not in it, since the server outlives that actor.

    Args:
        preload: Modules that it imports besides NumPy and Gymnasium.
        wanted: The environment of its first worker, from which it gets the numbers of threads.
        lock: Held by whoever calls a method; reaping a worker acquires it.

    Raises:
        OSError: The server could not be started.
    """

    def __init__(self, preload: list[str], wanted: Mapping[str, str], lock: threading.RLock) -> None:
        numbers = {name: wanted[name] for name in THREAD_CAPS if name in wanted}
        self._environment = {**os.environ, **numbers, **REAPER.mark("server")}
        self._lock = lock
        self._number = 0  # of the last request
        self._socket, theirs = packet_pair()
        with theirs, ExitStack() as undo:
            undo.enter_context(self._socket)
            boot = {"channel": theirs.fileno(), "parent_pid": os.getpid(), "preload": preload}
            self.process = _python("serve_forks", boot, (theirs.fileno(),), self._environment)
            undo.pop_all()

    def fork(self, descriptors: Descriptors, wanted: Mapping[str, str]) -> Process:
        """Fork a worker with these descriptors and this environment.

        Raises:
            OSError: The server has ended, or does not answer.
        """
        before = self._environment
        names = {name for name in (*before, *wanted) if before.get(name) != wanted.get(name)}
        changes = {name: wanted.get(name) for name in names}
        pid, (sentinel,) = self._request("fork", changes, descriptors.present(), _FORK_SERVER_PATIENCE)
        return Process(pid, sentinel, lambda: self._reap(pid))

    def _reap(self, pid: int) -> int | None:
        with self._lock:
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


def _python(
    function: str, boot: dict[str, Any], fds: Sequence[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter with this environment; it runs a function of `envactors.worker.bootstrap`."""
    boot = {**boot, "path": [entry or os.getcwd() for entry in sys.path], "argv": sys.argv}  # noqa: PTH109
    code = (
        "import json, sys; boot = json.loads(sys.argv.pop()); sys.path[:] = boot.pop('path'); "
        f"sys.argv[:] = boot.pop('argv'); from envactors.worker.bootstrap import {function}; {function}(**boot)"
    )
    command = [sys.executable, "-c", code, json.dumps(boot)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment)  # noqa: S603 # its own code


def _watched(pid: int, exit_code: Callable[[], int | None]) -> Process:
    try:
        return Process(pid, open_sentinel(pid), exit_code)
    except BaseException:
        os.kill(pid, SIGKILL)
        os.waitpid(pid, 0)
        raise
