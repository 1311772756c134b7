"""The caller's side of a node: its link, its lease, and its workers."""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence

from envactors.backends.base import NodeLoss
from envactors.loop import Timer
from envactors.remote.lease import NodeLease
from envactors.remote.link import Link
from envactors.remote.notices import log_node
from envactors.remote.records import PLACE, LinkCorruptError, ProgressReport, Record, RecordKind
from envactors.remote.rows import MirroredMemory
from envactors.remote.worker import RemoteWorker
from envactors.runtime import Runtime
from envactors.system.clocks import boot_clock
from envactors.system.polling import WRITABLE

# How long the agent may take to report the end of a killed worker, in seconds. Then the worker counts as ended.
_KILL_PATIENCE = 0.7


class Node:
    """A node with its agent.

    Args:
        name: The name of the node.
        link: The link to its agent.
        lease: The length of the lease, in seconds.
        runtime: Its loop watches the link and runs the timers.
        on_change: Called, in any thread, when there may be more room, or the node is lost or over.

    Attributes:
        workers: Its workers that have not ended, by id.
        is_lost: Whether it is lost.
        is_over: Whether it is lost and none of its workers can still be running.
        draining: Whether no more workers are placed on it.
    """

    def __init__(
        self, name: str, link: Link, lease: float, runtime: Runtime, on_change: Callable[[Node], None]
    ) -> None:
        self.name = name
        self.workers: dict[int, RemoteWorker] = {}
        self.is_lost: bool = False
        self.is_over: bool = False
        self.draining = False
        self._link = link
        self._lease_seconds = lease
        self._lease = NodeLease(lease, boot_clock())
        self._runtime = runtime
        self._loop = runtime.loop
        # The parts of memories that the agent has: for each memory, the id of the content by place.
        self._contents: dict[int, dict[tuple[int, int], int]] = {}
        # Held while a memory is announced, so that an older content never follows a newer one.
        self._announce_lock = threading.RLock()
        self._on_change = on_change
        # Guards `is_lost`, and what the link is watched for.
        self._watch_lock = threading.Lock()
        self._wants_write = False
        # How the node was lost; None before.
        self._loss: NodeLoss | None = None
        self._loop.watch(link.fileno(), self._on_link)
        self._lease_timer: Timer = self._schedule_lease_check()

    @property
    def envs(self) -> int:
        """How many envs its workers have."""
        return sum(worker.envs for worker in tuple(self.workers.values()))

    # Sending ---------------------------------------------------------------------------------------------

    def announce(self, memory: MirroredMemory) -> None:
        """Send the agent the layout and content of a memory, or have it free the memory."""
        memory_id = memory.memory_id
        with self._announce_lock:
            if memory.is_closed:
                self._contents.pop(memory_id, None)
                self.send(Record(RecordKind.MEMORY, call_id=memory_id))
            elif memory.layout is not None:
                self.send(Record(RecordKind.MEMORY, payload=pickle.dumps(memory.layout), call_id=memory_id))
                known = self._contents.setdefault(memory_id, {})
                for place, content in memory.published.items():
                    part = memory.parts.get(place)
                    if part is not None and known.get(place) != content:
                        self.send(Record(RecordKind.PART, payload=PLACE.pack(*place) + part[:], call_id=memory_id))
                        known[place] = content

    def free(self, memory: MirroredMemory, places: Sequence[tuple[int, int]]) -> None:
        """Have the agent free parts of a memory that the caller has freed."""
        with self._announce_lock:
            known = self._contents.get(memory.memory_id, {})
            for place in places:
                known.pop(place, None)
                self.send(Record(RecordKind.PART, payload=PLACE.pack(*place), call_id=memory.memory_id))

    def place(self, worker: RemoteWorker) -> None:
        """Start a worker here."""
        if worker.memory is not None:
            self.announce(worker.memory)
        self.workers[worker.worker_id] = worker
        worker.place(self)
        if self.is_lost:  # another thread may have lost the node since it was chosen, without knowing of this worker
            self._loop.call_soon(lambda: self._end_lost(worker))

    def send(self, record: Record) -> None:
        """Have the loop send a record; if that fails, the node is lost.

        So an interrupt in the calling thread never breaks a record, and records that are sent together need one write.
        """
        if not self.is_lost:
            self._link.add(record)
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write as much as fits, in the loop."""
        if self.is_lost:
            return
        try:
            self._link.flush()
        except OSError as error:
            self.give_up(f"whose link broke ({error})")
        else:
            self._follow_backlog()

    def kill(self, worker: RemoteWorker) -> None:
        """Kill a worker; if its end is not reported soon, it counts as ended."""
        self.send(Record(RecordKind.KILL, worker.worker_id))
        self._loop.call_at(time.monotonic() + _KILL_PATIENCE, functools.partial(self._end_killed, worker.worker_id))

    def _end_killed(self, worker_id: int) -> None:
        """Count a killed worker as ended, unless its end was reported."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.end()

    def _follow_backlog(self) -> None:
        """Watch the link for being writable while it is full."""
        with self._watch_lock:
            if not self.is_lost and self._link.is_full is not self._wants_write:
                self._wants_write = self._link.is_full
                self._loop.want_write(self._link.fileno(), self._wants_write)

    def _echo(self, stamp: float) -> None:
        self._lease.echo(boot_clock())
        self.send(Record(RecordKind.ECHO, call_id=int(stamp * 1e9)))

    # Receiving, in the loop ------------------------------------------------------------------------------

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
        self.workers.pop(worker.worker_id, None)
        self._on_change(self)

    # Losing it -------------------------------------------------------------------------------------------

    def _schedule_lease_check(self) -> Timer:
        """Check the lease again when it may be over. Each sign of life puts that off, so the timer may come early."""
        ends_at = self._lease.over_at if self.is_lost else self._lease.silent_at
        return self._loop.call_at(time.monotonic() + ends_at - boot_clock(), self._check_lease)

    def _check_lease(self) -> None:
        """Give the node up if it is silent, and its workers once none of them can be running."""
        if self.is_over:
            return
        if not self.is_lost and boot_clock() >= self._lease.silent_at:
            self.give_up(f"which was silent for {self._lease_seconds:g} s")
        if self.is_lost and boot_clock() >= self._lease.over_at:
            self._set_over()
        else:
            self._lease_timer = self._schedule_lease_check()

    def give_up(self, reason: str) -> None:
        """Count the node as lost, and its workers as ended; they are over when the lease is."""
        if not self._lose(reason):
            return
        self._link.close()
        workers = tuple(self.workers.values())
        text = "node %s, %s, is lost with %d workers"
        log_node(self._runtime, logging.WARNING, self.name, text, self.name, reason, len(workers))
        for worker in workers:
            self._end_lost(worker)
        self._on_change(self)

    def _lose(self, reason: str) -> bool:
        """Count the node as lost, and watch its link no more; return False if it is lost already."""
        with self._watch_lock:
            if self.is_lost:
                return False
            self._loss = NodeLoss(self.name, reason)
            self.is_lost = True
            self._loop.unwatch(self._link.fileno())
        return True

    def _end_lost(self, worker: RemoteWorker) -> None:
        if worker.loss is None and self._loss is not None:
            worker.on_node_lost(self._loss)
        if self.is_over:
            worker.end(is_over=True)

    def _set_over(self) -> None:
        self.is_over = True
        workers = tuple(self.workers.values())
        self.workers.clear()
        for worker in workers:
            worker.end(is_over=True)
        self._on_change(self)

    def end(self) -> None:
        """End the agent with all its workers."""
        if self._lose("which was ended"):
            with contextlib.suppress(OSError):
                self._link.send(Record(RecordKind.END))
            self._link.close()
        self._lease_timer.cancel()
        self.is_over = True
