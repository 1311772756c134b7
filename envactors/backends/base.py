"""The interfaces of backends, workers, and the memory that they share."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from envactors.backends.output import Output
from envactors.mailbox.control_page import NO_SPIN, TIMED, ControlPage
from envactors.mailbox.info_codec import Infos
from envactors.mailbox.messages import Frame
from envactors.mailbox.slab import Layout, Slab
from envactors.process.refusal import LaunchRefusedError as LaunchRefusedError  # noqa: PLC0414 # for other backends
from envactors.system.cpus import usable_cores
from envactors.system.processes import resident_memory

if TYPE_CHECKING:
    from envactors.runtime import Runtime


class NodeLoss(NamedTuple):
    """The loss of a worker's node: the name of the node, and how it was lost."""

    node: str
    reason: str


class ExitStatus(NamedTuple):
    """How a worker ended.

    Attributes:
        exitcode: Its exit code, if that is known.
        signal: The number of the signal that ended it, if that is known.
        refusal: Why it could not be started; None if it was.
        loss: The loss of its node, if it counts as ended for that reason.
        is_helper_lost: Whether it ended because the helper process that had forked it was lost.
        is_certain: Whether none of its code can still be running. If not, `WorkerEvents.on_certain_end` follows.
    """

    exitcode: int | None = None
    signal: int | None = None
    refusal: BaseException | None = None
    loss: NodeLoss | None = None
    is_helper_lost: bool = False
    is_certain: bool = True


class Stacks(Protocol):
    """A request for the stacks of a worker's threads."""

    def read(self) -> str:
        """Return the stacks as far as they have arrived."""

    def wait(self, seconds: float) -> str:
        """Wait at most this long and return the stacks, or a line that says why there are none."""


# Errors of `RowMemory` if there is too little memory, or the size is more than the system can address.
MEMORY_ERRORS: Final = (OSError, MemoryError, ValueError, OverflowError)


class RowMemory(ABC):
    """The memory of a vector's slab. The parent creates it, and each worker opens it."""

    @abstractmethod
    def create(self, layout: Layout) -> tuple[Slab, Infos]:
        """Allocate the memory and return a slab of zeros in it.

        Raises:
            Exception: There is not enough memory: one of `MEMORY_ERRORS`.
        """

    @abstractmethod
    def extend(self, size: int) -> tuple[tuple[int, int], Any]:
        """Add a region of zeros, which is freed once nothing refers to it.

        Args:
            size: Its size in bytes.

        Returns:
            The place, by which workers open the region, and the region.

        Raises:
            Exception: There is not enough memory: one of `MEMORY_ERRORS`.
        """

    def publish(self, place: tuple[int, int]) -> None:
        """Make the content of a region visible to all workers before any request that is sent later."""
        del place  # on this machine the memory is shared

    @abstractmethod
    def close(self) -> None:
        """Close the memory for further workers; slabs that are open stay usable."""


class MirroredPart(Protocol):
    """A part of the memory that a worker on another machine shares with its node only. It is pickled.

    Attributes:
        places: The places of its regions, from `RowMemory.extend`; None for missing ones.
    """

    @property
    def places(self) -> Sequence[tuple[int, int] | None]: ...

    def write(self, regions: Sequence[memoryview | None], content: bytes | memoryview) -> None:
        """Write a content on the node, before a request."""

    def read(self, regions: Sequence[memoryview | None]) -> bytes | bytearray:
        """Return what the request has written, for a frame of `Kind.PIECE`."""


class Node(Protocol):
    """The node that runs a worker.

    Attributes:
        name: Its name.
    """

    name: str


class WorkerEvents(Protocol):
    """The actor of a worker. The worker calls its methods in the loop's thread, and without any locks.

    The same event may be reported again.
    """

    @property
    def name(self) -> str:
        """The name of the actor, printed before each line of output."""

    @property
    def runtime(self) -> Runtime:
        """The threads that serve the actor."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock that its threads hold while they use the worker."""

    def on_frames(self, worker: Worker) -> None:
        """Frames have come, or no more will: `Worker.receive` tells."""

    def on_exit(self, worker: Worker) -> None:
        """The worker has ended, or counts as ended: `Worker.reap` tells why."""

    def on_certain_end(self, worker: Worker) -> None:
        """None of the code of a worker that counts as ended can be running any more."""


class Worker(ABC):
    """One incarnation of an actor. All methods are called under the actor's lock, if they do not say otherwise.

    Attributes:
        events: Its actor, once there is a first call of `report_to`.
        pid: The id of its process; None until a node has started it.
        page: Its control page; the doorbells are closed when the worker is reaped.
        node: Its node; None for this machine.
        at_end: Whether it can do no more work, since its channel has ended.
        corruption: How it has corrupted shared memory, for which it was killed; empty if it has not.
        outputs: Its output streams; empty if it prints to the caller's streams.
        watches_rings: Whether the loop acts on rings of the worker.
    """

    events: WorkerEvents
    pid: int | None
    page: ControlPage
    node: Node | None = None
    at_end: bool = False
    corruption: str = ""
    outputs: Sequence[Output] = ()
    watches_rings: bool = False

    @property
    def launched_at(self) -> float:
        """When its node started its process (`time.monotonic`), or now while it waits there; 0 without a node."""
        return 0.0

    @property
    def reason_to_move(self) -> str:
        """Why a worker on another node must replace it; empty if it may stay. Needs no lock."""
        return ""

    @abstractmethod
    def report_to(self, events: WorkerEvents) -> None:
        """Report everything to this actor from now on, also what has happened before.

        Raises:
            OSError: The system cannot watch more descriptors; the worker was killed and reaped.
        """

    @abstractmethod
    def send(self, frame: Frame, wait: int = NO_SPIN) -> None:
        """Send a frame, or as much of it as fits; the rest follows.

        Args:
            frame: The frame.
            wait: How the worker waits for the next request; see `envactors.mailbox.control_page`.
        """

    @abstractmethod
    def receive(self) -> list[Frame] | None:
        """Read once and return the frames that are complete; None if there is nothing to read.

        Of a long frame, a read may be only a part. If no more frames will come, set ``at_end``.
        """

    def drain(self) -> list[Frame]:
        """Return all frames that the worker has sent by now."""
        frames: list[Frame] = []
        while not self.at_end and (more := self.receive()) is not None:
            frames += more
        return frames

    def as_lender(self) -> LendingWorker | None:
        """Return this worker if another thread than the loop's can read its replies now."""
        return None

    @abstractmethod
    def kill(self) -> None:
        """End the worker now or, if the backend cannot kill, after the current request. Needs no lock."""

    def kill_corrupted(self, corruption: str) -> None:
        """End the worker, since env code has corrupted memory that it shares with this process."""
        self.corruption = self.corruption or corruption
        self.kill()

    @abstractmethod
    def reap(self) -> ExitStatus:
        """Close all descriptors of a worker that has ended, and return how it ended.

        If the backend cannot kill, a closed actor reaps a worker that hangs, which closes its descriptors at its end.
        """

    @abstractmethod
    def ask_stacks(self, *, may_interrupt: bool = True) -> Stacks:
        """Request the stacks of its threads.

        Args:
            may_interrupt: Whether that may interrupt a system call of env code. Otherwise there are no stacks while it
                sleeps in one.
        """

    def resident_memory(self) -> int:
        """Return its resident memory in bytes; 0 if it has ended. Needs no lock."""
        return 0 if self.pid is None else resident_memory(self.pid)

    def is_current_thread(self) -> bool:
        """Return whether the calling thread is the worker, which runs env code. Needs no lock."""
        return False

    def begin_timing(self, spans: bool) -> None:
        """Have the worker time steps and resets on its page from now on; may be called again.

        Args:
            spans: Whether the parent also reads when each of them ran.
        """
        del spans  # both sides share the page
        self.page.counters[TIMED] = True

    def mirror(self, part: MirroredPart, content: bytes | bytearray) -> None:
        """Have the next request start with this content in a part of the memory, and send back what it writes there."""
        del part, content  # on this machine the memory is shared

    @property
    def stderr_tail(self) -> str:
        """The last lines of its stderr. Needs no lock."""
        return next((output.tail for output in self.outputs if output.stream == "stderr"), "")

    def watch_rings(self, on_ring: Callable[[], object]) -> None:
        """Have the loop call a function after each ring of the worker."""
        if not self.watches_rings:
            self.watches_rings = True
            self.events.runtime.loop.watch_bell(self.page.to_parent, on_ring)

    def unwatch_rings(self) -> None:
        """End `watch_rings`."""
        if self.watches_rings:
            self.watches_rings = False
            self.events.runtime.loop.unwatch(self.page.to_parent.fileno())


class LendingWorker(Worker):
    """A worker whose replies a thread can read that waits for one, in place of the loop."""

    @abstractmethod
    def lend(self) -> None:
        """Report no more frames until `take_back`: the calling thread receives them."""

    @abstractmethod
    def take_back(self) -> None:
        """Report frames again."""

    @abstractmethod
    def wait_for_reply(self, deadline: float, *, spins: bool) -> bool:
        """Wait until frames may have come. Needs no lock.

        If the worker is reaped meanwhile, its descriptors may belong to others by now. Then it may return anything, and
        only at the deadline.

        Args:
            deadline: When to stop (`time.monotonic`).
            spins: Whether to spin first.

        Returns:
            Whether to continue: False at the exit of the worker, or after the deadline.
        """


class Use(ABC):
    """The use of a backend by one actor.

    Making it does nothing. Its owner opens it and closes it, so an exception that interrupts either leaks nothing.
    """

    @abstractmethod
    def open(self) -> None:
        """Begin the use.

        Raises:
            Exception: The backend cannot be used.
        """

    @abstractmethod
    def start(self, name: str, memory: Any, envs: int) -> Worker:
        """Start a worker. Called in a thread that outlives all actors.

        Args:
            name: The actor's name.
            memory: The memory of the worker's vector, from `Backend.make_memory`; None without one.
            envs: How many envs it will have.

        Raises:
            LaunchRefusedError: No worker can be started with these settings.
            OSError: The system could not start the worker.
        """

    @abstractmethod
    def close(self) -> None:
        """End the use, however far it has begun; after the last one, end everything that the backend has started.

        It may be called again. This may take long.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The properties of a backend.

    Attributes:
        can_kill: Whether a worker can be ended during a call.
        is_inline: Whether envs run in the threads of their callers, without workers.
        is_remote: Whether workers are on other machines, so that they share no memory with the caller.
        may_spin: Whether callers and workers may spin before they sleep.
        max_starting: How many workers may be starting at a time, from the launch until they are ready; None for no
            limit.
        import_advice: What to do if workers do not find a module that a factory needs; may be empty.
    """

    can_kill: bool
    is_inline: bool = False
    is_remote: bool = False
    may_spin: bool = False
    max_starting: int | None = None
    import_advice: str = ""


class Backend(ABC):
    """A way to start workers."""

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """Its properties, which do not change."""

    @abstractmethod
    def make_memory(self) -> RowMemory:
        """Return memory for the rows of a vector."""

    @abstractmethod
    def use(self, env_vars: Mapping[str, str], runtime: Runtime) -> Use:
        """Return the use by another actor, which is not open yet.

        Args:
            env_vars: Environment variables of its workers, set before anything is imported.
            runtime: The threads that serve the actor.
        """

    def loads_code(self, env_vars: Mapping[str, str]) -> bool:
        """Return whether workers with these environment variables can load functions that are pickled by value.

        That takes the same version of Python. If the version is not known yet, the answer is True.
        """
        del env_vars
        return True

    def count_cores(self) -> int:
        """Return how many cores the workers can use.

        Raises:
            ValueError: No core is known yet.
        """
        return usable_cores()
