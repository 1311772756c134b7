"""Agents as processes: they end with whoever started them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from helpers import SOON, Counter

import envactors as ea
from envactors.remote import LocalNodes, local_nodes
from envactors.remote.launching import AgentOptions
from envactors.remote.starting import AgentOrders, end_agents, read_port, start_agent


def orders(**changes):
    return AgentOrders("a node", "127.0.0.1", "00" * 32, "0", 10.0, 1.0, {})._replace(**changes)


def test_an_agent_without_a_caller_ends_when_its_pipe_is_closed():
    agent = start_agent(orders())
    assert read_port(agent) > 0
    agent.stdin.close()
    assert agent.wait(SOON) == 0


def test_ctrl_c_does_not_end_an_agent_that_is_starting():
    agent = start_agent(orders())
    agent.send_signal(signal.SIGINT)
    assert read_port(agent) > 0
    end_agents([agent])


def test_an_agent_ends_with_the_process_that_started_it():
    code = """
        import os, sys
        from envactors.remote import starting
        agent = starting.start_agent(starting.AgentOrders.from_json(sys.argv[1]))
        starting.read_port(agent)
        print(agent.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), json.dumps(orders()._asdict())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3 * SOON)
    pid = int(done.stdout)
    if psutil.pid_exists(pid):
        _, alive = psutil.wait_procs([psutil.Process(pid)], timeout=SOON)
        assert alive == []


def test_an_agent_that_cannot_listen_reports_the_reason(capfd):
    agent = start_agent(orders(host="192.0.2.1", insecure=True))
    with pytest.raises(ChildProcessError, match="its agent ended with exit code 1, and its stderr says why"):
        read_port(agent)
    end_agents([agent])
    assert "Cannot assign requested address" in capfd.readouterr().err


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "", "::", "a-node.example"])
def test_no_agent_listens_beyond_loopback_without_tls_unless_told_to(host, capfd):
    with pytest.raises(ValueError, match="without TLS, the node agent would accept connections from anyone at"):
        start_agent(orders(host=host))
    command = [sys.executable, "-m", "envactors.remote.agent"]
    line = json.dumps(orders(host=host)._asdict())
    done = subprocess.run(command, input=line, capture_output=True, text=True, timeout=3 * SOON)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"without TLS, the node agent would accept connections from anyone at {host!r}" in done.stderr


@pytest.mark.parametrize("changes", [{"host": "localhost"}, {"host": "0.0.0.0", "insecure": True}])
def test_an_agent_listens_at_loopback_or_where_it_is_told_to(changes):
    agent = start_agent(orders(**changes))
    assert read_port(agent) > 0
    end_agents([agent])


def test_orders_that_cannot_be_sent_start_no_agent(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("an agent was started"))
    with pytest.raises(TypeError):
        start_agent(orders(options={"preload": object()}))


class Broken:
    """A launcher whose cluster does not answer."""

    def start(self, options, nodes):
        raise OSError("no cluster answers")


def test_every_actor_gets_the_error_of_a_launcher_that_cannot_start_agents():
    backend = ea.RemoteBackend(Broken())
    for _ in range(2):
        with pytest.raises(OSError, match="no cluster answers"):
            ea.spawn(dict, backend=backend)


def test_a_launcher_ends_the_agents_of_one_backend_and_not_those_of_another():
    launcher = LocalNodes(1)
    with ea.spawn(Counter, backend=ea.RemoteBackend(launcher)) as later:
        with ea.spawn(Counter, backend=ea.RemoteBackend(launcher)) as actor:
            assert actor.add(1).result(SOON) == 1
            (newest,) = launcher.agents.values()
            assert later.add(1).result(SOON) == 1
        assert newest.returncode is not None
        assert later.add(1).result(SOON) == 2
        assert later.incarnation == 0


def test_a_launcher_that_fails_halfway_ends_the_agents_that_it_has_started(monkeypatch):
    started = []

    def start(orders):
        if started:
            raise OSError("too many processes")
        started.append(start_agent(orders))
        return started[0]

    class Nodes:
        def expect_nodes(self, count):
            pass

        def refuse_node(self, name, reason):
            pass

        def add_node(self, address):
            pass

    monkeypatch.setattr(local_nodes, "start_agent", start)
    launcher = LocalNodes(2)
    with pytest.raises(OSError, match="too many processes"):
        launcher.start(AgentOptions(10.0, 1.0, {}), Nodes())
    assert started[0].returncode is not None
    assert launcher.agents == {}
