"""The helpers of a node are supervised by its agent, and while one is missing the lease still ends everything."""

from __future__ import annotations

import psutil
import pytest
from breeder import Breeder, assert_gone, helpers_of
from helpers import SOON, wait_until
from witness import Witness, assert_one_at_a_time

import envactors as ea
from envactors.remote import LocalNodes

LEASE = 1.5


def hostage(path):
    """Returns what makes an env that tells when it runs, and leaves processes behind."""

    # Travels by value: workers need not import this module, and pytest with it.
    class Hostage(Witness, Breeder):
        def __init__(self):
            Witness.__init__(self, path)
            Breeder.__init__(self)

    return Hostage


def everybody_on(launcher, actor):
    """The agent of an actor's node, and all processes there."""
    agent = psutil.Process(launcher.agents[actor.node].pid)
    return agent, [agent, *agent.children(recursive=True)]


@pytest.mark.parametrize(
    ("helper", "end"),
    [
        pytest.param("reaper", psutil.Process.suspend, id="reaper killed, agent stopped"),
        pytest.param("keeper", psutil.Process.suspend, id="keeper killed, agent stopped"),
        pytest.param("reaper", psutil.Process.kill, id="reaper killed, agent killed"),
    ],
)
def test_a_node_that_loses_a_helper_and_its_agent_keeps_no_process_beyond_the_lease(helper, end, tmp_path):
    path = tmp_path / "witness"
    launcher = LocalNodes(2)
    backend = ea.RemoteBackend(launcher, lease=LEASE, heartbeat=0.3)
    policy = ea.RestartPolicy(max_restarts=5, backoff=0.0)
    with ea.spawn(hostage(str(path)), backend=backend, restart=policy) as actor:
        escaped = [psutil.Process(pid) for pid in actor.escape().result(SOON) + actor.plain().result(SOON)]
        running = actor.work(60.0)
        wait_until(lambda: "runs" in path.read_text())
        agent, everybody = everybody_on(launcher, actor)
        (lost,) = helpers_of(agent.pid, helper)
        lost.kill()
        end(agent)
        with pytest.raises(ea.NodeLostError):
            running.result(SOON + LEASE)
        assert_gone([*everybody, *escaped], LEASE + 5.0)
        assert actor.work(0.01).result(SOON + LEASE) is None
        assert_one_at_a_time(path, least=2)


def test_an_agent_replaces_the_helpers_of_its_node_which_know_its_lease_and_its_workers():
    launcher = LocalNodes(1)
    with ea.spawn(Breeder, backend=ea.RemoteBackend(launcher, lease=LEASE, heartbeat=0.3)) as actor:
        escaped = [psutil.Process(pid) for pid in actor.escape().result(SOON)]
        agent, before = everybody_on(launcher, actor)
        for helper in ("reaper", "keeper"):
            (lost,) = helpers_of(agent.pid, helper)
            lost.kill()
            wait_until(lambda helper=helper, lost=lost: [one for one in helpers_of(agent.pid, helper) if one != lost])
        actor.hang_in_c()
        agent, everybody = everybody_on(launcher, actor)
        agent.suspend()
        assert_gone([*before, *everybody, *escaped], LEASE + 5.0)
