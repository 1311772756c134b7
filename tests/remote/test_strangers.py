"""Silent connections to an agent neither block its caller nor use many resources."""

from __future__ import annotations

import contextlib
import resource
import socket
import time

import psutil
import pytest
from helpers import SOON, Counter, wait_until

import envactors as ea
from envactors.remote import LocalNodes
from envactors.remote.greeting import GreetingError, new_secret
from envactors.remote.launching import NodeAddress, connect
from envactors.remote.starting import AgentOrders, end_agents, read_port, start_agent
from envactors.system.choice import PORTABLE

pytestmark = pytest.mark.timeout(120)
LONG = 60.0  # seconds that agents and workers may take to start on a busy machine
COUNTS = pytest.mark.parametrize("count", [200, pytest.param(1500, marks=pytest.mark.soak)])
LINUX = pytest.mark.skipif(PORTABLE, reason="limits of other processes are set as on Linux")
SECRET = new_secret()


@pytest.fixture
def waiting():
    """An agent that waits for its caller, and its address."""
    process = start_agent(AgentOrders("a node", "127.0.0.1", SECRET, "0", 10.0, 1.0, {}))
    try:
        yield psutil.Process(process.pid), NodeAddress("a node", "127.0.0.1", read_port(process), SECRET, "0")
    finally:
        end_agents([process])


@contextlib.contextmanager
def strangers(address, count, said=b""):
    """Connects this many times, says this, and nothing more."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(sock := socket.create_connection(address, SOON))
            sock.sendall(said)
        yield


@COUNTS
@pytest.mark.parametrize("said", [b"", b"\x05\0"], ids=["silent", "half a length"])
def test_idle_connections_do_not_keep_the_caller_out(waiting, count, said):
    agent, address = waiting
    with strangers((address.host, address.port), count, said):
        link = connect(address)
        assert agent.num_threads() < 10  # not one per stranger
        assert agent.num_fds() < 150
        link.close()


@COUNTS
def test_an_agent_serves_its_caller_whoever_else_connects(count):
    nodes = LocalNodes(1)
    with ea.spawn(Counter, backend=ea.RemoteBackend(nodes, lease=5.0, heartbeat=0.5)) as actor:
        assert actor.add(1).result(LONG) == 1
        agent = psutil.Process(nodes.agents["local-0"].pid)
        threads = agent.num_threads()
        (port,) = [one.laddr.port for one in agent.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        with strangers(("127.0.0.2", port), count):
            for turn in range(20):
                assert actor.add(1).result(SOON) == turn + 2
            assert agent.num_threads() < threads + 10  # not one per stranger
            assert actor.incarnation == 0


@LINUX
def test_an_agent_without_descriptors_continues_and_accepts_when_there_are_some(waiting):
    agent, address = waiting
    with pytest.raises(GreetingError, match="does not know the secret"):
        connect(address._replace(secret=new_secret()))  # it has opened all that it needs to wait
    soft, hard = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (agent.num_fds(), hard))
    with strangers((address.host, address.port), 20):
        time.sleep(0.3)
        before = sum(agent.cpu_times()[:2])
        time.sleep(1.0)
        assert sum(agent.cpu_times()[:2]) - before < 0.5, "it does not try again all the time"
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (soft, hard))
        link = connect(address)
        link.close()


def test_a_caller_of_another_version_learns_both_versions(waiting, monkeypatch):
    agent, address = waiting
    mine = ea.__version__
    monkeypatch.setattr(ea, "__version__", "99.8.7")
    text = f"the agent's envactors is '{mine}', and the caller's is '99.8.7': install the same version on both sides"
    with pytest.raises(GreetingError, match=text):
        connect(address)
    monkeypatch.setattr(ea, "__version__", f"{mine}.dev3+local")
    connect(address).close()
    wait_until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE)


def test_a_node_of_another_version_is_left_out_and_the_error_of_a_start_says_why(monkeypatch, caplog):
    monkeypatch.setattr(ea, "__version__", "99.8.7")
    text = r"the agent's envactors is '.*', and the caller's is '99\.8\.7'"
    backend, deadlines = ea.RemoteBackend(LocalNodes(1)), ea.Deadlines(start=0.5)
    with ea.spawn(Counter, backend=backend, deadlines=ea.Deadlines(start=LONG)) as waiting:
        wait_until(lambda: "cannot be used" in caplog.text)
        with (
            pytest.raises(ea.ActorStartError, match=text),
            ea.spawn(Counter, backend=backend, deadlines=deadlines) as actor,
        ):
            actor.add(1).result(LONG)
        waiting.kill()
