"""Agents as processes: they end with whoever started them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import psutil
import pytest
from helpers import SOON

import envactors as ea
from envactors.remote.starting import AgentOrders, end_agents, read_port, start_agent


def orders(**changes):
    return AgentOrders("a node", "127.0.0.1", "00" * 32, "0", 10.0, 1.0, {})._replace(**changes)


def test_an_agent_without_a_caller_ends_when_its_pipe_is_closed():
    agent = start_agent(orders())
    assert read_port(agent) > 0
    agent.stdin.close()
    assert agent.wait(SOON) == 0


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
    agent = start_agent(orders(host="192.0.2.1"))
    with pytest.raises(ChildProcessError, match="its agent ended with exit code 1, and its stderr says why"):
        read_port(agent)
    end_agents([agent])
    assert "Cannot assign requested address" in capfd.readouterr().err


def test_orders_that_cannot_be_sent_start_no_agent(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("an agent was started"))
    with pytest.raises(TypeError):
        start_agent(orders(options={"preload": object()}))


class Broken:
    """A launcher whose cluster does not answer."""

    def start(self, options, nodes):
        raise OSError("no cluster answers")

    def stop(self):
        pass


def test_every_actor_gets_the_error_of_a_launcher_that_cannot_start_agents():
    backend = ea.RemoteBackend(Broken())
    for _ in range(2):
        with pytest.raises(OSError, match="no cluster answers"):
            ea.spawn(dict, backend=backend)
