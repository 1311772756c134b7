"""What threads of the caller do to its nodes at the same moment: each case in the one order that matters."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import sys
import threading

import pytest
from helpers import SOON

from envactors.actor.reactor import Reactor
from envactors.backends.base import NodeLoss
from envactors.remote.link import Link
from envactors.remote.node import Node
from envactors.remote.records import Record, RecordKind
from envactors.remote.session import Session
from envactors.remote.watches import Watches
from envactors.remote.worker import RemoteWorker
from envactors.system.polling import WRITABLE, Doorbell

LEASE = 5.0
numbers = itertools.count(1)


class Loop:
    """A reactor whose posted functions run when the test says so, and which forgives as little as the real one."""

    def __init__(self):
        self.channels, self.timed, self.jobs = {}, [], []

    def watch_channel(self, fd, handler):
        self.channels[fd] = False

    def unwatch_channel(self, fd):
        self.channels.pop(fd, None)

    def want_write(self, fd, wanted):
        assert fd in self.channels, "epoll refuses a descriptor that it does not know"
        self.channels[fd] = wanted

    def watch_timers(self, timed):
        self.timed.append(timed)

    def unwatch_timers(self, timed):
        self.timed.remove(timed)

    def note_timer(self, when):
        pass

    def post(self, job):
        self.jobs.append(job)

    def run(self):
        while self.jobs:
            self.jobs.pop(0)()


@pytest.fixture
def loop():
    return Loop()


@pytest.fixture
def session(loop):
    session = Session(None, LEASE, loop)
    yield session
    session.end()


@pytest.fixture
def join(session, loop):
    """Returns a function that makes a node join; gives it and the agent's end of its link."""
    with contextlib.ExitStack() as stack:

        def do():
            with socket.create_server(("127.0.0.1", 0)) as server:
                ours = socket.create_connection(server.getsockname())
                theirs, _ = server.accept()
            agent = Link(theirs)
            stack.callback(agent.close)
            node = Node(f"node-{next(numbers)}", Link(ours), LEASE, loop, session._on_change)
            session.nodes = (*session.nodes, node)
            return node, agent

        yield do


@pytest.fixture
def worker(session):
    worker = RemoteWorker(next(numbers), "far", {}, None, 1, session)
    yield worker
    worker.reap()


def has_ended(worker):
    return bool(select.select([worker.sentinel], [], [], 0)[0])


def kinds(agent):
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


def test_a_worker_that_is_killed_while_it_is_placed_is_killed(session, join, worker):
    node, agent = join()
    session.launch(worker)
    assert kinds(agent) == [RecordKind.LAUNCH]
    session.kill(worker)  # by a thread that has found it in the queue
    assert kinds(agent) == [RecordKind.KILL]
    assert not worker.is_over
    assert worker.node == node.name


def test_a_worker_that_waits_for_a_node_can_be_killed_twice(session, worker):
    session.launch(worker)
    for _ in range(2):
        worker.kill()
        assert has_ended(worker)
        assert worker.is_over


def test_a_link_that_is_given_up_while_it_is_written_to_is_not_watched_any_more(join, loop, monkeypatch):
    node, _ = join()

    def send(record):
        node._link.is_full = True
        node.give_up("which fell silent")  # by another thread

    monkeypatch.setattr(node._link, "send", send)
    node.send(Record(RecordKind.ECHO))
    assert loop.channels == {}


def test_a_full_link_is_watched_for_room_until_there_is_some(join, loop):
    node, agent = join()
    (fd,) = loop.channels
    sent = came = 0
    while not loop.channels[fd]:
        node.send(Record(RecordKind.FRAME, payload=bytes(1 << 20)))
        sent += 1
    while came < sent:
        assert select.select([agent], [], [], SOON)[0]
        came += len(agent.receive())
        if loop.channels[fd]:
            node._on_link(WRITABLE)
    assert node._link.backlog == 0
    assert not loop.channels[fd]


def test_a_killed_worker_whose_end_comes_just_then_harms_no_timer(join, worker):
    node, _ = join()
    node.place(worker)
    worker.kill()
    (when,) = node._kills.values()

    class Racing(dict):
        def items(self):
            found = list(super().items())
            node._forget(worker)  # by the thread that reads replies
            return found

    node._kills = Racing(node._kills)
    node.on_timer(when + 1.0)
    assert node._kills == {}
    node._forget(worker)


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


def test_timers_that_several_threads_watch_are_all_watched(monkeypatch):
    reactor = Reactor()
    before, interval = reactor._timed.copy(), sys.getswitchinterval()

    class Timed:
        def next_timer(self):
            return float("inf")

    def change(kept):
        reactor.watch_timers(kept)
        for _ in range(300):
            timed = Timed()
            reactor.watch_timers(timed)
            reactor.unwatch_timers(timed)

    kept = [Timed() for _ in range(4)]
    threads = [threading.Thread(target=change, args=(one,)) for one in kept]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
    finally:
        sys.setswitchinterval(interval)
    assert {*reactor._timed} == {*before, *kept}
    reactor.stop()
