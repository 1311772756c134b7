"""Rollouts: the policy runs in the workers, with the results of a loop that steps and chooses in the caller."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import SOON, wait_for_path, wait_until

import envactors as ea
from envactors.actor.future import ActorFuture
from envactors.backends.process import ProcessWorker
from envactors.rollout import engine
from envactors.rollout.part import RolloutPart
from envactors.rollout.policy_runner import PolicyRunner

ALWAYS = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)


class Walk(gymnasium.Env):
    """An env that depends on seed, actions, and the number of steps. At a step it does what a file says, once."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(5)

    def __init__(self, orders: Path | None = None, fault: str = "", at: int = 0, length: int = 7) -> None:
        self.orders = orders
        self.fault = fault
        self.at = at
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.where = self.np_random.normal(size=2)
        self.count = 0
        return self.where.copy(), {"seed": seed} if seed is not None else {}

    def step(self, action):
        self.count += 1
        if self.count == self.at and self.orders is not None:
            obey(self.orders, self.fault)
        self.where += self.np_random.normal(size=2) + action
        info = {"count": self.count} if self.count % 3 == 0 else {}
        return self.where.copy(), float(self.where[0]), self.count >= self.length, False, info


def obey(orders, fault):
    """Does what is asked, once."""
    try:
        orders.touch(exist_ok=False)
    except FileExistsError:
        return
    if fault == "raise":
        raise RuntimeError("as ordered")
    if fault == "die":
        os._exit(3)
    if fault == "nap":
        time.sleep(0.8)
    if fault == "hang":
        time.sleep(3600)


def choose(obs, context):
    return (np.abs(obs).sum(1) * 10 + context.env_ids).astype(np.int64) % 5


def make_policy():
    return choose


def make_noisy_policy():
    def policy(obs, context):
        noise = context.rng.integers(0, 5, len(obs))
        return (choose(obs, context) + noise) % 5, {"noise": noise, "starts": context.starts.astype(np.float32)}

    return policy


class Learning:
    """A policy that adds what it has loaded."""

    def __init__(self):
        self.offset = 0
        self.loads = 0
        self.is_read_only = False

    def load(self, parameters):
        self.offset = int(parameters["offset"][0])
        self.is_read_only = not parameters["offset"].flags.writeable
        self.loads += 1

    def __call__(self, obs, context):
        said = {"loads": np.full(len(obs), self.loads), "read_only": np.full(len(obs), self.is_read_only)}
        return np.full(len(obs), self.offset), said


def loop(envs, steps, obs):
    """Steps with the policy in the caller; returns obs, actions, rewards, terminated of all steps, and the last obs."""
    rows = []
    for _ in range(steps):
        actions = choose(obs, ea.PolicyContext(np.arange(envs.num_envs), None, 0, None))
        after, rewards, terminated, _, _ = envs.step(actions)
        rows.append((obs, actions, rewards, terminated))
        obs = after
    return [np.stack(column) for column in zip(*rows, strict=True)], obs


def assert_same(rollouts, expected, last):
    columns = [(one.obs, one.actions, one.rewards, one.terminated) for one in rollouts]
    found = [np.concatenate(column) for column in zip(*columns, strict=True)]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(rollouts[-1].last_obs, last)


class Careless(Walk):
    """Its observations and rewards have other types than its spaces say, and from a step on another shape."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, bad_at: int = 10**9) -> None:
        super().__init__()
        self.bad_at = bad_at

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self.count == self.bad_at:
            return np.zeros((1, 2), np.float32), reward, *rest
        obs = [obs, obs.tolist(), obs.astype(np.float32), np.repeat(obs.astype(np.float32), 2)[::2]][self.count % 4]
        return obs, [reward, np.float32(reward), int(reward), np.float64(reward)][self.count % 3], *rest


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_results_of_other_types_are_converted_as_in_steps(backend):
    with ea.VectorEnv([Careless] * 2, envs_per_actor=2, backend=backend) as envs:
        expected, last = loop(envs, 20, envs.reset(seed=3)[0])
        envs.reset(seed=3)
        envs.set_policy(make_policy)
        rollout = envs.rollout(20)
        assert rollout.obs.dtype == np.float32
        assert_same([rollout], expected, last)


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_an_observation_of_another_shape_fails_its_step(backend):
    with ea.VectorEnv([Careless, lambda: Careless(bad_at=3)], envs_per_actor=2, backend=backend) as envs:
        envs.reset(seed=3)
        envs.set_policy(make_policy)
        with pytest.raises(ea.VectorStepError, match=r"the observation of env 1 has shape \(1, 2\): expected \(2,\)"):
            envs.rollout(5)


SETTINGS = [
    {"backend": "inline"},
    {},
    {"envs_per_actor": 2},
    {"on_failure": "replay", "envs_per_actor": 2},
    {"seed_episodes": True, "envs_per_actor": 3},
]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_rollout_is_the_loop_of_steps(options, autoreset):
    with ea.VectorEnv([Walk] * 3, autoreset=autoreset, **options) as envs:
        obs, _ = envs.reset(seed=4)
        expected, last = loop(envs, 30, obs)
    with ea.VectorEnv([Walk] * 3, autoreset=autoreset, **options) as envs:
        envs.reset(seed=4)
        envs.set_policy(make_policy)
        rollouts = [envs.rollout(11), envs.rollout(9), envs.rollout(10)]
        assert_same(rollouts, expected, last)
        following, _ = loop(envs, 3, last)
    with ea.VectorEnv([Walk] * 3, autoreset=autoreset, **options) as envs:
        obs, _ = envs.reset(seed=4)
        whole, _ = loop(envs, 33, obs)
    np.testing.assert_array_equal(following[0], whole[0][30:])


def test_steps_and_rollouts_alternate():
    with ea.VectorEnv([Walk] * 2) as envs:
        obs, _ = envs.reset(seed=4)
        expected, last = loop(envs, 12, obs)
    with ea.VectorEnv([Walk] * 2) as envs:
        obs, _ = envs.reset(seed=4)
        envs.set_policy(make_policy)
        first = envs.rollout(5)
        (middle, *_), obs = loop(envs, 3, first.last_obs)
        second = envs.rollout(4)
    np.testing.assert_array_equal(np.concatenate([first.obs, middle, second.obs]), expected[0])
    np.testing.assert_array_equal(second.last_obs, last)


def test_a_rollout_marks_the_starts_of_episodes_and_invalid_steps():
    with ea.VectorEnv([Walk] * 2, envs_per_actor=2) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_noisy_policy)
        rollout = envs.rollout(18)
        again = envs.rollout(1)
    begins = [step in (0, 8, 16) for step in range(18)]
    assert rollout.starts[:, 0].tolist() == begins
    assert rollout.extras["starts"][:, 1].tolist() == begins
    assert rollout.valid[:, 0].tolist() == [step not in (7, 15) for step in range(18)]
    assert rollout.rewards[7].tolist() == [0.0, 0.0]
    assert [(step, env) for step, env, _ in rollout.infos] == [(step, env) for step in (2, 5, 10, 13) for env in (0, 1)]
    assert rollout.infos[0][2] == {"count": 3}
    assert rollout.env_ids.tolist() == [0, 1]
    assert not again.starts.any()


def test_random_numbers_follow_from_the_seed_the_rollout_and_the_step():
    with ea.VectorEnv([Walk] * 4, envs_per_actor=2) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_noisy_policy, seed=7)
        rollouts = [envs.rollout(3), envs.rollout(3)]
    for number, rollout in enumerate(rollouts):
        for step in range(3):
            for first in (0, 2):
                rng = np.random.Generator(np.random.Philox(key=7, counter=[0, step, number, first]))
                assert rollout.extras["noise"][step, first : first + 2].tolist() == rng.integers(0, 5, 2).tolist()


def test_steps_and_seeds_may_be_small_ints_of_numpy():
    with ea.VectorEnv([Walk] * 3, backend="inline") as envs:
        envs.reset(seed=1)
        envs.set_policy(make_noisy_policy, seed=np.uint8(7))
        rollout = envs.rollout(np.uint8(200))
        assert rollout.rewards.shape == (200, 3)
        rng = np.random.Generator(np.random.Philox(key=7, counter=[0, 199, 0, 0]))
        assert rollout.extras["noise"][199, 0] == rng.integers(0, 5, 3)[0]


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_parameters_are_loaded_once_and_are_read_only(backend):
    with ea.VectorEnv([Walk] * 2, backend=backend) as envs:
        envs.reset(seed=1)
        envs.set_policy(Learning)
        first = envs.rollout(2)
        second = envs.rollout(2, {"offset": np.array([3])})
        third = envs.rollout(2)
        fourth = envs.rollout(2, {"offset": np.array([4])})
    assert [rollout.actions[0, 0] for rollout in (first, second, third, fourth)] == [0, 3, 3, 4]
    assert [rollout.policy_version.tolist() for rollout in (first, second, third, fourth)] == [
        [version] * 2 for version in (0, 1, 1, 2)
    ]
    assert fourth.extras["loads"][0].tolist() == [2, 2]
    assert second.extras["read_only"].all()


def test_parameters_need_a_policy_that_loads_them():
    with ea.VectorEnv([Walk]) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        with pytest.raises(TypeError, match="that has no method load"):
            envs.rollout(2, {"offset": np.zeros(1)})
        assert envs.rollout(2).valid.all(), "the envs are where they were"


def test_a_new_process_makes_the_policy_again_and_loads_the_last_parameters():
    with ea.VectorEnv([Walk] * 2, on_failure="replay", restart=ALWAYS) as envs:
        envs.reset(seed=1)
        envs.set_policy(Learning)
        envs.rollout(2, {"offset": np.array([3])})
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        wait_until(lambda: envs.actors[0].incarnation == 1)
        rollout = envs.rollout(2)
    assert rollout.actions.tolist() == [[3, 3]] * 2
    assert rollout.policy_version.tolist() == [1, 1]
    assert rollout.extras["loads"][0].tolist() == [1, 1]


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_a_crash_between_two_rollouts_repeats_the_last_observation(envs_per_actor):
    with ea.VectorEnv([Walk] * 2, envs_per_actor=envs_per_actor, on_failure="renew", restart=ALWAYS) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        last_obs = envs.rollout(2).last_obs
        for actor in envs.actors:
            os.kill(actor.pid, signal.SIGKILL)
            wait_until(lambda actor=actor: actor.incarnation == 1)
        rollout = envs.rollout(2)
    assert [(step, env_id) for step, env_id, _ in rollout.failures] == [(0, 0), (0, 1)]
    assert rollout.truncated[0].tolist() == [True, True]
    np.testing.assert_array_equal(rollout.obs[0], last_obs)
    np.testing.assert_array_equal(rollout.obs[1], last_obs)


class Gate(Walk):
    """Its steps wait for a file."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def step(self, action):
        while not self.gate.exists():
            time.sleep(0.001)
        return super().step(action)


def test_two_rollouts_may_be_in_flight_and_nothing_else(tmp_path):
    gate = tmp_path / "gate"
    with ea.VectorEnv([lambda: Gate(gate)] * 2) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        first, second = envs.rollout_async(4), envs.rollout_async(4)
        for ask in (
            lambda: envs.rollout_async(1),
            lambda: envs.step([0, 0]),
            lambda: envs.send([0, 0]),
            lambda: envs.submit([0, 0]),
        ):
            with pytest.raises(ea.AlreadyPendingError):
                ask()
        with pytest.raises(ea.VectorTimeoutError, match="rollouts in flight"):
            envs.reset(timeout=0.05)
        with pytest.raises(ea.NothingPendingError):
            envs.recv()
        gate.touch()
        np.testing.assert_array_equal(second.result(SOON).obs[0], first.result(SOON).last_obs)
        envs.step([0, 0])


def test_a_rollout_that_takes_too_long_continues(tmp_path):
    gate = tmp_path / "gate"
    with ea.VectorEnv([lambda: Gate(gate)]) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        with pytest.raises(ea.VectorTimeoutError) as caught:
            envs.rollout(4, timeout=0.05)
        gate.touch()
        assert caught.value.future.result(SOON).valid.all()


def test_each_actor_can_have_a_future_of_its_own(tmp_path):
    gate = tmp_path / "gate"
    with ea.VectorEnv([Walk, Walk, lambda: Gate(gate), lambda: Gate(gate)], envs_per_actor=2) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        quick, slow = envs.rollout_each(4)
        assert quick.result(SOON).env_ids.tolist() == [0, 1]
        assert not slow.done()
        with pytest.raises(ea.AlreadyPendingError):
            envs.send([0, 0], env_ids=[0, 1])  # their next rollout may begin while the others are at this one
        gate.touch()
        assert slow.result(SOON).env_ids.tolist() == [2, 3]
        assert slow.result().obs.shape == (4, 2, 2)
        envs.step([0, 0], env_ids=[0, 1])


def test_a_rollout_that_ends_as_its_timeout_passes_is_returned(monkeypatch):
    class Late(ActorFuture):
        def result(self, timeout=None):
            if timeout is None:
                return super().result()
            super().result()
            raise TimeoutError

    monkeypatch.setattr(engine, "ActorFuture", Late)
    with ea.VectorEnv([Walk]) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        assert envs.rollout(2, timeout=1.0).valid.all()


def test_closing_ends_rollouts_in_flight(tmp_path):
    envs = ea.VectorEnv([lambda: Gate(tmp_path / "never")] * 2)
    envs.reset(seed=1)
    envs.set_policy(make_policy)
    futures = [envs.rollout_async(4), envs.rollout_async(4)]
    envs.close(0)
    for future in futures:
        assert isinstance(future.exception(SOON), ea.VectorStepError)


def test_invalid_rollout_arguments_raise():
    with ea.VectorEnv([Walk]) as envs:
        with pytest.raises(ea.VectorInputError, match="call set_policy first"):
            envs.rollout(1)
        with pytest.raises(TypeError, match="expected a function"):
            envs.set_policy(3)
        with pytest.raises(ValueError, match="expected an int >= 0"):
            envs.set_policy(make_policy, seed=-1)
        envs.set_policy(make_policy)
        with pytest.raises(ea.VectorInputError, match="needs a reset first"):
            envs.rollout(1)
        envs.reset()
        for steps in (0, 1.0, True):
            with pytest.raises(ea.VectorInputError, match="steps is"):
                envs.rollout(steps)
        envs.send([0])
        with pytest.raises(ea.AlreadyPendingError):
            envs.rollout(1)
        envs.recv()


def broken():
    raise LookupError("no policy")


@pytest.mark.parametrize("steps", [10**12, 10**18, 10**30])
@pytest.mark.parametrize("backend", ["process", "inline"])
def test_more_steps_than_there_is_memory_for_are_one_kind_of_error(backend, steps):
    """It used to depend on the backend and the number: MemoryError, and ValueError of NumPy."""
    with ea.VectorEnv([Walk], backend=backend) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        with pytest.raises(ea.VectorEnvError, match=f"there is too little memory for {steps} steps of a rollout"):
            envs.rollout(steps)
        assert envs.rollout(2).valid.all()


def test_a_policy_that_cannot_be_made():
    with ea.VectorEnv([Walk]) as envs:
        with pytest.raises(LookupError, match="no policy"):
            envs.set_policy(broken)
        envs.reset()
        envs.set_policy(make_policy)
        assert envs.rollout(2).valid.all()


# Failures ------------------------------------------------------------------------------------------------


def with_fault(tmp_path, fault, on_failure, *, envs_per_actor, autoreset="next_step"):
    """Returns a vector whose env 1 fails once, in its fourth step; its other envs do not."""
    faulty = Walk(tmp_path / "orders", fault, at=4)
    return ea.VectorEnv(
        [Walk, lambda: faulty, Walk],
        envs_per_actor=envs_per_actor,
        on_failure=on_failure,
        autoreset=autoreset,
        deadlines=ea.Deadlines(step=1.0),
        restart=ALWAYS,
    )


FAULTS = pytest.mark.parametrize("fault", ["die", "raise", "hang"])
ERRORS = {"die": ea.ActorDiedError, "raise": RuntimeError, "hang": ea.ActorTimeoutError}


@FAULTS
@pytest.mark.parametrize("envs_per_actor", [1, 3])
def test_a_raised_failure_contains_the_steps_before_it(tmp_path, fault, envs_per_actor):
    with with_fault(tmp_path, fault, "raise", envs_per_actor=envs_per_actor) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        with pytest.raises(ea.VectorStepError, match="env 1") as caught:
            envs.rollout(6, timeout=SOON)
        assert isinstance(caught.value.failures[1], ERRORS[fault])
        batch = caught.value.batch
        assert batch.obs.shape == (6, 3, 2)
        assert batch.valid[:, 1].tolist() == [True] * 3 + [False] * 3
        # Env 2, in the same process, was lost with it before its own step.
        is_lost = envs_per_actor == 3 and fault != "raise"
        assert [(step, env) for step, env, _ in batch.failures] == [(3, 1), (3, 2)][: 1 + is_lost]
        if envs_per_actor == 1:
            assert batch.valid[:, [0, 2]].all(), "no actor waits for another"
        envs.reset(seed=2)
        assert envs.rollout(6, timeout=SOON).valid.all()


@pytest.mark.parametrize("fault", ["die", "hang"])
@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_an_exception_is_known_if_the_process_of_the_env_ends_in_the_same_step(tmp_path, fault, on_failure):
    """As in `step`, which gets the results of each env at once."""
    factories = [lambda: Walk(tmp_path / "raise", "raise", 2), lambda: Walk(tmp_path / fault, fault, 2)]
    options = {"envs_per_actor": 2, "on_failure": on_failure, "restart": ALWAYS, "deadlines": ea.Deadlines(step=1.0)}
    with ea.VectorEnv(factories, **options) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        if on_failure == "raise":
            with pytest.raises(ea.VectorStepError) as caught:
                envs.rollout(4, timeout=SOON)
            failures = caught.value.batch.failures
            assert caught.value.failures == {index: error for _, index, error in failures}
            envs.reset(seed=2)
        else:
            failures = envs.rollout(4, timeout=SOON).failures
        places, errors = [each[:2] for each in failures], [type(error) for _, _, error in failures]
        if on_failure == "replay":
            assert (tmp_path / fault).exists()
            assert failures == []
        else:
            assert (places, errors) == ([(1, 0), (1, 1)], [RuntimeError, ERRORS[fault]])
        assert envs.rollout(2, timeout=SOON).valid.any()


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_a_second_rollout_in_flight_does_not_step_an_env_that_the_first_one_has_lost(tmp_path, fault):
    with with_fault(tmp_path, fault, "raise", envs_per_actor=1) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        first, second = envs.rollout_async(6), envs.rollout_async(6)
        told = first.exception(SOON).failures[1]
        error = second.exception(SOON)
        assert error.failures == {1: told}
        assert error.batch.valid[0].tolist() == [True, False, True]
        assert not error.batch.valid[:, 1].any()


class Spaceless(Walk):
    """A policy without a spec of its actions."""

    action_space = None


class DiesFirst:
    """A policy that ends its process when it is called first."""

    def __init__(self, orders: Path) -> None:
        self.orders = orders

    def __call__(self, obs, context):
        obey(self.orders, "die")
        return choose(obs, context), {"twice": 2 * obs}


@pytest.mark.parametrize("envs_per_actor", [1, 2])
@pytest.mark.parametrize("env", [Walk, Spaceless])
def test_the_results_of_a_policy_are_known_after_a_failure_at_the_first_step(tmp_path, env, envs_per_actor):
    orders = tmp_path / "orders"
    with ea.VectorEnv([env] * 2, envs_per_actor=envs_per_actor, on_failure="renew", restart=ALWAYS) as envs:
        envs.reset(seed=1)
        envs.set_policy(lambda: DiesFirst(orders))
        rollout = envs.rollout(4, timeout=SOON)
        failed = sorted(index for _, index, _ in rollout.failures)
        assert len(failed) == envs_per_actor
        valid = np.ones((4, 2), bool)
        valid[:2, failed] = False  # the last observation once more, and a reset
        np.testing.assert_array_equal(rollout.valid, valid)
        np.testing.assert_array_equal(rollout.obs[1, failed], rollout.obs[0, failed])
        np.testing.assert_array_equal(rollout.extras["twice"][1:], 2 * rollout.obs[1:])


@FAULTS
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("envs_per_actor", [1, 3])
def test_with_renew_a_failure_in_a_rollout_behaves_like_a_failure_in_step(tmp_path, fault, envs_per_actor, autoreset):
    with with_fault(tmp_path, fault, "renew", envs_per_actor=envs_per_actor, autoreset=autoreset) as envs:
        obs, _ = envs.reset(seed=1)
        expected, last = loop(envs, 12, obs)
    (tmp_path / "orders").unlink()
    with with_fault(tmp_path, fault, "renew", envs_per_actor=envs_per_actor, autoreset=autoreset) as envs:
        obs, _ = envs.reset(seed=1)
        envs.set_policy(make_policy)
        rollout = envs.rollout(12, timeout=SOON)
        if fault != "raise" or envs_per_actor == 1:  # else how far the others come before the process goes is chance
            assert_same([rollout], expected, last)
        assert (3, 1) in [(step, env) for step, env, _ in rollout.failures]
        assert not rollout.valid[3, 1]
        assert isinstance(rollout.failures[0][2], ERRORS[fault])
        envs.step([0] * 3)


@FAULTS
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("envs_per_actor", [1, 3])
def test_with_replay_a_failure_changes_no_result(tmp_path, fault, envs_per_actor, autoreset):
    with ea.VectorEnv([Walk] * 3, autoreset=autoreset) as envs:
        obs, _ = envs.reset(seed=1)
        expected, last = loop(envs, 20, obs)
    with with_fault(tmp_path, fault, "replay", envs_per_actor=envs_per_actor, autoreset=autoreset) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        rollouts = [envs.rollout(10, timeout=SOON), envs.rollout(10, timeout=SOON)]
        assert (tmp_path / "orders").exists()
        assert_same(rollouts, expected, last)
        assert not rollouts[0].failures


class Unlucky(Walk):
    """An env that raises in the middle of a step, once, what takes the caller a while to read."""

    def step(self, action):
        if self.count + 1 == self.at and self.orders is not None and not self.orders.exists():
            self.orders.touch()
            self.count += 1
            self.where += 100
            raise RuntimeError(ReadLate())
        return super().step(action)


class ReadLate:
    def __reduce__(self):
        return time.sleep, (0.5,)


def state_of(env):
    return env.count, env.where.copy(), env.np_random.bit_generator.state


def put_state(env, state):
    env.count, env.where, env.np_random.bit_generator.state = state


def test_a_state_that_is_saved_after_a_step_has_raised_is_not_replayed(tmp_path):
    def run(orders):
        snapshot = ea.SnapshotPolicy(state_of, put_state, every=1)
        make = functools.partial(Unlucky, orders, at=4)
        with ea.VectorEnv([make], on_failure="replay", restart=ALWAYS, snapshot=snapshot) as envs:
            envs.reset(seed=1)
            envs.set_policy(make_policy)
            return envs.rollout(10, timeout=SOON)

    expected, rollout = run(None), run(tmp_path / "orders")
    assert (tmp_path / "orders").exists()
    assert not rollout.failures
    np.testing.assert_array_equal(rollout.obs, expected.obs)


def test_with_replay_a_failure_after_the_end_of_another_episode_changes_no_result(tmp_path):
    def run(fault):
        orders = tmp_path / "orders" if fault else None
        makers = [lambda: Walk(orders, fault, at=8, length=20), lambda: Walk(length=4)]
        with ea.VectorEnv(makers, envs_per_actor=2, autoreset="disabled", on_failure="replay") as envs:
            envs.reset(seed=1)
            envs.set_policy(make_policy)
            rollout = envs.rollout(10, timeout=SOON)
            return rollout, envs.reset()[0]

    expected, expected_obs = run("")
    rollout, obs = run("die")
    assert (tmp_path / "orders").exists()
    assert not rollout.failures
    np.testing.assert_array_equal(obs, expected_obs)
    np.testing.assert_array_equal(rollout.obs, expected.obs)
    np.testing.assert_array_equal(rollout.last_obs, expected.last_obs)
    np.testing.assert_array_equal(rollout.valid, expected.valid)


@pytest.mark.parametrize("each", [False, True])
def test_a_result_is_let_go_as_soon_as_it_is_dropped(each):
    with ea.VectorEnv([Walk] * 2) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        gc.disable()
        try:
            for _ in range(4):
                futures = envs.rollout_each(3) if each else [envs.rollout_async(3)]
                rewards = [weakref.ref(future.result(SOON).rewards) for future in futures]
                del futures
                wait_until(lambda found=rewards: all(reward() is None for reward in found))
        finally:
            gc.enable()


def make_faulty_policy(orders, fault):
    def policy(obs, context):
        if context.step == 4 and context.env_ids[0] == 0:
            obey(orders, fault)
        return choose(obs, context)

    return lambda: policy


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_the_exception_of_a_policy_is_raised(tmp_path, on_failure):
    with ea.VectorEnv([Walk] * 2, on_failure=on_failure) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_faulty_policy(tmp_path / "orders", "raise"))
        with pytest.raises(RuntimeError, match="as ordered"):
            envs.rollout(7, timeout=SOON)
        envs.rollout(2, timeout=SOON)
        envs.step([0, 0])


@pytest.mark.parametrize("fault", ["die", "hang"])
@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_an_error_says_that_the_policy_was_running(tmp_path, fault, on_failure):
    deadlines = ea.Deadlines(policy=1.0, slow=None)  # no other limit makes the actor look at the time
    with ea.VectorEnv([Walk] * 4, envs_per_actor=2, on_failure=on_failure, deadlines=deadlines, restart=ALWAYS) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_faulty_policy(tmp_path / "orders", fault))
        if on_failure == "raise":
            with pytest.raises(ea.VectorStepError) as caught:
                envs.rollout(7, timeout=SOON)
            rollout = caught.value.batch
        else:
            rollout = envs.rollout(7, timeout=SOON)
    if on_failure == "replay":
        assert rollout.failures == []
        assert rollout.valid.all()
        return
    assert [(step, env) for step, env, _ in rollout.failures] == [(4, 0), (4, 1)]
    first = rollout.failures[0][2]
    assert isinstance(first, ERRORS[fault])
    assert "in policy" in str(first)
    assert first.method == "policy"
    assert rollout.valid[:, 2:].all()


def make_twice_faulty_policy(where):
    """A policy that crashes at step 4; the process after it crashes with the order that tries this step again."""

    def make():
        run = PolicyRunner.run

        def crash_first(self, order):
            if min(fields[0] for fields in order.plans) == 4:
                obey(where / "before the policy", "die")
            return run(self, order)

        PolicyRunner.run = crash_first
        return make_faulty_policy(where / "in the policy", "die")()

    return make


def test_a_crash_before_the_first_call_of_the_policy_does_not_count_as_a_failure_of_the_step(tmp_path):
    def run(make_policy):
        with ea.VectorEnv([Walk] * 2, envs_per_actor=2, on_failure="replay", restart=ALWAYS) as envs:
            envs.reset(seed=1)
            envs.set_policy(make_policy)
            return envs.rollout(7, timeout=SOON), envs.stats().actors[0].restarts

    expected, _ = run(make_policy)
    found, restarts = run(make_twice_faulty_policy(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before the policy", "in the policy"]
    assert restarts == 2
    assert found.failures == []
    for mine, theirs in zip(found[1:6], expected[1:6], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("envs_per_actor", [1, 4])
def test_kills_at_any_moment_change_nothing_under_replay(envs_per_actor):
    def run(kills):
        options = {"on_failure": "replay", "seed_episodes": True, "restart": ALWAYS}
        with ea.VectorEnv([lambda: Walk(length=50)] * 4, envs_per_actor=envs_per_actor, **options) as envs:
            envs.reset(seed=1)
            envs.set_policy(make_noisy_policy, seed=2)
            rollouts = []
            for number in range(kills or 6):
                future = envs.rollout_async(400)
                if kills:
                    time.sleep(0.003 * (number % 5))
                    os.kill(envs.actors[number % len(envs.actors)].pid, signal.SIGKILL)
                rollouts.append(future.result(SOON))
            assert sum(actor.restarts for actor in envs.stats().actors) == (kills or 0)
            return rollouts

    for mine, theirs in zip(run(6), run(0), strict=True):
        for name in ("obs", "actions", "rewards", "terminated", "truncated", "starts", "valid", "last_obs"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)
        np.testing.assert_array_equal(mine.extras["noise"], theirs.extras["noise"])
        assert mine.failures == []


class Unpicklable(Walk):
    """Its info cannot be pickled, once, in a step or a reset."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs, self.spoil("reset", info)

    def step(self, action):
        *result, info = super().step(action)
        return *result, self.spoil("step", info) if self.count == 3 else info

    def spoil(self, place, info):
        if self.fault != place or self.seen == 0 or self.orders.exists():
            return info
        self.orders.touch()
        return {"lock": threading.Lock()}


@pytest.mark.parametrize("envs_per_actor", [1, 2])
@pytest.mark.parametrize("place", ["step", "reset"])
def test_an_info_that_cannot_be_pickled_is_tried_once_more(tmp_path, place, envs_per_actor):
    def run(orders):
        class Late(Unpicklable):
            seen = 0

            def step(self, action):
                Late.seen += 1
                return super().step(action)

        factories = [Late, lambda: Late(orders, place)] if orders else [Late] * 2
        with ea.VectorEnv(factories, envs_per_actor=envs_per_actor, on_failure="replay", restart=ALWAYS) as envs:
            envs.reset(seed=4)
            envs.set_policy(make_policy)
            return envs.rollout(20)

    found, expected = run(tmp_path / "orders"), run(None)
    assert (tmp_path / "orders").exists()
    assert found.failures == []
    for mine, theirs in zip(found[1:6], expected[1:6], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("on_failure", ["renew", "replay"])
def test_results_after_the_deadline_do_not_count(monkeypatch, tmp_path, on_failure):
    kill = ProcessWorker.kill

    def kill_late(worker):
        time.sleep(1.0)  # meanwhile it wakes, and runs the rest of the rollout
        kill(worker)

    def run(orders):
        factories = [Walk, lambda: Walk(orders, "nap", 3)]
        options = {"envs_per_actor": 2, "on_failure": on_failure, "deadlines": ea.Deadlines(step=0.5)}
        with ea.VectorEnv(factories, **options) as envs:
            envs.reset(seed=4)
            envs.set_policy(make_policy)
            return envs.rollout(12)

    expected = run(None)
    monkeypatch.setattr(ProcessWorker, "kill", kill_late)
    found = run(tmp_path / "orders")
    if on_failure == "replay":
        assert found.failures == []
        for mine, theirs in zip(found[1:6], expected[1:6], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    else:
        assert [(step, env_id) for step, env_id, _ in found.failures] == [(2, 1), (3, 0)]
        assert found.valid[:, 0].tolist() == [True] * 3 + [False] * 2 + [True] * 7
        assert found.terminated[:, 0].tolist() == [False] * 11 + [True]
    monkeypatch.undo()


@pytest.mark.parametrize("fault", [None, "raise"])
def test_steps_count_if_the_process_crashes_after_its_reply(monkeypatch, tmp_path, fault):
    """The next process brings the envs to where the reply has left them."""
    on_reply, killed = RolloutPart.on_reply, []

    def on_reply_after_a_kill(part, frame):
        if not killed:
            killed.append(envs.actors[0].pid)
            os.kill(killed[0], signal.SIGKILL)
        return on_reply(part, frame)

    def make():
        factories = [Walk, lambda: Walk(tmp_path / "orders" if fault else None, fault, 3)]
        return ea.VectorEnv(factories, envs_per_actor=2, on_failure="replay", restart=ALWAYS)

    def run():
        envs.reset(seed=4)
        envs.set_policy(make_policy)
        return [envs.rollout(5), envs.rollout(5)]

    with make() as envs:
        with monkeypatch.context() as patches:
            patches.setattr(RolloutPart, "on_reply", on_reply_after_a_kill)
            found = run()
        assert killed
    with make() as envs:
        expected = run()
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.failures == []
        np.testing.assert_array_equal(mine.obs, theirs.obs)
        np.testing.assert_array_equal(mine.rewards, theirs.rewards)


@pytest.mark.parametrize("each", [False, True])
def test_the_first_two_rollouts_in_flight_learn_what_the_policy_returns(each):
    def run(overlaps):
        with ea.VectorEnv([Walk] * 4, envs_per_actor=2) as envs:
            envs.reset(seed=1)
            envs.set_policy(make_noisy_policy)
            started, found = [], []
            for _ in range(4):
                started.append(envs.rollout_each(20) if each else [envs.rollout_async(20)])
                if len(started) > overlaps:
                    found += [future.result(SOON) for future in started.pop(0)]
            return found + [future.result(SOON) for futures in started for future in futures]

    for _ in range(3):
        for mine, theirs in zip(run(1), run(0), strict=True):
            for name in ("obs", "actions", "rewards", "starts", "valid"):
                np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
            np.testing.assert_array_equal(mine.extras["noise"], theirs.extras["noise"])


def test_results_that_are_kept_never_change():
    """Two of them are the memory that the workers have written to, the others are copies."""
    with ea.VectorEnv([lambda: Walk(length=10**6)] * 2) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        kept, copies = [], []
        for _ in range(6):
            kept.append(envs.rollout(5))
            copies.append([kept[-1].obs.copy(), kept[-1].rewards.copy(), kept[-1].last_obs.copy()])
            if len(kept) == 4:
                del kept[1], copies[1]
        for rollout, expected in zip(kept, copies, strict=True):
            for mine, theirs in zip((rollout.obs, rollout.rewards, rollout.last_obs), expected, strict=True):
                np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(kept[0].obs, copies[0][0])  # the memory outlives the vector


class Told(Walk):
    """Has an info in each step; from the fourth one on it waits for a file, if it has the path of one."""

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        wait_until(lambda: self.count < 4 or self.orders is None or self.orders.exists())
        return obs, reward, terminated, truncated, {"count": self.count, "text": "abc"}


class ToldBadly(Told):
    """The infos from the fourth step on do something when they are unpickled."""

    def __init__(self, path, info=None):
        super().__init__(path)
        self.info = info

    def step(self, action):
        *result, info = super().step(action)
        return *result, info if self.count < 4 or self.info is None else {"bad": self.info}


class Unpickled:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_infos_that_take_long_to_read_do_not_prolong_a_wait(tmp_path):
    path = tmp_path / "go on"
    with ea.VectorEnv([lambda: ToldBadly(None, Unpickled(wait_for_path, path)), lambda: ToldBadly(path)]) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        envs.rollout(3)
        with pytest.raises(ea.VectorTimeoutError) as caught:
            envs.rollout(1, timeout=0.2)
        path.touch()
        assert len(caught.value.future.result(SOON).infos) == 2


def test_an_info_that_ends_the_program_when_it_is_read_does_so_once_the_rollout_has_ended(tmp_path):
    path = tmp_path / "go on"
    with ea.VectorEnv([lambda: ToldBadly(None, Unpickled(sys.exit, 3)), lambda: ToldBadly(path)]) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        envs.rollout(3)
        future = envs.rollout_async(1)
        threading.Timer(0.2, path.touch).start()
        with pytest.raises(SystemExit):
            future.result()
        assert future.done()
        envs.reset(seed=1)


@pytest.mark.parametrize("late", [1, 4])
def test_a_rollout_writes_over_none_whose_result_is_being_made(monkeypatch, late):
    """Each of them is late, or one in four, so that those of the next rollout are made before."""
    assemble, calls = engine.assemble, []

    def assemble_late(*args, **others):
        calls.append(args)
        if len(calls) % late == 1 % late:
            time.sleep(0.1)
        return assemble(*args, **others)

    monkeypatch.setattr(engine, "assemble", assemble_late)
    with ea.VectorEnv([lambda: Walk(length=10**6)] * 2) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        futures = []
        while len(futures) < 12:
            try:
                futures += envs.rollout_each(3)
            except ea.AlreadyPendingError:
                time.sleep(0.001)
        for future in futures:
            assert future.result(SOON).valid.all()


class Short(Walk):
    """Its episodes end where rollouts of 8 end: a step for each of 7, and one that resets."""

    def __init__(self):
        super().__init__(length=7)


@pytest.mark.parametrize("on_failure", ["renew", "replay"])
def test_a_process_is_recycled_between_rollouts(on_failure):
    recycle = ea.RecyclePolicy(max_steps=10)
    with ea.VectorEnv([Short] * 2, recycle=recycle, on_failure=on_failure) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        envs.rollout(7)
        pids = [actor.pid for actor in envs.actors]
        for _ in range(6):
            rollout = envs.rollout(8)  # begins with a reset
            assert rollout.starts[1].all()
            assert not rollout.failures
            assert rollout.valid.sum() == 14
        assert [actor.incarnation for actor in envs.actors] == [3, 3]  # due every second time
        assert [actor.pid for actor in envs.actors] != pids
        assert [counts.restarts for counts in envs.stats().actors] == [0, 0]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted there")
def test_rollouts_leave_a_worker_as_many_descriptors_as_it_had():
    def descriptors():
        return [len(list(Path(f"/proc/{actor.pid}/fd").iterdir())) for actor in envs.actors]

    with ea.VectorEnv([Walk] * 4, envs_per_actor=2) as envs:
        envs.reset(seed=1)
        envs.step([0] * 4)
        before = descriptors()
        envs.set_policy(Learning)
        for scale in range(5):
            envs.rollout(4, {"offset": np.full(3, scale)})
            envs.rollout(5 + scale)
        assert descriptors() == before


def shared_memory(pid="self"):
    """Returns how much shared memory a process has mapped, in bytes."""
    mappings = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:" in line]
    limits = [[int(limit, 16) for limit in addresses.split("-")] for addresses, *_ in mappings]
    return sum(stop - start for start, stop in limits)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings are read there")
def test_rollouts_take_two_buffers_of_shared_memory_and_a_policy_none():
    def sizes():
        return np.array([shared_memory(), *(shared_memory(actor.pid) for actor in envs.actors)])

    gc.collect()  # errors that other tests have met keep the memory of vectors
    with ea.VectorEnv([Walk] * 4, envs_per_actor=2, backend="process") as envs:
        envs.reset(seed=1)
        envs.step([0] * 4)
        before = sizes()
        envs.set_policy(make_policy)
        assert (sizes() == before).all()
        found = []
        for _ in range(8):
            envs.rollout(200)
            found.append(sizes() - before)
        assert (found[0] > 0).all()
        assert (found[1] == 2 * found[0]).all()
        assert (np.array(found[2:]) == found[1]).all()


# Other options -------------------------------------------------------------------------------------------


def test_without_autoreset_an_env_repeats_its_last_observation():
    with ea.VectorEnv([Walk, lambda: Walk(length=4)], autoreset="disabled") as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        rollout = envs.rollout(6)
        assert rollout.valid[:, 0].all()
        assert rollout.valid[:, 1].tolist() == [True] * 4 + [False] * 2
        assert rollout.terminated[:, 1].tolist() == [False] * 3 + [True] + [False] * 2
        assert rollout.rewards[4:, 1].tolist() == [0.0, 0.0]
        np.testing.assert_array_equal(rollout.obs[5, 1], rollout.obs[4, 1])
        np.testing.assert_array_equal(rollout.last_obs[1], rollout.obs[4, 1])
        with pytest.raises(ea.VectorInputError, match="needs a reset first"):
            envs.rollout(1)


def test_without_autoreset_a_second_rollout_in_flight_repeats_the_last_observation():
    with ea.VectorEnv([lambda: Walk(length=20), lambda: Walk(length=4)], autoreset="disabled") as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        first, second = envs.rollout_async(6), envs.rollout_async(3)
        last = first.result(SOON).last_obs[1]
        assert second.result(SOON).valid.tolist() == [[True, False]] * 3
        np.testing.assert_array_equal(second.result().obs[:, 1], [last] * 3)
        envs.reset(env_ids=[1])
        assert envs.rollout(3, timeout=SOON).valid.all()


def test_without_copies_a_rollout_is_a_view():
    with ea.VectorEnv([Walk] * 2, copy=False) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        first = envs.rollout(3)
        kept = first.obs.copy()
        envs.rollout(3)
        np.testing.assert_array_equal(first.obs, kept)
        third = envs.rollout(3)
        assert np.shares_memory(first.obs, third.obs)


class Rich(Walk):
    """Observations of several leaves, actions too, and infos that have no place in the trajectory."""

    observation_space = spaces.Dict({"a": spaces.Box(-9, 9, (3,), np.float32), "b": spaces.Discrete(9)})
    action_space = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)))

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.look(), {}

    def look(self):
        return {"a": np.full(3, self.count, np.float32), "b": np.int64(self.count % 9)}

    def step(self, action):
        self.count += 1
        large = {"large": "x" * 5000} if self.count == 2 else {}
        return self.look(), float(action[0] + action[1][0]), False, False, large


def make_rich_policy():
    return lambda obs, context: (obs["b"] % 3, obs["a"][:, :2] / 100)


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_nested_spaces_and_large_infos(backend):
    with ea.VectorEnv([Rich] * 2, envs_per_actor=2, backend=backend) as envs:
        envs.reset()
        envs.set_policy(make_rich_policy)
        rollout = envs.rollout(5)
    assert rollout.obs["a"][:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert rollout.obs["b"].shape == (5, 2)
    assert rollout.actions[0][:, 1].tolist() == [0, 1, 2, 0, 1]
    assert rollout.actions[1].shape == (5, 2, 2)
    assert rollout.last_obs["b"].tolist() == [5, 5]
    assert [(step, env, len(info["large"])) for step, env, info in rollout.infos] == [(1, 0, 5000), (1, 1, 5000)]


def test_rollouts_count_as_steps():
    with ea.VectorEnv([Walk] * 2) as envs:
        envs.reset(seed=1)
        envs.set_policy(make_policy)
        envs.rollout(17)
        stats = envs.stats()
    assert list(stats.steps) == [15, 15], "two of the rows are resets"
    assert list(stats.episodes) == [2, 2]


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_no_policy_is_waited_for_in_a_closed_actor(backend):
    with ea.VectorEnv([Walk] * 3, backend=backend) as envs:
        envs.reset(seed=0)
        envs[1].close()
        with pytest.raises(ea.ActorClosedError, match="'env-1'"):
            envs.set_policy(make_policy)
        envs.step([1, 1], env_ids=[0, 2])
