"""RLlib with its envs in actors: crashes cost episodes of single envs, and env runners continue."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import signal

import numpy as np
import pytest

import envactors as ea

gymnasium = pytest.importorskip("gymnasium")

from rllibenvs import (  # noqa: E402
    FOREVER,
    FailsToReset,
    Unreliable,
    assert_accounted_for,
    assert_same_training,
    train_in_a_program,
)
from trainingfaults import Failing  # noqa: E402

from envactors.integrations.gymnasium import ActorVectorEnv  # noqa: E402
from envactors.integrations.rllib import on_actors  # noqa: E402


@pytest.fixture
def make():
    """Makes vector envs as an env runner does, and closes them in the end."""
    made = []

    def make_one(env, num_envs, env_config=(), **options):
        made.append(on_actors(env, **options)({**dict(env_config), "num_envs": num_envs}))
        return made[-1]

    yield make_one
    while made:  # views of the last observations would keep the memory of what is still in the list
        made.pop().close()


class Registered(gymnasium.Wrapper):
    """Tells which envs of RLlib its process knows."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))

    def ids(self):
        return [name for name in gymnasium.registry if name.startswith("rllib")]


# Without Ray ----------------------------------------------------------------------------------------------


def test_an_id_gets_the_env_config_as_keyword_arguments(make):
    envs = make("Pendulum-v1", 2, {"g": 1.5})
    assert isinstance(envs, ActorVectorEnv)
    assert envs.call("g") == (1.5, 1.5)
    assert envs.autoreset_mode is gymnasium.vector.AutoresetMode.NEXT_STEP


def test_a_creator_gets_the_env_config_as_a_plain_dict(make):
    envs = make(Unreliable, 2, {"level": 3})
    assert envs.get_attr("config") == ({"level": 3}, {"level": 3})


def test_a_crash_truncates_the_episode_of_one_env(make):
    envs = make(Unreliable, 2, restart=FOREVER)
    before, _ = envs.reset(seed=0)
    os.kill(envs.actors[1].pid, signal.SIGKILL)
    observations, rewards, terminations, truncations, infos = envs.step(np.array([0, 0]))
    assert truncations.tolist() == [False, True]
    assert not terminations.any()
    assert rewards.tolist() == [1.0, 0.0]
    assert np.array_equal(observations[1], before[1])
    assert isinstance(infos["failure"][1], ea.ActorDiedError)
    truncations = envs.step(np.array([0, 0]))[3]
    assert truncations.tolist() == [False, False]


def play_until_over(envs):
    envs.reset(seed=0)
    while not envs.step(np.zeros(envs.num_envs, int))[2].all():
        pass


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_reset_that_fails_is_repeated_in_a_new_process(is_killed, envs_per_actor, make):
    envs = make(FailsToReset, 2, {"is_killed": is_killed}, envs_per_actor=envs_per_actor, restart=FOREVER)
    play_until_over(envs)
    observations, rewards, terminations, truncations, infos = envs.step(np.array([0, 0]))
    assert observations.tolist() == [[0], [0]]
    assert rewards.tolist() == [0, 0]
    assert not (terminations | truncations).any()
    expected = ea.ActorDiedError if is_killed else (RuntimeError, ea.ActorDiedError)
    assert all(isinstance(failure, expected) for failure in infos["failure"])
    assert envs.step(np.array([0, 0]))[0].tolist() == [[1], [1]]


def test_crash_between_two_episodes_is_no_part_of_the_next_one(make):
    envs = make(Unreliable, 2, restart=FOREVER)
    play_until_over(envs)
    os.kill(envs.actors[1].pid, signal.SIGKILL)
    observations, _, _, truncations, infos = envs.step(np.array([0, 0]))
    assert np.abs(observations).max() < 0.05  # of resets
    assert not truncations.any()
    assert isinstance(infos["failure"][1], ea.ActorDiedError)


def test_reset_that_fails_too_often_raises(make):
    envs = make(FailsToReset, 1, restart=ea.RestartPolicy(max_restarts=0))
    play_until_over(envs)
    with pytest.raises(ea.ActorDiedError, match=r"reset raised RuntimeError\(.reset.\)"):
        envs.step(np.array([0]))


@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")  # Gymnasium's log
def test_failures_raise_with_on_failure_raise(make):
    envs = make(Unreliable, 1, {"errors": 1.0}, on_failure="raise")
    envs.reset()
    with pytest.raises(RuntimeError, match="unreliable"):
        envs.step(np.array([0]))


def test_workers_get_no_registration_of_the_env_runner(make):
    name = "rllib-single-agent-env-v0"
    gymnasium.register(name, entry_point=lambda: None)
    try:
        envs = make(lambda config: Registered(), 1)
        assert envs.call("ids") == ([],)
        assert name in gymnasium.registry
    finally:
        del gymnasium.registry[name]


def test_a_creator_can_be_pickled():
    creator = pickle.loads(pickle.dumps(on_actors("CartPole-v1", standbys=1)))
    assert (creator.env, creator.options) == ("CartPole-v1", {"standbys": 1, "on_failure": "renew"})


def test_another_vectorize_mode_is_rejected():
    with pytest.raises(ea.VectorInputError, match=r"gym_env_vectorize_mode='vector_entry_point'.*env_runner_cls="):
        on_actors("CartPole-v1")({})


def test_objects_that_are_not_envs_are_rejected():
    with pytest.raises(TypeError, match="expected the id of a Gymnasium env or an env creator"):
        on_actors(3)
    with pytest.raises(ea.VectorInputError, match="autoreset='same_step'"):
        on_actors("CartPole-v1", autoreset="same_step")
    with pytest.raises(TypeError, match="did you mean 'standbys'"):
        on_actors("CartPole-v1", standby=1)


# With Ray -------------------------------------------------------------------------------------------------


needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture
def sample():
    """Makes an env runner, and returns the episodes that it samples, and how many processes it has replaced."""
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.tune.registry import register_env

    torch.set_num_threads(1)  # its threads would count as leaked

    def sample_from(env, mode):
        register_env("env", env)
        config = (
            PPOConfig()
            .environment("env")
            .env_runners(num_env_runners=0, num_envs_per_env_runner=2, gym_env_vectorize_mode=mode)
            .debugging(seed=3)
        )
        runner = SingleAgentEnvRunner(config=config, worker_index=0)
        torch.manual_seed(0)
        episodes = runner.sample(num_timesteps=40)
        envs = runner.env.unwrapped
        restarts = sum(actor.restarts for actor in envs.vector.stats().actors) if hasattr(envs, "vector") else 0
        runner.stop()
        return [
            [one.tolist() for one in (episode.get_observations(), episode.get_actions(), episode.get_rewards())]
            for episode in episodes
        ], restarts

    return sample_from


def cartpole(failing_at, config):
    return Failing(gymnasium.make("CartPole-v1"), failing_at, 1)


# Of Gymnasium, since each env runner of RLlib registers its envs under the same id.
twice = pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning")


@needs_ray
@twice
def test_env_runner_samples_the_same_episodes_as_rllibs(sample):
    theirs, _ = sample(functools.partial(cartpole, 0), "sync")
    ours = sample(on_actors(functools.partial(cartpole, 12), on_failure="replay"), "vector_entry_point")
    assert ours == (theirs, 2)


@needs_ray
@twice
def test_episodes_have_no_step_that_no_env_made_if_a_reset_fails(sample):
    episodes, restarts = sample(on_actors(FailsToReset), "vector_entry_point")
    assert restarts == 2
    assert [observations for observations, _, _ in episodes] == [[[0], [1], [2], [3], [4], [5]]] * 8
    assert [rewards for _, _, rewards in episodes] == [[1] * 5] * 8


@needs_ray
@pytest.mark.timeout(600)
def test_crashes_and_errors_cost_episodes_and_neither_steps_nor_the_runner():
    found = train_in_a_program("single", 0.05, 0.05, 2, 256)
    assert_accounted_for(found)
    assert found["steps"] >= 512
    assert found["failed"] >= 20


@needs_ray
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ppo_learns_with_failures_in_a_tenth_of_the_steps():
    found = train_in_a_program("single", 0.1, 0.1, 10, 1024)
    assert_accounted_for(found)
    assert found["trained_return"] > 2 * found["untrained_return"]


@needs_ray
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("iterations", "batch_size"), [(1, 128), pytest.param(4, 1024, marks=pytest.mark.soak)])
def test_training_with_a_fifth_of_the_steps_failing_ends_as_without_failures(iterations, batch_size, tmp_path):
    assert_same_training("single", iterations, batch_size, tmp_path)
