"""What a network may do between the caller and its nodes: promises 28 to 31 of docs/reliability.md."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import SOON, Counter

import envactors as ea
from envactors.remote import LocalNodes
from envactors.testing import EchoEnv

pytestmark = pytest.mark.timeout(120)
LEASE = 1.5
CHUNK = 1 << 16
BOTH = pytest.param(["there", "back"], marks=pytest.mark.soak)
WAYS = pytest.mark.parametrize("ways", [["there"], ["back"], BOTH], ids=" and ".join)


class Proxy:
    """Passes bytes on between one caller and one agent, as long as it is let."""

    def __init__(self, host, port):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = host, port
        self.delay = 0.0
        # Per direction: whether bytes are held back, and what is done to the next ones.
        self.held = {"there": threading.Event(), "back": threading.Event()}
        self.spoil = {"there": None, "back": None}
        self._sockets = []
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            caller, _ = self._listener.accept()
            agent = socket.create_connection(self._target)
            self._sockets = [caller, agent]
            for source, target, way in ((caller, agent, "there"), (agent, caller, "back")):
                thread = threading.Thread(target=self._pass_on, args=(source, target, way))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source, target, way):
        with contextlib.suppress(OSError, ValueError):
            while not self._closed.is_set():
                if self.held[way].is_set() or not select.select([source], [], [], 0.01)[0]:
                    self._closed.wait(0.01 if self.held[way].is_set() else 0)
                    continue
                data = source.recv(CHUNK)
                if not data:
                    break
                time.sleep(self.delay)
                if (spoil := self.spoil[way]) is not None:
                    data, self.spoil[way] = spoil(data), None
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def cut(self, *ways):
        for way in ways:
            self.held[way].set()
        time.sleep(0.05)  # what is on its way passes

    def mend(self):
        for event in self.held.values():
            event.clear()

    def reset(self):
        for sock in self._sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close()

    def close(self):
        self._closed.set()
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(SOON)


class ProxiedNodes(LocalNodes):
    """Local nodes that are reached through proxies."""

    def __init__(self, count=2):
        super().__init__(count)
        self.proxies = {}

    def start(self, options, nodes):
        launcher = self

        class Registry:
            expect_nodes, refuse_node = nodes.expect_nodes, nodes.refuse_node

            def add_node(self, address):
                proxy = launcher.proxies[address.name] = Proxy(address.host, address.port)
                nodes.add_node(address._replace(host="127.0.0.1", port=proxy.port))

        super().start(options, Registry())

    def stop(self):
        for proxy in self.proxies.values():
            proxy.close()
        self.proxies.clear()
        super().stop()


@pytest.fixture
def launcher():
    return ProxiedNodes()


@pytest.fixture
def backend(launcher):
    return ea.RemoteBackend(launcher, lease=LEASE, heartbeat=0.3)


@pytest.fixture
def actor(backend):
    with ea.spawn(Counter, backend=backend, restart=ea.RestartPolicy(max_restarts=5)) as actor:
        assert actor.add(1).result(SOON) == 1
        yield actor


def begin(actor, tmp_path):
    """Has the actor run a call that does not end; returns it once it runs."""
    running = actor.touch_then_wait(str(tmp_path / "begun"), str(tmp_path / "never"))
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    return running


@WAYS
def test_a_short_cut_loses_nothing(launcher, actor, ways):
    proxy = launcher.proxies[actor.node]
    proxy.cut(*ways)
    waiting = actor.add(1)
    time.sleep(0.4 * LEASE)
    assert not waiting.done()
    proxy.mend()
    assert waiting.result(SOON) == 2
    assert actor.incarnation == 0


@WAYS
def test_a_long_cut_in_any_direction_is_a_lost_node(launcher, actor, ways, tmp_path):
    running, node = begin(actor, tmp_path), actor.node
    begun = time.monotonic()
    launcher.proxies[node].cut(*ways)
    with pytest.raises(ea.NodeLostError) as lost:
        running.result(SOON)
    assert lost.value.node == node
    assert time.monotonic() - begun < LEASE + 2.0
    assert actor.add(5).result(SOON) == 5
    assert actor.node != node


def test_a_reset_is_a_lost_node_within_two_seconds(launcher, actor, tmp_path):
    running, node = begin(actor, tmp_path), actor.node
    begun = time.monotonic()
    launcher.proxies[node].reset()
    with pytest.raises(ea.NodeLostError):
        running.result(SOON)
    assert time.monotonic() - begun < 2.0
    assert actor.add(5).result(SOON) == 5


def garble(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("way", "spoil"),
    [
        pytest.param("there", garble, id="garbled there"),
        pytest.param("back", garble, id="garbled back"),
        pytest.param("back", lambda data: data + data, id="repeated"),
        pytest.param("back", lambda data: data[:-1], id="cut"),
        pytest.param("there", lambda data: data + data, id="repeated there", marks=pytest.mark.soak),
        pytest.param("there", lambda data: data[:-1], id="cut there", marks=pytest.mark.soak),
    ],
)
def test_bytes_that_are_not_what_was_sent_are_never_a_result(launcher, actor, way, spoil):
    node = actor.node
    launcher.proxies[node].spoil[way] = spoil
    results = []
    for number in range(200):
        try:
            results.append(actor.echo(number).result(SOON))
        except ea.NodeLostError:
            break
        assert results[-1] == number
    assert actor.echo("again").result(SOON) == "again"
    assert actor.node != node


def test_a_slow_network_is_only_slow(launcher, backend):
    with ea.VectorEnv([EchoEnv] * 4, envs_per_actor=2, backend=backend) as envs:
        envs.reset(seed=0)
        for proxy in launcher.proxies.values():
            proxy.delay = 0.02
        for turn in range(1, 6):
            obs, *_ = envs.step(np.arange(4))
            assert obs[:, 1].tolist() == [turn] * 4
        assert [actor.incarnation for actor in envs.actors] == [0, 0]


class Witness:
    """Writes when each of its calls begins and ends, by a clock that all processes share."""

    def __init__(self, path):
        self.path = path

    def work(self, seconds):
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            with Path(self.path).open("a") as file:
                file.write(f"{os.getpid()} {now}\n")
            time.sleep(0.002)


@WAYS
def test_two_processes_of_one_actor_never_run_at_once(launcher, backend, ways, tmp_path):
    path = str(tmp_path / "witness")
    policy = ea.RestartPolicy(max_restarts=5, backoff=0.0)
    with ea.spawn(lambda: Witness(path), backend=backend, restart=policy) as actor:
        actor.work(0.1).result(SOON)
        running = actor.options(retries=5).work(3.0)
        launcher.proxies[actor.node].cut(*ways)
        running.result(3 * SOON)
        actor.work(0.1).result(SOON)
    spans = {}
    for line in (tmp_path / "witness").read_text().splitlines():
        pid, when = line.split()
        first, _ = spans.get(pid, (float(when), 0.0))
        spans[pid] = first, float(when)
    ordered = sorted(spans.values())
    assert len(ordered) >= 2
    for (_, ended), (began, _) in itertools.pairwise(ordered):
        assert ended < began


@pytest.mark.parametrize("ways", [["there"], BOTH], ids=" and ".join)
def test_deadlines_and_closing_keep_their_times_while_a_link_is_silent(launcher, ways):
    backend = ea.RemoteBackend(launcher, lease=20.0, heartbeat=1.0)
    actor = ea.spawn(Counter, backend=backend)
    actor.add(1).result(SOON)
    launcher.proxies[actor.node].cut(*ways)
    begun = time.monotonic()
    with pytest.raises(ea.ActorTimeoutError):
        actor.options(timeout=0.5).sleep(30).result(SOON)
    assert time.monotonic() - begun < 4.0
    begun = time.monotonic()
    actor.close(0.5)
    assert time.monotonic() - begun < 6.0


def test_replay_gives_the_trajectory_of_an_undisturbed_run(launcher, backend):
    with (
        ea.VectorEnv([EchoEnv] * 4, envs_per_actor=2, backend=backend, on_failure="replay") as envs,
        ea.VectorEnv([EchoEnv] * 4, backend="inline") as undisturbed,
    ):
        np.testing.assert_equal(envs.reset(seed=1), undisturbed.reset(seed=1))
        for turn in range(12):
            if turn == 5:
                launcher.proxies[envs.actors[0].node].cut("back")
            actions = np.full(4, turn)
            np.testing.assert_equal(envs.step(actions), undisturbed.step(actions))


def test_when_the_caller_dies_its_agents_and_their_workers_end(tmp_path):
    code = """
    import sys, time
    import envactors as ea
    from envactors.remote import LocalNodes

    if __name__ == "__main__":
        backend = ea.RemoteBackend(LocalNodes(2), lease=1.5, heartbeat=0.3)
        actors = [ea.spawn(dict, backend=backend) for _ in range(4)]
        for actor in actors:
            actor.copy().result(30)
        print("ready", flush=True)
        time.sleep(60)
    """
    script = tmp_path / "caller.py"
    script.write_text(textwrap.dedent(code))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout.readline() == "ready\n"
        processes = psutil.Process(caller.pid).children(recursive=True)
        assert len(processes) >= 2 + 2 + 4, "agents, keepers, workers"
        caller.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=LEASE + 5.0)
    assert alive == []
