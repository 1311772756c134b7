"""Faults of the network between the caller and its nodes.

They test the promises `node-lost`, `one-at-a-time`, `link`, and `caller-gone`.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque

import numpy as np
import psutil
import pytest
from helpers import SOON, Counter, promised, wait_until
from nodes import preloading_backend, standing
from proxy import Proxy
from witness import Witness, assert_one_at_a_time

import envactors as ea
from envactors.remote import LocalNodes
from envactors.remote.greeting import new_secret
from envactors.remote.starting import AgentOrders, end_agents, read_port, start_agent
from envactors.testing import EchoEnv

pytestmark = pytest.mark.timeout(120)
LEASE = 1.5
# Where no node is to be lost but those that a test picks: a busy machine may hold everything up for longer than a cut
# lasts, in seconds.
PATIENT_LEASE = 4.0
CHUNK = 1 << 16
SOAK = pytest.mark.soak
BOTH = pytest.param(["there", "back"], marks=SOAK)
WAYS = pytest.mark.parametrize("ways", [["there"], ["back"], BOTH], ids=" and ".join)


class TamperingProxy(Proxy):
    """Forwards bytes between one caller and one agent until told to stop."""

    def __init__(self, host, port):
        # Per direction, in seconds.
        self.delay = {"there": 0.0, "back": 0.0}
        # Per direction: whether bytes are held back, and what is done to the next ones.
        self.held = {"there": threading.Event(), "back": threading.Event()}
        self.spoil = {"there": None, "back": None}
        super().__init__(host, port)

    def pass_on(self, source, target, way):
        line = deque()  # when it is to continue, and what
        is_open = True
        with contextlib.suppress(OSError, ValueError):
            while (is_open or line) and not self._closed.is_set():
                if self.held[way].is_set():
                    self._closed.wait(0.01)
                    continue
                # A socket wakes this when there is something, and when `close` shuts it down.
                wait = max(0.0, line[0][0] - time.monotonic()) if line else None
                if not is_open:
                    self._closed.wait(wait)
                elif select.select([source], [], [], wait)[0]:
                    data = source.recv(CHUNK)
                    is_open = bool(data)
                    if data and (spoil := self.spoil[way]) is not None:
                        data, self.spoil[way] = spoil(data), None
                    line.append((time.monotonic() + self.delay[way], data))
                while line and line[0][0] <= time.monotonic() and not self.held[way].is_set():
                    self._send(target, line.popleft()[1])

    def _send(self, target, data):
        if data:
            target.sendall(data)
        else:
            target.shutdown(socket.SHUT_WR)

    def cut(self, *ways):
        for way in ways:
            self.held[way].set()
        time.sleep(0.05)  # what is on its way passes

    def mend(self):
        for event in self.held.values():
            event.clear()

    def restore(self):
        self.mend()
        self.delay = {"there": 0.0, "back": 0.0}

    def reset(self):
        for sock in self._sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close()


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
                proxy = launcher.proxies[address.name] = TamperingProxy(address.host, address.port)
                nodes.add_node(address._replace(host="127.0.0.1", port=proxy.port))

        return super().start(options, Registry())

    def _stop(self, agents):
        for proxy in self.proxies.values():
            proxy.close()
        self.proxies.clear()
        super()._stop(agents)


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


@pytest.fixture
def witness(backend, tmp_path):
    path = str(tmp_path / "witness")
    policy = ea.RestartPolicy(max_restarts=5, backoff=0.0)
    with ea.spawn(lambda: Witness(path), backend=backend, restart=policy) as actor:
        actor.work(0.0).result(SOON)
        yield actor


def processes_of(launcher, node):
    """Return a node's agent, helper, and workers."""
    agent = psutil.Process(launcher.agents[node].pid)
    return [agent, *agent.children(recursive=True)]


def garble(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def garble_first(data):
    return bytes([data[0] ^ 128]) + data[1:]


def spoil(way, how):
    def do(launcher, node):
        launcher.proxies[node].spoil[way] = how

    return do


def cut(*ways):
    return lambda launcher, node: launcher.proxies[node].cut(*ways)


def hold_back(launcher, node):
    """Every heartbeat and echo comes, in order, but each later than a lease."""
    launcher.proxies[node].delay = {"there": 0.6 * LEASE, "back": 0.6 * LEASE}


LONG, BROKEN = LEASE + 2.0, 2.0


def fault(do, limit, name, *, marks=()):
    return pytest.param(do, limit, id=name, marks=marks)


FAULTS = pytest.mark.parametrize(
    ("inject", "limit"),
    [
        fault(cut("there"), LONG, "cut there"),
        fault(cut("back"), LONG, "cut back"),
        fault(cut("there", "back"), LONG, "cut both ways", marks=SOAK),
        fault(hold_back, LONG + 1.2 * LEASE, "held back"),
        fault(lambda launcher, node: launcher.proxies[node].reset(), BROKEN, "reset"),
        fault(lambda launcher, node: launcher.agents[node].kill(), BROKEN, "killed", marks=SOAK),
        fault(lambda launcher, node: launcher.agents[node].send_signal(signal.SIGSTOP), LONG, "stopped"),
        fault(spoil("there", garble_first), LONG, "garbled there", marks=SOAK),
        fault(spoil("back", garble), LONG, "garbled back", marks=SOAK),
        fault(spoil("there", lambda data: data + data), LONG, "repeated there", marks=SOAK),
        fault(spoil("back", lambda data: data + data), LONG, "repeated back", marks=SOAK),
        fault(spoil("there", lambda data: data[:-1]), LONG, "shortened there", marks=SOAK),
        fault(spoil("back", lambda data: data[1:]), LONG, "shortened back", marks=SOAK),
    ],
)


@FAULTS
def test_a_fault_is_a_lost_node_and_two_processes_of_an_actor_never_run_at_once(
    launcher, backend, witness, tmp_path, inject, limit
):
    node, path = witness.node, tmp_path / "witness"
    old = processes_of(launcher, node)
    with ea.spawn(Counter, backend=backend) as other:
        assert other.add(1).result(SOON) == 1
        assert other.node != node
        running = witness.work(60.0)
        wait_until(lambda: "runs" in path.read_text())
        begun = time.monotonic()
        inject(launcher, node)
        with pytest.raises(ea.NodeLostError) as lost:
            running.result(2 * SOON)
        took = time.monotonic() - begun
        assert (lost.value.node, lost.value.method) == (node, "work")
        assert took < limit
        assert other.add(1).result(SOON) == 2, "the other node goes on"
        witness.work(0.05).result(SOON)
        assert (witness.node, witness.incarnation) == (other.node, 1)
        _, alive = psutil.wait_procs(old, timeout=SOON)
        assert alive == []
        assert (other.add(1).result(SOON), other.incarnation) == (3, 0)
    assert_one_at_a_time(path, least=2)


@pytest.fixture(scope="class")
def shared(helper_processes):
    """A backend whose nodes stay for the tests of a class."""
    backend = preloading_backend(ProxiedNodes(), lease=PATIENT_LEASE, heartbeat=0.2)
    with standing(backend):
        yield backend


class TestWhatLosesNoNode:
    """Each test leaves the links as they were."""

    @pytest.fixture
    def launcher(self, shared):
        yield shared.launcher
        for proxy in shared.launcher.proxies.values():
            proxy.restore()

    @pytest.fixture
    def backend(self, shared):
        return shared

    @WAYS
    def test_a_short_cut_loses_nothing(self, launcher, actor, ways):
        proxy = launcher.proxies[actor.node]
        proxy.cut(*ways)
        waiting = actor.add(1)
        time.sleep(0.4 * PATIENT_LEASE)
        assert not waiting.done()
        proxy.mend()
        assert waiting.result(SOON) == 2
        assert actor.incarnation == 0

    def test_a_slow_network_is_only_slow(self, launcher, backend):
        with ea.VectorEnv([EchoEnv] * 4, envs_per_actor=2, backend=backend) as envs:
            envs.reset(seed=0)
            for proxy in launcher.proxies.values():
                proxy.delay = {"there": 0.25, "back": 0.4}
            begun, turns = time.monotonic(), 0
            while time.monotonic() - begun < 1.2 * PATIENT_LEASE:
                turns += 1
                obs, *_ = envs.step(np.arange(4))
                assert obs[:, 1].tolist() == [turns] * 4
            assert [actor.incarnation for actor in envs.actors] == [0, 0]

    def test_heartbeats_that_arrive_in_bursts_keep_the_node(self, launcher, actor):
        proxy = launcher.proxies[actor.node]
        for number in range(3):
            proxy.cut("there" if number % 2 else "back")
            time.sleep(0.4 * PATIENT_LEASE)
            proxy.mend()
            assert actor.add(1).result(SOON) == number + 2
        assert actor.incarnation == 0


@pytest.mark.parametrize(
    ("way", "spoil"),
    [
        pytest.param("there", garble, id="garbled there", marks=SOAK),
        pytest.param("back", garble, id="garbled back"),
        pytest.param("back", lambda data: data + data, id="repeated"),
        pytest.param("back", lambda data: data[:-1], id="cut", marks=SOAK),
        pytest.param("there", lambda data: data + data, id="repeated there", marks=SOAK),
        pytest.param("there", lambda data: data[:-1], id="cut there", marks=SOAK),
    ],
)
def test_corrupted_bytes_are_never_a_result(launcher, actor, way, spoil):
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


def test_queued_messages_to_a_silent_node_fail_with_it(launcher, actor):
    """More than fits into any buffer, from several threads, while the link is given up."""
    launcher.proxies[actor.node].cut("there")
    payload, outcomes = b"x" * 20_000_000, []

    def flood():
        outcomes.append(actor.echo(payload).exception(2 * SOON))

    threads = [threading.Thread(target=flood) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SOON)
    assert {type(outcome) for outcome in outcomes} <= {ea.NodeLostError, type(None)}, "the others go to the next node"
    assert ea.NodeLostError in map(type, outcomes)
    assert actor.add(1).result(SOON) == 1


@pytest.mark.parametrize("ways", [["there"], pytest.param(["back"], marks=SOAK), BOTH], ids=" and ".join)
def test_deadlines_and_closing_keep_their_times_while_a_link_is_silent(ways):
    launcher = ProxiedNodes(1)
    backend = ea.RemoteBackend(launcher, lease=20.0, heartbeat=1.0)
    limits = ea.Deadlines(step=0.5)
    actor = ea.spawn(Counter, backend=backend)
    envs = ea.VectorEnv([EchoEnv] * 2, envs_per_actor=2, backend=backend, deadlines=limits)
    actor.add(1).result(SOON)
    envs.reset(seed=0)
    for proxy in launcher.proxies.values():
        proxy.cut(*ways)
    begun = time.monotonic()
    with pytest.raises(ea.ActorTimeoutError):
        actor.options(deadline=0.5).sleep(30).result(SOON)
    assert time.monotonic() - begun < promised(4.0)
    begun = time.monotonic()
    with pytest.raises(ea.VectorStepError) as late:
        envs.step(np.zeros(2, np.int64))
    assert {type(error) for error in late.value.failures.values()} <= {ea.ActorTimeoutError, ea.ActorDiedError}
    assert time.monotonic() - begun < promised(4.0)
    begun = time.monotonic()
    actor.close(0.5)
    assert time.monotonic() - begun < promised(6.0)
    begun = time.monotonic()
    envs.close()
    assert time.monotonic() - begun < promised(6.0)


def test_replay_gives_the_trajectory_of_an_undisturbed_run():
    launcher = ProxiedNodes(5)
    backend = ea.RemoteBackend(launcher, lease=PATIENT_LEASE, heartbeat=0.3)
    options = {"envs_per_actor": 2, "on_failure": "replay"}
    policy = ea.RestartPolicy(max_restarts=9, backoff=0.0)
    faults = {3: cut("back"), 6: spoil("back", garble), 9: spoil("there", garble_first)}
    with (
        ea.VectorEnv([EchoEnv] * 4, backend=backend, restart=policy, **options) as envs,
        ea.VectorEnv([EchoEnv] * 4, backend="inline") as undisturbed,
    ):
        np.testing.assert_equal(envs.reset(seed=1), undisturbed.reset(seed=1))
        for turn in range(12):
            if turn in faults:
                faults[turn](launcher, envs.actors[turn % 2].node)
            actions = np.full(4, turn)
            np.testing.assert_equal(envs.step(actions), undisturbed.step(actions))
        assert sum(actor.incarnation for actor in envs.actors) >= 3


def test_a_frozen_node_never_runs_its_remaining_calls(launcher, backend, witness, tmp_path):
    path, old = tmp_path / "witness", processes_of(launcher, witness.node)
    for process in old:
        process.suspend()
    running = witness.work(0.05)
    with pytest.raises(ea.NodeLostError):
        running.result(SOON)
    witness.work(0.05).result(SOON)
    before = path.read_text()
    for process in reversed(old):  # its workers first, its agent last
        with contextlib.suppress(psutil.NoSuchProcess):  # the helper has killed the agent
            process.resume()
    _, alive = psutil.wait_procs(old, timeout=SOON)
    assert alive == []
    assert path.read_text() == before
    assert_one_at_a_time(path, least=2)


def test_a_worker_whose_lease_is_over_begins_nothing(launcher, backend, tmp_path):
    class Marks(EchoEnv):
        def step(self, action):
            if action == 7:
                (tmp_path / "begun").touch()
            return super().step(action)

    with ea.VectorEnv([Marks], backend=backend, on_failure="renew") as envs:
        envs.reset(seed=0)
        (actor,) = envs.actors
        node, old = actor.node, processes_of(launcher, actor.node)
        worker = psutil.Process(actor.pid)
        worker.suspend()
        envs.send(np.array([7]))
        proxy = launcher.proxies[node]
        time.sleep(0.2)  # the agent passes it on to the worker
        for process in old:
            process.suspend()
        envs.recv()
        proxy.cut("there", "back")
        worker.resume()  # nothing else ends it
        wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
        assert not (tmp_path / "begun").exists()
        for process in old:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def test_agents_and_workers_end_when_the_caller_is_killed(tmp_path):
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
        assert len(processes) >= 2 + 2 + 4, "agents, helpers, workers"
        caller.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=LEASE + 5.0)
    assert alive == []


def test_the_lease_ends_everything_when_the_caller_is_killed_behind_a_silent_link(tmp_path):
    """With agents that somebody else has started, as on a cluster: neither their pipes nor the link tell them."""
    code = """
    import json, sys, time
    import envactors as ea
    from envactors.remote.launching import NodeAddress

    class Given:
        def start(self, options, nodes):
            addresses = [NodeAddress(*address) for address in json.loads(sys.argv[1])]
            nodes.expect_nodes(len(addresses))
            for address in addresses:
                nodes.add_node(address)
            return lambda: None

    if __name__ == "__main__":
        backend = ea.RemoteBackend(Given(), lease=1.5, heartbeat=0.3)
        actors = [ea.spawn(dict, backend=backend) for _ in range(4)]
        for actor in actors:
            actor.copy().result(30)
        print("ready", flush=True)
        time.sleep(60)
    """
    script = tmp_path / "caller.py"
    script.write_text(textwrap.dedent(code))
    secret, agents, proxies, addresses = new_secret(), [], [], []
    try:
        for number in range(2):
            orders = AgentOrders(f"node-{number}", "127.0.0.1", secret, "0", LEASE, 0.3, {})
            agents.append(start_agent(orders))
            proxies.append(TamperingProxy("127.0.0.1", read_port(agents[-1])))
            addresses.append([orders.name, "127.0.0.1", proxies[-1].port, secret, "0"])
        command = [sys.executable, str(script), json.dumps(addresses)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
            assert caller.stdout.readline() == "ready\n"
            processes = [psutil.Process(agent.pid) for agent in agents]
            processes += [child for agent in tuple(processes) for child in agent.children(recursive=True)]
            assert len(processes) >= 2 + 2 + 4, "agents, helpers, workers"
            agents[1].send_signal(signal.SIGSTOP)  # its helper has to act
            for proxy in proxies:
                proxy.cut("there", "back")
            caller.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=LEASE + 5.0)
        assert alive == []
    finally:
        for proxy in proxies:
            proxy.close()
        end_agents(agents)
