"""An error on a node that concerns one worker, vector or call ends neither the agent nor anything else."""

from __future__ import annotations

import functools
import resource

import numpy as np
import psutil
import pytest
from bulky import Huge, Talkative, Wide
from helpers import SOON, Counter
from nodes import preloading_backend, standing
from slowlink import ChangedNodes

import envactors as ea
from envactors.remote import LocalNodes, records
from envactors.system.choice import PORTABLE
from envactors.testing import EchoEnv

pytestmark = pytest.mark.timeout(120)
LONG = 60.0  # seconds that agents and workers may take to start on a busy machine
LIMIT = 1_000_000
LARGEST_FILE = 1 << 24
TOO_LARGE = f"too large for the link to its node.* ha(s|ve) [0-9]+ bytes pickled.* at most {LIMIT}"
LINUX = pytest.mark.skipif(PORTABLE, reason="limits of other processes are set as on Linux")


# What is too large for a record ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes_with_limits(helper_processes):
    """A backend of two nodes that stay, where files are small, and which accept short records alone."""
    files = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({LARGEST_FILE}, {LARGEST_FILE}))"
    nodes = ChangedNodes(f"{files}; import envactors.remote.records as r; r.LONGEST = {LIMIT}")
    backend = preloading_backend(nodes, "bulky", lease=10.0, heartbeat=0.5)
    with standing(backend):
        yield backend


@pytest.fixture
def limited(nodes_with_limits, monkeypatch):
    """The same, where this side, too, sends short records alone."""
    monkeypatch.setattr(records, "LONGEST", LIMIT)
    return nodes_with_limits


@pytest.mark.parametrize("retries", [0, 1])
def test_a_result_or_arguments_above_the_links_limit_fail_their_own_call_alone(limited, retries):
    with ea.spawn(Counter, backend=limited) as actor, ea.spawn(Counter, backend=limited) as other:
        assert (actor.add(1).result(LONG), other.add(1).result(LONG)) == (1, 1)
        calls = actor.options(retries=retries)
        futures = [
            calls.make(2 * LIMIT),
            calls.echo(bytes(2 * LIMIT)),
            calls.fail(ValueError, "x" * (LIMIT - 1000)),
        ]
        last = calls.add(1)
        for future in futures:
            with pytest.raises(ea.SerializationError, match=TOO_LARGE):
                future.result(LONG)
        assert last.result(SOON) == 2
        assert len(actor.make(LIMIT - 1000).result(SOON)) == LIMIT - 1000
        assert other.add(1).result(SOON) == 2
        assert (actor.incarnation, other.incarnation) == (0, 0)
        assert len(limited.nodes) == 2


def test_a_steps_result_above_the_limit_fails_its_own_env_alone(limited):
    talkative = functools.partial(Talkative, 2 * LIMIT)
    with ea.VectorEnv([talkative] * 4, envs_per_actor=2, backend=limited) as envs:
        envs.reset(seed=0, timeout=LONG)
        with pytest.raises(ea.VectorStepError) as failed:
            envs.step(np.array([1, 7, 2, 3]))
        assert list(failed.value.failures) == [1]
        assert isinstance(failed.value.failures[1], ea.SerializationError)
        assert "too large for the link to its node" in str(failed.value.failures[1])
        assert failed.value.batch.env_ids.tolist() == [0, 2, 3]
        envs.step(np.array([1, 2, 3, 4]))
        assert [actor.incarnation for actor in envs.actors] == [0, 0]


def test_results_of_a_batch_that_are_above_the_limit_together_come_in_several_records(limited):
    with ea.VectorEnv([Wide] * 5, envs_per_actor=5, backend=limited) as envs:
        envs.reset(seed=0, timeout=LONG)
        for turn in range(1, 4):
            obs, *_ = envs.step(np.zeros(5, np.int64))
            assert obs.shape == (5, 50_000)
            assert (obs == turn).all()
        assert envs.actors[0].incarnation == 0


# Limits of an agent -------------------------------------------------------------------------------------


@LINUX
def test_a_vector_that_is_too_large_for_its_nodes_harms_no_other(nodes_with_limits):
    backend = nodes_with_limits
    assert Huge.observation_space.shape[0] * 8 >= LARGEST_FILE
    with ea.VectorEnv([EchoEnv] * 4, envs_per_actor=2, backend=backend) as envs:
        envs.reset(seed=0, timeout=LONG)
        with pytest.raises(ea.EnvActorsError, match="its node has no memory for the vector"):
            ea.VectorEnv([Huge] * 2, backend=backend, restart=ea.RestartPolicy(max_restarts=1)).close()
        obs, *_ = envs.step(np.arange(4))
        assert obs[:, 1].tolist() == [1] * 4
        assert [actor.incarnation for actor in envs.actors] == [0, 0]
        assert len(backend.nodes) == 2


def limit_memory(agent):
    """Allows a running agent a little more memory than it has."""
    limit = psutil.Process(agent.pid).memory_info().vms + (48 << 20)
    resource.prlimit(agent.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


@LINUX
@pytest.mark.parametrize("way", ["there", "back"])
def test_an_agent_without_memory_for_a_payload_ends_the_worker_that_it_concerns_alone(way):
    nodes = LocalNodes(1)
    backend = ea.RemoteBackend(nodes, lease=10.0, heartbeat=0.5)
    with ea.spawn(Counter, backend=backend) as actor, ea.spawn(Counter, backend=backend) as other:
        assert (actor.add(1).result(LONG), other.add(1).result(LONG)) == (1, 1)
        (agent,) = nodes.agents.values()
        limit_memory(agent)
        future = actor.echo(bytes(100_000_000)) if way == "there" else actor.make(100_000_000)
        with pytest.raises(ea.ActorDiedError, match="this worker was ended: MemoryError"):
            future.result(LONG)
        assert (other.add(1).result(SOON), other.incarnation) == (2, 0)
        assert agent.poll() is None
