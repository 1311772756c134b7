"""Set up a worker process and run its loop: environment, signals, output, stacks, and the end with its parent.

How the process is started is up to `envactors.backends`; the loop itself is in `envactors.worker.main`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, NoReturn

from envactors.mailbox.channel import Channel
from envactors.mailbox.control_page import ControlPage
from envactors.mailbox.info_codec import Infos
from envactors.mailbox.slab import Layout, Slab
from envactors.process import reaper
from envactors.system.memory import map_part, open_unnamed
from envactors.system.polling import Doorbell
from envactors.system.processes import (
    STACKS_SIGNAL,
    detach,
    end_with_parent,
    tag_descendants,
    volunteer_for_oom,
)
from envactors.worker import context
from envactors.worker.log_records import FrameSender, forward_records
from envactors.worker.main import Server

# The name of the file that a worker writes its stacks to; its parent looks for a file of this name.
STACKS_FILE = "envactors-stacks"
# Streams of the process that a worker was forked from; see `_redirect`.
_inherited: list[Any] = []


class Descriptors(NamedTuple):
    """The descriptors that a worker inherits from its parent.

    ``slab`` is None for a worker without rows, and ``stacks`` if the parent finds the worker's own file.
    """

    channel: int
    stdout: int
    stderr: int
    page: int
    to_worker: int
    to_parent: int
    slab: int | None = None
    stacks: int | None = None

    def present(self) -> list[int]:
        """Return the descriptors without None, in order."""
        return [fd for fd in self if fd is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        # Only loky pickles them, and passes them to the process that it starts.
        return _unpickle_descriptors, tuple(None if fd is None else DupFd(fd) for fd in self)


def _unpickle_descriptors(*passed: Any) -> Descriptors:
    fds: list[Any] = [None if descriptor is None else descriptor.detach() for descriptor in passed]
    return Descriptors(*fds)


def run(descriptors: Descriptors, parent_pid: int | None, changes: Mapping[str, str | None]) -> NoReturn:
    """Run a worker in this process until its parent ends it.

    Args:
        descriptors: The descriptors from the parent.
        parent_pid: The process id of the caller, with which the worker ends; None if a fork server has forked it, and
            then the reaper ends it.
        changes: Environment variables to set, and with None to unset.
    """

    def work() -> None:
        volunteer_for_oom()
        for name, value in changes.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _reseed()
        detach()
        if parent_pid is not None:
            end_with_parent(parent_pid)
        _serve(descriptors)

    exit_after(work)


def exit_after(work: Callable[[], None]) -> NoReturn:
    """Do the work of this process, and end it without finalizing the interpreter."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # it is None, or what reads it is gone
                stream.flush()
        # Not sys.exit: finalizing an interpreter takes tens of milliseconds, and exit handlers must not run in a forked
        # copy of their process.
        os._exit(code)


def _serve(descriptors: Descriptors) -> None:
    tag_descendants(int(os.environ[reaper.VARIABLE]))
    # Env code that starts processes gets the system's default start method, as in any other program.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    _redirect(descriptors)
    faulthandler.enable()
    passed = descriptors.stacks
    stacks = open_unnamed(STACKS_FILE) if passed is None else os.fdopen(passed, "r+b", buffering=0)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)  # keeps the file open
    fcntl.fcntl(stacks, fcntl.F_SETFL, os.O_APPEND)  # the parent empties it now and then
    stacks.write(b"\n")  # from now on the parent may send the signal
    memory = map_part(descriptors.page, os.fstat(descriptors.page).st_size, 0)
    os.close(descriptors.page)
    page = ControlPage(memory, Doorbell(descriptors.to_worker), Doorbell(descriptors.to_parent))
    with socket.socket(fileno=descriptors.channel) as sock:
        sock.setblocking(True)
        memory_of_rows = None if descriptors.slab is None else MappedParts(descriptors.slab)
        channel = Channel(sock)
        server = Server(channel, page, memory_of_rows, send=FrameSender(channel).send)
        forward_records(server.send_record)
        context.of_process = server.host.running
        server.serve()


class MappedParts:
    """The memory of a vector, whose parts a worker maps; see `envactors.worker.main.OpenMemory`.

    Args:
        fd: The file.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def open(self, layout: Layout) -> tuple[Slab, Infos]:
        slab = Slab(layout, self.open_part((0, layout.size), writable=True))
        return slab, Infos(slab)

    def open_part(self, place: tuple[int, int], *, writable: bool) -> memoryview:
        start, size = place
        part = map_part(self._fd, size, start)
        return part if writable else part.toreadonly()


def _reseed() -> None:
    """Reseed NumPy's global generator, whose numbers forked workers would share; `random` does this after each fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # else it is seeded when NumPy is imported
        numpy_random.set_bit_generator(type(numpy_random.get_bit_generator())())


def _redirect(descriptors: Descriptors) -> None:
    with open(os.devnull) as null:  # noqa: PTH123
        os.dup2(null.fileno(), 0)
    for name, source, target in (("stdout", descriptors.stdout, 1), ("stderr", descriptors.stderr, 2)):
        os.dup2(source, target)
        os.close(source)
        # The stream of a forked worker may hold a copy of what the fork server has not flushed yet. This reference
        # prevents its finalization, which would write that copy again.
        _inherited.append(getattr(sys, name))
        # Line-buffered: Python would buffer more for a pipe, and the rest would be lost with the process.
        stream = os.fdopen(target, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
