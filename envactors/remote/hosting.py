"""The workers of a node: starts them, and keeps the memory that they share with the agent."""

from __future__ import annotations

import functools
import pickle
from collections import deque
from typing import Any

from envactors.backends.base import LaunchRefusedError
from envactors.backends.process import MappedMemory, ProcessBackend, ProcessUse, ProcessWorker
from envactors.remote.hosted_worker import HostedWorker, send_exit
from envactors.remote.link import Link
from envactors.remote.records import PLACE, ExitNotice, LaunchOrder, Record, RecordKind
from envactors.remote.rows import MirroredRows
from envactors.remote.watches import Watches
from envactors.runtime import ThreadPool
from envactors.system.polling import Doorbell


class Hosting:
    """All workers of this node.

    A separate thread starts them, so that the agent is not blocked. It lasts as long as the agent.

    Args:
        link: The link to the caller.
        watches: Watches their descriptors.
        options: Arguments for `envactors.ProcessBackend`.
        lease: The time until which workers may begin requests.

    Attributes:
        workers: The workers that have not ended, by id.
    """

    def __init__(self, link: Link, watches: Watches, options: dict[str, Any], lease: float) -> None:
        self.workers: dict[int, HostedWorker] = {}
        self._link = link
        self._watches = watches
        self._backend = ProcessBackend(**options)
        # The uses of the backend, by environment variables. The first one keeps a helper for most workers.
        self._uses: dict[frozenset[tuple[str, str]], ProcessUse] = {}
        self._use({})
        self._lease = lease
        # The workers to be started: their ids and their pickled orders.
        self._queue: deque[tuple[int, bytes | bytearray | memoryview]] = deque()
        # The records for workers that are not started yet, by id.
        self._early: dict[int, list[Record]] = {}
        # How many workers are being started.
        self._launching = 0
        self._launcher = ThreadPool("envactors-launcher", runs_user_code=False)
        # What the launcher has started, or the errors. It rings the doorbell.
        self._launched: deque[tuple[int, LaunchOrder, ProcessWorker | Exception]] = deque()
        self._bell = Doorbell()
        watches.add(self._bell.fileno(), lambda _mask: self._take_launched())
        # The memories of vectors, by id.
        self._memories: dict[int, MappedMemory] = {}
        # Their rows once the layout is known.
        self._rows: dict[int, MirroredRows] = {}
        # Why a memory cannot be used.
        self._broken_memories: dict[int, str] = {}
        # The parts of each memory, by place, until the caller frees them.
        self._parts: dict[int, dict[tuple[int, int], memoryview]] = {}

    # From the caller -------------------------------------------------------------------------------------

    def on_record(self, record: Record) -> None:
        """Handle a record from the caller. An error ends only the worker or the memory that it concerns."""
        if record.kind == RecordKind.LAUNCH:
            self._queue.append((record.worker, record.payload))
            self._early[record.worker] = []
            self.launch_queued()
        elif record.kind in (RecordKind.MEMORY, RecordKind.PART):
            handle = self._on_memory if record.kind == RecordKind.MEMORY else self._on_part
            try:
                handle(record.call_id, record.payload)
            except Exception as error:
                self._give_up_memory(record.call_id, error)
        elif (worker := self.workers.get(record.worker)) is not None:
            worker.on_record(record)
        elif record.worker in self._early:
            if record.kind == RecordKind.KILL and self._withdraw(record.worker):
                send_exit(self._link, record.worker, ExitNotice(None))
            else:
                self._early[record.worker].append(record)

    def _on_memory(self, memory_id: int, layout: bytes | bytearray | memoryview) -> None:
        self._broken_memories.pop(memory_id, None)  # it is retried for each worker, or no longer needed
        if not layout:
            self._rows.pop(memory_id, None)
            self._parts.pop(memory_id, None)
            if (memory := self._memories.pop(memory_id, None)) is not None:
                memory.close()
        elif memory_id not in self._rows:
            slab, _ = self._memory(memory_id).create(pickle.loads(layout))
            self._rows[memory_id] = MirroredRows(slab)

    def _on_part(self, memory_id: int, content: bytes | bytearray | memoryview) -> None:
        if memory_id not in self._memories:
            return  # the vector was closed
        place = PLACE.unpack_from(content)
        if len(content) > PLACE.size:
            self._part(memory_id, place)[:] = memoryview(content)[PLACE.size :]
        else:  # the caller has freed it
            self._parts.get(memory_id, {}).pop(place, None)

    def _part(self, memory_id: int, place: tuple[int, int]) -> memoryview:
        """Return a part of a memory, which is zeros until something is written there."""
        parts = self._parts.setdefault(memory_id, {})
        if place not in parts:
            parts[place] = self._memory(memory_id).add(*place)
        return parts[place]

    def _give_up_memory(self, memory_id: int, error: Exception) -> None:
        """End the workers of a memory that could not be allocated."""
        self._broken_memories[memory_id] = why = f"its node has no memory for the vector: {error!r}"
        for worker in self.workers.values():
            if worker.memory_id == memory_id:
                worker.end_because(why)

    def _memory(self, memory_id: int) -> MappedMemory:
        if memory_id not in self._memories:
            self._memories[memory_id] = self._backend.make_memory()
        return self._memories[memory_id]

    def set_lease(self, until: float) -> None:
        """Set the time until which workers may begin requests."""
        self._lease = until
        for worker in self.workers.values():
            worker.set_lease(until)

    def busy(self) -> list[HostedWorker]:
        """Return the workers with unfinished requests."""
        return [worker for worker in self.workers.values() if worker.is_busy]

    # Starting --------------------------------------------------------------------------------------------

    def launch_queued(self) -> None:
        """Start queued workers up to the limit of starting workers."""
        limit = self._backend.traits.max_starting
        while self._queue:
            starting = self._launching + sum(worker.starting for worker in self.workers.values())
            if limit is not None and starting >= limit:
                return
            worker_id, payload = self._queue.popleft()
            try:
                order = LaunchOrder(*pickle.loads(payload))
                use = self._use(order.env_vars)
                memory = self._memory(order.memory_id) if order.memory_id else None
            except Exception as error:
                self._refuse(worker_id, error)
                continue
            self._launching += 1
            self._launcher.submit(functools.partial(self._launch, worker_id, order, use, memory))

    def _withdraw(self, worker_id: int) -> bool:
        """Forget a worker whose start has not begun; return whether there was one."""
        waiting = [start for start in self._queue if start[0] != worker_id]
        was_waiting = len(waiting) < len(self._queue)
        if was_waiting:
            self._queue = deque(waiting)
            del self._early[worker_id]
        return was_waiting

    def _refuse(self, worker_id: int, error: Exception) -> None:
        """Report to the caller why a worker cannot be started."""
        self._early.pop(worker_id, None)
        for_good = isinstance(error, LaunchRefusedError)
        send_exit(self._link, worker_id, ExitNotice(None, refusal=str(error) or repr(error), for_good=for_good))

    def _use(self, env_vars: dict[str, str]) -> ProcessUse:
        """Return the use of the backend for workers with these environment variables."""
        key = frozenset(env_vars.items())
        if key not in self._uses:
            self._uses[key] = self._backend.use(env_vars)
            self._uses[key].open()
        return self._uses[key]

    def _launch(self, worker_id: int, order: LaunchOrder, use: ProcessUse, memory: MappedMemory | None) -> None:
        """Start a worker; runs in the launcher's thread."""
        outcome: ProcessWorker | Exception
        try:
            outcome = use.start(order.name, memory, order.envs)
        except Exception as error:
            outcome = error
        self._launched.append((worker_id, order, outcome))
        self._bell.ring()

    def _take_launched(self) -> None:
        self._bell.clear()
        while self._launched:
            worker_id, order, outcome = self._launched.popleft()
            self._launching -= 1
            if isinstance(outcome, Exception):
                self._refuse(worker_id, outcome)
            else:
                self._take(worker_id, order, outcome)
        self.launch_queued()

    def _take(self, worker_id: int, order: LaunchOrder, started: ProcessWorker) -> None:
        """Begin to serve a worker that has started."""
        early = self._early.pop(worker_id)
        rows = functools.partial(self._rows.get, order.memory_id)
        part = functools.partial(self._part, order.memory_id)
        worker = HostedWorker(
            worker_id, started, order, rows, part, self._link, self._watches, self.launch_queued, self._forget
        )
        self.workers[worker_id] = worker
        with worker.serving():
            worker.set_lease(self._lease)
            worker.introduce()
        if (why := self._broken_memories.get(order.memory_id)) is not None:
            worker.end_because(why)
        for record in early:
            worker.on_record(record)

    def _forget(self, worker: HostedWorker) -> None:
        del self.workers[worker.worker_id]
        self.launch_queued()

    def end(self) -> None:
        """End all workers."""
        for worker in self.workers.values():
            worker.end()
        for worker in self.workers.values():
            worker.reap()
        for use in self._uses.values():
            use.close()
