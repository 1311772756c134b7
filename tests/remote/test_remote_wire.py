"""Nodes behind a real wire: TCP itself over packets that are lost, late, kept back or cut off."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import SOON, Counter, promised
from wire import Wire, WiredNodes, in_namespace, is_possible
from witness import Witness, assert_one_at_a_time

import envactors as ea
from envactors.testing import EchoEnv

SOAK = pytest.mark.soak
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    if not is_possible():
        pytest.skip("network namespaces and TUN devices cannot be made here")


def run(scenario, *args):
    """Runs a function of this module, which is given a wire, in a namespace of its own."""
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    call = f"test_remote_wire.main({scenario.__name__!r}, {args!r})"
    code = f"import sys; sys.path[:0] = {path}; import test_remote_wire; {call}"
    command = in_namespace(sys.executable, "-W", "error", "-c", code)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def main(scenario, args):
    with contextlib.closing(Wire()) as wire:
        globals()[scenario](wire, *args)


@contextlib.contextmanager
def far_actor(backend, *factories):
    """Yields the actor that is on the far node, of two."""
    policy = ea.RestartPolicy(max_restarts=5, backoff=0.0)
    with contextlib.ExitStack() as stack:
        actors = [stack.enter_context(ea.spawn(factory, backend=backend, restart=policy)) for factory in factories]
        assert [actor.add(1).result(SOON) for actor in actors] == [1, 1]
        far, near = sorted(actors, key=lambda actor: actor.node)
        assert (far.node, near.node) == ("far", "near")
        yield far
        assert (near.add(1).result(SOON), near.incarnation) == (2, 0)


def cut_for_a_while(wire, lease, seconds, ways):
    backend = ea.RemoteBackend(WiredNodes(wire), lease=lease, heartbeat=lease / 10)
    with far_actor(backend, Counter, Counter) as actor:
        wire.cut = frozenset(ways)
        running = actor.add(1)
        time.sleep(seconds)
        wire.cut = frozenset()
        assert running.result(SOON) == 2
        assert (actor.add(1).result(SOON), actor.incarnation, actor.node) == (3, 0, "far")


def keep_back_and_cut(wire, lease, seconds, ways, path):
    nodes = WiredNodes(wire)
    backend = ea.RemoteBackend(nodes, lease=lease, heartbeat=lease / 10)
    with far_actor(backend, partial(Witness, f"{path}/0"), partial(Witness, f"{path}/1")) as actor:
        agent = psutil.Process(nodes.agents["far"].pid)
        processes = [agent, *agent.children(recursive=True)]
        running = actor.work(60.0)
        time.sleep(0.2)
        wire.kept = frozenset(ways)
        time.sleep(seconds)
        wire.kept = frozenset()
        time.sleep(0.1)  # what was kept arrives, and tells of a time that is long past
        wire.cut = frozenset(["there", "back"])
        begun = time.monotonic()
        with pytest.raises(ea.NodeLostError):
            running.result(SOON + lease)
        assert time.monotonic() - begun < promised(lease + 2.0)
        actor.work(0.05).result(SOON)
        assert (actor.node, actor.incarnation) == ("near", 1)
        _, alive = psutil.wait_procs(processes, timeout=SOON)
        assert alive == []
    for witness in Path(path).iterdir():
        assert_one_at_a_time(witness, least=1)


def lose_some(wire, steps, size):
    backend = ea.RemoteBackend(WiredNodes(wire))
    with (
        far_actor(backend, Counter, Counter) as actor,
        ea.VectorEnv([EchoEnv] * 4, envs_per_actor=2, backend=backend) as envs,
        ea.VectorEnv([EchoEnv] * 4, backend="inline") as undisturbed,
    ):
        wire.loss, wire.delay = 0.01, 0.02
        payload = np.random.default_rng(0).bytes(size)
        assert actor.echo(payload).result(SOON) == payload
        np.testing.assert_equal(envs.reset(seed=0), undisturbed.reset(seed=0))
        for turn in range(steps):
            actions = np.arange(4) + turn
            np.testing.assert_equal(envs.step(actions), undisturbed.step(actions))
        assert wire.lost > 0
        assert [one.incarnation for one in (actor, *envs.actors)] == [0, 0, 0]


THERE, BACK, BOTH = ["there"], ["back"], ["there", "back"]


@pytest.mark.parametrize(
    ("lease", "seconds", "ways"),
    [
        pytest.param(4.0, 1.0, BOTH, id="short"),
        pytest.param(10.0, 4.0, THERE, id="there", marks=SOAK),
        pytest.param(10.0, 4.0, BACK, id="back", marks=SOAK),
        pytest.param(10.0, 4.0, BOTH, id="both ways", marks=SOAK),
    ],
)
def test_a_wire_that_is_cut_for_less_than_the_lease_loses_nothing(lease, seconds, ways):
    run(cut_for_a_while, lease, seconds, ways)


@pytest.mark.parametrize(
    ("lease", "seconds", "ways"),
    [
        pytest.param(1.5, 0.0, [], id="cut", marks=SOAK),
        pytest.param(1.5, 0.9, BACK, id="kept back"),
        pytest.param(10.0, 8.0, THERE, id="for 8 s there", marks=SOAK),
        pytest.param(10.0, 8.0, BACK, id="for 8 s back", marks=SOAK),
        pytest.param(10.0, 8.0, BOTH, id="for 8 s both ways", marks=SOAK),
    ],
)
def test_a_late_heartbeat_does_not_prolong_an_expired_lease(lease, seconds, ways, tmp_path):
    run(keep_back_and_cut, lease, seconds, ways, str(tmp_path))


@pytest.mark.parametrize(("steps", "size"), [(12, 1_000_000), pytest.param(500, 3_000_000, marks=SOAK)])
def test_packets_that_are_lost_and_late_change_no_result(steps, size):
    run(lose_some, steps, size)
