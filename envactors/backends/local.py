"""Workers on this machine: the loop watches their descriptors, which no other part of the parent knows."""

from __future__ import annotations

import functools
import os
import select
import time
from abc import abstractmethod
from collections.abc import Sequence

from envactors.backends.base import ExitStatus, LendingWorker, WorkerEvents
from envactors.backends.output import Output, Stream
from envactors.loop import Loop
from envactors.mailbox.channel import Channel, ChannelCorruptError
from envactors.mailbox.control_page import FINISHED, NO_SPIN, ControlPage, spin_until_all
from envactors.mailbox.messages import Frame
from envactors.system.polling import READABLE, WRITABLE, is_disconnect

# How many bytes of output are read at once, and how often at the exit. Their product is the size of a full pipe.
_CHUNK = 1 << 16
_CHUNKS_AT_EXIT = 16


class LocalWorker(LendingWorker):
    """A worker with a channel, a sentinel, and pipes for its output; see `envactors.backends.base.Worker`.

    Args:
        page: Its control page.
        channel: The parent's end of its channel.
        sentinel: A descriptor that becomes readable once the worker has ended.
        pipes: Non-blocking descriptors of its output streams.

    Attributes:
        channel, sentinel, pipes: As above.
    """

    _loop: Loop

    def __init__(
        self, page: ControlPage, channel: Channel, sentinel: int, pipes: Sequence[tuple[Stream, int]] = ()
    ) -> None:
        self.page = page
        self.channel = channel
        self.sentinel = sentinel
        self.pipes = pipes
        self._channel_fd = channel.fileno()
        self._is_watched = False

    def report_to(self, events: WorkerEvents) -> None:
        self.events = events
        for output in self.outputs:
            output.name = events.name
        if not self._is_watched:
            self._watch(events)

    def _watch(self, events: WorkerEvents) -> None:
        loop = self._loop = events.runtime.loop
        self._is_watched = True
        self.outputs: Sequence[Output] = [
            Output(events.name, stream, events.runtime.printer) for stream, _ in self.pipes
        ]
        try:
            for output, (_, fd) in zip(self.outputs, self.pipes, strict=True):
                loop.watch(fd, functools.partial(self._on_output, output, fd))
            loop.watch(self.sentinel, lambda _mask: self.events.on_exit(self))
            loop.watch(self._channel_fd, self._on_channel)
        except BaseException:
            self.kill()
            self.reap()
            raise

    def send(self, frame: Frame, wait: int = NO_SPIN) -> None:
        page = self.page
        page.last_call = max(page.last_call, frame.call_id)
        try:
            self.channel.send(frame)
        except OSError as error:
            if not is_disconnect(error):
                raise
            return  # its exit is about to be noticed
        page.post_frame(wait)
        if self.channel.backlog:
            self._loop.want_write(self._channel_fd, True)

    def _on_channel(self, mask: int) -> None:
        if mask & WRITABLE:
            with self.events.lock:
                self._flush()
        if mask & READABLE:
            self.events.on_frames(self)

    def _flush(self) -> None:
        """Send as much of the backlog as fits."""
        try:
            self.channel.flush()
        except OSError as error:
            if not is_disconnect(error):
                raise
            self._loop.want_write(self._channel_fd, False)
        else:
            self._loop.want_write(self._channel_fd, bool(self.channel.backlog))

    def receive(self) -> list[Frame] | None:
        try:
            frames = self.channel.receive()
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
            self._loop.unwatch(self._channel_fd)
        return frames or []

    def as_lender(self) -> LocalWorker | None:
        return None if self.channel.backlog else self

    def lend(self) -> None:
        self._loop.set_lent(self._channel_fd, True)

    def take_back(self) -> None:
        self._loop.set_lent(self._channel_fd, False)

    def wait_for_reply(self, deadline: float, *, spins: bool) -> bool:
        if spins and spin_until_all([(self.page.counters, self.page.last_call)], FINISHED):
            return True
        poll = select.poll()
        poll.register(self._channel_fd, select.POLLIN)
        poll.register(self.sentinel, select.POLLIN)
        events = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
        return bool(events) and all(fd == self._channel_fd for fd, _ in events) and not self.at_end

    def _on_output(self, output: Output, fd: int, _mask: int) -> None:
        self._read_output(output, fd)

    def _read_output(self, output: Output, fd: int) -> bool:
        """Pass on some output; return whether there may be more now."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        output.add(data)
        if not data:
            self._loop.unwatch(fd)
        return bool(data)

    def reap(self) -> ExitStatus:
        self.unwatch_rings()
        if self._is_watched:
            for output, (_, fd) in zip(self.outputs, self.pipes, strict=True):
                for _ in range(_CHUNKS_AT_EXIT):
                    if not self._read_output(output, fd):
                        break  # what child processes of the worker print later is lost
                output.finish()
                self._loop.unwatch(fd)
            self._loop.unwatch(self.sentinel)
            self._loop.unwatch(self._channel_fd)
        return self.close()

    @abstractmethod
    def close(self) -> ExitStatus:
        """Close the descriptors, which nothing watches any more, and return how the worker ended."""
