"""Vectors on nodes: what a lost node leaves of a step or reset, and what goes beside the rows."""

from __future__ import annotations

import time

import numpy as np
import pytest
from helpers import SOON, wait_until
from nodes import preloading_backend, standing

import envactors as ea
from envactors.integrations.access import VectorAccess
from envactors.remote import LocalNodes
from envactors.testing import EchoEnv, FaultyEnv

pytestmark = pytest.mark.timeout(120)


class Slow(EchoEnv):
    """Writes down what it begins, and waits where it is told to for as long as there is no file."""

    def __init__(self, env_id=0, log=None):
        super().__init__(env_id)
        self.log = log

    def wait(self, what):
        with self.log.open("a") as log:
            log.write(f"{what}\n")
        while not self.log.with_suffix(".go").exists():
            time.sleep(0.005)

    def reset(self, *, seed=None, options=None):
        if options:
            self.wait("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if action == 9:
            self.wait("step")
        return super().step(action)


@pytest.fixture
def launcher():
    return LocalNodes(2)


@pytest.fixture
def make(launcher, tmp_path):
    """Makes vectors of two envs in one actor, on nodes that are given up soon."""
    made = []

    def make_one(**options):
        backend = ea.RemoteBackend(launcher, lease=1.0, heartbeat=0.2)
        factories = [lambda env_id=env_id: Slow(env_id, tmp_path / "log") for env_id in range(2)]
        made.append(ea.VectorEnv(factories, envs_per_actor=2, backend=backend, **options))
        return made[-1]

    yield make_one
    for envs in made:
        envs.close()


@pytest.fixture
def lose(launcher, tmp_path):
    """Loses the node of a vector once this many calls wait, and has those that come after it continue."""
    log = tmp_path / "log"

    def lose_node(envs, calls=1):
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == calls)
        launcher.agents[envs.actors[0].node].kill()
        wait_until(lambda: envs.actors[0].incarnation == 1)
        log.with_suffix(".go").touch()

    return lose_node


@pytest.mark.parametrize("env_id", [0, 1])
def test_a_reset_that_may_have_begun_on_a_lost_node_is_not_run_again(make, lose, tmp_path, env_id):
    envs = make()
    envs.reset(seed=0)
    with pytest.raises(ea.VectorTimeoutError):
        envs.reset(options={"slow": True}, env_ids=[env_id], timeout=0.01)
    lose(envs)
    with pytest.raises(ea.VectorStepError) as caught:
        envs.recv()
    assert isinstance(caught.value.failures[env_id], ea.NodeLostError)
    assert (tmp_path / "log").read_text() == "reset\n"
    assert envs.reset(seed=3)[0][:, :3].tolist() == [[0, 0, -1], [1, 0, -1]]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_step_on_a_lost_node_raises(make, lose, slow):
    envs = make()
    envs.reset(seed=0)
    access = VectorAccess(envs)
    access.start_step(np.where(np.arange(2) == slow, 9, 1))
    lose(envs)
    with pytest.raises(ea.VectorStepError) as caught:
        access.finish_step(SOON)
    assert slow in caught.value.failures
    assert {type(error) for error in caught.value.failures.values()} == {ea.NodeLostError}
    envs.reset(seed=0)
    assert envs.step(np.array([1, 2]))[0][:, :3].tolist() == [[0, 1, 1], [1, 1, 2]]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_step_on_a_lost_node_is_truncated_and_the_env_renewed(make, lose, slow):
    envs = make(on_failure="renew")
    envs.reset(seed=0)
    access = VectorAccess(envs)
    access.start_step(np.where(np.arange(2) == slow, 9, 1))
    lose(envs)
    _, _, terminated, truncated, infos = access.finish_step(SOON)
    assert truncated[slow]
    assert not terminated.any()
    assert isinstance(infos[slow]["failure"], ea.NodeLostError)
    envs.step(np.array([1, 1]))
    assert envs.step(np.array([3, 3]))[0][slow, :3].tolist() == [slow, 1, 3]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_step_on_a_lost_node_is_replayed(make, lose, slow):
    envs = make(on_failure="replay")
    envs.reset(seed=0)
    envs.step(np.array([1, 2]))
    access = VectorAccess(envs)
    access.start_step(np.where(np.arange(2) == slow, 9, 1))
    lose(envs)
    obs, *_, infos = access.finish_step(SOON)
    assert obs[:, :3].tolist() == [[0, 2, 9 if slow == 0 else 1], [1, 2, 9 if slow == 1 else 1]]
    assert infos == [{}, {}]


def test_options_and_infos_with_arrays_pass(make):
    class Arrays(EchoEnv):
        def reset(self, *, seed=None, options=None):
            obs, info = super().reset()
            return obs, {**info, "seed": seed, "given": options}

        def step(self, action):
            obs, *rest, _ = super().step(action)
            return obs, *rest, {"small": np.arange(3), "large": np.full(20_000, action)}

    backend = preloading_backend(LocalNodes(1))
    with standing(backend), ea.VectorEnv([Arrays] * 3, envs_per_actor=2, backend=backend) as envs:
        options = [{"level": np.full(5_000, i)} for i in range(3)]
        for seed in (3, 1 << 70):
            _, infos = envs.reset(seed=[seed] * 3, options=options)
            assert [info["seed"] for info in infos] == [seed] * 3
            for info, given in zip(infos, options, strict=True):
                np.testing.assert_equal(info["given"], given)
        for action in range(5):
            *_, infos = envs.step(np.full(3, action))
            for info in infos:
                np.testing.assert_equal(info, {"small": np.arange(3), "large": np.full(20_000, action)})
        for future in envs.submit(np.full(3, 7)):
            assert (future.result(SOON).info["large"] == 7).all()


def test_a_fault_on_a_node_leaves_a_bundle_that_ends_in_the_same_way_here(tmp_path):
    backend = preloading_backend(LocalNodes(1))
    with ea.VectorEnv([FaultyEnv] * 2, backend=backend, crash_dir=tmp_path) as envs:
        envs.reset(seed=3)
        envs.step([1, 2])
        envs[1].arm("segfault").result(SOON)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([1, 2])
        rerun = ea.load_bundle(caught.value.failures[1].bundle).replay()
    assert str(rerun) == "ends in the same way: SIGSEGV in step 2, 1 of 1"
