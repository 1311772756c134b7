"""The first steps of a worker process: signals, output, evidence, the parent's death."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, NoReturn

from envactors import system
from envactors.wire.board import PAGE, Board
from envactors.wire.channel import Channel
from envactors.worker.context import own_process
from envactors.worker.main import serve

_inherited: list[Any] = []


class Descriptors(NamedTuple):
    """The descriptors that a worker gets from its parent; the slab's where there may be one."""

    channel: int
    stdout: int
    stderr: int
    stacks: int
    page: int
    to_worker: int
    to_parent: int
    slab: int | None = None

    def present(self) -> list[int]:
        """Those that there are, in order."""
        return [fd for fd in self if fd is not None]


class Passage:
    """Carries descriptors into a process that is being started, whatever its start method."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, tuple(DupFd(fd) for fd in self._descriptors.present())


def _arrive(*passed: Any) -> Descriptors:
    return Descriptors(*(descriptor.detach() for descriptor in passed))


def run(descriptors: Descriptors, parent_pid: int) -> None:
    """Runs a worker in this process until it is told to end.

    Args:
        descriptors: What the parent passed.
        parent_pid: The parent's process id; without that parent the worker ends itself.
    """
    system.die_with_parent(parent_pid)
    system.own_layout()
    # A group of its own: Ctrl-C in the caller's terminal reaches the caller, who decides. Not a session: schedulers
    # that share a core out by session let no worker give it to the caller.
    os.setpgid(0, 0)
    system.leave_terminal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    own_process()
    # Env code that starts processes of its own gets what it would get anywhere.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    _redirect(descriptors)
    faulthandler.enable()
    faulthandler.register(system.STACKS_SIGNAL, file=descriptors.stacks, all_threads=True)
    page = system.map_file(descriptors.page, PAGE)
    os.close(descriptors.page)
    board = Board(page, system.Doorbell(descriptors.to_worker), system.Doorbell(descriptors.to_parent))
    with socket.socket(fileno=descriptors.channel) as sock:
        sock.setblocking(True)
        serve(Channel(sock), board, descriptors.slab)


def run_fresh(descriptors: list[int], parent_pid: int) -> None:
    """Runs a worker in an interpreter that was started for it alone."""
    run(Descriptors(*descriptors), parent_pid)


def run_forked(descriptors: Descriptors, parent_pid: int, environment: Mapping[str, str]) -> NoReturn:
    """Runs a worker in a process that was forked for it, and ends that process."""
    code = 1
    try:
        os.environ.update(environment)
        system.show_environment()
        run(descriptors, parent_pid)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        # Not sys.exit: what the original registered for its own end is not the copy's to run.
        os._exit(code)


def _redirect(descriptors: Descriptors) -> None:
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    for source, target in ((descriptors.stdout, 1), (descriptors.stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        # What a forked worker's caller had not written yet is the caller's to write: kept, so that nothing flushes it.
        _inherited.append(getattr(sys, name))
        # Line by line: what Python holds back since it goes into a pipe would come late, and be lost with the process.
        stream = os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
