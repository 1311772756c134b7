"""The helper of a node: it enforces the lease of its agent, and actors restart on the node when it is killed."""

from __future__ import annotations

import psutil
import pytest
from breeder import Breeder, assert_gone, helpers_of, is_there
from helpers import SOON, wait_until

import envactors as ea
from envactors.remote import LocalNodes

LEASE = 1.5
ONCE = ea.RestartPolicy(max_restarts=1, backoff=1000.0)


def everybody_on(launcher, actor):
    """The agent of an actor's node, and all processes there."""
    agent = psutil.Process(launcher.agents[actor.node].pid)
    return agent, [agent, *agent.children(recursive=True)]


def test_the_helper_ends_a_stopped_agent_and_all_its_processes_when_the_lease_is_over():
    launcher = LocalNodes(1)
    with ea.spawn(Breeder, backend=ea.RemoteBackend(launcher, lease=LEASE, heartbeat=0.3)) as actor:
        escaped = [psutil.Process(pid) for pid in actor.escape().result(SOON) + actor.of_own_group().result(SOON)]
        actor.hang_in_c()
        agent, everybody = everybody_on(launcher, actor)
        assert len(helpers_of(agent.pid)) == 1
        agent.suspend()
        assert_gone([*everybody, *escaped], LEASE + 5.0)


def test_actors_restart_on_their_node_when_its_helper_is_killed():
    launcher = LocalNodes(1)
    backend = ea.RemoteBackend(launcher, lease=LEASE, heartbeat=0.3)
    with ea.spawn(Breeder, backend=backend, restart=ONCE) as actor:
        children = [psutil.Process(pid) for pid in actor.of_own_group().result(SOON)]
        agent, _ = everybody_on(launcher, actor)
        for incarnation in range(1, 4):
            (lost,) = helpers_of(agent.pid)
            lost.kill()
            wait_until(lambda incarnation=incarnation: actor.incarnation == incarnation)
            assert actor.getpid().result(SOON) == actor.pid
        assert_gone(children)
        assert is_there(agent)
        assert (actor.stats().restarts, actor.stats().last_failure) == (0, None)


def test_the_next_helper_knows_the_lease():
    launcher = LocalNodes(1)
    with ea.spawn(Breeder, backend=ea.RemoteBackend(launcher, lease=LEASE, heartbeat=0.3), restart=ONCE) as actor:
        actor.getpid().result(SOON)
        agent, _ = everybody_on(launcher, actor)
        (lost,) = helpers_of(agent.pid)
        lost.kill()
        wait_until(lambda: actor.incarnation == 1)
        escaped = [psutil.Process(pid) for pid in actor.escape().result(SOON)]
        _, everybody = everybody_on(launcher, actor)
        agent.suspend()
        assert_gone([*everybody, *escaped], LEASE + 5.0)


@pytest.mark.parametrize("lease", [1e7, 1e300])
def test_a_lease_may_last_for_ages(lease):
    with ea.spawn(lambda: "text", backend=ea.RemoteBackend(LocalNodes(1), lease=lease)) as actor:
        assert actor.upper().result(SOON) == "TEXT"
