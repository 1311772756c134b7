"""The worker's loop: wait for a request, run it, reply; end when the parent closes the worker or the channel.

Steps and resets are rows that the parent has posted, which `envactors.worker.env_rows` runs. Everything else comes as
frames; what those do is in `envactors.worker.host`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Protocol

from envactors.mailbox import packing
from envactors.mailbox.channel import Channel
from envactors.mailbox.control_page import (
    FRAMES,
    LEASE,
    METHOD_CALL,
    OVERFLOWS,
    POSTS,
    STEP,
    STREAM,
    ControlPage,
)
from envactors.mailbox.info_codec import Infos
from envactors.mailbox.messages import Attach, Fault, Frame, Kind, Start
from envactors.mailbox.pickling import content_of, dumps, loads, pack_failure
from envactors.mailbox.slab import PAYLOAD, Layout, Slab
from envactors.system.clocks import boot_clock
from envactors.system.polling import Poller
from envactors.worker import context
from envactors.worker.env_rows import EnvRow, run_all
from envactors.worker.host import Host
from envactors.worker.log_records import set_levels


class OpenMemory(Protocol):
    """The memory of a vector, as its workers map it."""

    def open(self, layout: Layout) -> tuple[Slab, Infos]:
        """Open the slab."""

    def open_region(self, place: tuple[int, int], *, writable: bool) -> memoryview:
        """Open a region that the parent has added, given its place."""


# Before Python 3.12 looking up a member of an enum takes as long as a function call.
_PAYLOADS, _RESULT, _SET = Kind.PAYLOADS, Kind.RESULT, Kind.SET
_IN_ARGUMENTS, _RAISED, _IN_RESULT = Fault.ARGUMENTS, Fault.RAISED, Fault.RESULT


class Server:
    """Runs one request at a time and replies to it.

    Args:
        channel: The worker's end of the channel.
        page: The worker's control page.
        memory: The memory of its vector; None for a worker without rows.
        send: Sends frames in place of the channel, if the worker forwards its log records.

    Attributes:
        handled: The value of `POSTS` up to which requests were run or are about to be.
        closed: Whether no more requests will come.
        host: The host of the envs.
        page: The control page.
        memory: As above.
        rows: The rows of its envs.
        call_id: The call id of the current request.
        extension: What a `Kind.EXTEND` request keeps for the next one.
    """

    def __init__(
        self,
        channel: Channel,
        page: ControlPage,
        memory: OpenMemory | None = None,
        send: Callable[[Frame], None] | None = None,
    ) -> None:
        self.handled: int = 0
        self.closed: bool = False
        host = Host(page)
        self.host: Host = host
        self._channel = channel
        self._send = channel.send if send is None else send
        self._is_forwarding = send is not None
        self.page = page
        self._counters = page.counters
        self.memory = memory
        self.extension: Any = None
        self.rows: list[EnvRow] = []
        self._forks = context.forks
        # The count of frames that were read, to compare with `FRAMES`.
        self._frames_read = 0
        # The call id of the last batch step.
        self._last_step = 0
        # The incarnation of the last request that was a frame.
        self._incarnation = 0
        self.call_id: int = 0
        # By kind of request; each handler has the name of its kind, and takes the fields of the message.
        handlers = host.call, host.get, host.set, host.describe, host.replay, host.save, host.restore, host.close
        self._handlers: dict[int, Callable[..., Any]] = {
            Kind[handler.__name__.strip("_").upper()]: handler
            for handler in (self._start, self._adopt, self._attach, self._extend, *handlers)
        }

    def serve(self) -> None:
        """Run requests until the parent closes the worker or ends; the channel must block."""
        with contextlib.closing(Poller()) as poller:
            poller.add(self._channel.fileno())
            self.page.to_worker.register(poller)
            with contextlib.suppress(OSError):  # the parent has ended, so nobody waits for a reply
                while not self.closed:
                    if self._counters[POSTS] == self.handled:
                        self._wait(poller)
                    self.run_posted()

    def forget_envs(self) -> None:
        """Drop all references to the envs, so that they are finalized."""
        self.rows.clear()
        self.extension = None
        self.host.forget_envs()

    def _wait(self, poller: Poller) -> None:
        """Wait as the parent has said until a request is posted or the channel has something to read."""
        counters, handled, fd = self._counters, self.handled, self._channel.fileno()
        self.page.spin_for_post(handled)
        while counters[POSTS] == handled and fd not in dict(poller.poll(None)):
            pass  # the ring may belong to a request that has run

    def run_posted(self) -> None:
        """Run the posted requests; if there are none, read the channel to notice whether it was closed.

        Raises:
            OSError: The parent has ended.
        """
        counters = self._counters
        posted = counters[POSTS]
        nothing = posted == self.handled
        self.handled = posted
        # Read before the count of frames, since payloads are sent before the step that they belong to is posted.
        step = counters[STEP]
        # A frame may be read before it is counted.
        while (nothing or counters[FRAMES] > self._frames_read) and not self.closed:
            nothing = False
            frames = self._channel.receive()
            if frames is None:
                self.closed = True
                return
            for frame in frames:
                self._frames_read += 1
                self._run_frame(frame)
        if step != self._last_step and not self.closed:
            if counters[LEASE]:
                self._check_lease()
            self._last_step = self.call_id = step
            self._run_rows(step)

    def _run_frame(self, frame: Frame) -> None:
        if frame.kind == _PAYLOADS:
            self._take_payloads(frame.call_id, frame.payload)
            return
        if self._counters[LEASE]:
            self._check_lease()
        kind, self._incarnation, self.call_id, payload = frame
        self.page.start_request(self.call_id, METHOD_CALL, 0)
        self._reply(*self.execute(kind, payload))
        self.page.finish_frame(self.call_id)
        self.closed = self.closed or kind == Kind.CLOSE

    def _take_payloads(self, call_id: int, payload: Any) -> None:
        """Keep the payloads of a `Kind.PAYLOADS` frame for the rows that are posted with this call id."""
        for position, content in packing.unpack(payload):
            self.rows[position].payload = call_id, content

    def _run_rows(self, call_id: int) -> None:
        """Run every row that is posted and not completed, for the step of this call id."""
        page = self.page
        page.is_streaming = self._counters[STREAM] != 0
        due: list[tuple[EnvRow, int, int]] = []
        posted_ids, written_ids, ops = self._posted_ids, self._written_ids, self._ops
        for row in self.rows:
            index = row.index
            posted_id = posted_ids[index]
            if posted_id != written_ids[index]:
                op = ops[index]
                # A payload that has not come yet belongs to a later post, which brings the next scan.
                if not op & PAYLOAD or row.payload[0] == posted_id:
                    due.append((row, op, posted_id))
        if due:
            run_all(due)
            page.is_timing = False
        page.finish_step(call_id)
        page.is_streaming = False

    def _send_overflow(self, index: int, payload: bytes | bytearray) -> None:
        self._reply(Kind.OVERFLOW, packing.pack([(index, payload)]))
        self._counters[OVERFLOWS] += 1

    def _check_lease(self) -> None:
        """End this process at once if the lease is over: another process may have replaced it."""
        lease = self.page.times[LEASE]
        if lease and boot_clock() > lease:
            os._exit(1)

    def execute(self, kind: int, payload: Any) -> tuple[Kind, bytes | bytearray]:
        """Run one request and return its reply; an exception fails only this request."""
        fault = _IN_ARGUMENTS
        try:
            fields = loads(payload)
            if kind == _SET:
                fields = [*map(content_of, fields)]
            fault = _RAISED
            result = self._handlers[kind](*fields)
            fault = _IN_RESULT
            reply = _RESULT, dumps(result)
        except BaseException as error:
            reply = Kind.FAILED, dumps(tuple(pack_failure(error, fault)))
        if context.forks != self._forks:
            os._exit(1)  # env code has forked, and its child has come back here: it must not reply
        return reply

    def _reply(self, kind: Kind, payload: Any) -> None:
        self._send(Frame(kind, self._incarnation, self.call_id, payload))

    def send_record(self, payload: bytes) -> None:
        """Send a log record of env code; any thread may call it."""
        self._reply(Kind.LOGGED, payload)

    # Handlers, one per kind of request --------------------------------------------------------------------

    def _start(self, *fields: Any) -> None:
        message = Start(*fields)
        if self._is_forwarding:
            set_levels(message.levels)
        self.host.start(message, self._incarnation, lambda made: self._reply(Kind.ENV_MADE, dumps((made,))))
        if message.attach is not None:
            self._attach(*message.attach)

    def _adopt(self, name: str, first: int, envs: int, attach: Attach | None) -> None:
        self.host.adopt(name, first, envs, self._incarnation)
        if attach is not None:
            self._attach(*attach)

    def _attach(self, layout: Layout, resets_within_step: bool) -> None:
        """Use the rows of a slab from now on."""
        assert self.memory is not None, "the parent attaches only workers that it has passed a slab"
        slab, infos = self.memory.open(layout)
        self._posted_ids, self._written_ids, self._ops = slab.posted_ids.data, slab.written_ids.data, slab.ops.data
        beside = infos, resets_within_step, self.page, self._send_overflow
        self.rows = [EnvRow(hosted, slab, *beside) for hosted in self.host.hosted_envs]

    def _extend(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return function(self, *arguments)

    def send_piece(self, index: int, payload: bytes | bytearray) -> None:
        """Send a piece of the reply to the request that runs."""
        self._reply(Kind.PIECE, packing.pack([(index, payload)]))
