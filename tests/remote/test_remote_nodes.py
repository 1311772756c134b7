"""What threads of the caller do to its nodes at the same moment: each case in the one order that matters."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
from pathlib import Path

import numpy as np
import pytest
from helpers import SOON

from envactors.backends.base import NodeLoss
from envactors.loop import Timer
from envactors.mailbox.messages import Frame, Kind
from envactors.mailbox.slab import Layout
from envactors.mailbox.specs import ArraySpec
from envactors.remote import LocalNodes, records
from envactors.remote import node as node_module
from envactors.remote import session as session_module
from envactors.remote import worker as worker_module
from envactors.remote.backend import RemoteBackend
from envactors.remote.launching import NodeAddress
from envactors.remote.link import Link
from envactors.remote.node import Node
from envactors.remote.records import PLACE, Record, RecordKind
from envactors.remote.rows import MirroredMemory
from envactors.remote.session import Session
from envactors.remote.watches import Watches
from envactors.remote.worker import RemoteWorker
from envactors.system.polling import WRITABLE, Doorbell

LEASE = 5.0
numbers = itertools.count(1)


class Loop:
    """A loop whose functions and timers run when the test says so, and which forgives as little as the real one."""

    def __init__(self):
        self.channels, self.timers, self.jobs = {}, [], []

    def watch(self, fd, callback):
        self.channels[fd] = False

    def unwatch(self, fd):
        self.channels.pop(fd, None)

    def want_write(self, fd, wanted):
        assert fd in self.channels, "epoll refuses a descriptor that it does not know"
        self.channels[fd] = wanted

    def call_at(self, when, callback):
        timer = Timer(when, callback)
        self.timers.append(timer)
        return timer

    def call_soon(self, callback):
        self.jobs.append(callback)

    def run(self):
        while self.jobs:
            self.jobs.pop(0)()

    def run_timers(self):
        timers, self.timers = self.timers, []
        for timer in timers:
            timer.run()


class Runtime:
    printer = None

    def __init__(self):
        self.loop = Loop()

    def log(self, log):
        log()


@pytest.fixture
def runtime():
    return Runtime()


@pytest.fixture
def loop(runtime):
    return runtime.loop


@pytest.fixture
def session(runtime):
    session = Session(None, LEASE, runtime)
    yield session
    session.end()


@pytest.fixture
def join(session, runtime):
    """Returns a function that makes a node join; gives it and the agent's end of its link."""
    with contextlib.ExitStack() as stack:

        def do():
            with socket.create_server(("127.0.0.1", 0)) as server:
                ours = socket.create_connection(server.getsockname())
                theirs, _ = server.accept()
            agent = Link(theirs)
            stack.callback(agent.close)
            node = Node(f"node-{next(numbers)}", Link(ours), LEASE, runtime, session._on_change)
            session.nodes = (*session.nodes, node)
            return node, agent

        yield do


@pytest.fixture
def worker(session):
    worker = RemoteWorker(next(numbers), "far", {}, None, 1, session)
    yield worker
    worker.reap()


class Events:
    """What a worker has reported."""

    name, lock = "far", contextlib.nullcontext()

    def __init__(self, runtime):
        self.runtime = runtime
        self.reports = []

    def on_frames(self, worker):
        self.reports += [frame.kind for frame in worker.receive()]

    def on_exit(self, worker):
        self.reports.append("exit")

    def on_certain_end(self, worker):
        self.reports.append("certain end")


def has_ended(worker):
    return worker.has_ended


def kinds(agent, loop):
    loop.run()
    assert select.select([agent], [], [], SOON)[0]
    return [record.kind for record in agent.receive()]


def test_a_worker_that_is_placed_on_a_node_which_is_lost_at_that_moment_is_lost_with_it(join, loop, worker):
    node, _ = join()  # was chosen
    node.give_up("which fell silent")
    node.place(worker)
    loop.run()
    assert has_ended(worker)
    assert worker.loss == NodeLoss(node.name, "which fell silent")
    assert not worker.is_over, "the lease says when"
    node._set_over()
    assert worker.is_over


def test_a_worker_that_is_placed_on_a_node_whose_lease_is_over_at_that_moment_is_over(join, loop, worker):
    node, _ = join()
    node.give_up("which fell silent")
    node._set_over()
    node.place(worker)
    loop.run()
    assert has_ended(worker)
    assert worker.is_over


def test_a_worker_that_is_killed_while_it_is_placed_is_killed(session, join, loop, worker):
    node, agent = join()
    session.launch(worker)
    assert kinds(agent, loop) == [RecordKind.LAUNCH]
    session.kill(worker)  # by a thread that has found it in the queue
    assert kinds(agent, loop) == [RecordKind.KILL]
    assert not worker.is_over
    assert worker.node is node


def test_a_worker_that_waits_for_a_node_can_be_killed_twice(session, worker):
    session.launch(worker)
    for _ in range(2):
        worker.kill()
        assert has_ended(worker)
        assert worker.is_over


def test_a_worker_leaves_a_node_that_is_drained_once_another_one_has_room(join, session, worker):
    node, _ = join()
    session.launch(worker)
    node.draining = True
    assert not worker.reason_to_move, "it would wait for room, and end at its start deadline"
    other, _ = join()
    assert worker.reason_to_move == "its node is being drained"
    other.draining = True
    assert not worker.reason_to_move


def test_a_worker_that_finds_no_room_elsewhere_returns_to_the_node_of_the_last_one(session, join, worker):
    node, _ = join()
    session.launch(worker)
    node.draining = True
    worker.end(is_over=True)
    node._forget(worker)
    for home, expected in ((node, node), (None, None)):
        following = RemoteWorker(next(numbers), "far", {}, None, 1, session, home)
        session.launch(following)
        assert following.node is expected, "no other worker starts there"
        following.kill()
        following.reap()


def test_a_worker_reports_what_has_happened_before_it_has_an_actor(join, loop, runtime, worker):
    node, _ = join()
    node.place(worker)
    worker.on_record(Record(RecordKind.FRAME, worker.worker_id, b"", Kind.LOGGED))
    node.give_up("which fell silent")
    loop.run()
    events = Events(runtime)
    worker.report_to(events)
    loop.run()
    assert events.reports == [Kind.LOGGED, "exit"]
    status = worker.reap()
    assert status.loss == NodeLoss(node.name, "which fell silent")
    assert not status.is_certain
    node._set_over()
    loop.run()
    assert events.reports[-1] == "certain end"


def test_a_request_that_is_too_large_fails_in_the_loop_and_not_under_the_lock_of_its_sender(
    join, loop, runtime, worker, monkeypatch
):
    monkeypatch.setattr(records, "LONGEST", 100)
    node, _ = join()
    node.place(worker)
    events = Events(runtime)
    worker.report_to(events)
    loop.run()
    worker.send(Frame(Kind.CALL, 0, 1, bytes(101)))
    assert events.reports == []
    loop.run()
    assert events.reports == [Kind.FAILED]


def test_a_link_that_is_given_up_while_it_is_written_to_is_not_watched_any_more(join, loop, monkeypatch):
    node, _ = join()

    def flush():
        node._link.is_full = True
        node.end()  # by another thread

    monkeypatch.setattr(node._link, "flush", flush)
    node.send(Record(RecordKind.ECHO))
    loop.run()
    assert loop.channels == {}


def test_a_full_link_is_watched_for_room_until_there_is_some(join, loop):
    node, agent = join()
    (fd,) = loop.channels
    sent = came = 0
    while not loop.channels[fd]:
        node.send(Record(RecordKind.FRAME, payload=bytes(1 << 20)))
        loop.run()
        sent += 1
    while came < sent:
        assert select.select([agent], [], [], SOON)[0]
        came += len(agent.receive())
        if loop.channels[fd]:
            node._on_link(WRITABLE)
    assert node._link.backlog == 0
    assert not loop.channels[fd]


def test_a_killed_worker_counts_as_ended_soon_unless_its_end_was_reported(join, loop, session):
    node, _ = join()
    silent, reported = (RemoteWorker(next(numbers), "far", {}, None, 1, session) for _ in range(2))
    for worker in (silent, reported):
        node.place(worker)
        worker.kill()
    node._forget(reported)
    loop.run_timers()
    assert has_ended(silent)
    assert not silent.is_over, "nobody knows"
    assert not has_ended(reported)
    for worker in (silent, reported):
        worker.reap()


def test_a_silent_node_is_lost_after_its_lease_and_over_later(join, loop, monkeypatch):
    times = [100.0]
    monkeypatch.setattr(node_module, "boot_clock", lambda: times[-1])
    node, _ = join()
    seen = []
    for time in (104.0, 105.0, 105.4, 105.6):
        times.append(time)
        loop.run_timers()
        seen.append((node.is_lost, node.is_over))
    assert seen == [(False, False), (True, False), (True, False), (True, True)]
    assert loop.timers == [], "nothing is left to check"


@pytest.fixture
def memory(session):
    def announce(memory):
        for node in session.nodes:
            node.announce(memory)

    def free(memory, places):
        for node in session.nodes:
            node.free(memory, places)

    memory = MirroredMemory(next(numbers), announce, free)
    memory.create(Layout(ArraySpec((2,), np.dtype(np.float32)), None, None, 1))
    return memory


def parts(agent, loop):
    """Return the content of each part that was sent, by the first byte of its place."""
    loop.run()
    found = []
    while select.select([agent], [], [], 0.1)[0]:
        for record in agent.receive():
            if record.kind == RecordKind.PART:
                place = PLACE.unpack_from(record.payload)
                found.append((place, bytes(record.payload[PLACE.size :])))
    return found


def test_parameters_that_are_published_while_a_worker_is_placed_are_sent_once_and_in_order(join, loop, memory, session):
    node, agent = join()
    (place, part), (other_place, _) = memory.extend(8), memory.extend(8)
    part[:] = b"version1"
    memory.publish(place)
    assert parts(agent, loop) == [(place, b"version1")]
    send, sent = node.send, []

    def publish_while_sending(record):
        send(record)
        if record.kind == RecordKind.MEMORY and not sent:
            sent.append(True)
            memory.publish(other_place)  # by a thread of the user
            part[:] = b"version2"
            memory.publish(place)

    node.send = publish_while_sending
    worker = RemoteWorker(next(numbers), "far", {}, memory, 1, session)
    session.launch(worker)
    assert worker.node is node
    assert parts(agent, loop)[-1] == (place, b"version2")
    worker.reap()


def test_a_content_that_could_not_be_sent_is_not_known_on_the_node(join, loop, memory):
    node, agent = join()
    place, part = memory.extend(8)
    send, errors = node.send, [MemoryError("too little memory")]

    def fail(record):
        if record.kind == RecordKind.PART and errors:
            raise errors.pop()
        send(record)

    node.send = fail
    part[:] = b"contents"
    with pytest.raises(MemoryError):
        memory.publish(place)
    assert parts(agent, loop) == []
    node.announce(memory)
    assert parts(agent, loop) == [(place, b"contents")]


def test_a_node_that_joins_gets_each_content_that_the_caller_still_uses(join, loop, memory):
    kept = [memory.extend(8) for _ in range(3)]
    unused, dropped = memory.extend(8)
    for number, (place, part) in enumerate([(unused, dropped), *kept]):
        part[:] = b"version%d" % number
        memory.publish(place)
    del part, dropped
    node, agent = join()
    node.announce(memory)
    assert sorted(parts(agent, loop)) == [(place, b"version%d" % number) for number, (place, _) in enumerate(kept, 1)]


def open_files():
    return len(list(Path("/dev/fd").iterdir()))


def fail(*_):
    raise MemoryError("too little memory")


@pytest.mark.parametrize("place", [(worker_module, "Output"), (Session, "launch"), (Session, "find_room")])
def test_a_worker_whose_start_fails_leaves_no_descriptor_and_waits_for_no_node(session, runtime, monkeypatch, place):
    backend = RemoteBackend(LocalNodes())
    backend._session = session
    before = open_files()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(*place, fail)
        backend.use({}, runtime).start("far", None, 1)
    assert open_files() == before
    assert session._waiting == []


def test_a_node_that_cannot_be_watched_is_refused_and_its_link_closed(session, runtime, monkeypatch):
    session.expect_nodes(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = Link(socket.create_connection(server.getsockname()))
        monkeypatch.setattr(session_module, "connect", lambda _address: link)
        monkeypatch.setattr(runtime.loop, "watch", fail)
        session._join(NodeAddress("full", "127.0.0.1", 1, "", ""))
    assert link.fileno() == -1
    assert "too little memory" in session._describe_room(1)
    assert session._expected == 0


def test_a_node_whose_agent_was_ended_before_it_joined_is_not_reported(session, caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = NodeAddress("early", *server.getsockname(), "", "")
    session.end()
    session.refuse_node("earlier", "its agent ended with exit code 3")
    session._join(address)
    assert caplog.records == []


def test_a_worker_that_its_node_cannot_be_sent_is_refused(join, session, memory, monkeypatch):
    node, _ = join()
    monkeypatch.setattr(node, "announce", lambda _memory: memoryview(b"")[0])
    worker = RemoteWorker(next(numbers), "far", {}, memory, 1, session)
    session.launch(worker)
    assert has_ended(worker)
    assert worker.is_over
    assert "index out of bounds" in str(worker.reap().refusal)


def test_parts_are_freed_on_the_nodes_when_the_next_part_is_made(join, loop, memory):
    _, agent = join()
    place, part = memory.extend(8)
    del part
    assert parts(agent, loop) == []
    memory.extend(8)
    assert parts(agent, loop) == [(place, b"")]


def test_an_event_of_a_descriptor_that_was_closed_meanwhile_is_not_the_next_ones():
    watches, calls = Watches(), []
    bells = [Doorbell(), Doorbell()]
    reused = []

    def close_other(bell):
        (other,) = [one for one in bells if one is not bell]
        number = other.fileno()
        watches.remove(number)
        other.close()
        reused.extend(os.pipe())
        assert number in reused
        watches.add(number, lambda _mask: calls.append("stale"))

    for bell in bells:
        watches.add(bell.fileno(), lambda _mask, bell=bell: (calls.append("first"), close_other(bell)))
        bell.ring()
    watches.handle(SOON)()
    assert calls == ["first"]
    for fd in reused:
        watches.remove(fd)
        os.close(fd)
    next(bell for bell in bells if not bell._closed).close()
    watches._poller.close()
