"""The doorbells of all workers: few descriptors, and bells for several workers."""

from __future__ import annotations

import collections
import os
import signal

import numpy as np
import pytest
from budget import examples
from helpers import SOON, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

import envactors as ea
from envactors.process import doorbells
from envactors.process.doorbells import DoorbellPool
from envactors.system.choice import PORTABLE
from envactors.system.descriptors import count_descriptors
from envactors.testing import EchoEnv


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 5), max_size=40))
def test_workers_share_doorbells_evenly_and_the_last_one_closes_them(choices):
    """Each choice gives one of the pairs back, or takes another one."""
    before, pool, taken = count_descriptors(), DoorbellPool(), []
    for choice in choices:
        if choice < len(taken):
            pool.give_back(taken.pop(choice))
        else:
            taken.append(pool.take())
            used = collections.Counter(taken)
            assert max(used.values()) == 1, "there are more doorbells than workers"
    for bells in taken:
        pool.give_back(bells)
    assert count_descriptors() == before


def test_an_actor_takes_few_descriptors(run_warm):
    done = run_warm(
        """
        import envactors as ea
        from envactors.system.descriptors import count_descriptors

        class Env:
            def ping(self):
                return 1

        with ea.ActorPool(Env, 10) as first:
            [actor.ping().result(30) for actor in first.actors]
            before = count_descriptors()
            with ea.ActorPool(Env, 10) as second:
                [actor.ping().result(30) for actor in second.actors]
                print((count_descriptors() - before) / 10)
        """
    )
    assert (done.stdout, done.stderr) == ("10.0\n" if PORTABLE else "4.0\n", "")


@pytest.fixture
def one_bell(monkeypatch):
    """All workers share one pair of doorbells."""
    monkeypatch.setattr("envactors.backends.process.DOORBELLS", DoorbellPool())
    monkeypatch.setattr(doorbells, "_PAIRS", 1)


def test_envs_that_share_their_bells_step_together_and_one_by_one(one_bell):
    with ea.VectorEnv([EchoEnv] * 6, envs_per_actor=2) as envs, ea.VectorEnv([EchoEnv] * 2) as others:
        envs.reset(seed=0)
        others.reset(seed=0)
        for turn in range(50):
            obs = envs.step([turn] * 6)[0]
            assert (np.asarray(obs)[:, 2] == turn).all()
            envs.step([turn] * 3, env_ids=[4, 0, 3])
            others.step([turn] * 2)
        envs.send([1] * 6)
        received = []
        while len(received) < 6:
            received += envs.recv(min_envs=1, timeout=SOON).env_ids.tolist()
        assert sorted(received) == [*range(6)]


def test_calls_behind_steps_of_several_actors_with_one_bell_all_come(one_bell):
    with ea.VectorEnv([EchoEnv] * 4) as envs:
        envs.reset(seed=0)
        for turn in range(30):
            envs.send([turn] * 4)
            futures = [envs[env_id].get("action_space") for env_id in range(4)]
            assert len(envs.recv(timeout=SOON).env_ids) == 4
            for future in futures:
                future.result(SOON)


def test_a_crashed_worker_does_not_take_a_doorbell_with_it(one_bell):
    with ea.VectorEnv([EchoEnv] * 3, on_failure="renew", restart=ea.RestartPolicy(backoff=0.0)) as envs:
        envs.reset(seed=0)
        for turn in range(3):
            os.kill(envs[turn].pid, signal.SIGKILL)
            wait_until(lambda turn=turn: envs[turn].incarnation == 1)
            envs.reset(seed=0)
            for action in range(20):
                envs.step([action] * 3)
