"""The node agent: hosts the workers of one caller on this machine, and relays their frames over one link.

It is started with one line of JSON on its standard input, a pipe (`AgentOrders`), and answers with one line, the port
on which it waits for its caller. It ends with the link, when the caller says so, when its lease is over, or when the
pipe is closed: the process that started it has ended. Its workers end with it, as those of any caller do.

usage: python -m envactors.remote.agent
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from envactors.arrays.slab import Slab
from envactors.backends.base import LaunchRefusedError, Stream
from envactors.backends.process import MappedMemory, ProcessBackend, ProcessWorker
from envactors.remote.greeting import PATIENCE, GreetingError, answer_greeting, refuse
from envactors.remote.keeper import LEASE_FORMAT
from envactors.remote.lease import WorkerLease
from envactors.remote.link import Link
from envactors.remote.records import (
    ExitNotice,
    LaunchOrder,
    LinkCorruptError,
    ProgressReport,
    Record,
    RecordKind,
)
from envactors.remote.rows import apply_requests, pack_results
from envactors.remote.starting import AgentOrders, module_command
from envactors.remote.tls import make_server_context
from envactors.system.clocks import boot_clock
from envactors.system.memory import SharedFile
from envactors.system.polling import WRITABLE, Poller
from envactors.system.processes import open_sentinel, resident_memory
from envactors.wire import bundle
from envactors.wire.channel import ChannelCorruptError
from envactors.wire.control_page import ASLEEP, FINISHED, LEASE, OVERFLOWS
from envactors.wire.messages import Frame, Kind

# How long to wait for the caller, in seconds.
_PATIENCE = 60.0
# How often to say what busy workers are at, in seconds.
_TICK = 0.05
# How much may wait to be sent before no more output of workers is read, in bytes.
_MOST_OUTPUT = 1 << 20
_OUTPUT_CHUNK = 1 << 16
_STDIN = 0
STREAM_CODES: dict[Stream, int] = {"stdout": 1, "stderr": 2}


class HostedWorker:
    """One worker of this node.

    Args:
        number: Its number on the link.
        memory: The number of the memory that its steps may go through, 0 for none.
        worker: The worker.

    Attributes:
        last_call: The call id of the last frame that it was sent.
        at_end: Whether nothing more comes through its channel.
        starting: Whether its envs are still being made.
        overflows: How many parts of `Kind.OVERFLOW` frames were passed on.
    """

    def __init__(self, number: int, memory: int, worker: ProcessWorker) -> None:
        self.number = number
        self.memory = memory
        self.worker = worker
        self.last_call = 0
        self.at_end = False
        self.starting = True
        self.overflows = 0
        # The steps that it was posted through shared memory: the call id, whether results stream, the rows that are
        # to be sent.
        self.steps: deque[tuple[int, bool, list[int]]] = deque()

    def progress(self) -> ProgressReport:
        """Return what it is at."""
        call_id, ended, position, method, since = self.worker.page.progress()
        rss = resident_memory(self.worker.pid)
        return ProgressReport(self.number, call_id, ended, position, method, time.monotonic() - since, rss)

    @property
    def is_busy(self) -> bool:
        """Whether it has not finished what it was sent."""
        return self.worker.page.counters[FINISHED] < self.last_call


class Agent:
    """Hosts workers until the link ends.

    Args:
        link: The link to the caller.
        orders: What the agent was told.
        stamp: The stamp that the caller was sent with the greeting.
        lease_file: Where the keeper reads until when workers may run.
    """

    def __init__(self, link: Link, orders: AgentOrders, stamp: float, lease_file: mmap.mmap) -> None:
        self._link = link
        self._backend = ProcessBackend(**orders.options)
        self._backend.retain({})
        self._retained: list[dict[str, str]] = [{}]
        self._heartbeat = orders.heartbeat
        self._lease = WorkerLease(orders.lease, stamp)
        self._lease_file = lease_file
        self._workers: dict[int, HostedWorker] = {}
        # What is to be started, in order, with the frames that have come for it.
        self._queue: deque[tuple[int, LaunchOrder]] = deque()
        self._early: dict[int, list[Record]] = {}
        self._poller = Poller()
        self._handlers: dict[int, Callable[[int], None]] = {}
        # The descriptors of outputs that are not read until there is less to be sent.
        self._paused: set[int] = set()
        self._ending = False
        # By number: the memories of vectors, and their slabs once they are known.
        self._memories: dict[int, MappedMemory] = {}
        self._slabs: dict[int, Slab] = {}
        self.watch(link.fileno(), self._on_link)
        self.watch(_STDIN, self._on_stdin)
        self._show_lease()

    # The loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve the caller until the link ends or the lease is over; then end all workers."""
        next_beat = next_tick = 0.0
        writing = False
        try:
            while not self._ending and boot_clock() < self._lease.until:
                now = time.monotonic()
                if now >= next_beat:
                    self._beat()
                    next_beat = now + self._heartbeat
                busy = [worker for worker in self._workers.values() if worker.is_busy]
                if busy and now >= next_tick:
                    self._report(busy)
                    next_tick = now + _TICK
                self._launch_queued()
                if writing is not (self._link.backlog > 0):
                    writing = not writing
                    self._poller.watch(self._link.fileno(), writable=writing)
                if self._paused and self._link.backlog < _MOST_OUTPUT:
                    for fd in self._paused:
                        self._poller.watch(fd)
                    self._paused.clear()
                left = self._lease.until - boot_clock()
                timeout = min(next_beat - now, left, _TICK if busy else left)
                events = self._poller.poll(max(0.0, timeout))
                self._link.cork()  # one write per round, whatever it is made of
                for fd, mask in events:
                    if (handler := self._handlers.get(fd)) is not None:
                        handler(mask)
                self._link.uncork()
        except (OSError, LinkCorruptError) as error:
            print(f"envactors agent: the link is given up: {error}", file=sys.stderr)
        finally:
            self._end_workers()

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call a function with the event mask when a descriptor is readable."""
        self._handlers[fd] = handler
        self._poller.add(fd)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._paused.discard(fd)
            self._poller.remove(fd)

    def _beat(self) -> None:
        self._link.send(Record(RecordKind.BEAT, call_id=int(boot_clock() * 1e9)))
        if self._workers:
            self._report(list(self._workers.values()))

    def _report(self, workers: list[HostedWorker]) -> None:
        reports = [tuple(worker.progress()) for worker in workers]
        self._link.send(Record(RecordKind.PROGRESS, payload=pickle.dumps(reports)))

    def _show_lease(self) -> None:
        LEASE_FORMAT.pack_into(self._lease_file, 0, self._lease.until)
        for worker in self._workers.values():
            worker.worker.page.times[LEASE] = self._lease.until

    # From the caller -------------------------------------------------------------------------------------

    def _on_link(self, mask: int) -> None:
        if mask & WRITABLE:
            self._link.flush()
        records = self._link.receive()
        if records is None:
            self._ending = True
            return
        for record in records:
            self._on_record(record)

    def _on_stdin(self, _mask: int) -> None:
        self._ending = not os.read(_STDIN, _OUTPUT_CHUNK)

    def _on_record(self, record: Record) -> None:
        if record.kind == RecordKind.ECHO:
            self._lease.renew(record.call_id / 1e9)
            self._show_lease()
        elif record.kind == RecordKind.END:
            self._ending = True
        elif record.kind == RecordKind.LAUNCH:
            self._queue.append((record.worker, LaunchOrder(*pickle.loads(record.payload))))
            self._early[record.worker] = []
        elif record.kind == RecordKind.MEMORY:
            self._on_memory(record.call_id, record.payload)
        elif (worker := self._workers.get(record.worker)) is not None:
            self._on_workers_record(worker, record)
        elif record.worker in self._early:
            self._early[record.worker].append(record)

    def _on_workers_record(self, worker: HostedWorker, record: Record) -> None:
        if record.kind == RecordKind.FRAME:
            self._forward(worker, Frame(record.frame_kind, record.incarnation, record.call_id, record.payload))
        elif record.kind == RecordKind.REQUESTS:
            self._post_rows(worker, record)
        elif record.kind == RecordKind.KILL:
            worker.worker.kill()
        elif record.kind == RecordKind.ASK_STACKS:
            worker.worker.ask_stacks()

    def _forward(self, worker: HostedWorker, frame: Frame) -> None:
        channel, page = worker.worker.channel, worker.worker.page
        worker.last_call = frame.call_id
        page.set_wait(ASLEEP)
        with contextlib.suppress(OSError):  # it has ended, which its sentinel tells
            channel.send(frame)
            page.post_frame()
            if channel.backlog:
                self._poller.watch(channel.fileno(), writable=True)

    # Steps through shared memory ---------------------------------------------------------------------------

    def _on_memory(self, number: int, layout: bytes | bytearray | memoryview) -> None:
        if not layout:
            self._slabs.pop(number, None)
            if (memory := self._memories.pop(number, None)) is not None:
                memory.close()
        elif number not in self._slabs:
            self._slabs[number], _ = self._memory(number).create(pickle.loads(layout))

    def _memory(self, number: int) -> MappedMemory:
        if number not in self._memories:
            self._memories[number] = self._backend.make_memory()
        return self._memories[number]

    def _post_rows(self, worker: HostedWorker, record: Record) -> None:
        slab, page, stream = self._slabs[worker.memory], worker.worker.page, bool(record.frame_kind)
        rows = apply_requests(slab, record.payload)
        worker.last_call = record.call_id
        worker.steps.append((record.call_id, stream, rows))
        if stream:
            page.ring_at(1)
            page.ring_at_end(record.call_id)
        page.post_step(record.call_id, ASLEEP, stream, rows)

    def _on_bell(self, fd: int) -> None:
        for worker in tuple(self._workers.values()):
            if worker.steps and worker.worker.page.to_parent.fileno() == fd:
                self._send_results(worker)

    def _send_results(self, worker: HostedWorker, *, all_complete: bool = False) -> None:
        """Send the results that are of use: those of finished steps, and single ones of those that stream."""
        slab, counters = self._slabs.get(worker.memory), worker.worker.page.counters
        if slab is None:
            return
        finished, ready = counters[FINISHED], []
        for call_id, stream, rows in worker.steps:
            if finished >= call_id or stream or all_complete:
                complete = [row for row in rows if slab.completed[row] == slab.requested[row]]
                ready += complete
                rows[:] = [row for row in rows if row not in complete]
        over = bool(worker.steps) and finished >= worker.steps[0][0]
        while worker.steps and finished >= worker.steps[0][0]:
            worker.steps.popleft()
        if ready or over:  # the end of a step that streams comes after its results
            while counters[OVERFLOWS] > worker.overflows and self._read_frames(worker):
                pass  # what belongs to the rows comes before them
            payload = pack_results(slab, ready) if ready else b""
            self._link.send(
                Record(RecordKind.RESULTS, worker.number, payload, incarnation=worker.overflows, call_id=finished)
            )

    # Workers ---------------------------------------------------------------------------------------------

    def _launch_queued(self) -> None:
        limit = self._backend.max_starting
        while self._queue:
            if limit is not None and sum(worker.starting for worker in self._workers.values()) >= limit:
                return
            self._launch(*self._queue.popleft())

    def _launch(self, number: int, order: LaunchOrder) -> None:
        early = self._early.pop(number)
        if any(record.kind == RecordKind.KILL for record in early):
            self._send_exit(number, ExitNotice(None))
            return
        if order.env_vars not in self._retained:
            self._backend.retain(order.env_vars)
            self._retained.append(order.env_vars)
        try:
            memory = self._memory(order.memory) if order.memory else None
            worker = HostedWorker(number, order.memory, self._backend.launch(order.name, order.env_vars, memory))
        except Exception as error:
            for_good = isinstance(error, LaunchRefusedError)
            self._send_exit(number, ExitNotice(None, refusal=f"{error}", for_good=for_good))
            return
        self._workers[number] = worker
        worker.worker.page.times[LEASE] = self._lease.until
        self._link.send(Record(RecordKind.LAUNCHED, number, call_id=worker.worker.pid))
        self.watch(worker.worker.channel.fileno(), lambda mask: self._on_channel(worker, mask))
        self.watch(worker.worker.sentinel, lambda _mask: self._on_exit(worker))
        for stream, fd in worker.worker.outputs:
            self.watch(fd, lambda _mask, stream=stream, fd=fd: self._on_output(worker, stream, fd))  # type: ignore[misc]
        bell = worker.worker.page.to_parent
        self._handlers[bell.fileno()] = lambda _mask: self._on_bell(bell.fileno())
        bell.register(self._poller)
        for record in early:
            self._on_workers_record(worker, record)

    def _on_channel(self, worker: HostedWorker, mask: int) -> None:
        channel = worker.worker.channel
        if mask & WRITABLE:
            with contextlib.suppress(OSError):
                channel.flush()
            if not channel.backlog:
                self._poller.watch(channel.fileno())
        self._read_frames(worker)

    def _read_frames(self, worker: HostedWorker) -> bool:
        """Pass on what has come; return whether anything had."""
        frames: list[Frame] | None = None
        try:
            frames = worker.worker.channel.receive()
        except BlockingIOError:
            return False
        except ChannelCorruptError:
            worker.worker.kill()
        except OSError:
            pass  # it has ended
        if frames is None:
            worker.at_end = True
            self._unwatch(worker.worker.channel.fileno())
            return False
        for kind, incarnation, call_id, payload in frames:
            worker.starting &= kind == Kind.ENV_MADE
            worker.overflows += sum(1 for _ in bundle.unpack(payload)) if kind == Kind.OVERFLOW else 0
            self._link.send(Record(RecordKind.FRAME, worker.number, payload, kind, incarnation, call_id))
        return True

    def _on_output(self, worker: HostedWorker, stream: Stream, fd: int) -> None:
        if self._link.backlog > _MOST_OUTPUT:
            self._poller.watch(fd, readable=False)  # the worker waits, as it would for any reader
            self._paused.add(fd)
            return
        if not self._read_output(worker, stream, fd):
            self._unwatch(fd)

    def _read_output(self, worker: HostedWorker, stream: Stream, fd: int) -> bool:
        """Pass on some output; return False at its end."""
        try:
            data = os.read(fd, _OUTPUT_CHUNK)
        except BlockingIOError:
            return True
        self._link.send(Record(RecordKind.OUTPUT, worker.number, data, STREAM_CODES[stream]))
        return bool(data)

    def _on_exit(self, worker: HostedWorker) -> None:
        while not worker.at_end and self._read_frames(worker):
            pass
        self._send_results(worker, all_complete=True)
        for _, _, rows in worker.steps:
            slab = self._slabs[worker.memory]
            slab.requested[rows] = slab.completed[rows]  # the next worker must not take it for its own
        self._unwatch(worker.worker.channel.fileno())
        self._unwatch(worker.worker.sentinel)
        for stream, fd in worker.worker.outputs:
            self._unwatch(fd)
            self._read_output(worker, stream, fd)
        progress, stacks = worker.progress(), worker.worker.stacks()
        status = worker.worker.reap()
        del self._workers[worker.number]
        self._send_exit(worker.number, ExitNotice(progress, *status, stacks=stacks))

    def _send_exit(self, number: int, notice: ExitNotice) -> None:
        notice = notice._replace(progress=notice.progress and tuple(notice.progress))  # type: ignore[arg-type]
        self._link.send(Record(RecordKind.EXIT, number, pickle.dumps(tuple(notice))))

    def _end_workers(self) -> None:
        for worker in self._workers.values():
            worker.worker.kill()
        for worker in self._workers.values():
            with contextlib.suppress(OSError):
                worker.worker.reap()
        for env_vars in self._retained:
            self._backend.release(env_vars)
        self._link.close()


def main() -> None:
    """Run an agent: see the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's
    orders = AgentOrders.from_json(sys.stdin.readline())
    sys.path.extend(entry for entry in orders.path if entry not in sys.path)
    tls = None if orders.certificates is None else make_server_context(orders.certificates)
    listener = socket.create_server((orders.host, 0), family=socket.AF_INET6 if ":" in orders.host else socket.AF_INET)
    print(json.dumps({"port": listener.getsockname()[1], "pid": os.getpid()}), flush=True)
    with open(os.devnull, "wb") as null:  # noqa: PTH123
        os.dup2(null.fileno(), 1)  # what reads the line above may be gone
    link, stamp = _wait_for_caller(listener, orders, tls)
    lease_file = SharedFile("envactors-lease")
    lease = lease_file.map(mmap.PAGESIZE)
    LEASE_FORMAT.pack_into(lease, 0, stamp + orders.lease)
    own, fds = open_sentinel(os.getpid()), (lease_file.fileno(),)
    command = module_command("envactors.remote.keeper", orders.path, str(own), str(lease_file.fileno()))
    keeper = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(own, *fds))  # noqa: S603 # its own module
    agent = Agent(link, orders, stamp, lease)
    agent.watch(listener.fileno(), lambda _mask: _refuse_second(listener, tls))
    agent.run()
    keeper.kill()
    keeper.wait()


def _wait_for_caller(listener: socket.socket, orders: AgentOrders, tls: ssl.SSLContext | None) -> tuple[Link, float]:
    end = time.monotonic() + _PATIENCE
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(_STDIN, select.POLLIN)
    listener.setblocking(False)
    while events := poll.poll(max(0.0, 1000 * (end - time.monotonic()))):
        if _STDIN in (fd for fd, _ in events) and not os.read(_STDIN, _OUTPUT_CHUNK):
            sys.exit()  # the process that started this one has ended, or needs no agent any more
        with contextlib.suppress(BlockingIOError):
            sock, _ = listener.accept()
            stamp = boot_clock()
            node = {"pid": os.getpid(), "stamp": stamp}
            try:
                sock = _encrypt(sock, tls, PATIENCE)
                answer_greeting(sock, orders.secret, orders.epoch, node)
            except (OSError, GreetingError) as error:
                print(f"envactors agent: a caller was refused: {error}", file=sys.stderr)
                sock.close()
                continue
            return Link(sock), stamp
    sys.exit(f"envactors agent: no caller came within {_PATIENCE:.0f} s")


def _encrypt(sock: socket.socket, tls: ssl.SSLContext | None, patience: float) -> socket.socket:
    sock.settimeout(patience)
    return sock if tls is None else tls.wrap_socket(sock, server_side=True)


def _refuse_second(listener: socket.socket, tls: ssl.SSLContext | None) -> None:
    with contextlib.suppress(OSError):
        sock, _ = listener.accept()
        # In a thread: the handshake takes as long as the other side likes.
        threading.Thread(target=_say_taken, args=(sock, tls), daemon=True).start()


def _say_taken(sock: socket.socket, tls: ssl.SSLContext | None) -> None:
    with contextlib.suppress(OSError, GreetingError), _encrypt(sock, tls, 1.0) as encrypted:
        encrypted.recv(_OUTPUT_CHUNK)  # closing before the greeting is read would discard the answer
        refuse(encrypted, "this agent has a caller already")


if __name__ == "__main__":
    main()
