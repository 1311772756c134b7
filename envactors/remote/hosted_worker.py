"""One worker of a node: passes requests from the link to it, and its replies back."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator

from envactors.backends.base import MirroredPart, Stacks
from envactors.backends.output import Stream
from envactors.backends.process import ProcessWorker
from envactors.mailbox import packing
from envactors.mailbox.channel import ChannelCorruptError
from envactors.mailbox.control_page import FINISHED, LEASE, NO_SPIN, OVERFLOWS, TIMED
from envactors.mailbox.info_codec import FAILED
from envactors.mailbox.messages import Frame, Kind
from envactors.remote.link import Link, LinkLostError
from envactors.remote.oversize import fit_reply
from envactors.remote.records import ExitNotice, LaunchOrder, ProgressReport, Record, RecordKind
from envactors.remote.rows import MirroredRows
from envactors.remote.watches import Watches
from envactors.system.polling import WRITABLE
from envactors.system.processes import resident_memory

# The backlog of the link, in bytes, above which no output of workers is read.
MOST_OUTPUT = 1 << 20
_OUTPUT_CHUNK = 1 << 16
# How long a worker may take to write its stacks, in seconds; callers wait a second by default.
_STACKS_PATIENCE = 0.8
STREAM_CODES: dict[Stream, int] = {"stdout": 1, "stderr": 2}


class HostedWorker:
    """One worker of this node.

    Args:
        worker_id: Its id on the link.
        worker: The worker.
        order: The order that has started it.
        rows: Returns the rows of its memory; None without any.
        part: Returns the part of its memory at a place.
        link: The link to the caller.
        watches: Watches its descriptors.
        on_started: Called once its envs are made, or could not be made.
        on_exit: Called after its end was reported.

    Attributes:
        memory_id: The id of its memory; 0 without one.
        starting: Whether its envs are still being made.
    """

    def __init__(
        self,
        worker_id: int,
        worker: ProcessWorker,
        order: LaunchOrder,
        rows: Callable[[], MirroredRows | None],
        part: Callable[[tuple[int, int]], memoryview],
        link: Link,
        watches: Watches,
        on_started: Callable[[], None],
        on_exit: Callable[[HostedWorker], None],
    ) -> None:
        self.worker_id = worker_id
        self.memory_id: int = order.memory_id
        self.starting: bool = True
        self._worker = worker
        self._page = worker.page
        self._channel = worker.channel
        self._envs = order.envs
        self._rows = rows
        self._part = part
        # What the current request writes besides its rows, and the regions of that in the memory.
        self._mirrored: tuple[MirroredPart, list[memoryview | None]] | None = None
        self._link = link
        self._watches = watches
        self._on_started = on_started
        self._on_exit = on_exit
        # Whether its channel has ended.
        self._at_end = False
        # Whether it was killed because of an error in this process.
        self._was_ended = False
        # Whether the caller wants the spans of steps and resets, and how many it has.
        self._sends_spans = False
        self._spans_seen = 0
        # The call id of the last request, and the incarnation that it was for.
        self._last_call = self._incarnation = 0
        # How many parts of `Kind.OVERFLOW` frames were passed on.
        self._overflows = 0
        # The posted steps: the call id, whether results stream, and the rows whose results were not sent yet.
        self._steps: deque[tuple[int, bool, list[int]]] = deque()

    def introduce(self) -> None:
        """Report its start to the caller, and watch its descriptors."""
        worker = self._worker
        watches = self._watches
        self._link.send(Record(RecordKind.LAUNCHED, self.worker_id, call_id=worker.pid))
        watches.add(self._channel.fileno(), self._on_channel)
        watches.add(worker.sentinel, lambda _mask: self._finish())
        watches.add_bell(self._page.to_parent, self._on_bell)
        for stream, fd in worker.pipes:
            watches.add(fd, lambda _mask, stream=stream, fd=fd: self._on_output(stream, fd))  # type: ignore[misc]

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Return a context in which an error of this process, such as too little memory, ends only this worker."""
        try:
            yield
        except LinkLostError:
            raise
        except Exception as error:
            self.end_because(f"{error!r} in its node's agent")

    def end_because(self, why: str) -> None:
        """Kill it, and add the reason to its stderr, which the errors of its calls contain."""
        if not self._was_ended:
            self._was_ended = True
            self._worker.kill()
            text = f"envactors agent: this worker was ended: {why}\n".encode(errors="replace")
            self._link.send(Record(RecordKind.OUTPUT, self.worker_id, text, STREAM_CODES["stderr"]))

    @property
    def is_busy(self) -> bool:
        """Whether it has unfinished requests."""
        return self._page.counters[FINISHED] < self._last_call

    def progress(self) -> ProgressReport:
        """Return its progress; kill it if its page contains impossible values."""
        if untrue := self._page.find_untrue(self._envs):
            text = f"envactors: {untrue} on the control page of this worker cannot be true, so it is killed\n"
            self._link.send(Record(RecordKind.OUTPUT, self.worker_id, text.encode(), STREAM_CODES["stderr"]))
            self._worker.kill()
        call_id, ended, position, method, since = self._page.progress()
        rss = resident_memory(self._worker.pid)
        return ProgressReport(self.worker_id, call_id, ended, position, method, time.monotonic() - since, rss)

    def set_lease(self, until: float) -> None:
        """Set the time until which it may begin requests."""
        self._page.times[LEASE] = until

    def end(self) -> None:
        """Kill it without a report to the caller."""
        self._worker.kill()

    def reap(self) -> None:
        """Wait for its end, and reap it."""
        with contextlib.suppress(OSError):
            self._worker.reap()

    # From the caller -------------------------------------------------------------------------------------

    def on_record(self, record: Record) -> None:
        """Handle a record from the caller."""
        with self.serving():
            if record.lost:
                raise MemoryError(f"there is no memory for a request of {record.lost} bytes")
            if record.kind == RecordKind.FRAME:
                self._forward(Frame(record.frame_kind, record.incarnation, record.call_id, record.payload))
            elif record.kind == RecordKind.REQUESTS:
                self._post_rows(record)
            elif record.kind == RecordKind.STREAM:
                self._steps = deque((call_id, True, rows) for call_id, _, rows in self._steps)
                self._page.ring_at(1)
                self.send_results()
            elif record.kind == RecordKind.MIRROR:
                self._open_mirrored(record.payload)
            elif record.kind == RecordKind.KILL:
                self._worker.kill()
            elif record.kind == RecordKind.ASK_STACKS:
                self._ask_stacks(record.call_id, may_interrupt=bool(record.frame_kind))
            elif record.kind == RecordKind.BEGIN_TIMING:
                with contextlib.suppress(OSError):  # without memory there is no timing
                    self._sends_spans = bool(record.frame_kind)
                    self._worker.begin_timing(self._sends_spans)

    def _ask_stacks(self, request_id: int, *, may_interrupt: bool) -> None:
        stacks = self._worker.ask_stacks(may_interrupt=may_interrupt)
        answer = functools.partial(self._send_stacks, stacks, request_id)
        try:
            threading.Thread(target=answer, name="envactors-stacks", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            text = f"its node cannot read its stacks: {error}\n".encode()
            self._link.send(Record(RecordKind.STACKS, self.worker_id, text, call_id=request_id))

    def _send_stacks(self, stacks: Stacks, request_id: int) -> None:
        text = stacks.wait(_STACKS_PATIENCE).encode(errors="replace")
        with contextlib.suppress(OSError):  # the caller has ended
            self._link.send(Record(RecordKind.STACKS, self.worker_id, text, call_id=request_id))

    def _open_mirrored(self, payload: bytes | bytearray | memoryview) -> None:
        (_, pickled), (_, content) = packing.unpack(payload)
        part: MirroredPart = pickle.loads(pickled)
        regions = [None if place is None else self._part(place) for place in part.places]
        part.write(regions, content)
        self._mirrored = part, regions

    def _send_mirrored(self) -> None:
        """Send what the last request has written besides its rows, if anything."""
        if self._mirrored is not None:
            part, regions = self._mirrored
            self._mirrored = None
            payload = part.read(regions)
            record = Record(RecordKind.FRAME, self.worker_id, payload, Kind.PIECE, self._incarnation, self._last_call)
            self._link.send(record)

    def _forward(self, frame: Frame) -> None:
        self._last_call = frame.call_id
        self._incarnation = frame.incarnation
        self._page.last_call = max(self._page.last_call, frame.call_id)
        with contextlib.suppress(OSError):  # it has ended, which its sentinel reports
            self._channel.send(frame)
            self._page.post_frame(NO_SPIN)
            if self._channel.backlog:
                self._watches.want_write(self._channel.fileno(), True)

    def _post_rows(self, record: Record) -> None:
        mirrored = self._rows()
        streams = bool(record.frame_kind)
        assert mirrored is not None, "the layout comes before the first rows"
        rows = mirrored.apply_requests(record.payload)
        self._last_call = record.call_id
        self._steps.append((record.call_id, streams, rows))
        self._page.ring_at(int(any(streams for _, streams, _ in self._steps)))
        if streams:
            self._page.ring_at_end(record.call_id)
        self._page.post_step(record.call_id, NO_SPIN, streams, rows)

    def send_measured(self) -> None:
        """Send the durations and spans of its steps and resets, if they are measured."""
        page = self._page
        if not page.counters[TIMED]:
            return
        with self.serving():
            spans, self._spans_seen = page.spans.read(self._spans_seen)
            if not self._sends_spans:
                spans = spans[:0]
            payload = zlib.compress(spans.tobytes() + page.histograms(self._envs).tobytes(), 1)
            now = int(time.monotonic() * 1e9)
            self._link.send(Record(RecordKind.MEASURED, self.worker_id, payload, incarnation=len(spans), call_id=now))

    # To the caller ---------------------------------------------------------------------------------------

    def send_results(self, *, all_complete: bool = False) -> None:
        """Send the results of finished steps, and single results of steps that stream."""
        mirrored = self._rows()
        counters = self._page.counters
        if mirrored is None or not self._steps:
            return
        # Env code may have written any value there; the caller finds out which results are missing.
        finished = min(max(0, counters[FINISHED]), self._last_call)
        ready = []
        for call_id, streams, rows in self._steps:
            if finished >= call_id or streams or all_complete:
                complete = mirrored.complete(rows)
                ready += complete
                rows[:] = [row for row in rows if row not in complete]
        over = finished >= self._steps[0][0]
        while self._steps and finished >= self._steps[0][0]:
            self._steps.popleft()
        if ready or over:  # the end of a step that streams comes after its results
            while counters[OVERFLOWS] > self._overflows and self._read_frames():
                pass  # overflows come before their rows
            groups = mirrored.split_results(ready)
            for rows in groups:
                payload = mirrored.pack_results(rows) if rows else b""
                ended = finished if rows is groups[-1] else 0
                record = Record(RecordKind.RESULTS, self.worker_id, payload, incarnation=self._overflows, call_id=ended)
                self._link.send(record)

    def _on_bell(self, _mask: int) -> None:
        with self.serving():
            self.send_results()

    def _on_channel(self, mask: int) -> None:
        with self.serving():
            if mask & WRITABLE:
                with contextlib.suppress(OSError):
                    self._channel.flush()
                if not self._channel.backlog:
                    self._watches.want_write(self._channel.fileno(), False)
            self._read_frames()

    def _read_frames(self) -> bool:
        """Pass on the frames that have arrived; return whether there were any."""
        frames: list[Frame] | None = None
        try:
            frames = self._channel.receive()
        except BlockingIOError:
            return False
        except ChannelCorruptError:
            self._worker.kill()
        except OSError:
            pass  # it has ended
        if frames is None:
            self._at_end = True
            self._watches.remove(self._channel.fileno())
            return False
        for frame in frames:
            if self.starting and frame.kind not in (Kind.ENV_MADE, Kind.LOGGED):
                self.starting = False
                self._on_started()
            if frame.kind in (Kind.RESULT, Kind.FAILED) and frame.call_id == self._last_call:
                self._send_mirrored()  # before the reply
            for kind, incarnation, call_id, payload in fit_reply(frame, self._mark_failed):
                self._overflows += sum(1 for _ in packing.unpack(payload)) if kind == Kind.OVERFLOW else 0
                self._link.send(Record(RecordKind.FRAME, self.worker_id, payload, kind, incarnation, call_id))
        return True

    def _mark_failed(self, index: int) -> None:
        if (mirrored := self._rows()) is not None:
            mirrored.slab.info_encoding[index] = FAILED

    def _on_output(self, stream: Stream, fd: int) -> None:
        with self.serving():
            if self._link.backlog > MOST_OUTPUT:
                self._watches.pause(fd)  # when the pipe is full, the worker waits
            elif not self._read_output(stream, fd):
                self._watches.remove(fd)

    def _read_output(self, stream: Stream, fd: int) -> bool:
        """Pass on some output; return False at its end."""
        try:
            data = os.read(fd, _OUTPUT_CHUNK)
        except BlockingIOError:
            return True
        self._link.send(Record(RecordKind.OUTPUT, self.worker_id, data, STREAM_CODES[stream]))
        return bool(data)

    def _finish(self) -> None:
        """Pass on everything that it has left, and report how it has ended."""
        with self.serving():
            while not self._at_end and self._read_frames():
                pass
            self._send_mirrored()
            self.send_results(all_complete=True)
        worker = self._worker
        watches = self._watches
        with self.serving():
            for _, _, rows in self._steps:
                if (mirrored := self._rows()) is not None:
                    mirrored.take_back(rows)  # the next worker must not run these requests
        watches.remove(self._channel.fileno())
        watches.remove(worker.sentinel)
        watches.remove_bell(self._page.to_parent)
        progress = None
        with self.serving():
            for stream, fd in worker.pipes:
                watches.remove(fd)
                self._read_output(stream, fd)
            self.send_measured()
            progress = self.progress()
        status = worker.reap()
        notice = ExitNotice(progress, status.exitcode, status.signal, is_helper_lost=status.is_helper_lost)
        send_exit(self._link, self.worker_id, notice)
        self._on_exit(self)


def send_exit(link: Link, worker_id: int, notice: ExitNotice) -> None:
    """Report to the caller how a worker has ended, or why it could not be started."""
    progress = None if notice.progress is None else tuple(notice.progress)
    link.send(Record(RecordKind.EXIT, worker_id, pickle.dumps((progress, *notice[1:]))))
