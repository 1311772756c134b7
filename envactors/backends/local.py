"""Workers in the caller's process: as threads, or in the threads of their callers. They pass objects, not bytes."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from envactors.backends.base import Backend, ExitStatus, Stacks, Stream, Worker
from envactors.mailbox.control_page import POSTED, TIMED, ControlPage, page_size
from envactors.mailbox.info_codec import InfoReader, InfoWriter
from envactors.mailbox.messages import Frame
from envactors.mailbox.slab import Layout, Slab
from envactors.system.polling import Doorbell, Poller
from envactors.worker import context
from envactors.worker.main import Server
from envactors.worker.step_runner import WriteGuard


class _LocalPart(mmap.mmap):
    """A part of the memory of one process, to which weak references lead."""


class LocalMemory:
    """Memory of one process; see `envactors.backends.base.RowMemory`."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._parts: weakref.WeakValueDictionary[tuple[int, int], _LocalPart] = weakref.WeakValueDictionary()

    def create(self, layout: Layout) -> tuple[Slab, InfoReader]:
        # Not a bytearray: pages are allocated when they are first used, and private ones are copied in forked children.
        self._slab = Slab(layout, mmap.mmap(-1, layout.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        # Per env, its info and object leaves, or its failure; see `InfoWriter`.
        self._contents: list[Any] = [None] * layout.envs
        return self._slab, InfoReader(self._slab, self._contents)

    def open(self, _layout: Layout) -> tuple[Slab, InfoWriter]:
        """Return the slab, which the parent has created, for a worker."""
        return self._slab, InfoWriter(self._slab, self._contents)

    def extend(self, size: int) -> tuple[tuple[int, int], mmap.mmap]:
        part = _LocalPart(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        place = next(self._numbers), size
        self._parts[place] = part
        return place, part

    def publish(self, place: tuple[int, int]) -> None:
        """Do nothing: workers have the same memory."""

    def open_part(self, place: tuple[int, int], *, writable: bool) -> memoryview:
        """Return a part that the parent has added, for a worker."""
        part = memoryview(self._parts[place])
        return part if writable else part.toreadonly()

    def close(self) -> None:
        """Do nothing: the memory is freed with its last user."""


class LocalBackend(Backend):
    """The base of `ThreadBackend` and `InlineBackend`."""

    kills = spin = pickles = False
    max_starting = None
    _worker: type[ThreadWorker | InlineWorker]

    def make_memory(self) -> LocalMemory:
        """Return memory to share; see `envactors.backends.base.Backend.make_memory`."""
        return LocalMemory()

    def launch(self, name: str, env_vars: Mapping[str, str], memory: LocalMemory | None, envs: int = 1) -> LocalWorker:
        """Make a worker; see `envactors.backends.base.Backend.launch`."""
        del env_vars
        return self._worker(name, memory, envs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class LocalChannel:
    """One end of a channel within the process; see `FrameChannel`. Neither end blocks.

    Args:
        inbox: The frames that were sent to this end.
        outbox: Those that were sent to the other end.
        bell: What the other end rings, if any end does.
        ring: Rings for the other end; None if both ends are in the same thread.
    """

    backlog = False

    def __init__(
        self, inbox: deque[Frame], outbox: deque[Frame], bell: Doorbell, ring: Callable[[], None] | None
    ) -> None:
        self._inbox, self._outbox, self._bell, self._ring = inbox, outbox, bell, ring

    def fileno(self) -> int:
        return self._bell.fileno()

    def send(self, frame: Frame) -> None:
        self._outbox.append(frame)
        if self._ring is not None:
            self._ring()

    def flush(self) -> None:
        """Do nothing: there is never a backlog."""

    def receive(self) -> list[Frame]:
        if self._ring is not None:
            self._bell.clear()
        frames = []
        while self._inbox:
            frames.append(self._inbox.popleft())
        if not frames:
            raise BlockingIOError
        return frames


class LocalStacks(Stacks):
    """The stack of the thread that a worker runs in now."""

    def __init__(self, worker: LocalWorker) -> None:
        self._worker = worker

    def read(self) -> str:
        frame = sys._current_frames().get(self._worker.thread or 0)  # noqa: SLF001 # documented, for such tools
        return "it runs nothing\n" if frame is None else "".join(traceback.format_stack(frame))

    def wait(self, seconds: float) -> str:
        del seconds
        return self.read()


class LocalWorker(Worker):
    """The base of `ThreadWorker` and `InlineWorker`; see `envactors.backends.base.Worker`.

    Args:
        memory: The memory that steps may go through, or None.
        envs: How many envs it will have.
        rings: Whether caller and worker ring for each other's frames.
    """

    def __init__(self, memory: LocalMemory | None, envs: int, *, rings: bool) -> None:
        self.pid = os.getpid()
        # The id of the thread that runs requests.
        self.thread: int | None = None
        self.outputs: list[tuple[Stream, int]] = []
        to_worker, to_parent, self._replied = Doorbell(), Doorbell(), Doorbell()
        to_parent.ring_open = to_parent.ring  # an abandoned worker may ring after the parent has closed the bell
        self.page = ControlPage(bytearray(page_size(envs)), to_worker, to_parent)
        # Rung when the worker has ended.
        self._ended = Doorbell()
        self.sentinel = self._ended.fileno()
        self._requests: deque[Frame] = deque()
        self._replies: deque[Frame] = deque()
        self.channel = LocalChannel(self._replies, self._requests, self._replied, to_worker.ring if rings else None)
        end = LocalChannel(self._requests, self._replies, to_worker, self._replied.ring if rings else None)
        self._guard = WriteGuard()
        self._server = Server(end, self.page, memory, self._guard)

    def kill(self) -> None:
        self._guard.close()
        self._requests.clear()
        self.page.to_worker.ring()

    def begin_timing(self, spans: bool) -> None:
        del spans  # they are read where they are written
        self.page.counters[TIMED] = True

    def ask_stacks(self) -> LocalStacks:
        return LocalStacks(self)

    def reap(self) -> ExitStatus:
        for bell in (self.page.to_parent, self._replied, self._ended):
            bell.close()
        return ExitStatus(None, None)


class ThreadWorker(LocalWorker):
    """One worker thread; see `envactors.backends.base.Worker`. It ends after the call that it runs."""

    def __init__(self, name: str, memory: LocalMemory | None, envs: int) -> None:
        super().__init__(memory, envs, rings=True)
        threading.Thread(target=self._run, name=f"envactors-worker-{name}", daemon=True).start()

    def _run(self) -> None:
        server, counters, self.thread = self._server, self.page.counters, threading.get_ident()
        context.of_thread.set(server.host.running)
        try:
            with contextlib.closing(self.page.to_worker) as bell, contextlib.closing(Poller()) as poller:
                bell.register(poller)
                while not (server.closed or self._guard.is_closed):
                    # The bell may have rung for a frame that is there, when only the one before it was counted.
                    if counters[POSTED] == server.handled and not self._requests:
                        poller.poll(None)
                    try:
                        server.run_posted()
                    except OSError:
                        continue  # there is nothing to read, or the parent has abandoned this worker
        finally:
            self._ended.ring()


class InlineWorker(LocalWorker):
    """A worker that runs in `work`; see `envactors.backends.base.Worker`."""

    def __init__(self, name: str, memory: LocalMemory | None, envs: int) -> None:
        del name
        super().__init__(memory, envs, rings=False)
        # Who has posted runs it, and who runs it looks for results.
        self.page.to_worker.ring_open = self.page.to_parent.ring_open = _no_ring
        self._run_lock = threading.Lock()

    def work(self) -> bool:
        # One thread at a time runs requests, also those that other threads post meanwhile. A frame comes before the
        # counter that announces it, so both are checked.
        server, counters = self._server, self.page.counters
        while (counters[POSTED] != server.handled or self._requests) and not server.closed:
            if not self._run_lock.acquire(blocking=False):
                return False
            before, self.thread = context.of_thread.set(server.host.running), threading.get_ident()
            try:
                server.run_posted()
            except BlockingIOError:
                break  # there is nothing to read
            except OSError:
                server.closed = True  # the parent has abandoned this worker
            finally:
                context.of_thread.reset(before)
                self.thread = None
                self._run_lock.release()
            if server.closed:
                self._ended.ring()
        return bool(self._replies)

    def kill(self) -> None:
        super().kill()
        self._ended.ring()

    def reap(self) -> ExitStatus:
        self.page.to_worker.close()
        return super().reap()


def _no_ring() -> None:
    """Stand for a ring that nobody hears."""


class ThreadBackend(LocalBackend):
    """A backend with one thread per actor: for envs that release the GIL, and for debugging.

    Arguments and results of calls are pickled as for a process; those of steps are copied, so that nothing is shared by
    accident. A thread cannot be killed: deadlines are not enforced, and ``kill`` and ``abort`` refuse to end a running
    call. ``env_vars`` are refused too, since a thread has no environment of its own.
    """

    inline = False
    _worker = ThreadWorker


class InlineBackend(LocalBackend):
    """A backend without processes and threads: a call has run when its future is returned.

    It is as fast as a plain loop, and suits a debugger. Arguments and results of calls are pickled as for a process;
    those of steps are copied, so that nothing is shared by accident. Nothing can be killed: deadlines are not enforced,
    and ``kill`` and ``abort`` refuse to end a running call.
    """

    inline = True
    _worker = InlineWorker
