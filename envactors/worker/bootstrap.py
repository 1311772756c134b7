"""The start of a worker process: signals, output, stacks, its end with the parent; and the fork server."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, NoReturn

from envactors.arrays.slab import Layout, Slab
from envactors.system.memory import map_file
from envactors.system.polling import Doorbell
from envactors.system.processes import STACKS_SIGNAL, await_exit, detach, open_sentinel, restore_random_layout
from envactors.wire.channel import Channel
from envactors.wire.control_page import PAGE, ControlPage
from envactors.wire.info_codec import InfoWriter
from envactors.worker import context
from envactors.worker.main import Server

# What the fork server imports, if it is installed.
_PRELOADED = ("numpy", "gymnasium")
# Streams of the process that a worker was forked from; see `_redirect`.
_inherited: list[Any] = []


class Descriptors(NamedTuple):
    """The descriptors that a worker inherits from its parent; the slab's is None if its steps never use one."""

    channel: int
    stdout: int
    stderr: int
    stacks: int
    page: int
    to_worker: int
    to_parent: int
    slab: int | None = None

    def present(self) -> list[int]:
        """Return the descriptors without None, in order."""
        return [fd for fd in self if fd is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled by loky alone, which passes them to the process that it is starting.
        return _unpickle_descriptors, tuple(DupFd(fd) for fd in self.present())


def _unpickle_descriptors(*passed: Any) -> Descriptors:
    return Descriptors(*(descriptor.detach() for descriptor in passed))


def run(descriptors: Descriptors, parent_pid: int, fixed_layout: bool = False) -> None:
    """Run a worker in this process until its parent ends it.

    Args:
        descriptors: The descriptors from the parent.
        parent_pid: The parent's process id; the worker ends when that process ends.
        fixed_layout: Whether the parent has fixed the addresses of this process; if so, its children get random ones
            again.
    """
    descriptors = Descriptors(*descriptors)  # a fresh interpreter has got a list
    detach(parent_pid)
    if fixed_layout:
        restore_random_layout()
    # Env code that starts processes uses the system's default start method, as in any other program.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    _redirect(descriptors)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, file=descriptors.stacks, all_threads=True)
    memory = map_file(descriptors.page, PAGE)
    os.close(descriptors.page)
    page = ControlPage(memory, Doorbell(descriptors.to_worker), Doorbell(descriptors.to_parent))
    with socket.socket(fileno=descriptors.channel) as sock:
        sock.setblocking(True)
        rows = None if descriptors.slab is None else functools.partial(_open_rows, descriptors.slab)
        server = Server(Channel(sock), page, rows)
        context.of_process = server.host.running
        server.serve()


def _open_rows(fd: int, layout: Layout) -> tuple[Slab, InfoWriter]:
    slab = Slab(layout, map_file(fd, layout.size))
    return slab, InfoWriter(slab)


def run_forked(descriptors: Descriptors, parent_pid: int, changes: Mapping[str, str | None]) -> NoReturn:
    """Run a worker in a process that was forked for it, and end that process.

    Args:
        descriptors: The descriptors from the parent.
        parent_pid: The parent's process id; the worker ends when that process ends.
        changes: Environment variables to set, and with None to unset.
    """
    code = 1
    try:
        for name in changes:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in changes.items() if value is not None})
        _reseed()
        run(descriptors, parent_pid)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        # Not sys.exit: exit handlers of the original process must not run in its copy.
        os._exit(code)


def _reseed() -> None:
    """Reseed NumPy's global generator, so that workers do not share its numbers; `random` does so after each fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return  # the generator is seeded when NumPy is imported
    try:
        numpy_random.seed()
    except TypeError:  # the bit generator was replaced by one that cannot be reseeded
        numpy_random.set_bit_generator(type(numpy_random.get_bit_generator())())


def _redirect(descriptors: Descriptors) -> None:
    with open(os.devnull) as null:  # noqa: PTH123
        os.dup2(null.fileno(), 0)
    for name, source, target in (("stdout", descriptors.stdout, 1), ("stderr", descriptors.stderr, 2)):
        os.dup2(source, target)
        os.close(source)
        # The stream of a forked worker may have a copy of what the caller has not flushed yet. This reference prevents
        # its finalization, which would write that copy a second time.
        _inherited.append(getattr(sys, name))
        # Line-buffered: Python would buffer more for a pipe, and the rest would be lost with the process.
        stream = os.fdopen(target, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)


# The fork server ---------------------------------------------------------------------------------------


def serve_forks(channel: int, parent_pid: int, preload: list[str]) -> None:
    """Fork workers until the other end of the channel is closed.

    Args:
        channel: The descriptor of a packet socket; each request and each answer is one packet.
        parent_pid: The caller's process id.
        preload: Further modules to import.
    """
    detach(parent_pid)
    for name in (*_PRELOADED, *preload):
        with contextlib.suppress(Exception):  # an env that needs a module that fails to import raises the error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # workers share these objects copy-on-write; a garbage collection would write to them
    with socket.socket(fileno=channel) as sock:
        while True:
            request, fds, _, _ = socket.recv_fds(sock, 1 << 20, len(Descriptors._fields))
            if not request:
                return
            number, kind, content = pickle.loads(request)
            if kind == "reap":
                sock.send(pickle.dumps((number, await_exit(content))))
                continue
            server_pid, pid = os.getpid(), os.fork()
            if pid == 0:
                sock.close()
                run_forked(Descriptors(*fds), server_pid, content)
            # The pidfd is opened here, where the child cannot have been reaped yet.
            fds.append(open_sentinel(pid))
            socket.send_fds(sock, [pickle.dumps((number, pid))], fds[-1:])
            for fd in fds:
                os.close(fd)
