"""Evaluations: whole episodes with the policy, each with its seed, whatever happens to the envs."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from test_rollouts import ALWAYS, Walk, choose, make_policy

import envactors as ea


class Uneven(Walk):
    """Its episodes have 3 to 40 steps, which their seeds tell."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.length = int(self.np_random.integers(3, 41))
        return obs, info


def seed_of(policy_seed, number):
    return int(np.random.SeedSequence(policy_seed, spawn_key=(1, number)).generate_state(1)[0])


def play(env, number, policy_seed, env_id):
    """Plays an episode in a loop; returns its return and length."""
    obs, _ = env.reset(seed=seed_of(policy_seed, number))
    context = ea.PolicyContext(np.array([env_id]), None, 0, None)
    total, length, over = 0.0, 0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(choose(obs[None], context)[0])
        total += reward
        length += 1
        over = terminated or truncated
    return total, length


def expected(episodes, num_envs, policy_seed):
    env = Uneven()
    played = [play(env, number, policy_seed, number % num_envs) for number in range(episodes)]
    return [np.array(column) for column in zip(*played, strict=True)]


def check(found, episodes, num_envs, policy_seed):
    returns, lengths = expected(episodes, num_envs, policy_seed)
    np.testing.assert_array_equal(found.returns, returns)
    np.testing.assert_array_equal(found.lengths, lengths)
    assert found.seeds.tolist() == [seed_of(policy_seed, number) for number in range(episodes)]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("options", [{}, {"envs_per_actor": 2}, {"backend": "inline"}], ids=str)
def test_episodes_are_those_of_a_loop(options, autoreset):
    with ea.VectorEnv([Uneven] * 3, autoreset=autoreset, **options) as envs:
        envs.set_policy(make_policy, seed=6)
        for episodes in (2, 11):
            found = envs.evaluate(episodes)
            check(found, episodes, 3, 6)
            assert found.failures == []
        with pytest.raises(ea.VectorInputError, match="needs a reset first"):
            envs.rollout(1)
        envs.reset(seed=0)
        envs.rollout(5)


def test_rewards_are_added_as_a_loop_adds_them():
    """Sums over arrays round otherwise; and episodes are longer than the rollouts within."""
    with ea.VectorEnv([lambda: Walk(length=333)] * 2, envs_per_actor=2) as envs:
        envs.set_policy(make_policy)
        found = envs.evaluate(3)
        for number in range(3):
            assert (found.returns[number], found.lengths[number]) == play(Walk(length=333), number, 0, number % 2)


class Offset:
    """A policy that returns what it has loaded, and nothing else."""

    def load(self, parameters):
        self.offset = parameters

    def __call__(self, obs, context):
        return np.full(len(obs), self.offset)


class Counting(Walk):
    """Rewards are the actions."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(action), *rest


def test_parameters_are_loaded_before_the_first_step():
    with ea.VectorEnv([Counting] * 2) as envs:
        envs.set_policy(Offset)
        assert [envs.evaluate(1, parameters).returns.tolist() for parameters in (3, 1)] == [[21.0], [7.0]]
        assert envs.evaluate(1).returns.tolist() == [7.0]
        envs.set_policy(make_policy)
        with pytest.raises(TypeError, match="no method load"):
            envs.evaluate(1, 3)


@pytest.mark.parametrize("fault", ["raise", "die", "hang"])
@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
@pytest.mark.parametrize("envs_per_actor", [1, 3])
def test_a_failed_episode_is_repeated_with_its_seed(tmp_path, fault, on_failure, envs_per_actor):
    factories = [lambda i=i: Faulty(tmp_path / "orders" if i == 1 else None, fault, 3) for i in range(3)]
    options = {"on_failure": on_failure, "envs_per_actor": envs_per_actor, "restart": ALWAYS}
    with ea.VectorEnv(factories, deadlines=ea.Deadlines(step=1.0), **options) as envs:
        envs.set_policy(make_policy, seed=2)
        found = envs.evaluate(7)
        check(found, 7, 3, 2)
    assert (tmp_path / "orders").exists()
    numbers = [number for number, _ in found.failures]
    if on_failure == "replay":
        assert numbers == []
    else:
        # All envs of a process are lost with it; and "renew" replaces that of an env that raises.
        is_alone = envs_per_actor == 1 or (fault == "raise" and on_failure == "raise")
        assert numbers == ([1] if is_alone else [0, 1, 2])
        assert all(isinstance(error, Exception) for _, error in found.failures)


class Faulty(Uneven):
    def __init__(self, orders, fault, at):
        super().__init__(orders, fault, at)


@pytest.mark.parametrize("on_failure", ["raise", "renew"])
def test_a_failure_behind_the_last_episode_counts_for_none(tmp_path, on_failure):
    """Env 1 has nothing to play, but continues while the others do."""
    factories = [Walk, lambda: Walk(tmp_path / "orders", "raise", 9, length=10)]
    with ea.VectorEnv(factories, on_failure=on_failure, restart=ALWAYS) as envs:
        envs.set_policy(make_policy)
        found = envs.evaluate(1)
    assert (tmp_path / "orders").exists()
    assert found.failures == []
    assert (found.returns[0], found.lengths[0]) == play(Walk(), 0, 0, 0)


class Hopeless(Walk):
    def step(self, action):
        raise RuntimeError("never")


class Unready(Walk):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("never")


@pytest.mark.parametrize("env", [Hopeless, Unready])
@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_an_episode_that_always_fails_ends_the_evaluation(env, on_failure):
    restart = ea.RestartPolicy(max_restarts=5, backoff=0.0)
    with ea.VectorEnv([Walk, env], on_failure=on_failure, restart=restart) as envs:
        envs.set_policy(make_policy)
        with pytest.raises(ea.VectorStepError, match="never"):
            envs.evaluate(4)
        with pytest.raises(ea.VectorInputError, match="needs a reset first"):
            envs.step([0, 0])


def test_a_policy_that_raises():
    def make():
        def policy(obs, context):
            raise ZeroDivisionError("no actions")

        return policy

    with ea.VectorEnv([Walk] * 2) as envs:
        envs.set_policy(make)
        with pytest.raises(ZeroDivisionError, match="no actions"):
            envs.evaluate(2)
        envs.set_policy(make_policy)
        assert len(envs.evaluate(2).returns) == 2


def test_invalid_rollout_arguments_raise():
    with ea.VectorEnv([Walk] * 2) as envs:
        with pytest.raises(ea.VectorInputError, match="evaluate needs a policy: call set_policy first"):
            envs.evaluate(1)
        envs.set_policy(make_policy)
        for episodes in (0, -1, 1.5, True):
            with pytest.raises(ea.VectorInputError, match=r"episodes is .*: expected an int >= 1"):
                envs.evaluate(episodes)
        envs.reset(seed=0)
        future = envs.rollout_async(10)
        with pytest.raises(ea.AlreadyPendingError):
            envs.evaluate(1)
        future.result()
        envs.send([0, 0])
        with pytest.raises(ea.AlreadyPendingError):
            envs.evaluate(1)
        envs.recv(2)
        envs.step([0, 0])  # nothing was reset
    with pytest.raises(ea.ActorClosedError):
        envs.evaluate(1)


def test_a_gymnasium_env():
    def make():
        return gymnasium.make("CartPole-v1")

    with ea.VectorEnv([make] * 4, envs_per_actor=2) as envs:
        envs.set_policy(lambda: lambda obs, context: (obs[:, 2] + obs[:, 3] > 0).astype(np.int64))
        found = envs.evaluate(6)
    assert (found.lengths > 100).all()
    assert found.returns.tolist() == found.lengths.tolist()


class Robot(Uneven):
    """Its infos say whether the robot has failed."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"failure": False}


def test_what_an_env_calls_a_failure_is_none_of_the_vector():
    with ea.VectorEnv([Robot] * 2, backend="inline") as envs:
        envs.set_policy(make_policy, seed=6)
        assert envs.evaluate(3).failures == []
