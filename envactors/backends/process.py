"""Workers as processes, started by loky: a fresh interpreter, never a fork of the caller."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import socket
from collections.abc import Mapping

from loky.backend.context import get_context

from envactors import system
from envactors.backends.base import ExitStatus
from envactors.wire.channel import Channel
from envactors.worker.bootstrap import Descriptors, Passage, run

_children: set[object] = getattr(multiprocessing.process, "_children", set())

_THREAD_CAPS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


class ProcessBackend:
    """One process an actor, started by loky's process context."""

    def launch(self, name: str, env_vars: Mapping[str, str]) -> ProcessWorker:
        """Starts a worker process; see `envactors.backends.base.Backend.launch`."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as undo:
            sock, their_sock = socket.socketpair()
            undo.enter_context(sock)
            theirs.enter_context(their_sock)
            out_r, out_w = _pipe(undo, theirs)
            err_r, err_w = _pipe(undo, theirs)
            stacks = system.anonymous_file("envactors-stacks")
            undo.callback(os.close, stacks)
            process = get_context("loky").Process(
                target=run,
                name=name,
                args=(Passage(Descriptors(their_sock.fileno(), out_w, err_w, stacks)), os.getpid()),
                env={**thread_caps(env_vars), **env_vars},
            )
            process.start()
            undo.callback(_end, process)
            # This backend reaps its processes itself; multiprocessing's own clean-up must not come in between.
            _children.discard(process)
            worker = ProcessWorker(process, sock, out_r, err_r, stacks)
            undo.pop_all()
        return worker


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    ours.callback(os.close, reader)
    theirs.callback(os.close, writer)
    return reader, writer


def _end(process: multiprocessing.process.BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, system.SIGKILL)
    process.join()


class ProcessWorker:
    """One worker process; see `envactors.backends.base.Worker`."""

    def __init__(
        self, process: multiprocessing.process.BaseProcess, sock: socket.socket, stdout: int, stderr: int, stacks: int
    ) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process
        self._watch = system.ProcessWatch(process.pid)
        self._stacks = stacks
        sock.setblocking(False)
        self.channel = Channel(sock)
        self.stdout = stdout
        self.stderr = stderr
        os.set_blocking(stdout, False)
        os.set_blocking(stderr, False)
        self.sentinel = self._watch.fileno()

    def kill(self) -> None:
        self._watch.send(system.SIGKILL)

    def ask_stacks(self) -> None:
        self._watch.send(system.STACKS_SIGNAL)

    def stacks(self) -> str:
        size = os.fstat(self._stacks).st_size
        return os.pread(self._stacks, size, 0).decode(errors="replace")

    def reap(self) -> ExitStatus:
        system.kill_session(self.pid)  # what env code has started goes with it
        code = self._process.exitcode
        self.channel.close()
        self._watch.close()
        for fd in (self.stdout, self.stderr, self._stacks):
            os.close(fd)
        if code is None:
            return ExitStatus(None, None)
        return ExitStatus(None, -code) if code < 0 else ExitStatus(code, None)


def thread_caps(env_vars: Mapping[str, str]) -> dict[str, str]:
    """One thread for every numerical library, unless the caller's environment or ``env_vars`` say otherwise."""
    if "OMP_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in env_vars:
        return {}
    return {name: "1" for name in _THREAD_CAPS if name not in os.environ}
