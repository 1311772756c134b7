"""The interfaces of backends, workers, and the memory that they share."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from envactors.mailbox.channel import FrameChannel
from envactors.mailbox.control_page import TIMED, ControlPage
from envactors.mailbox.info_codec import Infos
from envactors.mailbox.slab import Layout, Slab
from envactors.process.refusal import LaunchRefusedError as LaunchRefusedError  # noqa: PLC0414 # for other backends
from envactors.system.cpus import usable_cores
from envactors.system.processes import resident_memory

if TYPE_CHECKING:
    from envactors.runtime import Runtime

Stream = Literal["stdout", "stderr"]


class ExitStatus(NamedTuple):
    """How a worker ended: its exit code or a signal number; both are None if neither is known."""

    exitcode: int | None
    signal: int | None


class NodeLoss(NamedTuple):
    """The loss of a worker's node: the name of the node, and how it was lost."""

    node: str
    reason: str


class Stacks(Protocol):
    """A request for the stacks of a worker's threads."""

    def read(self) -> str:
        """Return the stacks as far as they have arrived."""

    def wait(self, seconds: float) -> str:
        """Wait at most this long and return the stacks, or a line that says why there are none."""


class RowMemory(ABC):
    """The memory of a vector's slab. The parent creates it, and each worker opens it."""

    @abstractmethod
    def create(self, layout: Layout) -> tuple[Slab, Infos]:
        """Allocate the memory and return a slab of zeros in it.

        Raises:
            OSError: There is not enough memory.
            ValueError: The size is more than the system can address.
            OverflowError: Likewise.
        """

    @abstractmethod
    def extend(self, size: int) -> tuple[tuple[int, int], Any]:
        """Add a part of zeros, which is freed once nothing refers to it.

        Args:
            size: Its size in bytes.

        Returns:
            The place, by which workers open the part, and the part.

        Raises:
            OSError: There is not enough memory.
        """

    def publish(self, place: tuple[int, int]) -> None:
        """Make the content of a part visible to all workers before any request that is sent later."""
        del place  # on this machine the memory is shared

    @abstractmethod
    def close(self) -> None:
        """Close the memory for further workers; slabs that are open stay usable."""


class Worker(ABC):
    """One incarnation of an actor.

    Attributes:
        pid: The id of its process; None until a node has started it.
        page: Its control page; the doorbells are closed when the worker is reaped.
        outputs: Non-blocking descriptors of its output streams; empty if it prints to the caller's streams.
        sentinel: A descriptor that becomes readable once the worker has ended.
        channel: The parent's end of its channel.
        node: The name of its node; None for this machine.
        refusal: Why it could not be started, if that became known after the launch.
        loss: The loss of its node, if it counts as ended for that reason.
        is_leaving: Whether its node is being drained, so that another worker must replace it.
        is_over: Whether none of its code can still be running, once the sentinel is readable.
    """

    node: str | None = None
    refusal: OSError | None = None
    loss: NodeLoss | None = None
    is_leaving: bool = False
    is_over: bool = True
    pid: int | None
    page: ControlPage
    outputs: list[tuple[Stream, int]]
    sentinel: int
    channel: FrameChannel

    @abstractmethod
    def kill(self) -> None:
        """End the worker now or, if the backend cannot kill, after the current request."""

    def is_current_thread(self) -> bool:
        """Return whether the calling thread is the worker, which runs env code."""
        return False

    def begin_timing(self, spans: bool) -> None:
        """Have the worker time steps and resets on its page from now on; may be called again.

        Args:
            spans: Whether the parent also reads when each of them ran.
        """
        del spans  # both sides share the page
        self.page.counters[TIMED] = True

    @abstractmethod
    def ask_stacks(self) -> Stacks:
        """Request the stacks of its threads."""

    def mirror(self, note: tuple[Any, ...], content: bytes) -> None:
        """Send columns of a trajectory to a worker on another machine before its next request.

        What the worker writes there comes back with the reply; see `envactors.rollout.trajectory.ColumnsNote`.
        """
        del note, content  # on this machine the memory is shared

    def when_over(self, then: Callable[[], None]) -> None:
        """Call a function, in any thread, once `is_over` is true."""
        then()

    def resident_memory(self) -> int:
        """Return its resident memory in bytes; 0 if it has ended."""
        return 0 if self.pid is None else resident_memory(self.pid)

    @abstractmethod
    def reap(self) -> ExitStatus:
        """Close all descriptors of a worker that has ended, and return how it ended.

        If the backend cannot kill, a closed actor reaps a worker that hangs, which closes its descriptors at its end.
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
