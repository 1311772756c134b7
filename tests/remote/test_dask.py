"""Actors on real Dask clusters whose workers are added, stopped, and lost; nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import cloudpickle
import numpy as np
import psutil
import pytest
from helpers import SOON, Counter
from leaks import describe

import envactors as ea
from envactors.remote.greeting import GreetingError
from envactors.remote.launching import NodeAddress, connect
from envactors.remote.records import Record, RecordKind
from envactors.remote.starting import NOT_NEEDED
from envactors.testing import EchoEnv

distributed = pytest.importorskip("distributed")
pytest.importorskip("cryptography", reason="the temporary certificates of Dask need it")

from envactors.integrations.dask import DaskBackend  # noqa: E402
from envactors.integrations.dask.agents import AgentHost, AgentTerms  # noqa: E402

pytestmark = pytest.mark.timeout(120)
LONG = 30.0  # seconds that a cluster may take for anything on a busy machine
ROLES = ("client", "scheduler", "worker")
FAST = {"lease": 1.0, "heartbeat": 0.2}


def wait_until(condition, seconds=LONG):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)
    return found


def descendants():
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def nothing_left_behind(helper_processes):
    """Every test: as many processes as before. Threads and descriptors are Dask's own business."""
    # Dask's scheduler sets variables of the process that it runs in, and fork servers are kept by environment.
    before = descendants()
    with mock.patch.dict(os.environ):
        yield
    deadline = time.monotonic() + SOON
    while (after := descendants()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not after - before, "\n".join(describe(pid) for pid in after - before)


def local_cluster(**options):
    defaults = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "security": True, "dashboard_address": None}
    return distributed.LocalCluster(**{**defaults, **options})


@pytest.fixture
def client():
    with local_cluster() as cluster, distributed.Client(cluster) as client:
        yield client


def dask_workers(client):
    """Returns the processes of the Dask workers, by name."""
    pids = client.run(os.getpid)
    names = client.run(lambda dask_worker: str(dask_worker.name))
    return {names[address]: psutil.Process(pid) for address, pid in pids.items()}


def agents_in(process):
    return [child for child in process.children() if "envactors.remote.agent" in " ".join(child.cmdline())]


def agent_of(dask_worker):
    (agent,) = agents_in(dask_worker)
    return agent


def plugins(client):
    return client.run_on_scheduler(
        lambda dask_scheduler: [name for name in dask_scheduler.worker_plugins if name.startswith("envactors")]
    )


def start_sleeping(actor):
    running = actor.sleep(60)
    wait_until(lambda: actor.state is ea.ActorState.BUSY, SOON)
    return running


def assert_end(processes):
    _, alive = psutil.wait_procs(processes, timeout=LONG)
    assert alive == []


def reports_of(client):
    """Returns where the agents listen, by node."""
    (topic,) = plugins(client)
    return {report["name"]: report for _, report in client.get_events(topic)}


# Normal use -----------------------------------------------------------------------------------------------


def test_actors_and_vectors_run_on_dask_workers_and_leave_nothing_behind(client):
    backend = DaskBackend(client)
    nodes = dask_workers(client)
    with (
        ea.VectorEnv([EchoEnv] * 8, envs_per_actor=2, backend=backend) as far,
        ea.VectorEnv([EchoEnv] * 8, backend="inline") as near,
    ):
        np.testing.assert_equal(far.reset(seed=3), near.reset(seed=3))
        for turn in range(20):
            np.testing.assert_equal(far.step(np.full(8, turn % 2)), near.step(np.full(8, turn % 2)))
        assert sorted(actor.node for actor in far.actors) == ["0", "0", "1", "1"]
        agents = {name: agent_of(process) for name, process in nodes.items()}
        with ea.spawn(Counter, backend=backend) as actor:
            assert actor.add(3).result(SOON) == 3
            assert actor.pid in [child.pid for child in agents[actor.node].children(recursive=True)]
    assert backend.nodes == []
    assert_end(agents.values())
    assert plugins(client) == []
    assert dask_workers(client) == nodes
    with ea.spawn(Counter, backend=backend) as actor:
        assert actor.add(1).result(SOON) == 1, "it starts agents again"


def test_large_arrays_pass_encrypted_links_both_ways_at_once(client):
    array = np.arange(1 << 20)
    with contextlib.ExitStack() as stack:
        actors = [stack.enter_context(ea.spawn(Counter, backend=DaskBackend(client))) for _ in range(2)]
        futures = [actor.echo(array + number) for number in range(8) for actor in actors]
        for index, future in enumerate(futures):
            np.testing.assert_array_equal(future.result(LONG), array + index // 2)


def test_the_example_of_the_docs_runs_as_it_stands(tmp_path):
    page = (Path(__file__).parents[2] / "docs/guides/many-machines.md").read_text()
    (example,) = [block for block in page.split("```")[1::2] if "LocalCluster(" in block]
    script = tmp_path / "script.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {"{'0', '1'}", "{'1', '0'}"} & {done.stdout.rstrip()[-10:]}


def test_a_cluster_without_tls_works():
    with (
        local_cluster(security=None) as cluster,
        distributed.Client(cluster) as client,
        ea.VectorEnv([EchoEnv] * 4, backend=DaskBackend(client)) as envs,
    ):
        assert envs.reset(seed=0)[0].shape == (4, 4)
        assert sorted(actor.node for actor in envs.actors) == ["0", "0", "1", "1"]


def test_as_many_actors_as_the_cluster_has_threads(client):
    with ea.VectorEnv([EchoEnv] * 5, envs_per_actor="auto", backend=DaskBackend(client)) as envs:
        assert envs.reset(seed=0)[0].shape == (5, 4)
        assert len({actor.node for actor in envs.actors}) == len(envs.actors) == 2


def test_a_cluster_without_workers_has_no_cores_to_count():
    with (
        local_cluster(n_workers=0, security=None) as cluster,
        distributed.Client(cluster) as client,
        pytest.raises(ValueError, match=r"no workers yet: call client\.wait_for_workers"),
    ):
        ea.VectorEnv([EchoEnv] * 5, envs_per_actor="auto", backend=DaskBackend(client.scheduler.address))


def test_a_cluster_without_processes_has_nodes():
    with (
        local_cluster(processes=False, security=None, n_workers=1) as cluster,
        distributed.Client(cluster) as client,
        ea.spawn(Counter, backend=DaskBackend(client)) as actor,
    ):
        assert actor.add(1).result(SOON) == 1


def test_an_address_is_enough_and_the_client_for_it_is_closed():
    with local_cluster(security=None) as cluster, distributed.Client(cluster) as watching:

        def clients():
            found = watching.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.clients))
            return [name for name in found if name.startswith("Client-")]

        assert clients() == [watching.id]
        backend = DaskBackend(cluster.scheduler_address)
        with ea.spawn(Counter, backend=backend) as actor:
            assert actor.add(1).result(SOON) == 1
            assert len(clients()) == 2
        assert clients() == [watching.id]
        assert plugins(watching) == []


def test_a_worker_added_later_is_used(client):
    backend = DaskBackend(client)
    with ea.spawn(Counter, backend=backend) as first:
        first.add(1).result(SOON)
        client.cluster.scale(3)
        wait_until(lambda: sorted(backend.nodes) == ["0", "1", "2"])
        with contextlib.ExitStack() as stack:
            more = [stack.enter_context(ea.spawn(Counter, backend=backend)) for _ in range(2)]
            assert [actor.add(1).result(SOON) for actor in more] == [1, 1]
            assert sorted(actor.node for actor in (first, *more)) == ["0", "1", "2"]


def test_certificates_may_be_files(tmp_path):
    temporary, files = distributed.Security.temporary(), {}
    for field in ("tls_ca_file", *(f"tls_{role}_{what}" for role in ROLES for what in ("cert", "key"))):
        files[field] = str(tmp_path / f"{field}.pem")
        (tmp_path / f"{field}.pem").write_text(getattr(temporary, field))
    security = distributed.Security(**files, require_encryption=True)
    with (
        local_cluster(security=security, n_workers=1) as cluster,
        distributed.Client(cluster, security=security) as client,
        ea.spawn(Counter, backend=DaskBackend(client)) as actor,
    ):
        assert actor.add(1).result(SOON) == 1


def test_an_actor_that_is_closed_immediately_leaves_nothing_behind(client):
    with ea.spawn(Counter, backend=DaskBackend(client)):
        pass
    assert plugins(client) == []
    wait_until(lambda: not any(agents_in(process) for process in dask_workers(client).values()))


# Failures ---------------------------------------------------------------------------------------------


@pytest.fixture
def two_actors(client):
    """Two actors, one per node, and the processes of the Dask workers by name."""
    backend, policy = DaskBackend(client, **FAST), ea.RestartPolicy(max_restarts=3)
    with (
        ea.spawn(Counter, backend=backend, restart=policy) as one,
        ea.spawn(Counter, backend=backend, restart=policy) as two,
    ):
        one.add(1).result(LONG)
        two.add(1).result(LONG)
        assert one.node != two.node
        yield one, two, dask_workers(client), backend


def test_a_killed_dask_worker_is_a_lost_node(two_actors):
    lost, other, nodes, _ = two_actors
    agent = agent_of(nodes[lost.node])
    processes = [agent, *agent.children(recursive=True)]
    running, node = start_sleeping(lost), lost.node
    nodes[node].kill()
    with pytest.raises(ea.NodeLostError, match=f"was lost with its node '{node}', whose") as caught:
        running.result(SOON)
    assert caught.value.node == node
    assert_end(processes)
    assert other.add(1).result(SOON) == 2
    assert (lost.add(5).result(LONG), lost.incarnation) == (5, 1)


def test_a_killed_agent_is_a_lost_node_that_joins_again(two_actors):
    lost, other, nodes, backend = two_actors
    agent = agent_of(nodes[lost.node])
    processes = agent.children(recursive=True)
    running, node = start_sleeping(lost), lost.node
    agent.kill()
    with pytest.raises(ea.NodeLostError, match=f"was lost with its node '{node}', whose"):
        running.result(SOON)
    assert_end(processes)
    assert (lost.add(5).result(LONG), lost.incarnation) == (5, 1)
    assert other.add(1).result(SOON) == 2
    assert nodes[node].is_running()
    wait_until(lambda: sorted(backend.nodes) == ["0", "1"])


def test_a_stopped_agent_is_lost_after_the_lease(two_actors):
    lost, other, nodes, _ = two_actors
    agent = agent_of(nodes[lost.node])
    processes = [agent, *agent.children(recursive=True)]
    running = start_sleeping(lost)
    agent.suspend()
    with pytest.raises(ea.NodeLostError, match=r"whose agent has ended|whose link broke|which was silent"):
        running.result(SOON)
    assert lost.add(5).result(LONG) == 5
    assert other.add(1).result(SOON) == 2
    wait_until(lambda: all(not one.is_running() for one in processes))


def test_a_stopped_dask_worker_whose_agent_answers_costs_nothing(two_actors):
    actor, _, nodes, _ = two_actors
    process, node = nodes[actor.node], actor.node
    process.suspend()
    try:
        deadline = time.monotonic() + 3 * FAST["lease"]
        count = 1
        while time.monotonic() < deadline:
            count += 1
            assert actor.add(1).result(SOON) == count
        assert (actor.node, actor.incarnation) == (node, 0)
    finally:
        process.resume()


class Cluster:
    """A scheduler and Dask workers as programs, each with its nanny, as on a cluster of machines."""

    def __init__(self, tmp_path, stack):
        self.file = tmp_path / "scheduler.json"
        self._stack = stack
        self.scheduler = self.run("scheduler", "--port", "0", "--scheduler-file", self.file, "--no-show")
        wait_until(self.file.exists)

    def run(self, program, *args):
        """Runs a program of Dask; what it prints is in a file beside the scheduler's."""
        output = self._stack.enter_context((self.file.parent / f"{program}.log").open("ab"))
        command = [sys.executable, "-m", f"distributed.cli.dask_{program}", "--host", "127.0.0.1", *args]
        path = os.pathsep.join(sys.path)
        process = subprocess.Popen(
            [*command, "--no-dashboard"],
            env={**os.environ, "PYTHONPATH": path},
            cwd=self.file.parent,
            stdout=output,
            stderr=output,
        )
        self._stack.callback(self._end, process)
        return process

    def add_worker(self, name, *args):
        return self.run("worker", "--scheduler-file", self.file, "--nthreads", "1", "--name", name, *args)

    def _end(self, process):
        process.terminate()
        try:
            process.wait(SOON)
        except subprocess.TimeoutExpired:
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                one.kill()
        process.wait()


@pytest.fixture
def programs(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path, stack)


def test_a_killed_nanny_is_a_lost_node(programs):
    nannies = {name: programs.add_worker(name) for name in ("a", "b")}
    with distributed.Client(scheduler_file=str(programs.file)) as client:
        client.wait_for_workers(2, timeout=LONG)
        policy = ea.RestartPolicy(max_restarts=1)
        with ea.spawn(Counter, backend=DaskBackend(client, **FAST), restart=policy) as actor:
            actor.add(1).result(LONG)
            node = actor.node
            agent = agent_of(dask_workers(client)[node])
            processes = [agent, *agent.children(recursive=True)]
            running = start_sleeping(actor)
            nannies[node].kill()
            with pytest.raises(ea.NodeLostError, match=f"was lost with its node '{node}'"):
                running.result(LONG)
            assert_end(processes)
            assert actor.add(2).result(LONG) == 2
            assert {actor.node, node} == {"a", "b"}


def test_losing_the_scheduler_loses_all_nodes_without_a_hang(programs):
    for name in ("a", "b"):
        programs.add_worker(name)
    with distributed.Client(scheduler_file=str(programs.file)) as client:
        client.wait_for_workers(2, timeout=LONG)
        policy, deadlines = ea.RestartPolicy(max_restarts=1), ea.Deadlines(start=5.0)
        backend = DaskBackend(client, **FAST)
        with ea.spawn(Counter, backend=backend, restart=policy, deadlines=deadlines) as actor:
            actor.add(1).result(LONG)
            agents = [agent_of(process) for process in dask_workers(client).values()]
            processes = [one for agent in agents for one in (agent, *agent.children(recursive=True))]
            running = start_sleeping(actor)
            programs.scheduler.kill()
            with pytest.raises(ea.NodeLostError):
                running.result(LONG)
            assert_end(processes)
            with pytest.raises(ea.RestartsExhaustedError, match="lost the connection to its scheduler"):
                actor.add(1).result(LONG)
            begun = time.monotonic()
        assert time.monotonic() - begun < SOON


# Errors ------------------------------------------------------------------------------------------


def test_an_agent_rejects_other_callers(client):
    with ea.spawn(Counter, backend=DaskBackend(client)) as actor:
        actor.add(1).result(SOON)
        report = reports_of(client)[actor.node]
        stranger = NodeAddress("n", report["host"], report["port"], "00" * 32, "0")
        with pytest.raises(OSError):
            connect(stranger)
        tls = client.security.get_connection_args("client")["ssl_context"]
        with pytest.raises(GreetingError, match="this agent has a caller already"):
            connect(stranger._replace(tls=tls))
        assert actor.add(1).result(SOON) == 2


def test_a_worker_without_envactors_is_rejected_in_one_line_and_may_join(programs, caplog):
    (programs.file.parent / "block.py").write_text("import sys\nsys.modules['envactors'] = None\n")
    programs.add_worker("good")
    programs.add_worker("bare", "--preload", "block.py")
    with distributed.Client(scheduler_file=str(programs.file)) as client:
        client.wait_for_workers(2, timeout=LONG)
        backend = DaskBackend(client, envs_per_node=1)
        with ea.spawn(Counter, backend=backend) as actor:
            assert actor.add(1).result(LONG) == 1
            assert backend.nodes == ["good"]
            refused = "bare cannot be used, cannot use envactors there .*: install .* client.upload_file"
            with pytest.raises(ea.ActorStartError, match=refused):
                ea.spawn(Counter, backend=backend, deadlines=ea.Deadlines(start=0.5)).add(1).result(SOON)
            programs.add_worker("late", "--preload", "block.py")
            client.wait_for_workers(3, timeout=LONG)
            wait_until(lambda: "node late cannot be used" in caplog.text)


class FakeWorker(SimpleNamespace):
    """A Dask worker at an address that this machine does not have."""

    def __init__(self):
        super().__init__(name=7, address="tcp://192.0.2.1:80", security=distributed.Security(), reports=[])

    def log_event(self, topic, report):
        self.reports.append((topic, report))


def agent_host(worker, **terms):
    defaults = AgentTerms("a topic", "00" * 32, "0", 1.0, 0.2, {}, tls=False, insecure=False)
    return AgentHost(worker, defaults._replace(**terms))


def test_a_factory_that_a_node_cannot_import_says_what_to_do(client, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("class Env:\n    def echo(self, value):\n        return value\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    said = r"No module named 'only_here'.*on the node.*client\.upload_file"
    with ea.spawn(only_here.Env, backend=DaskBackend(client)) as actor, pytest.raises(ea.ActorStartError, match=said):
        actor.echo(1).result(SOON)
    cloudpickle.register_pickle_by_value(only_here)
    try:
        with ea.spawn(only_here.Env, backend=DaskBackend(client)) as actor:
            assert actor.echo(1).result(SOON) == 1
    finally:
        cloudpickle.unregister_pickle_by_value(only_here)
    client.upload_file(str(tmp_path / "only_here.py"))
    with ea.spawn(only_here.Env, backend=DaskBackend(client)) as actor:
        assert actor.echo(2).result(SOON) == 2


def test_without_tls_agents_listen_at_loopback_only_unless_told_otherwise(capfd):
    worker = FakeWorker()
    agent_host(worker).start()
    ((topic, report),) = worker.reports
    assert (topic, report["name"]) == ("a topic", "7")
    assert report["refused"] == (
        "without TLS, the node agent would accept connections from anyone at '192.0.2.1': give it certificates (with "
        "Dask, start the cluster with security=...), or pass insecure=True in a network that you trust"
    )
    host = agent_host(worker, insecure=True)
    host.start()
    wait_until(lambda: len(worker.reports) == 2)
    asyncio.run(host.end())
    assert "its agent ended with exit code 1" in worker.reports[1][1]["refused"]
    assert "Cannot assign requested address" in capfd.readouterr().err


class Broker(FakeWorker):
    """A Dask worker at a loopback address, which keeps the port of each agent."""

    def __init__(self):
        super().__init__()
        self.address, self.ports = "tcp://127.0.0.1:80", queue.Queue()

    def log_event(self, topic, report):
        self.ports.put(report["port"])


def test_an_agent_is_replaced_whenever_it_dies_unless_its_caller_has_ended_it():
    worker = Broker()
    host = agent_host(worker)
    host.start()
    for _ in range(2):
        worker.ports.get(timeout=LONG)
        host._agent.kill()
    address = NodeAddress("7", "127.0.0.1", worker.ports.get(timeout=LONG), "00" * 32, "0")
    connect(address).close()  # as a caller does that takes the node for lost
    link = connect(address._replace(port=worker.ports.get(timeout=LONG)))
    link.send(Record(RecordKind.END))
    assert host._agent.wait(LONG) == NOT_NEEDED
    wait_until(lambda: not any(thread.name == "envactors-agent" for thread in threading.enumerate()))
    link.close()
    assert worker.ports.empty()
    asyncio.run(host.end())


def test_an_agent_that_dies_while_its_host_ends_is_not_replaced():
    worker = Broker()
    host = agent_host(worker)
    host.start()
    worker.ports.get(timeout=LONG)
    asyncio.run(host.end())
    wait_until(lambda: not any(thread.name == "envactors-agent" for thread in threading.enumerate()))
    assert host._start_agent() is None


def test_a_worker_without_certificates_is_rejected():
    worker = FakeWorker()
    agent_host(worker, tls=True).start()
    assert "the Security of this Dask worker has no certificates" in worker.reports[0][1]["refused"]


def test_clients_that_cannot_work_are_rejected():
    with pytest.raises(TypeError, match=r"client is 3: expected a distributed\.Client, or the address of a scheduler"):
        DaskBackend(3)
    with pytest.raises(TypeError, match=r"^insecure is 'no': expected bool"):
        DaskBackend("tcp://scheduler:8786", insecure="no")
    with pytest.raises(ValueError, match=r"lease is 1\.0 with heartbeat=1\.0"):
        DaskBackend("tcp://127.0.0.1:1", lease=1.0)


def test_a_client_that_is_closed_is_one_clear_error(client):
    with distributed.Client(client.scheduler.address, security=client.security, set_as_default=False) as other:
        backend = DaskBackend(other)
    with (
        pytest.raises(ea.ActorStartError, match="cannot start its node agents: client is closed: expected an open"),
        ea.spawn(Counter, backend=backend, deadlines=ea.Deadlines(start=2.0)) as actor,
    ):
        actor.add(1).result(LONG)


def test_a_scheduler_that_does_not_answer_is_one_clear_error(monkeypatch):
    import dask

    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        backend = DaskBackend("tcp://127.0.0.1:1")
        with (
            pytest.raises(ea.ActorStartError, match="cannot start its node agents"),
            ea.spawn(Counter, backend=backend, deadlines=ea.Deadlines(start=4.0)) as actor,
        ):
            actor.add(1).result(LONG)


def test_without_dask_the_error_names_the_extra():
    code = "import sys; sys.modules['distributed'] = None; from envactors.integrations.dask import DaskBackend"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'envactors[dask]'" in done.stderr
