"""RLlib with its envs in actors: crashes cost episodes of single envs, and env runners go on."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal

import numpy as np
import pytest

import envactors as ea

gymnasium = pytest.importorskip("gymnasium")

from rllibenvs import FOREVER, Unreliable, assert_accounted_for, train_in_a_program  # noqa: E402

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
    for envs in made:
        envs.close()


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
