"""Simulated worker processes: the library's own code for workers, on memory, doorbells, and channels of the world."""

from __future__ import annotations

import errno
import signal
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

from envactors.backends.base import Backend, ExitStatus, Stacks, Traits, Use
from envactors.backends.local import LocalWorker
from envactors.mailbox.control_page import ControlPage, page_size
from envactors.mailbox.messages import Frame, Kind
from envactors.system.polling import READABLE
from envactors.worker import context
from envactors.worker.main import Server
from simulation.memory import Memory, PageCells
from simulation.world import Event, Fiber, Killed, World

# How likely a process cannot be started.
REFUSALS = 0.02
# How likely a launch takes its time.
_SLOW_STARTS = 0.3
# How likely a part of a message has to be sent later.
_BACKLOGS = 0.05
# The process id of the first process; those after it have the numbers that follow.
FIRST_PID = 10_000
_SEGFAULT = ExitStatus(None, signal.SIGSEGV)
_KILLED = ExitStatus(None, signal.SIGKILL)
# A process that was killed runs fewer times than this until it has ended.
_MOST_LAST_RUNS = 3


class Bell:
    """A doorbell. Each poller that listens to it hears of its rings once, and late.

    Args:
        world: The world.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._fd = world.new_fd(lambda: False)
        self._was_rung = False
        self._is_closed = False
        self._pollers: weakref.WeakSet[Any] = weakref.WeakSet()

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        self._world.at_store()
        if not self._is_closed:
            self._was_rung = True
            for poller in self._pollers:
                poller.rung.add(self)

    ring_open = ring

    def register(self, poller: Any) -> None:
        if not self._is_closed and poller not in self._pollers:
            self._pollers.add(poller)
            if self._was_rung:
                poller.rung.add(self)

    def unregister(self, poller: Any) -> None:
        self._pollers.discard(poller)
        poller.rung.discard(self)

    def close(self) -> None:
        self._is_closed = True
        for poller in self._pollers:
            poller.rung.discard(self)


class CallerPoller:
    """Replaces the poller in which threads of the caller wait for results."""

    world: ClassVar[World]

    def __init__(self) -> None:
        self.rung: set[Bell] = set()

    def poll(self, seconds: float | None) -> None:
        self.world.wait(lambda: bool(self.rung), seconds, lambda: not self.world.conditions[-1]())
        self.rung.clear()

    def close(self) -> None:
        """Do nothing."""


class WorkerPoller:
    """Replaces the poller in which a worker sleeps."""

    world: ClassVar[World]

    def __init__(self) -> None:
        self.rung: set[Bell] = set()
        self._fds: list[int] = []

    def add(self, fd: int) -> None:
        self._fds.append(fd)

    def _has_news(self) -> bool:
        return bool(self.rung) or any(self.world.descriptors[fd]() for fd in self._fds)

    def poll(self, seconds: float | None) -> list[tuple[int, int]]:
        fiber = self.world.fiber
        assert fiber is not None, "only workers sleep here"
        if not self._has_news():
            fiber.pause(self._has_news)
        ready = [(fd, READABLE) for fd in self._fds if self.world.descriptors[fd]()]
        ready += [(bell.fileno(), READABLE) for bell in self.rung]
        self.rung.clear()
        return ready

    def close(self) -> None:
        """Do nothing."""


class End:
    """One end of a channel.

    Args:
        world: The world.
        blocks: Whether `receive` waits, and `send` sends everything.

    Attributes:
        inbox: What has come.
        other: The other end.
        is_cut: Whether nothing comes any more.
        backlog: What is still to be sent.
    """

    def __init__(self, world: World, *, blocks: bool) -> None:
        self._world = world
        self._blocks = blocks
        self._fd = world.new_fd(lambda: self.is_readable)
        self.inbox: deque[Frame] = deque()
        self.backlog: deque[Frame] = deque()
        self.other: End
        self.is_cut = False

    def fileno(self) -> int:
        return self._fd

    @property
    def is_readable(self) -> bool:
        return bool(self.inbox) or self.is_cut

    def send(self, frame: Frame) -> None:
        self._world.at_store()
        if self.is_cut:
            raise BrokenPipeError(errno.EPIPE, "the process has ended")
        kind, incarnation, call_id, payload = frame
        if self._blocks and kind in (Kind.RESULT, Kind.FAILED):
            self._world.replies.add(call_id)
        sent = Frame(kind, incarnation, call_id, bytes(payload))
        if self.backlog or (not self._blocks and self._world.chance(_BACKLOGS)):
            self.backlog.append(sent)
        else:
            self.other.inbox.append(sent)

    def flush(self) -> None:
        if self.is_cut:
            raise BrokenPipeError(errno.EPIPE, "the process has ended")
        while self.backlog and not self._world.chance(_BACKLOGS):
            self.other.inbox.append(self.backlog.popleft())

    def receive(self) -> list[Frame] | None:
        if not self.is_readable:
            if not self._blocks:
                raise BlockingIOError
            assert self._world.fiber is not None, "only workers wait here"
            self._world.fiber.pause(lambda: self.is_readable)
        if not self.inbox:
            return None
        count = self._world.random.randint(1, len(self.inbox))
        return [self.inbox.popleft() for _ in range(count)]


class NoStacks:
    def read(self) -> str:
        return ""

    def wait(self, seconds: float) -> str:
        del seconds
        return ""


class Process(LocalWorker):
    """A simulated process; see `envactors.backends.base.Worker`.

    Attributes:
        fiber: What runs in it.
        number: Its number, which its envs know it by.
        bell: What it rings.
        wakes_at: Until when its env sleeps; None while none does.
        has_ended: Whether it has ended, which its sentinel tells.
    """

    def __init__(self, world: World, number: int, memory: Memory | None, envs: int) -> None:
        self._world = world
        self.number = number
        self.pid = FIRST_PID + number
        near, end = End(world, blocks=False), End(world, blocks=True)
        near.other, end.other = end, near
        self._ends = near, end
        page = bytearray(page_size(envs))
        self._bells = Bell(world), Bell(world)
        self.bell = self._bells[1]
        sentinel = world.new_fd(lambda: self.has_ended)
        super().__init__(self._page_over(page), near, sentinel)  # type: ignore[arg-type]
        self._server = Server(end, self._page_over(page), memory)  # type: ignore[arg-type]
        self.wakes_at: float | None = None
        self.has_ended = False
        self._status = _SEGFAULT
        # How many more times it runs after it was killed; None while it was not.
        self._last_slices: int | None = None
        self.fiber = Fiber(world, self._run, "worker")
        self._run_event: Event = f"process {number} runs", self.run_slice
        self._end_event: Event = f"process {number} ends", self.end

    def _page_over(self, memory: bytearray) -> ControlPage:
        page = ControlPage(memory, *self._bells)  # type: ignore[arg-type]
        page.counters = PageCells(self._world, page.counters)  # type: ignore[assignment]
        return page

    def _run(self) -> None:
        context.of_thread.set(self._server.host.running)
        self._server.serve()

    # What the world does with it -------------------------------------------------------------------------

    def add_events(self, events: list[Event]) -> None:
        """Add what may happen next in it."""
        if self.has_ended:
            return
        if self.wakes_at is not None and self.wakes_at <= self._world.now:
            self.wakes_at = None
        if self._last_slices is not None:
            events.append(self._end_event)
        elif self.fiber.can_run:
            events.append(self._run_event)

    def run_slice(self) -> None:
        if self._last_slices is not None:
            self._last_slices -= 1
            if self._last_slices < 0:
                self.end()
                return
        self.fiber.resume()
        if self.fiber.ended:
            self._note_end(ExitStatus(0, None) if self._last_slices is None else self._status)

    def end(self) -> None:
        """End it here."""
        self.fiber.is_killed = True
        if not self.fiber.ended:
            self.fiber.resume()
        self._note_end(self._status)

    def _note_end(self, status: ExitStatus) -> None:
        self._status = status
        self.has_ended = True
        self.wakes_at = None
        for end in self._ends:
            end.is_cut = True

    # What its envs do ------------------------------------------------------------------------------------

    def crash(self) -> None:
        """End it from within, as a segmentation fault does."""
        self.fiber.is_killed = True
        raise Killed

    def sleep(self, seconds: float | None) -> None:
        """Let virtual time pass; None: without limit."""
        if seconds is None:
            self.fiber.pause(lambda: False)
        else:
            self.wakes_at = self._world.now + seconds
            self.fiber.pause(lambda: self.wakes_at is None)

    # What the caller does with it ------------------------------------------------------------------------

    @property
    def is_being_killed(self) -> bool:
        """Whether it was killed from outside."""
        return self._last_slices is not None

    def kill(self) -> None:
        if self._last_slices is None and not self.has_ended:
            self._status = _KILLED
            self._last_slices = self._world.random.randrange(_MOST_LAST_RUNS)

    def ask_stacks(self, *, may_interrupt: bool = True) -> Stacks:
        return NoStacks()

    def resident_memory(self) -> int:
        return 0

    def close(self) -> ExitStatus:
        assert self.has_ended, "reaped before it has ended"
        self._world.present.remove(self)
        for bell in self._bells:
            bell.close()
        for fd in (self.channel.fileno(), self.sentinel):
            self._world.reuse_fd(fd)
        return self._status


class SimulatedBackend(Backend):
    """Starts simulated processes; see `envactors.backends.base.Backend`."""

    traits = Traits(can_kill=True)

    def __init__(self, world: World, max_starting: int | None = None) -> None:
        self._world = world
        self.traits = Traits(can_kill=True, max_starting=max_starting)

    def make_memory(self) -> Memory:
        return Memory(self._world)

    def use(self, env_vars: Mapping[str, str], runtime: Any) -> SimulatedUse:
        del env_vars, runtime
        return SimulatedUse(self._world)


class SimulatedUse(Use):
    """Starts the simulated processes of an actor; see `envactors.backends.base.Use`.

    Attributes:
        is_open: Whether it is open.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_open = False

    def open(self) -> None:
        self.is_open = True

    def start(self, name: str, memory: Memory | None, envs: int) -> Process:
        assert self.is_open, "a process is started by an actor that does not use the backend"
        if self._world.chance(_SLOW_STARTS):
            self._world.wait(lambda: False, self._world.random.choice((0.0, 0.01, 1.0)))
        if self._world.chance(REFUSALS):
            self._world.note(f"{name} cannot be started")
            self._world.troubles += 1
            raise OSError(11, "no process can be started")
        process = Process(self._world, len(self._world.processes), memory, envs)
        self._world.note(f"{name} starts in process {process.number}")
        self._world.add_process(process)
        return process

    def close(self) -> None:
        self.is_open = False
