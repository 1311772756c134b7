"""The thread backend: one thread of this process per worker."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import threading
import traceback
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from envactors.backends.base import Backend, ExitStatus, RowMemory, Traits, Use, Worker
from envactors.backends.local import LocalWorker
from envactors.mailbox.channel import Channel
from envactors.mailbox.control_page import ControlPage, page_size
from envactors.mailbox.info_codec import Infos
from envactors.mailbox.slab import Layout, Slab
from envactors.system.polling import Doorbell
from envactors.system.sockets import open_pair
from envactors.system.threads import current_frames
from envactors.worker import context
from envactors.worker.main import OpenMemory, Server

if TYPE_CHECKING:
    from envactors.runtime import Runtime


class ThreadMemory(RowMemory, OpenMemory):
    """Plain memory of this process; see `envactors.backends.base.RowMemory`."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._next_part = itertools.count()
        self._parts: weakref.WeakValueDictionary[tuple[int, int], npt.NDArray[np.uint8]] = weakref.WeakValueDictionary()

    def create(self, layout: Layout) -> tuple[Slab, Infos]:
        # An anonymous mapping, since the system allocates its pages only once they are used.
        self._memory = mmap.mmap(-1, layout.size)
        return self.open(layout)

    def open(self, layout: Layout) -> tuple[Slab, Infos]:
        slab = Slab(layout, self._memory)
        return slab, Infos(slab)

    def extend(self, size: int) -> tuple[tuple[int, int], memoryview]:
        place, part = (next(self._next_part), size), np.zeros(size, np.uint8)
        self._parts[place] = part
        return place, part.data

    def open_region(self, place: tuple[int, int], *, writable: bool) -> memoryview:
        part = self._parts[place].data
        return part if writable else part.toreadonly()

    def close(self) -> None:
        """Do nothing: the memory is freed with its last user."""


class ThreadBackend(Backend):
    """A backend with one thread per actor: for envs that release the GIL, and for debugging.

    Everything is pickled or copied as for a process, so that nothing is shared by accident. A thread cannot be killed:
    deadlines are not enforced, and ``kill`` and ``abort`` refuse to end a running call. A thread that hangs is not
    replaced before it has ended. ``env_vars`` are refused too, since threads share one environment.
    """

    traits: Traits = Traits(can_kill=False)

    def __repr__(self) -> str:
        return "ThreadBackend()"

    def make_memory(self) -> ThreadMemory:
        """Return memory for rows; see `envactors.backends.base.Backend.make_memory`."""
        return ThreadMemory()

    def use(self, env_vars: Mapping[str, str], runtime: Runtime) -> Use:
        """Return the use by another actor; see `envactors.backends.base.Backend.use`."""
        del env_vars, runtime
        return ThreadUse()


class ThreadUse(Use):
    """Starts the threads of an actor; see `envactors.backends.base.Use`."""

    def open(self) -> None:
        """Do nothing: threads need nothing that they could share."""

    def start(self, name: str, memory: ThreadMemory | None, envs: int) -> Worker:
        return ThreadWorker(name, memory, envs)

    def close(self) -> None:
        """Do nothing: see `open`."""


class ThreadWorker(LocalWorker):
    """One worker thread; see `envactors.backends.base.Worker`. When killed, it ends after the current request.

    The parent may reap a thread that still runs. The descriptors are closed once both are done with them.
    """

    def __init__(self, name: str, memory: ThreadMemory | None, envs: int) -> None:
        self.pid: int = os.getpid()
        with contextlib.ExitStack() as on_failure:
            ours, theirs = [on_failure.enter_context(contextlib.ExitStack()) for _ in range(2)]
            self._socket, fd = open_pair(ours, theirs)
            their_socket = theirs.enter_context(socket.socket(fileno=os.dup(fd)))
            to_worker, to_parent, self._ended = [ours.enter_context(contextlib.closing(Doorbell())) for _ in range(3)]
            self._socket.setblocking(False)
            page = ControlPage(bytearray(page_size(envs)), to_worker, to_parent)
            super().__init__(page, Channel(self._socket), self._ended.fileno())
            self._server = Server(Channel(their_socket), page, memory)
            self._thread = threading.Thread(
                target=self._run, args=(theirs,), name=f"envactors-worker-{name}", daemon=True
            )
            self._lock = threading.Lock()
            self._users = 2  # the parent and the thread
            self._descriptors = ours
            self._thread.start()
            on_failure.pop_all()

    def _run(self, descriptors: contextlib.ExitStack) -> None:
        context.of_thread.set(self._server.host.running)
        try:
            with descriptors:
                self._server.serve()
        finally:
            self._ended.ring()
            self._leave()

    def kill(self) -> None:
        self._server.closed = True
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_WR)

    def is_current_thread(self) -> bool:
        return self._thread is threading.current_thread()

    def ask_stacks(self, *, may_interrupt: bool = True) -> ThreadStacks:
        del may_interrupt  # nothing is interrupted
        return ThreadStacks(self._thread)

    def close(self) -> ExitStatus:
        self._leave()
        return ExitStatus()

    def _leave(self) -> None:
        """Close the descriptors, unless the other user still needs them."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self._descriptors.close()


class ThreadStacks:
    """The stack of a worker thread, in the form of `faulthandler`."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def read(self) -> str:
        ident = self._thread.ident or 0
        frame = current_frames().get(ident)
        if frame is None:
            return "the worker thread has ended\n"
        frames = reversed(traceback.extract_stack(frame))
        lines = [f'  File "{entry.filename}", line {entry.lineno} in {entry.name}\n' for entry in frames]
        return f"Thread 0x{ident:016x} (most recent call first):\n{''.join(lines)}"

    def wait(self, seconds: float) -> str:
        del seconds
        return self.read()
