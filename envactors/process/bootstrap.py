"""Turn a new process into a worker, run its loop, and end it in an orderly way.

How the process was started is in `envactors.process.helper_program` and `envactors.process.starting`; the loop is in
`envactors.worker.main`.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import gc
import logging
import multiprocessing.util
import os
import socket
import sys
import threading
import weakref
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, NoReturn

from envactors.mailbox.channel import Channel
from envactors.mailbox.control_page import ControlPage
from envactors.mailbox.pickling import CACHED_FUNCTION
from envactors.process.stacks import READY
from envactors.system.memory import map_part
from envactors.system.polling import Doorbell
from envactors.system.processes import STACKS_SIGNAL, become_worker, exit_after
from envactors.worker import context
from envactors.worker.log_records import FrameSender, forward_records
from envactors.worker.main import Server
from envactors.worker.mapped_memory import MappedParts
from envactors.worker.setup import WorkerSetup

# Streams of the process that a worker was forked from; see `_redirect`.
_inherited: list[Any] = []


class Descriptors(NamedTuple):
    """The descriptors that a worker inherits from its caller; ``slab`` is None for a worker without rows."""

    channel: int
    stdout: int
    stderr: int
    page: int
    to_worker: int
    to_parent: int
    stacks: int
    slab: int | None = None

    def present(self) -> list[int]:
        """Return the descriptors without None, in order."""
        return [fd for fd in self if fd is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        # Only loky pickles them, and passes them to the process that it starts.
        return _unpickle_descriptors, tuple(map(DupFd, self.present()))


def _unpickle_descriptors(*passed: Any) -> Descriptors:
    return Descriptors(*(descriptor.detach() for descriptor in passed))


def run(descriptors: Descriptors, parent_pid: int, setup: WorkerSetup) -> NoReturn:
    """Run a worker in this process until its caller closes it or ends.

    Args:
        descriptors: The descriptors from the caller.
        parent_pid: The process id of the process that has started this one, and with which it ends.
        setup: Its setup.
    """

    def work() -> None:
        become_worker(parent_pid)
        setup.apply()
        _forget_exit_handlers()
        _reseed()
        # Env code that starts processes gets the system's default start method, as in any other program.
        multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
        _serve(descriptors)
        for each in gc.get_objects():
            if type(each) is CACHED_FUNCTION:
                each.cache_clear()  # it may refer to envs
        gc.collect()  # finalizes envs that are in cycles
        for wait in reversed(threading._threading_atexits):  # type: ignore[attr-defined] # noqa: SLF001
            wait()  # until executors have run what env code has submitted
        atexit._run_exitfuncs()  # noqa: SLF001 # nothing public runs them

    exit_after(work)


def _forget_exit_handlers() -> None:
    """Leave the exit handlers and finalizers so far to the process that this one was forked from."""
    atexit._clear()  # noqa: SLF001
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined] # noqa: SLF001
        finalizer.atexit = False
    logging._handlerList.clear()  # type: ignore[attr-defined] # noqa: SLF001
    # Their modules register these only once, which may have been in the other process.
    atexit.register(logging.shutdown)
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined] # noqa: SLF001
    atexit.register(multiprocessing.util._run_finalizers)  # type: ignore[attr-defined] # noqa: SLF001


def _reseed() -> None:
    """Reseed NumPy's global generator, whose numbers forked workers would share; `random` does this after each fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # else it is seeded when NumPy is imported
        numpy_random.set_bit_generator(type(numpy_random.get_bit_generator())())


def _serve(descriptors: Descriptors) -> None:
    """Run requests until the caller closes the worker, then drop the envs."""
    _redirect(descriptors)
    faulthandler.enable()
    stacks = os.fdopen(descriptors.stacks, "r+b", buffering=0)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)  # keeps the file open
    fcntl.fcntl(stacks, fcntl.F_SETFL, os.O_APPEND)  # the caller empties it now and then
    stacks.write(READY)
    memory = map_part(descriptors.page, os.fstat(descriptors.page).st_size, 0)
    os.close(descriptors.page)
    page = ControlPage(memory, Doorbell(descriptors.to_worker), Doorbell(descriptors.to_parent))
    sock = socket.socket(fileno=descriptors.channel)  # never closed: exit handlers may log
    sock.setblocking(True)
    channel = Channel(sock)
    memory_of_rows = None if descriptors.slab is None else MappedParts(descriptors.slab)
    server = Server(channel, page, memory_of_rows, send=FrameSender(channel).send)
    forward_records(server.send_record)
    context.of_process = server.host.running
    server.serve()
    server.forget_envs()


def _redirect(descriptors: Descriptors) -> None:
    with open(os.devnull) as null:  # noqa: PTH123
        os.dup2(null.fileno(), 0)
    for name, source, target in (("stdout", descriptors.stdout, 1), ("stderr", descriptors.stderr, 2)):
        os.dup2(source, target)
        os.close(source)
        # The stream of a forked worker may hold a copy of what the helper has not flushed yet. This reference prevents
        # its finalization, which would write that copy again.
        _inherited.append(getattr(sys, name))
        # Line-buffered: Python would buffer more for a pipe, and the rest would be lost with the process.
        stream = os.fdopen(target, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
