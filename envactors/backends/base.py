"""The interfaces of backends and workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

from envactors.mailbox.channel import FrameChannel
from envactors.mailbox.control_page import ControlPage
from envactors.mailbox.info_codec import InfoReader
from envactors.mailbox.slab import Layout, Slab
from envactors.system.cpus import usable_cores
from envactors.system.processes import resident_memory

Stream = Literal["stdout", "stderr"]
_NOTHING = nullcontext()


class ExitStatus(NamedTuple):
    """How a worker ended: its exit code or the signal that ended it; both None if that is not known."""

    exitcode: int | None
    signal: int | None


class NodeLoss(NamedTuple):
    """The loss of the node that a worker ran on: the node's name, and how it was lost."""

    node: str
    reason: str


class LaunchRefusedError(OSError):
    """A worker that cannot be started, however often it is tried."""


class Stacks(Protocol):
    """The stacks of a worker's threads, which were asked for."""

    def read(self) -> str:
        """Return what has come so far."""

    def wait(self, seconds: float) -> str:
        """Wait for them, so long at most, and return them, or a line that says why there are none."""


class RowMemory(Protocol):
    """The memory of a vector's slab: created once by the parent, opened by each of the workers."""

    def create(self, layout: Layout) -> tuple[Slab, InfoReader]:
        """Allocate the memory and return the slab in it, all zeros.

        Raises:
            OSError: There is not enough memory.
            ValueError: The size is more than the system can address.
            OverflowError: Likewise.
        """

    def extend(self, size: int) -> tuple[tuple[int, int], Any]:
        """Add a part, all zeros, that stays until nobody refers to it any more.

        Args:
            size: Its size in bytes.

        Returns:
            Its place, which workers open; the memory.

        Raises:
            OSError: There is not enough memory.
        """

    def publish(self, place: tuple[int, int]) -> None:
        """Have all workers see what was written to a part, before any request that is sent later."""

    def close(self) -> None:
        """Close the memory for further workers; slabs that are open stay usable."""


class Worker(Protocol):
    """One incarnation of an actor.

    Attributes:
        pid: The id of the process that it runs in.
        page: Its control page; the doorbells are closed when the worker is reaped.
        outputs: Non-blocking descriptors of its output streams; empty if it prints to the caller's streams itself.
        sentinel: A descriptor that becomes readable once the worker has ended.
        channel: The parent's end of its channel.
        node: The name of the other machine that it runs on; None for this one.
        refusal: Why it never came to be, where that turned out after its launch.
        loss: The loss of its node, where that is why it counts as ended.
        is_leaving: Whether its node is being drained, so that another worker is to take its place.
        is_over: Whether it is certain, once the sentinel is readable, that none of its code runs any more.
    """

    node: str | None = None
    refusal: OSError | None = None
    loss: NodeLoss | None = None
    is_leaving: bool = False
    is_over: bool = True
    pid: int
    page: ControlPage
    outputs: list[tuple[Stream, int]]
    sentinel: int
    channel: FrameChannel

    def kill(self) -> None:
        """End it now or, if the backend cannot kill, after the call that it runs."""

    def begin_timing(self, spans: bool) -> None:
        """Have it time steps and resets on its page from now on; may be called again.

        Args:
            spans: Whether also when they ran is of interest here.

        Raises:
            OSError: There is not enough memory.
        """

    def ask_stacks(self) -> Stacks:
        """Ask for the stacks of its threads."""

    def work(self) -> bool:
        """Run the posted requests in the calling thread, if the backend is in line; return whether any were run."""
        return False

    def mirror(self, note: tuple[Any, ...], content: bytes) -> None:
        """Have a worker on another machine see some columns of a trajectory before its next request.

        What it has written there comes with the reply, or its end; see `envactors.rollout.trajectory.ColumnsNote`.
        """
        del note, content  # on this machine it shares the memory

    def when_over(self, then: Callable[[], None]) -> None:
        """Call a function, in any thread, once `is_over`."""
        then()

    def resident_memory(self) -> int:
        """Return how many bytes of memory it occupies; 0 if it has ended."""
        return resident_memory(self.pid)

    def reap(self) -> ExitStatus:
        """Reap it after the sentinel became readable, close all descriptors and return how it ended."""


class Timed(Protocol):
    """Something with deadlines."""

    def next_timer(self) -> float:
        """Return the time (`time.monotonic`) of the next deadline, infinity if there is none."""

    def on_timer(self, now: float) -> None:
        """Handle the deadlines that have passed."""


class EventLoop(Protocol):
    """What a backend may use of the reactor: `envactors.actor.reactor.Reactor` has these methods."""

    def watch_channel(self, fd: int, handler: Callable[[int], None]) -> None: ...

    def unwatch_channel(self, fd: int) -> None: ...

    def want_write(self, fd: int, wanted: bool) -> None: ...

    def watch_timers(self, timed: Timed) -> None: ...

    def unwatch_timers(self, timed: Timed) -> None: ...

    def note_timer(self, when: float) -> None: ...

    def post(self, job: Callable[[], None]) -> None: ...


class Backend(Protocol):
    """A way to start workers.

    Attributes:
        kills: Whether a worker can be ended while it runs a call.
        spin: Whether callers and workers may spin before they sleep.
        inline: Whether workers run in the threads of their callers.
        is_far: Whether workers are on other machines, and what they ring comes with their replies.
        import_advice: What to do if a factory needs a module that workers do not find; empty if that is plain.
        pickles: Whether payloads and overflows are pickled; otherwise they are passed as objects.
        max_starting: How many workers may be starting at a time, from the launch until they are ready; None for no
            limit.
    """

    is_far: bool = False
    import_advice: str = ""
    kills: bool
    spin: bool
    inline: bool
    pickles: bool
    max_starting: int | None

    def make_memory(self) -> RowMemory:
        """Return memory for the rows of a vector, which workers share with the parent."""

    def launch(self, name: str, env_vars: Mapping[str, str], memory: Any, envs: int = 1) -> Worker:
        """Start a worker. Called in a thread that outlives all actors.

        Args:
            name: The actor's name.
            env_vars: Environment variables to set before anything is imported.
            memory: The memory from `make_memory` that steps may go through, or None.
            envs: How many envs it will have.

        Raises:
            LaunchRefusedError: No worker can be started like this.
            OSError: The system could not start it.
        """

    def retain(self, env_vars: Mapping[str, str], loop: EventLoop) -> None:
        """Count an actor that uses the backend, with its environment variables, and what waits for its workers."""
        del env_vars, loop

    def release(self, env_vars: Mapping[str, str]) -> None:
        """Uncount an actor; after the last one, free everything that the backend has started."""
        del env_vars

    def loads_code(self, env_vars: Mapping[str, str]) -> bool:
        """Return whether workers with these environment variables can load functions that are pickled by value.

        They can if they run the same version of Python, or if it is not known yet that they do not.
        """
        del env_vars
        return True

    def count_cores(self) -> int:
        """Return how many cores there are for its workers.

        Raises:
            ValueError: None are known yet.
        """
        return usable_cores()

    def corked(self) -> AbstractContextManager[object]:
        """Return a context at whose end everything is written that was sent in it, if that saves writes."""
        return _NOTHING
