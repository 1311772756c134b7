"""One process of an actor as the parent uses it: its channel, its output, and its exit, all watched by the loop."""

from __future__ import annotations

import functools
import select
from collections.abc import Callable
from typing import NamedTuple

from envactors.actor.output import Output
from envactors.actor.states import EndReason
from envactors.backends.base import ExitStatus, LaunchRefusedError, NodeLoss, Stacks, Worker
from envactors.mailbox.channel import ChannelCorruptError
from envactors.mailbox.control_page import ASLEEP, FINISHED, ControlPage, spin_until_all
from envactors.mailbox.messages import Frame
from envactors.runtime import Runtime
from envactors.system.polling import is_disconnect, remaining

# The call id of the first message to a process; those of jobs begin with 1.
START_CALL_ID = 0
# How long a thread that reads replies waits at once, in seconds.
_LOOK_AGAIN = 0.5


class ExitReport(NamedTuple):
    """The facts about a process that has ended, or could not be started.

    Attributes:
        pid: Its process id; None if there was no process.
        status: How it ended.
        stderr_tail: The last lines of its stderr.
        stacks: The stacks that it wrote before it was killed for a deadline.
        refusal: Why no process could be started.
        corruption: How it has corrupted shared memory, for which it was killed; empty if it has not.
        loss: The loss of its node; None if that is not the reason.
        reason: Why the parent ended it; None if it ended by itself.
    """

    pid: int | None = None
    status: ExitStatus = ExitStatus(None, None)
    stderr_tail: str = ""
    stacks: str = ""
    refusal: BaseException | None = None
    corruption: str = ""
    loss: NodeLoss | None = None
    reason: EndReason | None = None

    @property
    def is_refused(self) -> bool:
        """Whether no other process can be started either."""
        return isinstance(self.refusal, LaunchRefusedError)


class ActorProcess:
    """A worker process. Every method but `wait_for_reply` is called under the actor's lock.

    Args:
        worker: The worker.
        name: The actor's name.
        runtime: Watches its descriptors.
        on_channel: Called in the loop with this object and the events of its channel.
        on_exit: Called in the loop with this object when the process has ended.

    Raises:
        OSError: The system cannot watch more descriptors; the worker was killed.

    Attributes:
        worker: The worker.
        page: The control page that it shares with the parent.
        at_end: Whether its channel has ended.
        corruption: How it has corrupted shared memory; empty if it has not.
        channel_fd: The descriptor of its channel.
        watches_rings: Whether the loop acts on rings of the worker.
    """

    def __init__(
        self,
        worker: Worker,
        name: str,
        runtime: Runtime,
        on_channel: Callable[[ActorProcess, int], object],
        on_exit: Callable[[ActorProcess], object],
    ) -> None:
        self.worker = worker
        self.page: ControlPage = worker.page
        self.at_end: bool = False
        self.corruption: str = ""
        self.channel_fd: int = worker.channel.fileno()
        self.watches_rings: bool = False
        self._loop = runtime.loop
        self._channel = worker.channel
        self._on_channel, self._on_exit = on_channel, on_exit
        self._outputs = [Output(fd, name, stream, runtime.printer) for stream, fd in worker.outputs]
        self._stacks: Stacks | None = None
        try:
            for output in self._outputs:
                self._loop.watch(output.fd, functools.partial(self._read_output, output))
            self._loop.watch(worker.sentinel, lambda _events: self._on_exit(self))
            self._loop.watch(self.channel_fd, lambda events: self._on_channel(self, events))
        except BaseException:
            worker.kill()
            self.reap()
            raise

    @property
    def pid(self) -> int | None:
        """The process id; None until a node has started the process."""
        return self.worker.pid

    @property
    def stderr_tail(self) -> str:
        """The last lines of stderr."""
        return next((output.tail for output in self._outputs if output.stream == "stderr"), "")

    def hand_over(
        self,
        name: str,
        on_channel: Callable[[ActorProcess, int], object],
        on_exit: Callable[[ActorProcess], object],
    ) -> None:
        """Report to another actor from now on; for the arguments see the class."""
        self._on_channel, self._on_exit = on_channel, on_exit
        for output in self._outputs:
            output.name = name

    def send(self, frame: Frame, wait: int = ASLEEP) -> None:
        """Send a frame, or as much of it as fits; the loop sends the rest.

        Args:
            frame: The frame.
            wait: How the worker waits for the next request; see `envactors.mailbox.control_page`.
        """
        page = self.page
        page.last_call = max(page.last_call, frame.call_id)
        try:
            self._channel.send(frame)
        except OSError as error:
            if not is_disconnect(error):
                raise
            return  # its exit is about to be noticed
        page.post_frame(wait)
        if self._channel.backlog:
            self._loop.want_write(self.channel_fd, True)

    @property
    def has_backlog(self) -> bool:
        """Whether the loop still has to send a part of a frame."""
        return bool(self._channel.backlog)

    def flush(self) -> None:
        """Send as much of the backlog as fits."""
        try:
            self._channel.flush()
        except OSError as error:
            if not is_disconnect(error):
                raise
            self._loop.want_write(self.channel_fd, False)
            return
        self._loop.want_write(self.channel_fd, bool(self._channel.backlog))

    def read(self) -> list[Frame]:
        """Read once and return the frames that are complete; set ``at_end`` if no more will come."""
        return self._receive() or []

    def drain(self) -> list[Frame]:
        """Return all frames that the worker has sent by now; set ``at_end`` if no more will come."""
        frames: list[Frame] = []
        while not self.at_end and (more := self._receive()) is not None:
            frames += more
        return frames

    def _receive(self) -> list[Frame] | None:
        """Read once; return None if there is nothing to read. Of a long frame, a read may be only a part."""
        try:
            frames = self._channel.receive()
        except BlockingIOError:
            return None
        except ChannelCorruptError as error:
            self.kill_corrupted(f"in its channel {error}")
            frames = None
        except OSError as error:
            if not is_disconnect(error):
                raise
            frames = None
        if frames is None:
            self.at_end = True
            self._loop.unwatch(self.channel_fd)
        return frames or []

    def wait_for_reply(self, deadline: float | None, *, spins: bool) -> bool:
        """Wait in a thread that reads replies in place of the loop.

        Args:
            deadline: When to stop (`time.monotonic`); None for no limit.
            spins: Whether to spin first.

        Returns:
            Whether to continue: False at the exit of the process, or after the deadline.
        """
        if spins and spin_until_all([(self.page.counters, self.page.last_call)], FINISHED):
            return True
        poll = select.poll()
        poll.register(self.channel_fd, select.POLLIN)
        poll.register(self.worker.sentinel, select.POLLIN)
        seconds = remaining(deadline)
        # The caller looks again after a while: a signal handler in this thread may have had the loop read the reply.
        events = poll.poll(1000 * (_LOOK_AGAIN if seconds is None else min(seconds, _LOOK_AGAIN)))
        if not events:
            return seconds is None or seconds > _LOOK_AGAIN
        return all(fd == self.channel_fd for fd, _ in events) and not self.at_end

    def watch_rings(self, on_ring: Callable[[], object]) -> None:
        """Have the loop call a function after each ring of the worker."""
        if not self.watches_rings:
            self.watches_rings = True
            self._loop.watch_bell(self.page.to_parent, on_ring)

    def unwatch_rings(self) -> None:
        """End `watch_rings`."""
        if self.watches_rings:
            self.watches_rings = False
            self._loop.unwatch(self.page.to_parent.fileno())

    def kill_corrupted(self, corruption: str) -> None:
        """Kill the worker, since env code has corrupted memory that it shares with this process."""
        self.corruption = self.corruption or corruption
        self.worker.kill()

    def request_stacks(self) -> None:
        """Have the worker write its stacks, for the report of its exit."""
        self._stacks = self.worker.ask_stacks()

    def reap(self) -> ExitReport:
        """Reap the ended process and close its descriptors."""
        self.unwatch_rings()
        for output in self._outputs:
            output.finish()
            self._loop.unwatch(output.fd)
        self._loop.unwatch(self.worker.sentinel)
        self._loop.unwatch(self.channel_fd)
        stacks = "" if self._stacks is None else self._stacks.read()
        worker, tail = self.worker, self.stderr_tail
        status = worker.reap()
        return ExitReport(self.pid, status, tail, stacks, worker.refusal, self.corruption, worker.loss)

    def _read_output(self, output: Output, _events: int) -> None:
        if not output.read():
            self._loop.unwatch(output.fd)
