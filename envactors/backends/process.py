"""Workers as processes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from typing import get_args

from envactors import system
from envactors.backends.base import ExitStatus, Stream
from envactors.backends.reaping import REAPER
from envactors.backends.starting import Starter, StartMethod, make_starter
from envactors.wire.board import PAGE, Board
from envactors.wire.channel import Channel
from envactors.worker.bootstrap import Descriptors

# How numerical libraries are told their number of threads.
THREAD_CAPS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)

# While some load their imports, others are computing.
_STARTING_PER_CORE = 4
_STARTING_AT_LEAST = 8


class ProcessBackend:
    """One process an actor.

    Args:
        start_method: ``"loky"`` and ``"spawn"``: a fresh interpreter, by loky's process context or directly.
            ``"forkserver"``: forked from a fresh process that has imported NumPy and, where installed, Gymnasium;
            a worker in milliseconds. ``"fork"``: forked from the caller itself with all that its other threads
            may be in the middle of; only here the caller is ever forked. None needs a ``__main__`` guard.
        spin: Whether caller and workers look with open eyes for some tens of microseconds before they sleep, where
            there are cores to spare for it.
        max_starting: How many processes may be starting at a time, from the launch until the env is made; further ones
            wait, and their start deadlines with them. None: four a core, and at least eight. Worth raising for envs
            that mostly wait while they start.
        preload: Modules that the fork server imports too, where they are installed: those that take their time in every
            worker, and start no threads. Only with ``"forkserver"``.

    Raises:
        ValueError: No such start method; ``max_starting`` is no int >= 1; ``preload`` without a fork server.
        TypeError: ``spin`` is no bool.
    """

    kills = True
    inline = False

    def __init__(
        self,
        start_method: StartMethod = "loky",
        spin: bool = True,
        max_starting: int | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        if start_method not in get_args(StartMethod):
            raise ValueError(f"start_method is {start_method!r}: expected one of {get_args(StartMethod)}")
        if not isinstance(spin, bool):
            raise TypeError(f"spin is {spin!r}: expected True or False")
        if max_starting is None:
            max_starting = max(_STARTING_AT_LEAST, _STARTING_PER_CORE * system.cores())
        if isinstance(max_starting, bool) or not isinstance(max_starting, int) or max_starting < 1:
            raise ValueError(f"max_starting is {max_starting!r}: expected an int >= 1, or None")
        self.max_starting: int | None = max_starting
        self.start_method = start_method
        self.spin = spin
        if preload and start_method != "forkserver":
            raise ValueError(f"preload is {preload!r} with start_method={start_method!r}: expected 'forkserver'")
        self._starter: Starter = make_starter(start_method, preload)

    def __repr__(self) -> str:
        return f"ProcessBackend(start_method={self.start_method!r}, spin={self.spin})"

    def launch(self, name: str, env_vars: Mapping[str, str], slab: int | None) -> ProcessWorker:
        """Starts a worker process; see `envactors.backends.base.Backend.launch`."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as undo:
            sock, their_sock = socket.socketpair()
            undo.enter_context(sock)
            theirs.enter_context(their_sock)
            out_r, out_w = _pipe(undo, theirs)
            err_r, err_w = _pipe(undo, theirs)
            stacks = system.anonymous_file("envactors-stacks")
            undo.callback(os.close, stacks)
            page = theirs.enter_context(contextlib.closing(system.SharedFile("envactors-page")))
            to_worker = undo.enter_context(contextlib.closing(system.Doorbell()))
            to_parent = undo.enter_context(contextlib.closing(system.Doorbell()))
            board = Board(page.allocate(PAGE), to_worker, to_parent)
            descriptors = Descriptors(
                channel=their_sock.fileno(),
                stdout=out_w,
                stderr=err_w,
                stacks=stacks,
                page=page.fileno(),
                to_worker=to_worker.fileno(),
                to_parent=to_parent.fileno(),
                slab=slab,
            )
            number, mark = REAPER.enlist()
            process = self._starter.start(name, descriptors, {**thread_caps(env_vars), **env_vars, **mark})
            REAPER.watch(number, process.pid)
            worker = ProcessWorker(process, sock, board, [("stdout", out_r), ("stderr", err_r)], stacks, number)
            undo.pop_all()
        return worker

    def retain(self) -> None:
        REAPER.retain()
        self._starter.retain()

    def release(self) -> None:
        self._starter.release()
        REAPER.release()


class ProcessWorker:
    """One worker process; see `envactors.backends.base.Worker`."""

    def __init__(
        self,
        process: system.Process,
        sock: socket.socket,
        board: Board,
        outputs: list[tuple[Stream, int]],
        stacks: int,
        number: int,
    ) -> None:
        self.pid = process.pid
        self.sentinel = process.fileno()
        sock.setblocking(False)
        self.channel = Channel(sock)
        self.board = board
        self.outputs = outputs
        self._process = process
        self._stacks = stacks
        self._number = number
        for _, fd in outputs:
            os.set_blocking(fd, False)

    def kill(self) -> None:
        self._process.send(system.SIGKILL)

    def ask_stacks(self) -> None:
        self._process.send(system.STACKS_SIGNAL)

    def stacks(self) -> str:
        size = os.fstat(self._stacks).st_size
        return os.pread(self._stacks, size, 0).decode(errors="replace")

    def work(self) -> bool:
        return False

    def reap(self) -> ExitStatus:
        REAPER.dismiss(self._number)  # what env code has started goes with it
        code = self._process.reap()
        self.channel.close()
        self.board.close_bells()
        for _, fd in self.outputs:
            os.close(fd)
        os.close(self._stacks)
        if code is None:
            return ExitStatus(None, None)
        return ExitStatus(None, -code) if code < 0 else ExitStatus(code, None)


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    ours.callback(os.close, reader)
    theirs.callback(os.close, writer)
    return reader, writer


def thread_caps(env_vars: Mapping[str, str]) -> dict[str, str]:
    """One thread for every numerical library, unless the caller's environment or ``env_vars`` say otherwise."""
    if "OMP_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in env_vars:
        return {}
    return {name: "1" for name in THREAD_CAPS if name not in os.environ}
