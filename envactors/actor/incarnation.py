"""One process of an actor: its channel, what it prints, and what it leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from envactors.actor.output import Output
from envactors.actor.reactor import Reactor
from envactors.backends.base import ExitStatus, Worker
from envactors.system import READABLE, WRITABLE, is_disconnect
from envactors.wire.board import ASLEEP, FRAMES_DOWN, WAIT
from envactors.wire.channel import ChannelCorruptError
from envactors.wire.messages import Frame


class Obituary(NamedTuple):
    """What is known of a process that has ended.

    Attributes:
        pid: Its process id, None where no process came to be.
        status: How it ended.
        stderr_tail: The last lines of its stderr.
        stacks: What it told of its stacks.
        unread: Whether it left the last request unread, so that it never began it.
        refusal: Why no process came to be.
    """

    pid: int | None = None
    status: ExitStatus = ExitStatus(None, None)
    stderr_tail: str = ""
    stacks: str = ""
    unread: bool = False
    refusal: BaseException | None = None


class Incarnation:
    """A worker that is being waited for.

    Args:
        worker: The worker.
        name: The actor's name.
        reactor: What waits for it.
        on_channel: Called in any one thread when the channel has something, or room.
        on_death: Called in the reactor's thread once the process has ended.

    Attributes:
        pid: Its process id.
        silent: Whether nothing will come through its channel any more.
        board: What it shares with the parent beside its channel, where its process is another.
        received: How many frames have come from it.
        hearing: Whether its rings are told to whoever reads replies.
    """

    def __init__(
        self,
        worker: Worker,
        name: str,
        reactor: Reactor,
        on_channel: Callable[[int], None],
        on_death: Callable[[Incarnation], None],
    ) -> None:
        self._worker = worker
        self._reactor = reactor
        self._reset_by_peer = False
        self._on_channel = on_channel
        self._on_death = on_death
        self.board = worker.board
        self.hearing = False
        self.received = 0
        self.silent = False
        self.pid = worker.pid
        self.outputs = [Output(fd, name, stream, reactor.printing.submit) for stream, fd in worker.outputs]
        for output in self.outputs:
            reactor.watch(output.fd, self._reader(output))
        reactor.watch_channel(worker.channel.fileno(), self._tell)
        reactor.watch(worker.sentinel, lambda _mask: self._on_death(self))

    def _tell(self, mask: int) -> None:
        self._on_channel(mask)  # whose it is may have changed

    def move(self, name: str, on_channel: Callable[[int], None], on_death: Callable[[Incarnation], None]) -> None:
        """Makes it another actor's; what has come and was not taken in yet is told to that one."""
        self._on_channel = on_channel
        self._on_death = on_death
        for output in self.outputs:
            output.name = name

    def kill(self) -> None:
        self._worker.kill()

    def ask_stacks(self) -> None:
        self._worker.ask_stacks()

    def send(self, frame: Frame, wait: int = ASLEEP) -> None:
        """Sends a frame; what does not fit at once follows when there is room.

        Args:
            frame: The frame.
            wait: How the worker is to wait for what comes after it, as `envactors.wire.board` says.
        """
        channel = self._worker.channel
        if self.board is not None:
            self.board.words[WAIT] = wait
        try:
            channel.send(frame)
        except OSError as error:
            self._check_disconnect(error)
            return
        if self.board is not None:
            self.board.words[FRAMES_DOWN] += 1
        if channel.backlog:
            self._reactor.want_write(channel.fileno(), True)

    def hear(self, on_bell: Callable[[int], None] | None) -> None:
        """Has rings told to whoever reads replies, or not any more."""
        if self.board is None or self.hearing is (on_bell is not None):
            return
        fd = self.board.to_parent.fileno()
        self.hearing = on_bell is not None
        if on_bell is None:
            self._reactor.unwatch_channel(fd)
        else:
            self._reactor.watch_channel(fd, on_bell)

    def clear_bell(self) -> None:
        """Takes in the rings so far."""
        if self.board is not None:
            self.board.to_parent.clear()

    def advance(self, mask: int) -> list[Frame] | None:
        """Writes and reads once, as far as the channel lets; None when there was nothing to read.

        `silent` says when nothing will come any more.
        """
        channel = self._worker.channel
        if mask & WRITABLE:
            try:
                channel.flush()
            except OSError as error:
                self._check_disconnect(error)
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
            self._check_disconnect(error)
        except ChannelCorruptError:
            self.kill()
        if frames is None:
            self.silent = True
            self._reactor.unwatch_channel(channel.fileno())
            return []
        self.received += len(frames)
        return frames

    def bury(self) -> tuple[list[Frame], Obituary]:
        """Takes in everything that a dead process left, and frees its descriptors."""
        worker, reactor = self._worker, self._reactor
        self.hear(None)
        frames: list[Frame] = []
        with contextlib.suppress(BlockingIOError):
            while not self.silent:
                frames += self._read()
        unread = self._reset_by_peer or worker.channel.unread()
        for output in self.outputs:
            output.finish()
            reactor.unwatch(output.fd)
        reactor.unwatch(worker.sentinel)
        reactor.unwatch_channel(worker.channel.fileno())
        stacks = worker.stacks()
        status = worker.reap()
        tail = "".join(output.tail for output in self.outputs if output.stream == "stderr")
        return frames, Obituary(worker.pid, status, tail, stacks, unread)

    def work(self) -> bool:
        """Runs a request in this thread, where the backend wants that; False when there was nothing to run."""
        return self._worker.work()

    def _reader(self, output: Output) -> Callable[[int], None]:
        def read(_mask: int) -> None:
            if not output.read():
                self._reactor.unwatch(output.fd)

        return read

    def _check_disconnect(self, error: OSError) -> None:
        if not is_disconnect(error):
            raise error
        if isinstance(error, ConnectionResetError):
            self._reset_by_peer = True
