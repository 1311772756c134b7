"""Workers in the caller's process, as threads or in the calling thread. They pass objects, not bytes."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import operator
import os
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from envactors.backends.base import Backend, ExitStatus, RowMemory, Stacks, Stream, Worker
from envactors.mailbox.control_page import BEGUN, POSTED, STEP, ControlPage, page_size
from envactors.mailbox.info_codec import Infos
from envactors.mailbox.messages import Frame
from envactors.mailbox.slab import Layout, Slab
from envactors.system.polling import Doorbell, Poller
from envactors.system.threads import current_frames
from envactors.worker import context
from envactors.worker.context import ActorContext
from envactors.worker.env_rows import EnvRow, WorkerRetiredError, WriteGuard, run_all
from envactors.worker.main import Server


class _LocalPart(mmap.mmap):
    """A part of the memory, with weak references."""


class LocalMemory(RowMemory):
    """Private memory of this process; see `envactors.backends.base.RowMemory`."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._parts: weakref.WeakValueDictionary[tuple[int, int], _LocalPart] = weakref.WeakValueDictionary()

    def create(self, layout: Layout) -> tuple[Slab, Infos]:
        # Not a bytearray: the system allocates pages at their first use, and forked children get private copies.
        slab = Slab(layout, mmap.mmap(-1, layout.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._created = slab, Infos(slab, passes_objects=True)
        return self._created

    def open(self, _layout: Layout) -> tuple[Slab, Infos]:
        """Return what the parent has created for a worker."""
        return self._created

    def extend(self, size: int) -> tuple[tuple[int, int], mmap.mmap]:
        part = _LocalPart(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        place = next(self._numbers), size
        self._parts[place] = part
        return place, part

    def open_part(self, place: tuple[int, int], *, writable: bool) -> memoryview:
        """Return a part that the parent has added for a worker."""
        part = memoryview(self._parts[place])
        return part if writable else part.toreadonly()

    def close(self) -> None:
        """Do nothing: the memory is freed with its last user."""


class LocalBackend(Backend):
    """The base of `ThreadBackend` and `InlineBackend`."""

    kills = spin = pickles = False
    max_starting: int | None = None
    _worker: type[ThreadWorker | InlineWorker]

    def make_memory(self) -> LocalMemory:
        """Return memory to share; see `envactors.backends.base.Backend.make_memory`."""
        return LocalMemory()

    def launch(self, name: str, env_vars: Mapping[str, str], memory: LocalMemory | None, envs: int = 1) -> LocalWorker:
        """Start a worker; see `envactors.backends.base.Backend.launch`."""
        del env_vars
        return self._worker(name, memory, envs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class LocalChannel:
    """One end of a channel within the process; see `FrameChannel`. Neither end blocks.

    Args:
        inbox: The frames for this end.
        outbox: The frames for the other end.
        bell: The doorbell of this end.
        ring: Rings the doorbell of the other end; None if both ends are in the same thread.
    """

    backlog = False

    def __init__(
        self, inbox: deque[Frame], outbox: deque[Frame], bell: Doorbell, ring: Callable[[], None] | None
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._bell = bell
        self._ring = ring

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
    """The stack of the thread that currently runs a worker."""

    def __init__(self, worker: LocalWorker) -> None:
        self._worker = worker

    def read(self) -> str:
        frame = current_frames().get(self._worker.find_thread() or 0)
        return "it runs nothing\n" if frame is None else "".join(traceback.format_stack(frame))

    def wait(self, seconds: float) -> str:
        del seconds
        return self.read()


class LocalWorker(Worker):
    """The base of `ThreadWorker` and `InlineWorker`; see `envactors.backends.base.Worker`.

    Args:
        memory: The memory of its vector; None without one.
        envs: How many envs it will have.
        rings: Whether caller and worker ring for each other's frames.
    """

    def __init__(self, memory: LocalMemory | None, envs: int, *, rings: bool) -> None:
        self.pid: int = os.getpid()
        # The id of the thread that runs requests.
        self.thread: int | None = None
        self.outputs: list[tuple[Stream, int]] = []
        to_worker = Doorbell()
        to_parent = Doorbell()
        self._replied = Doorbell()
        # An abandoned worker may ring after the parent has closed the doorbell, and a worker that ends closes its own.
        for bell in (to_worker, to_parent):
            bell.ring_open = bell.ring
        self.page: ControlPage = ControlPage(bytearray(page_size(envs)), to_worker, to_parent)
        # Rung when the worker has ended.
        self._ended = Doorbell()
        self.sentinel: int = self._ended.fileno()
        self._requests: deque[Frame] = deque()
        self._replies: deque[Frame] = deque()
        self.channel: LocalChannel = LocalChannel(
            self._replies, self._requests, self._replied, to_worker.ring if rings else None
        )
        end = LocalChannel(self._requests, self._replies, to_worker, self._replied.ring if rings else None)
        self._guard = WriteGuard()
        self.server: Server = Server(end, self.page, memory, self._guard)

    def kill(self) -> None:
        self._guard.close()
        self._requests.clear()
        self.page.to_worker.ring()

    def find_thread(self) -> int | None:
        return self.thread

    def ask_stacks(self) -> LocalStacks:
        return LocalStacks(self)

    def reap(self) -> ExitStatus:
        for bell in (self.page.to_parent, self._replied, self._ended):
            bell.close()
        return ExitStatus(None, None)


class ThreadWorker(LocalWorker):
    """One worker thread; see `envactors.backends.base.Worker`. When killed, it ends after the current call."""

    def __init__(self, name: str, memory: LocalMemory | None, envs: int) -> None:
        super().__init__(memory, envs, rings=True)
        threading.Thread(target=self._run, name=f"envactors-worker-{name}", daemon=True).start()

    def _run(self) -> None:
        self.thread = threading.get_ident()
        server = self.server
        counters = self.page.counters
        context.of_thread.set(server.host.running)
        try:
            with contextlib.closing(self.page.to_worker) as bell, contextlib.closing(Poller()) as poller:
                bell.register(poller)
                while not (server.closed or self._guard.is_closed):
                    # The doorbell may have rung for a frame that has arrived but is not counted yet.
                    if counters[POSTED] == server.handled and not self._requests:
                        poller.poll(None)
                    try:
                        server.run_posted()
                    except OSError:
                        continue  # nothing to read, or the parent has abandoned this worker
        finally:
            self.thread = None  # the next thread of this process may get the same id
            self._ended.ring()


class InlineWorker(LocalWorker):
    """A worker whose requests run in `work`; see `envactors.backends.base.Worker`."""

    def __init__(self, name: str, memory: LocalMemory | None, envs: int) -> None:
        del name
        super().__init__(memory, envs, rings=False)
        # The thread that posts a request also runs it and then looks for results.
        self.page.to_worker.ring_open = self.page.to_parent.ring_open = lambda: None
        # The thread that runs requests adds an entry, and takes it out: unlike a lock, it is never left behind by an
        # interrupt. A dict's setdefault is atomic.
        self._runner: dict[None, object] = {}
        # Runs most steps of its vector.
        self.loop: InlineLoop | None = None

    def find_thread(self) -> int | None:
        return self.thread or (None if self.loop is None else self.loop.thread_in(self))

    def work(self) -> bool:
        # One thread at a time runs requests, including those that other threads post meanwhile. A frame arrives before
        # the counter that announces it, so both are checked.
        server, counters, me, before = self.server, self.page.counters, object(), context.of_thread.get()
        while (counters[POSTED] != server.handled or self._requests) and not server.closed:
            try:
                if self._runner.setdefault(None, me) is not me:
                    return False
                self.thread = threading.get_ident()
                context.of_thread.set(server.host.running)
                server.run_posted()
            except BlockingIOError:
                break  # nothing to read
            except OSError:
                server.closed = True  # the parent has abandoned this worker
            finally:
                if self._runner == {None: me}:
                    self.thread = None
                    del self._runner[None]
                    context.of_thread.set(before)
            if server.closed:
                self._ended.ring()
        return bool(self._replies)

    def kill(self) -> None:
        super().kill()
        self._ended.ring()

    def reap(self) -> ExitStatus:
        self.page.to_worker.close()
        return super().reap()


class InlineLoop:
    """Runs rows of several workers in one loop, in the thread that posts them.

    Args:
        workers: The workers.

    Attributes:
        thread: The thread that runs the loop, or is about to.
    """

    def __init__(self, workers: Sequence[InlineWorker]) -> None:
        self._workers = workers
        self._rows = [row for worker in workers for row in worker.server.rows]
        # What the loop runs, and the iterator over it.
        self._due: list[tuple[EnvRow, int, int]] = []
        self._rest = iter(self._due)
        self._number = 0
        self.thread: int | None = None
        for worker in workers:
            worker.loop = self

    def prepare(self, ops: Iterable[int], number: int) -> None:
        """Take over the rows, which are about to be posted. Called under the lock that guards what workers are sent.

        Args:
            ops: The operation of each.
            number: The call id.
        """
        self.thread = threading.get_ident()
        self._number = number
        self._due = list(zip(self._rows, ops, itertools.repeat(number)))
        self._rest = iter(self._due)

    def run(self) -> None:
        """Run the rows that were taken over, but for those that a worker was sent."""
        before = context.of_thread.get()
        try:
            context.of_thread.set(self._running)
            run_all(self._rest)
        except WorkerRetiredError:
            pass  # the others run what is left
        finally:
            context.of_thread.set(before)

    def leave(self, page: ControlPage) -> None:
        """Leave the rows of a worker, which the loop has not begun, to the worker; under the lock."""
        self._due[:] = [due for due in self._due if due[0].page is not page]

    def has_taken(self, page: ControlPage) -> bool:
        """Return whether the loop is at a row of a worker, or has been there; under the lock."""
        taken = len(self._due) - operator.length_hint(self._rest)
        return self.thread is not None and any(due[0].page is page for due in self._due[:taken])

    def may_send(self) -> bool:
        """Return whether a worker may be sent rows that the loop has not begun; under the lock."""
        return self.thread in (None, threading.get_ident())

    def thread_in(self, worker: InlineWorker) -> int | None:
        """Return the thread that runs the loop, if it is at an env of this worker."""
        return self.thread if worker is self._current() else None

    def _current(self) -> InlineWorker | None:
        """Return the worker that the loop is at: the last one that has begun this step."""
        for worker in reversed(self._workers):
            counters = worker.page.counters
            if counters[BEGUN] == self._number > counters[STEP]:
                return worker
        return None

    def _running(self) -> ActorContext | None:
        # None once the loop has ended: an interrupt may have left this set as the thread's context.
        worker = None if self.thread is None else self._current()
        return None if worker is None else worker.server.host.running()


class ThreadBackend(LocalBackend):
    """A backend with one thread per actor: for envs that release the GIL, and for debugging.

    Arguments and results of calls are pickled as for a process, and those of steps are copied, so that nothing is
    shared by accident. A thread cannot be killed: deadlines are not enforced, and ``kill`` and ``abort`` refuse to end
    a running call. ``env_vars`` are refused too, since threads share one environment.
    """

    inline = False
    _worker = ThreadWorker


class InlineBackend(LocalBackend):
    """A backend without processes and threads: a call has run when its future is returned.

    It suits a debugger, and envs whose steps are too short for processes: a step takes some microseconds more than in a
    plain loop. Arguments and results of calls are pickled as for a process, and those of steps are copied, so that
    nothing is shared by accident. Nothing can be killed: deadlines are not enforced, and ``kill`` and ``abort`` refuse
    to end a running call.
    """

    inline = True
    _worker = InlineWorker
