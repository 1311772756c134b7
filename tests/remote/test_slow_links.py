"""A slow link is only slow: heartbeats, echoes and kills do not wait for payloads. Encryption costs little more."""

from __future__ import annotations

import select
import socket
import threading
import time

import numpy as np
import pytest
from helpers import SOON, Counter, is_gone, wait_until
from nodes import preloading_backend, standing
from slowlink import CERTIFICATES, SlowNodes, client_context

import envactors as ea
from envactors.remote.link import Link
from envactors.remote.records import Record, RecordKind
from envactors.remote.streams import TlsStream
from envactors.remote.tls import make_server_context

pytestmark = pytest.mark.timeout(120)
LONG = 60.0  # seconds that agents and workers may take to start on a busy machine
SOAK = pytest.mark.soak
RATE = 2_000_000  # bytes per second
LINKS = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
WAYS = pytest.mark.parametrize("way", ["there", "back"])


@pytest.fixture(scope="module")
def patient(helper_processes):
    """A backend of one node that stays, with a long lease, for tests that let its link be quick again."""
    backend = preloading_backend(SlowNodes(), lease=30.0, heartbeat=0.5)
    with standing(backend):
        yield backend


@LINKS
@WAYS
@pytest.mark.parametrize(
    ("size", "lease"), [(4_000_000, 1.8), pytest.param(16_000_000, 3.0, marks=SOAK)], ids=["4 MB", "16 MB"]
)
def test_a_payload_that_takes_longer_than_the_lease_loses_no_node(way, tls, size, lease):
    nodes = SlowNodes(tls=tls)
    with ea.spawn(Counter, backend=ea.RemoteBackend(nodes, lease=lease, heartbeat=lease / 10)) as actor:
        assert actor.add(1).result(LONG) == 1
        nodes.throttle(way, RATE)
        begun = time.monotonic()
        if way == "there":
            assert actor.take(bytes(size)).result(LONG) == size
        else:
            assert len(actor.make(size).result(LONG)) == size
        assert time.monotonic() - begun > lease, "the link was slow enough to lose a node that is not heard"
        assert (actor.add(1).result(SOON), actor.incarnation) == (2, 0)


@WAYS
def test_a_kill_overtakes_payloads(patient, way, tmp_path):
    nodes = patient.launcher
    with ea.spawn(Counter, backend=patient) as actor, ea.spawn(Counter, backend=patient) as other:
        assert (actor.add(1).result(LONG), other.add(1).result(LONG)) == (1, 1)
        running = actor.touch_then_wait(str(tmp_path / "begun"), str(tmp_path / "never"))
        pid = actor.pid
        wait_until((tmp_path / "begun").exists)
        (proxy,) = nodes.proxies.values()
        passed = proxy.passed[way]
        nodes.throttle(way, RATE / 10)
        payload = other.take(bytes(8_000_000)) if way == "there" else other.make(8_000_000)
        wait_until(lambda: proxy.passed[way] > passed + 100_000)
        actor.kill()
        with pytest.raises(ea.ActorDiedError):
            running.result(SOON)
        wait_until(lambda: is_gone(pid))
        assert not payload.done(), "the payload still travels"
        nodes.throttle(way, float("inf"))
        assert payload.exception(LONG) is None


@LINKS
def test_urgent_records_overtake_unwritten_ones(tls):
    ours, theirs = linked(tls)
    ours.send(Record(RecordKind.FRAME, payload=bytes(20_000_000)))
    assert ours.is_full
    for kind in (RecordKind.BEAT, RecordKind.KILL):
        ours.send(Record(kind, 7))
    assert [record.kind for record in exchange(ours, theirs, 3)] == [
        RecordKind.BEAT,
        RecordKind.KILL,
        RecordKind.FRAME,
    ]
    ours.close()
    theirs.close()


def linked(tls, buffers=None):
    """Returns two links that are connected over TCP, encrypted or not, perhaps with buffers of this many bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    if buffers is not None:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
    if not tls:
        return Link(ours), Link(theirs)
    client = TlsStream(ours, client_context(), server_side=False)
    agent = TlsStream(theirs, make_server_context(CERTIFICATES), server_side=True)
    thread = threading.Thread(target=agent.handshake)
    thread.start()
    client.handshake()
    thread.join(SOON)
    return Link(client), Link(agent)


def exchange(ours, theirs, count):
    """Passes on what one link has to send, until this many records have come at the other."""
    came = []
    while len(came) < count:
        readable, writable, _ = select.select([theirs], [ours] if ours.is_full else [], [], SOON)
        assert readable or writable
        if writable:
            ours.flush()
        if readable:
            came += theirs.receive()
    return came


def cpu_of_sending(tls, size, buffers):
    """Returns the seconds of CPU time that it takes to send one record to a peer that pauses after each read."""
    ours, theirs = linked(tls, buffers)
    sending = []

    def send():
        begun = time.thread_time()
        ours.send(Record(RecordKind.FRAME, payload=bytes(size)))
        while ours.is_full:
            select.select([], [ours], [], SOON)
            ours.flush()
        sending.append(time.thread_time() - begun)

    thread = threading.Thread(target=send)
    thread.start()
    came = []
    while not came:
        assert select.select([theirs], [], [], SOON)[0]
        came += theirs.receive()
        time.sleep(0.002)
    thread.join(SOON)
    assert len(came[0].payload) == size
    ours.close()
    theirs.close()
    return sending[0]


@pytest.mark.parametrize("size", [20_000_000, pytest.param(40_000_000, marks=SOAK)])
def test_encryption_takes_at_most_three_times_the_cpu_time_of_sending_in_the_clear(size):
    """Each byte is encrypted once, however often its write is tried again. Of three runs the least counts."""
    plain, encrypted = (min(cpu_of_sending(tls, size, 1 << 16) for _ in range(3)) for tls in (False, True))
    assert encrypted < 3.0 * plain


def test_arrays_of_any_size_can_be_written_to_when_they_arrive(patient):
    with ea.spawn(Counter, backend=patient) as actor:
        for count in (1_000, 8_100, 9_000, 100_000):
            array = actor.echo(np.arange(count)).result(LONG)
            array += 1
            assert array.sum() == count * (count + 1) // 2
