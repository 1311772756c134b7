"""One process of an actor: its channel, its output, and the processes that it leaves behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from envactors.actor.output import Output
from envactors.actor.reactor import Reactor
from envactors.actor.states import EndReason
from envactors.backends.base import ExitStatus, LaunchRefusedError, NodeLoss, Stacks, Worker
from envactors.mailbox.channel import ChannelCorruptError
from envactors.mailbox.control_page import ASLEEP, ControlPage
from envactors.mailbox.messages import Adopt, Frame, Kind, Start
from envactors.mailbox.pickling import dumps
from envactors.system.polling import is_disconnect

# The call id of the first message of a process; requests begin with 1.
START_CALL_ID = 0


class ExitReport(NamedTuple):
    """The facts about a process that has ended.

    Attributes:
        pid: Its process id, None if no process came to be.
        status: How it ended.
        stderr_tail: The last lines of its stderr.
        stacks: The stacks that it wrote before it was killed.
        refusal: Why no process came to be.
        untrue: What it wrote into shared memory that cannot be true, for which it was killed.
        loss: The loss of the node that it ran on, if that is why it counts as ended.
        reason: Why the parent ended it; None if it ended by itself.
    """

    pid: int | None = None
    status: ExitStatus = ExitStatus(None, None)
    stderr_tail: str = ""
    stacks: str = ""
    refusal: BaseException | None = None
    loss: NodeLoss | None = None
    untrue: str = ""
    reason: EndReason | None = None

    @property
    def is_refused(self) -> bool:
        """Whether no other process can be started either."""
        return isinstance(self.refusal, LaunchRefusedError)


class ActorProcess:
    """A worker that the parent waits for.

    Args:
        worker: The worker.
        name: The actor's name.
        reactor: Watches its descriptors.
        on_channel: Handles an event mask of the channel; called in any one thread.
        on_exit: Handles the end of the process; called in the reactor's thread.

    Raises:
        OSError: The system cannot watch more descriptors; the worker has been ended.

    Attributes:
        worker: The worker.
        page: The control page that it shares with the parent.
        at_end: Whether its channel has ended.
        on_ring: Called when the worker rings, in the thread that reads replies; None if nobody has asked for that.
        overflows: How many parts have come in OVERFLOW frames; compared with the page's own count.
        untrue: What `distrust` has killed it for.
    """

    def __init__(
        self,
        worker: Worker,
        name: str,
        reactor: Reactor,
        on_channel: Callable[[int], None],
        on_exit: Callable[[ActorProcess], None],
    ) -> None:
        self.worker = worker
        self.page: ControlPage = worker.page
        self.at_end: bool = False
        self.on_ring: Callable[[], None] | None = None
        self.overflows = 0
        self.untrue: str = ""
        # The stacks that a passed deadline has requested.
        self._stacks: Stacks | None = None
        self._on_exit = on_exit
        self._reactor = reactor
        self._channel = worker.channel
        self._outputs = [Output(fd, name, stream, reactor.printing.submit) for stream, fd in worker.outputs]
        try:
            for output in self._outputs:
                reactor.watch(output.fd, functools.partial(self._read_output, output))
            reactor.watch_channel(self._channel.fileno(), on_channel)
            reactor.watch(worker.sentinel, lambda _mask: self._on_exit(self))
        except BaseException:  # such as too many watched descriptors
            worker.kill()
            self.reap()
            raise

    @property
    def pid(self) -> int | None:
        """Its process id; None while another machine has not told it."""
        return self.worker.pid or None

    def move(self, name: str, on_channel: Callable[[int], None], on_exit: Callable[[ActorProcess], None]) -> None:
        """Make it another actor's, which gets what has come and was not read yet."""
        self._on_exit = on_exit
        self._reactor.watch_channel(self._channel.fileno(), on_channel)
        for output in self._outputs:
            output.name = name

    @property
    def last_output(self) -> dict[str, str]:
        """The last lines of each output stream."""
        return {output.stream: output.tail for output in self._outputs}

    def ask_stacks(self) -> None:
        """Request the stacks of the worker, for the report of its end."""
        self._stacks = self.worker.ask_stacks()

    def introduce(self, kind: Kind, message: Start | Adopt, incarnation: int) -> None:
        """Send the first message: whose the process is."""
        self.send(Frame(kind, incarnation, START_CALL_ID, dumps(tuple(message))), ASLEEP)

    def send(self, frame: Frame, wait: int) -> None:
        """Send a frame; what does not fit at once follows when there is room.

        Args:
            frame: The frame.
            wait: How the worker waits for the request after this one, as `envactors.mailbox.control_page` says.
        """
        channel, page = self._channel, self.page
        page.last_call = max(page.last_call, frame.call_id)
        try:
            channel.send(frame)
        except OSError as error:
            if not is_disconnect(error):
                raise
            return
        page.post_frame(wait)
        if channel.backlog:
            self._reactor.want_write(channel.fileno(), True)

    def distrust(self, untrue: str) -> None:
        """Kill it, since env code has overwritten the memory that it shares with this process."""
        self.untrue = self.untrue or untrue
        self.worker.kill()

    def watch_doorbell(self, on_ring: Callable[[], None] | None) -> None:
        """Have rings handled by the thread that reads replies; None stops that."""
        self.on_ring = on_ring
        if on_ring is None:
            self._reactor.unwatch_bell(self.page.to_parent)
        else:
            self._reactor.watch_bell(self.page.to_parent, on_ring)  # also if it should be: an interrupt may have come

    def flush(self) -> None:
        """Write what did not fit before, as far as the channel has room."""
        try:
            self._channel.flush()
        except OSError as error:
            if not is_disconnect(error):
                raise
        if not self._channel.backlog:
            self._reactor.want_write(self._channel.fileno(), False)

    def read(self) -> list[Frame] | None:
        """Read once; return None if there was nothing, and no frames if none is complete.

        `at_end` says when nothing will come any more.
        """
        frames: list[Frame] | None = None
        try:
            frames = self._channel.receive()
        except BlockingIOError:
            return None
        except OSError as error:
            if not is_disconnect(error):
                raise
        except ChannelCorruptError as error:
            self.distrust(f"in its channel {error}")
        if frames is None:
            self.at_end = True
            self._reactor.unwatch_channel(self._channel.fileno())
        return frames or []

    def drain(self) -> list[Frame]:
        """Read everything that an ended process has left."""
        frames: list[Frame] = []
        while not self.at_end and (read := self.read()) is not None:
            frames += read
        return frames

    def reap(self) -> ExitReport:
        """Reap an ended process, and free its descriptors; from then on nothing may be sent, posted, or watched."""
        worker, reactor = self.worker, self._reactor
        self.watch_doorbell(None)
        for output in self._outputs:
            output.finish()
            reactor.unwatch(output.fd)
        reactor.unwatch(worker.sentinel)
        reactor.unwatch_channel(self._channel.fileno())
        tail, stacks = self.last_output.get("stderr", ""), "" if self._stacks is None else self._stacks.read()
        return ExitReport(self.pid, worker.reap(), tail, stacks, worker.refusal, worker.loss, self.untrue)

    def _read_output(self, output: Output, _mask: int) -> None:
        if not output.read():
            self._reactor.unwatch(output.fd)
