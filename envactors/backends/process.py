"""Workers as processes, started by loky: a fresh interpreter, never a fork of the caller."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Mapping

from loky.backend.context import get_context

from envactors import system
from envactors.backends.base import ExitStatus
from envactors.wire.channel import Channel
from envactors.worker.bootstrap import Descriptors, Passage, run

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
        ours, theirs = socket.socketpair()
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        stacks = system.anonymous_file("envactors-stacks")
        mine = [out_r, err_r, stacks]
        passed = Descriptors(theirs.fileno(), out_w, err_w, stacks)
        process = get_context("loky").Process(
            target=run,
            name=name,
            args=(Passage(passed), os.getpid()),
            env={**thread_caps(env_vars), **env_vars},
        )
        try:
            process.start()
            worker = ProcessWorker(process, ours, out_r, err_r, stacks)
        except BaseException:
            if process.pid is not None:
                os.kill(process.pid, system.SIGKILL)
                process.join()
            ours.close()
            for fd in mine:
                os.close(fd)
            raise
        finally:
            theirs.close()
            os.close(out_w)
            os.close(err_w)
        return worker


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
        code = self._process.exitcode
        if code is None:
            # Another thread's `multiprocessing` may be reaping it this very moment; its word is kept there.
            code = self._process.exitcode
        multiprocessing.active_children()  # lets multiprocessing forget a process that has ended
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
