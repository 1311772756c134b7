"""The caller's side of a worker on another machine, which reports to its actor what its node sends."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np

from envactors.backends import base
from envactors.backends.base import ExitStatus, LaunchRefusedError, MirroredPart, NodeLoss, Worker, WorkerEvents
from envactors.backends.output import Output, Stream
from envactors.mailbox import packing
from envactors.mailbox.control_page import (
    FINISHED,
    METHOD_STEP,
    NO_SPIN,
    OVERFLOWS,
    STEP,
    STREAM,
    TIMED,
    ControlPage,
    Progress,
    page_size,
)
from envactors.mailbox.durations import HISTOGRAM
from envactors.mailbox.messages import Frame
from envactors.mailbox.spans import SPAN
from envactors.remote.oversize import fit_request
from envactors.remote.records import ExitNotice, LaunchOrder, ProgressReport, Record, RecordKind
from envactors.remote.rows import MirroredMemory
from envactors.remote.stacks import RemoteStacks
from envactors.runtime import Runtime
from envactors.system.polling import Doorbell

# A reported age is not increased within this many seconds: a later request may have begun since.
_FRESH = 0.25
STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}
_STDERR = 2
# The ids of requests for stacks.
_request_ids = itertools.count(1)


class Queue(Protocol):
    """The queue of workers that wait for room on a node.

    Attributes:
        runtime: The threads that serve the actors of the workers.
    """

    runtime: Runtime

    def kill(self, worker: RemoteWorker) -> None:
        """End a worker that was not placed."""

    def find_room(self, envs: int) -> Host | None:
        """Return a node that has room for this many more envs, and is not being drained. Takes no lock."""


class Host(base.Node, Protocol):
    """The node that a worker is placed on.

    Attributes:
        draining: Whether its workers leave it once another node has room.
    """

    draining: bool

    def send(self, record: Record) -> None:
        """Send a record; errors are handled elsewhere."""

    def kill(self, worker: RemoteWorker) -> None:
        """Kill a worker; if its end is not reported soon, it counts as ended."""


class MirroredPage(ControlPage):
    """A control page that contains what the agent reports.

    Args:
        envs: How many envs the worker has.
        post: Sends the rows of a batch step: (call id, whether results stream, rows).
        stream: Has the node send single results of all steps that run.
    """

    def __init__(self, envs: int, post: Callable[[int, bool, Sequence[int]], None], stream: Callable[[], None]) -> None:
        # The worker is reached through the link.
        super().__init__(bytearray(page_size(envs)), Doorbell(-1), Doorbell())
        self.clock_lead: float = float("inf")
        self._post = post
        self._stream = stream
        # The call id of the last step whose results the node sends together.
        self._together = 0
        self._report = ProgressReport(0, 0, ended=True, position=0, method=0, age=0.0, rss=0)
        self._reported = time.monotonic()

    @property
    def rss(self) -> int:
        return self._report.rss

    def take_measured(self, measured: bytearray, spans: int, sent: float) -> None:
        """Store the measurements of the node.

        Args:
            measured: The new spans, and the histograms.
            spans: The number of the spans.
            sent: When they were sent, in seconds of the node's clock.
        """
        size = spans * SPAN.itemsize
        self.spans.extend(np.frombuffer(measured, SPAN, spans))
        self.spans.histograms[:] = np.frombuffer(measured, HISTOGRAM, offset=size).reshape(-1, 2)
        # The fastest record gives the best estimate.
        self.clock_lead = min(self.clock_lead, time.monotonic() - sent)

    def report(self, report: ProgressReport) -> None:
        """Store a report of the agent."""
        self._report = report
        self._reported = time.monotonic()

    def post_step(self, call_id: int, wait: int, streams: bool, rows: Sequence[int] = ()) -> None:
        del wait
        self.counters[STREAM] = streams
        self.counters[STEP] = call_id
        self.last_call = call_id
        if not streams:
            self._together = call_id
        self._post(call_id, streams, rows)

    def ring_at(self, count: int) -> None:
        """Have the node send single results of all steps that run; 0 if nobody waits for them."""
        if count and self.counters[FINISHED] < self._together:
            self._stream()
            self._together = 0

    def finish_rows(self, finished: int, overflows: int) -> None:
        """Record that the results of all steps up to this one have arrived, and wake the waiter."""
        counters = self.counters
        counters[OVERFLOWS] = overflows
        if finished > counters[FINISHED]:
            counters[FINISHED] = finished
            self.report(self._report._replace(call_id=finished, ended=True, age=0.0))
        self.to_parent.ring()

    def suspect(self, call_id: int, sent: float) -> None:
        """Assume that a request has begun that was sent to a lost node at this time (`time.monotonic`)."""
        report = self._report
        if report.call_id != call_id or report.ended:
            age = time.monotonic() - sent
            self.report(report._replace(call_id=call_id, ended=False, position=0, method=METHOD_STEP, age=age))

    def progress(self) -> Progress:
        report = self._report
        since = time.monotonic() - self._reported
        age = report.age if since < _FRESH else report.age + since
        return Progress(report.call_id, report.ended, report.position, report.method, time.monotonic() - age)


class RemoteWorker(Worker):
    """One worker on another machine; see `envactors.backends.base.Worker`. It is placed after its launch.

    Args:
        worker_id: Its id, unique in the backend.
        name: The actor's name.
        env_vars: Its environment variables.
        memory: The memory of its vector; None without one.
        envs: How many envs it has.
        queue: The queue in which it waits until it is placed.
        home: The node of the actor's last worker, to which it returns if no other one has room.

    Attributes:
        worker_id, memory, envs, home: As above.
        order: The order that starts it.
        loss: The loss of its node; None if the node is not lost.
        is_over: Whether none of its code can be running any more.
        has_ended: Whether it counts as ended.
    """

    page: MirroredPage

    def __init__(
        self,
        worker_id: int,
        name: str,
        env_vars: Mapping[str, str],
        memory: MirroredMemory | None,
        envs: int,
        queue: Queue,
        home: Host | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.home = home
        self.envs = envs
        self.memory = memory
        self.order: LaunchOrder = LaunchOrder(name, dict(env_vars), 0 if memory is None else memory.memory_id, envs)
        self.pid: int | None = None
        self.node: Host | None = None
        self.loss: NodeLoss | None = None
        self.is_over: bool = False
        self.has_ended: bool = False
        self._launched = 0.0
        self._status = ExitStatus()
        self._lock = threading.RLock()
        self._queue = queue
        self._loop = queue.runtime.loop
        self._outputs = {code: Output(name, stream, queue.runtime.printer) for code, stream in STREAMS.items()}
        self.outputs: Sequence[Output] = tuple(self._outputs.values())
        self._is_reporting = False
        # The frames that have come, and the records from before it was placed.
        self._inbox: deque[Frame] = deque()
        self._early: list[Record] = []
        # The call id of the last request, and when it was sent (`time.monotonic`).
        self._last_call = 0
        self._sent = 0.0
        # Whether its node sends the spans of steps and resets besides their durations.
        self._sends_spans = False
        # The requests for stacks that are still in use, by id.
        self._stacks: WeakValueDictionary[int, RemoteStacks] = WeakValueDictionary()
        # Made last: it has a descriptor, which would stay open if anything failed after it.
        self.page = MirroredPage(envs, self._send_rows, self._send_stream)

    # The actor's side ------------------------------------------------------------------------------------

    @property
    def launched_at(self) -> float:
        return time.monotonic() if self.node is not None and self.pid is None else self._launched

    @property
    def reason_to_move(self) -> str:
        node = self.node
        must_move = node is not None and node.draining and self._queue.find_room(self.envs) is not None
        return "its node is being drained" if must_move else ""

    def report_to(self, events: WorkerEvents) -> None:
        self.events = events
        for output in self.outputs:
            output.name = events.name
        self._is_reporting = True
        self._loop.call_soon(self._report)

    def _report(self) -> None:
        """Report frames and the end, in the loop; the actor ignores what it knows."""
        if self._is_reporting:
            if self._inbox:
                self.events.on_frames(self)
            if self.has_ended:
                self.events.on_exit(self)
            if self.is_over:
                self.events.on_certain_end(self)

    def send(self, frame: Frame, wait: int = NO_SPIN) -> None:
        del wait
        self.page.last_call = max(self.page.last_call, frame.call_id)
        request, refusal = fit_request(frame)
        if refusal is not None:
            self._deliver(refusal)
        if request is None:
            return
        kind, incarnation, call_id, payload = request
        self._last_call = call_id
        self._sent = time.monotonic()
        self._send(Record(RecordKind.FRAME, self.worker_id, payload, kind, incarnation, call_id))

    def receive(self) -> list[Frame] | None:
        frames = []
        while self._inbox:
            frames.append(self._inbox.popleft())
        self.at_end: bool = self.has_ended and not frames
        return frames or None

    def kill(self) -> None:
        with self._lock:
            host = self.node or self._queue
        host.kill(self)

    def begin_timing(self, spans: bool) -> None:
        if not self.page.counters[TIMED] or spans is not self._sends_spans:
            self.page.counters[TIMED] = True
            self._sends_spans = spans
            self._send(Record(RecordKind.BEGIN_TIMING, self.worker_id, frame_kind=spans))

    def ask_stacks(self, *, may_interrupt: bool = True) -> RemoteStacks:
        request_id = next(_request_ids)
        stacks = self._stacks[request_id] = RemoteStacks(None if self.node is None else self.node.name)
        self._send(Record(RecordKind.ASK_STACKS, self.worker_id, call_id=request_id, frame_kind=may_interrupt))
        return stacks

    def resident_memory(self) -> int:
        return self.page.rss

    def mirror(self, part: MirroredPart, content: bytes | bytearray) -> None:
        self._send(Record(RecordKind.MIRROR, self.worker_id, packing.pack(enumerate((pickle.dumps(part), content)))))

    def reap(self) -> ExitStatus:
        self.unwatch_rings()
        for output in self.outputs:
            output.finish()
        with self._lock:
            self.page.to_parent.close()
            return self._status._replace(loss=self.loss, is_certain=self.is_over)

    def _send_rows(self, call_id: int, streams: bool, rows: Sequence[int]) -> None:
        assert self.memory is not None, "it has rows"
        assert self.memory.rows is not None, "it has rows"
        self._last_call = call_id
        self._sent = time.monotonic()
        payload = self.memory.rows.pack_requests(rows)
        self._send(Record(RecordKind.REQUESTS, self.worker_id, payload, int(streams), call_id=call_id))

    def _send_stream(self) -> None:
        self._send(Record(RecordKind.STREAM, self.worker_id))

    def _send(self, record: Record) -> None:
        with self._lock:
            if self.node is None:
                self._early.append(record)
                return
        self.node.send(record)

    # The node's side -------------------------------------------------------------------------------------

    def place(self, host: Host) -> None:
        """Start it on a node, and send the records that have waited for that."""
        with self._lock:
            host.send(Record(RecordKind.LAUNCH, self.worker_id, pickle.dumps(tuple(self.order))))
            for record in self._early:
                host.send(record)
            self._early.clear()
            self.node = host

    def on_record(self, record: Record) -> None:
        """Handle a record of its node. If that raises an error, only this worker ends."""
        try:
            if record.lost:
                raise MemoryError(f"there is no memory for a reply of {record.lost} bytes")
            self._handle(record)
        except Exception as error:
            text = f"envactors: this worker was ended: {error!r} in its caller\n"
            self._outputs[_STDERR].add(text.encode(errors="replace"))
            self.kill()

    def _handle(self, record: Record) -> None:
        if record.kind == RecordKind.FRAME:
            self._deliver(Frame(record.frame_kind, record.incarnation, record.call_id, record.payload))
        elif record.kind == RecordKind.RESULTS:
            self._take_results(record)
        elif record.kind == RecordKind.STACKS:
            if (stacks := self._stacks.get(record.call_id)) is not None:
                stacks.set(bytes(record.payload).decode(errors="replace"))
        elif record.kind == RecordKind.MEASURED:
            measured = bytearray(zlib.decompress(record.payload))
            self.page.take_measured(measured, record.incarnation, record.call_id / 1e9)
        elif record.kind == RecordKind.OUTPUT:
            self._outputs[record.frame_kind].add(bytes(record.payload))
        elif record.kind == RecordKind.LAUNCHED:
            self._launched = time.monotonic()
            self.pid = record.call_id
        elif record.kind == RecordKind.EXIT:
            self._on_exit(ExitNotice(*pickle.loads(record.payload)))

    def _deliver(self, frame: Frame) -> None:
        self._inbox.append(frame)
        self._loop.call_soon(self._report)

    def _on_exit(self, notice: ExitNotice) -> None:
        if notice.progress is not None:
            self.page.report(ProgressReport(*notice.progress))
        refusal = None
        if notice.refusal and self.node is not None:
            kind = LaunchRefusedError if notice.for_good else OSError
            refusal = kind(f"{notice.refusal} (node {self.node.name!r})")
        self._status = ExitStatus(notice.exitcode, notice.signal, refusal, is_helper_lost=notice.is_helper_lost)
        self.end(is_over=True)

    def _take_results(self, record: Record) -> None:
        assert self.memory is not None, "it has rows"
        assert self.memory.rows is not None, "it has rows"
        with self._lock:
            if not self.has_ended:  # otherwise the rows may belong to another worker
                if record.payload:
                    self.memory.rows.apply_results(record.payload)
                self.page.finish_rows(record.call_id, record.incarnation)

    def on_node_lost(self, loss: NodeLoss) -> None:
        """Count it as ended, since its node is lost. It is over when the node's lease is."""
        self.loss = loss
        self.page.suspect(self._last_call, self._sent)
        self.end()

    def refuse(self, refusal: OSError) -> None:
        """Count it as ended, since no node can run it."""
        self._status = ExitStatus(refusal=refusal)
        self.end(is_over=True)

    def end(self, *, is_over: bool = False) -> None:
        """Count it as ended, and drop all results that arrive from it.

        Args:
            is_over: Whether none of its code can be running any more.
        """
        with self._lock:
            self.has_ended = True
            self.is_over |= is_over
        self._loop.call_soon(self._report)
