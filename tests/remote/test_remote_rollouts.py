"""Rollouts on nodes: what a lost node costs, and what travels how often. Most tests of rollouts run on nodes, too."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from helpers import SOON, wait_until
from nodes import preloading_backend, standing
from test_rollouts import Walk, choose

import envactors as ea
from envactors.remote import LocalNodes
from envactors.remote.link import Link
from envactors.remote.records import PLACE, RecordKind

pytestmark = pytest.mark.timeout(120)


class Halting(Walk):
    """Says when it is in its fourth step, and waits there for a file."""

    def step(self, action):
        if self.count == 3 and self.orders is not None and not (self.orders / "go").exists():
            (self.orders / "there").touch()
            wait_until((self.orders / "go").exists)
        return super().step(action)


def make_policy():
    return choose


def make_teller():
    """Returns a policy with extras for the envs 2 and 3, but none for 0 and 1."""

    def choose_and_tell(obs, context):
        actions = choose(obs, context)
        return actions if context.env_ids[0] == 0 else (actions, {"value": np.full(len(obs), 7.0)})

    return choose_and_tell


def make(orders, backend, **options):
    factories = [lambda i=i: Halting(orders if i == 1 else None) for i in range(4)]
    return ea.VectorEnv(factories, envs_per_actor=2, backend=backend, **options)


@pytest.fixture
def launcher():
    return LocalNodes(2)


@pytest.fixture
def hasty(launcher):
    """Nodes that are given up soon."""
    return ea.RemoteBackend(launcher, lease=1.0, heartbeat=0.2)


def roll(envs, orders, launcher):
    """Runs a rollout during which a node is lost; returns its future."""
    envs.reset(seed=0)
    envs.set_policy(make_policy)
    future = envs.rollout_async(20)
    wait_until((orders / "there").exists)
    launcher.agents[envs.actors[0].node].kill()
    (orders / "go").touch()
    return future


def test_a_lost_node_is_replayed(tmp_path, hasty, launcher):
    with make(None, "inline") as envs:
        envs.reset(seed=0)
        envs.set_policy(make_policy)
        expected = envs.rollout(20)
    with make(tmp_path, hasty, on_failure="replay") as envs:
        found = roll(envs, tmp_path, launcher).result(SOON)
        assert envs.actors[0].stats().restarts == 1
    assert found.failures == []
    for mine, theirs in zip(found[1:6], expected[1:6], strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_only_one_actor_may_have_extras(launcher):
    with make(None, ea.RemoteBackend(launcher)) as envs:
        envs.reset(seed=0)
        envs.set_policy(make_teller)
        for _ in range(2):
            assert envs.rollout(3).extras["value"].tolist() == [[0.0, 0.0, 7.0, 7.0]] * 3


def test_a_lost_node_loses_only_the_steps_that_had_not_arrived(tmp_path, hasty, launcher):
    with make(tmp_path, hasty, on_failure="renew") as envs:
        found = roll(envs, tmp_path, launcher).result(SOON)
    assert [(step, env_id, type(error)) for step, env_id, error in found.failures] == [
        (0, 0, ea.NodeLostError),
        (0, 1, ea.NodeLostError),
    ]
    assert found.valid.sum(axis=0).tolist()[2:] == [18, 18]
    assert not found.valid[0, :2].any()
    assert found.rewards.shape == (20, 4)


def test_an_exception_does_not_count_if_the_steps_before_it_are_lost_with_the_node(tmp_path, hasty, launcher):
    """The env used to report it in the first step that was lost, also under "replay"."""
    factories = [lambda: Walk(tmp_path / "raise", "raise", 4), lambda: Halting(tmp_path)]
    with ea.VectorEnv(factories, envs_per_actor=2, backend=hasty, on_failure="replay") as envs:
        envs.reset(seed=0)
        envs.set_policy(make_policy)
        future = envs.rollout_async(6)
        wait_until(lambda: envs.actors[0]._actor.jobs.running._raised)
        launcher.agents[envs.actors[0].node].kill()
        (tmp_path / "go").touch()
        assert future.result(SOON).failures == []


def test_a_lost_node_raises(tmp_path, hasty, launcher):
    with make(tmp_path, hasty) as envs:
        future = roll(envs, tmp_path, launcher)
        with pytest.raises(ea.VectorStepError) as caught:
            future.result(SOON)
        assert {type(error) for error in caught.value.failures.values()} == {ea.NodeLostError}
        assert caught.value.batch.valid[:, 2:].sum() == 36
        envs.reset(seed=1)
        assert envs.rollout(5).valid.all()


class Bias:
    """A policy that returns what it has loaded."""

    def load(self, parameters):
        self.bias = parameters["bias"]
        self.is_read_only = not self.bias.flags.writeable

    def __call__(self, obs, context):
        return np.full(len(obs), int(self.bias[-1])), {"read_only": np.full(len(obs), self.is_read_only)}


def test_parameters_go_to_each_node_once(monkeypatch, helper_processes):
    """And the steps of an actor come in one message."""
    sent, add, lock = [], Link.add, threading.Lock()

    def note(link, record):
        with lock:
            sent.append((record.kind, len(record.payload)))
        add(link, record)

    backend = preloading_backend(LocalNodes(2), "test_rollouts")
    with standing(backend), ea.VectorEnv([Walk] * 6, backend=backend) as envs:
        envs.reset(seed=0)
        envs.set_policy(Bias)
        assert len({actor.node for actor in envs.actors}) == 2
        monkeypatch.setattr(Link, "add", note)
        for turn in range(5):
            rollout = envs.rollout(7, {"bias": np.full(100_000, turn % 3)})
            assert (rollout.actions == turn % 3).all()
            assert rollout.extras["read_only"].all()
            assert rollout.policy_version.tolist() == [turn + 1] * 6
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        wait_until(lambda: envs.actors[0].incarnation == 1)
        envs.reset(seed=0)
        assert (envs.rollout(7).actions == 1).all()  # its new process has them from its node
        monkeypatch.undo()
    parts = [size for kind, size in sent if kind == RecordKind.PART and size > PLACE.size]
    assert len(parts) == 2 * 5
    assert all(800_000 <= size < 801_000 for size in parts)
    assert max(size for kind, size in sent if kind != RecordKind.PART) < 100_000


def test_parameters_stay_on_a_node_however_many_trajectories_come_after_them(launcher):
    with ea.VectorEnv([Walk] * 2, envs_per_actor=2, backend=ea.RemoteBackend(launcher)) as envs:
        envs.reset(seed=0)
        envs.set_policy(Bias)
        assert (envs.rollout(1, {"bias": np.full(100_000, 3)}).actions == 3).all()
        for steps in range(2, 20):
            assert (envs.rollout(steps).actions == 3).all()
        envs.actors[0].renew().result(SOON)
        envs.reset(seed=0)
        assert (envs.rollout(1).actions == 3).all()
