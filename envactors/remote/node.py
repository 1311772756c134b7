"""The caller's side of a node: its link, its lease, and its workers."""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable

from envactors.backends.base import EventLoop, NodeLoss, Timed
from envactors.remote.lease import NodeLease
from envactors.remote.link import Link
from envactors.remote.notices import tell_node
from envactors.remote.records import PLACE, LinkCorruptError, ProgressReport, Record, RecordKind
from envactors.remote.rows import MirroredMemory
from envactors.remote.worker import RemoteWorker
from envactors.system.clocks import boot_clock
from envactors.system.polling import WRITABLE

# How long the agent may take to report the end of a killed worker, in seconds. Then the worker counts as ended.
_KILL_PATIENCE = 0.7


class Node(Timed):
    """A node with its agent.

    Args:
        name: The name of the node.
        link: The link to its agent.
        lease: The length of the lease, in seconds.
        loop: Watches the link and the deadlines.
        on_change: Called, in any thread, when there may be more room, or the node is lost or over.

    Attributes:
        workers: Its workers that have not ended, by id.
        is_lost: Whether it is lost.
        is_over: Whether it is lost and none of its workers can still be running.
        draining: Whether no more workers are placed on it.
    """

    def __init__(self, name: str, link: Link, lease: float, loop: EventLoop, on_change: Callable[[Node], None]) -> None:
        self.name = name
        self.workers: dict[int, RemoteWorker] = {}
        self.is_lost: bool = False
        self.is_over: bool = False
        self.draining = False
        self._link = link
        self._lease_seconds = lease
        self._lease = NodeLease(lease, boot_clock())
        self._loop = loop
        # The parts of memories that the agent has: for each memory, the id of the content by place.
        self._contents: dict[int, dict[tuple[int, int], int]] = {}
        self._on_change = on_change
        # Guards `is_lost`, and what the link is watched for.
        self._watch_lock = threading.Lock()
        # How the node was lost; None before.
        self._loss: NodeLoss | None = None
        # When a killed worker counts as ended (`time.monotonic`), by id.
        self._kills: dict[int, float] = {}
        loop.watch_channel(link.fileno(), self._on_link)
        loop.watch_timers(self)

    @property
    def envs(self) -> int:
        """How many envs its workers have."""
        return sum(worker.envs for worker in tuple(self.workers.values()))

    # Sending ---------------------------------------------------------------------------------------------

    def announce(self, memory: MirroredMemory) -> None:
        """Send the agent the layout and content of a memory, or have it free the memory."""
        if memory.is_closed:
            self._contents.pop(memory.memory_id, None)
            self.send(Record(RecordKind.MEMORY, call_id=memory.memory_id))
        elif memory.layout is not None:
            self.send(Record(RecordKind.MEMORY, payload=pickle.dumps(memory.layout), call_id=memory.memory_id))
            known = self._contents.get(memory.memory_id, {})
            self._contents[memory.memory_id] = {place: content for place, (content, _) in memory.published.items()}
            for place, (content, part) in memory.published.items():
                if known.get(place) != content:
                    self.send(Record(RecordKind.PART, payload=PLACE.pack(*place) + part[:], call_id=memory.memory_id))

    def place(self, worker: RemoteWorker) -> None:
        """Start a worker here."""
        if worker.memory is not None:
            self.announce(worker.memory)
        self.workers[worker.worker_id] = worker
        worker.place(self)
        if self.is_lost:  # another thread may have lost the node since it was chosen, without knowing of this worker
            self._loop.post(lambda: self._end_lost(worker))

    def send(self, record: Record) -> None:
        """Send a record; if that fails, the node is lost."""
        self._write(functools.partial(self._link.send, record))

    def kill(self, worker: RemoteWorker) -> None:
        """Kill a worker; if its end is not reported soon, it counts as ended."""
        self.send(Record(RecordKind.KILL, worker.worker_id))
        when = time.monotonic() + _KILL_PATIENCE
        self._kills.setdefault(worker.worker_id, when)
        self._loop.note_timer(when)

    def cork(self) -> None:
        """Collect what is sent from now on."""
        self._link.cork()

    def uncork(self) -> None:
        """Write what was collected."""
        self._write(self._link.uncork)

    def _write(self, write: Callable[[], None]) -> None:
        if self.is_lost:
            return
        try:
            write()
        except OSError as error:
            reason = f"whose link broke ({error})"
            self._loop.post(lambda: self.give_up(reason))  # this thread may hold the lock of an actor
            return
        if self._link.is_full:
            self._follow_backlog()

    def _follow_backlog(self) -> None:
        """Watch the link for being writable while it is full; any thread may have filled it meanwhile."""
        with self._watch_lock:
            if not self.is_lost:
                self._loop.want_write(self._link.fileno(), self._link.is_full)

    def _echo(self, stamp: float) -> None:
        self._lease.echo(boot_clock())
        self.send(Record(RecordKind.ECHO, call_id=int(stamp * 1e9)))

    # Receiving, in the thread that reads replies ------------------------------------------------------------

    def _on_link(self, mask: int) -> None:
        if self.is_lost:
            return
        try:
            if mask & WRITABLE:
                self._link.flush()
                self._follow_backlog()
            records = self._link.receive()
        except (OSError, LinkCorruptError) as error:
            self.give_up(f"whose link broke ({error})")
            return
        if records is None:
            self.give_up("whose agent has ended")
            return
        self._lease.hear(boot_clock())
        stamp = None
        for record in records:
            if record.kind == RecordKind.BEAT:
                stamp = record.call_id / 1e9
            elif record.kind == RecordKind.PROGRESS:
                for report in pickle.loads(record.payload):
                    self._on_progress(ProgressReport(*report))
            elif (worker := self.workers.get(record.worker)) is not None:
                worker.on_record(record)
                if record.kind == RecordKind.EXIT:
                    self._forget(worker)
        if stamp is not None:
            self._echo(stamp)

    def _on_progress(self, report: ProgressReport) -> None:
        worker = self.workers.get(report.worker)
        if worker is not None:
            worker.page.report(report)

    def _forget(self, worker: RemoteWorker) -> None:
        self._kills.pop(worker.worker_id, None)
        self.workers.pop(worker.worker_id, None)  # the reactor's thread may have removed it, when the lease was over
        self._on_change(self)

    # Losing it -------------------------------------------------------------------------------------------

    def next_timer(self) -> float:
        """Return the time (`time.monotonic`) of the next deadline, infinity if there is none."""
        if self.is_over:
            return float("inf")
        lease = self._lease.over_at if self.is_lost else self._lease.silent_at
        return min([time.monotonic() + lease - boot_clock(), *self._kills.values()])

    def on_timer(self, now: float) -> None:
        """Handle the deadlines that have passed."""
        for worker_id in [worker_id for worker_id, when in tuple(self._kills.items()) if when <= now]:
            self._kills.pop(worker_id, None)  # the thread that reads replies may have removed it
            if (worker := self.workers.get(worker_id)) is not None:
                worker.end()
        if not self.is_lost and boot_clock() >= self._lease.silent_at:
            self.give_up(f"which was silent for {self._lease_seconds:g} s")
        if self.is_lost and boot_clock() >= self._lease.over_at:
            self._set_over()

    def give_up(self, reason: str) -> None:
        """Count the node as lost, and its workers as ended; they are over when the lease is."""
        if not self._close_link(reason):
            return
        workers = tuple(self.workers.values())
        tell_node(logging.WARNING, self.name, "node %s, %s, is lost with %d workers", self.name, reason, len(workers))
        for worker in workers:
            self._end_lost(worker)
        self._kills.clear()
        self._on_change(self)
        self._loop.note_timer(time.monotonic())

    def _close_link(self, reason: str) -> bool:
        """Count the node as lost; return False if it is lost already."""
        with self._watch_lock:
            if self.is_lost:
                return False
            self._loss = NodeLoss(self.name, reason)
            self.is_lost = True
            self._loop.unwatch_channel(self._link.fileno())
        self._link.close()
        return True

    def _end_lost(self, worker: RemoteWorker) -> None:
        if worker.loss is None and self._loss is not None:
            worker.on_node_lost(self._loss)
        if self.is_over:
            worker.set_over()

    def _set_over(self) -> None:
        self.is_over = True
        self._loop.unwatch_timers(self)
        workers = tuple(self.workers.values())
        self.workers.clear()
        for worker in workers:
            worker.set_over()
        self._on_change(self)

    def end(self) -> None:
        """End the agent with all its workers."""
        self.send(Record(RecordKind.END))
        self._close_link("which was ended")
        self._loop.unwatch_timers(self)
        self.is_over = True
