"""One process of an actor: its channel, what it prints, and what it leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from envactors.actor.output import Output
from envactors.actor.reactor import Reactor
from envactors.backends.base import ExitStatus, Worker
from envactors.system import READABLE, WRITABLE, is_disconnect
from envactors.wire.channel import ChannelCorruptError
from envactors.wire.messages import Frame


class ExitReport(NamedTuple):
    """What is known of a process that has ended.

    Attributes:
        pid: Its process id, None if no process came to be.
        status: How it ended.
        stderr_tail: The last lines of its stderr.
        stacks: The stacks that it wrote before it was killed.
        refusal: Why no process came to be.
    """

    pid: int | None = None
    status: ExitStatus = ExitStatus(None, None)
    stderr_tail: str = ""
    stacks: str = ""
    refusal: BaseException | None = None


class ActorProcess:
    """A worker that the parent waits for.

    Args:
        worker: The worker.
        name: The actor's name.
        reactor: Watches its descriptors.
        on_channel: Called with the event mask, in any one thread, when the channel is readable or writable.
        on_exit: Called in the reactor's thread once the process has ended.

    Attributes:
        pid: Its process id.
        page: The control page that it shares with the parent.
        at_end: Whether its channel has ended.
        watches_doorbell: Whether rings of the worker are handled by the thread that reads replies.
        overflows: How many parts have come in OVERFLOW frames; compared with the page's own count.
    """

    def __init__(
        self,
        worker: Worker,
        name: str,
        reactor: Reactor,
        on_channel: Callable[[int], None],
        on_exit: Callable[[ActorProcess], None],
    ) -> None:
        self._worker = worker
        self._reactor = reactor
        self._on_channel = on_channel
        self._on_exit = on_exit
        self.page = worker.page
        self.pid = worker.pid
        self.at_end = False
        self.overflows = 0
        self.watches_doorbell = False
        self.outputs = [Output(fd, name, stream, reactor.printing.submit) for stream, fd in worker.outputs]
        for output in self.outputs:
            reactor.watch(output.fd, self._output_reader(output))
        reactor.watch_channel(worker.channel.fileno(), self._handle_channel)
        reactor.watch(worker.sentinel, lambda _mask: self._on_exit(self))

    def _handle_channel(self, mask: int) -> None:
        self._on_channel(mask)  # looked up at each call: `move` changes it

    def move(self, name: str, on_channel: Callable[[int], None], on_exit: Callable[[ActorProcess], None]) -> None:
        """Make it another actor's; that one's handlers get what has come and was not read yet."""
        self._on_channel = on_channel
        self._on_exit = on_exit
        for output in self.outputs:
            output.name = name

    def kill(self) -> None:
        """Kill the process."""
        self._worker.kill()

    def ask_stacks(self) -> None:
        """Ask the process to write its stacks; they are part of the exit report."""
        self._worker.ask_stacks()

    def send(self, frame: Frame, wait: int) -> None:
        """Send a frame; what does not fit at once follows when there is room.

        Args:
            frame: The frame.
            wait: How the worker waits for the request after this one, as `envactors.wire.control_page` says.
        """
        channel = self._worker.channel
        self.page.post_frame(wait)
        try:
            channel.send(frame)
        except OSError as error:
            if not is_disconnect(error):
                raise
            return
        if channel.backlog:
            self._reactor.want_write(channel.fileno(), True)

    def watch_doorbell(self, on_ring: Callable[[int], None] | None) -> None:
        """Have rings handled by the thread that reads replies; None stops that."""
        if self.watches_doorbell is (on_ring is not None):
            return
        fd = self.page.to_parent.fileno()
        self.watches_doorbell = on_ring is not None
        if on_ring is None:
            self._reactor.unwatch_channel(fd)
        else:
            self._reactor.watch_channel(fd, on_ring)

    def clear_doorbell(self) -> None:
        """Clear the rings so far."""
        self.page.to_parent.clear()

    def advance(self, mask: int) -> list[Frame] | None:
        """Write and read once, as far as the channel lets; return None if there was nothing to read.

        `at_end` says when nothing will come any more.
        """
        channel = self._worker.channel
        if mask & WRITABLE:
            try:
                channel.flush()
            except OSError as error:
                if not is_disconnect(error):
                    raise
            if not channel.backlog:
                self._reactor.want_write(channel.fileno(), False)
        if not mask & READABLE:
            return None
        try:
            return self._read()
        except BlockingIOError:
            return None

    def _read(self) -> list[Frame]:
        channel = self._worker.channel
        frames: list[Frame] | None = None
        try:
            frames = channel.receive()
        except BlockingIOError:
            raise
        except OSError as error:
            if not is_disconnect(error):
                raise
        except ChannelCorruptError:
            self.kill()
        if frames is None:
            self.at_end = True
            self._reactor.unwatch_channel(channel.fileno())
            return []
        return frames

    def drain_and_reap(self) -> tuple[list[Frame], ExitReport]:
        """Read everything that an ended process has left, reap it, and free its descriptors."""
        worker, reactor = self._worker, self._reactor
        self.watch_doorbell(None)
        frames: list[Frame] = []
        with contextlib.suppress(BlockingIOError):
            while not self.at_end:
                frames += self._read()
        for output in self.outputs:
            output.finish()
            reactor.unwatch(output.fd)
        reactor.unwatch(worker.sentinel)
        reactor.unwatch_channel(worker.channel.fileno())
        stacks = worker.stacks()
        status = worker.reap()
        tail = "".join(output.tail for output in self.outputs if output.stream == "stderr")
        return frames, ExitReport(worker.pid, status, tail, stacks)

    def work(self) -> bool:
        """Run a request in this thread if the worker is an in-line one; return False if there was none to run."""
        return self._worker.work()

    def _output_reader(self, output: Output) -> Callable[[int], None]:
        def read(_mask: int) -> None:
            if not output.read():
                self._reactor.unwatch(output.fd)

        return read
