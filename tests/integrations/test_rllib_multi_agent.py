"""RLlib with its multi-agent envs in actors: the trajectories of its own vector env, and crashes that cost episodes."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import signal

import numpy as np
import pytest

import envactors as ea

pytest.importorskip("ray.rllib")

import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.vector.sync_vector_multi_agent_env import SyncVectorMultiAgentEnv
from ray.tune.registry import register_env
from rllibagents import Endless, FailsToReset, Relay, Unlisted
from rllibenvs import Unreliable, assert_accounted_for, assert_same_training, train_in_a_program
from rllibrelay import RelayOfRay

from envactors.integrations.rllib import ActorMultiAgentEnvRunner, on_actors
from envactors.integrations.rllib.multi_agent import ActorVectorMultiAgentEnv

# Of Gymnasium, since each env runner of RLlib registers its envs under the same id.
pytestmark = pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning")
torch.set_num_threads(1)  # its threads would count as leaked


@pytest.fixture
def make():
    """Makes vector envs with an env per config, and closes them in the end."""
    made = []

    def make_one(*configs, env=Relay, **options):
        factories = [functools.partial(env, config) for config in configs]
        # Without the modules that the fork server imports for envs of Ray.
        made.append(ActorVectorMultiAgentEnv(factories, {"on_failure": "renew", "backend": "process", **options}))
        return made[-1]

    yield make_one
    for envs in made:
        envs.close()


def choose(observations, step):
    return [{agent: (step + i) % 2 for i, agent in enumerate(each)} for each in observations]


def rollout(envs, steps=35):
    """Returns pickles of what the env runner gets in each step."""
    observations, infos = envs.reset(seed=5)
    seen = [pickle.dumps((observations, infos))]
    for step in range(steps):
        results = envs.step(choose(observations, step))
        observations = results[0]
        seen.append(pickle.dumps([list(column) for column in results]))
    return seen


def as_values(seen):
    return [pickle.loads(one) for one in seen]


def assert_same(ours, theirs):
    for one, other in zip(as_values(ours), as_values(theirs), strict=True):
        for column, expected in zip(one, other, strict=True):
            np.testing.assert_equal(column, expected)


def test_trajectories_are_those_of_rllibs_vector_env(make):
    theirs = SyncVectorMultiAgentEnv([functools.partial(RelayOfRay, {})] * 3)
    ours = make({}, {}, {}, envs_per_actor=2)
    assert ours.num_envs == theirs.num_envs
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.single_action_space == theirs.single_action_space
    assert_same(rollout(ours), rollout(theirs))


def test_killed_worker_does_not_change_a_replayed_run(make):
    killed = make({"killed_at": 14}, {}, {"killed_at": 3}, on_failure="replay")
    assert_same(rollout(killed), rollout(make({}, {}, {}, backend="inline")))
    assert [actor.incarnation for actor in killed.vector.actors] == [1, 0, 1]


def test_crash_truncates_the_episode_of_one_env(make):
    envs = make({"killed_at": 5}, {})
    whole = as_values(rollout(make({}, {}, backend="inline"), 5))
    results = as_values(rollout(envs, 7))
    observations, rewards, terminateds, truncateds, infos = results[5]
    assert truncateds[0] == {"__all__": True}
    assert terminateds[0] == {"__all__": False}
    assert rewards[0] == {"quick": 0.0, "slow": 0.0, "late": 0.0}
    np.testing.assert_equal(observations[0]["quick"], whole[4][0][0]["quick"])
    np.testing.assert_equal(observations[0]["slow"], whole[3][0][0]["slow"])
    assert all(isinstance(info["failure"], ea.ActorDiedError) for info in infos[0].values())
    np.testing.assert_equal(observations[1], whole[5][0][1])
    assert not truncateds[1]["__all__"]
    assert results[6][0][0].keys() == {"quick", "slow"}  # of a reset
    assert results[6][3][0] == dict.fromkeys(["quick", "slow", "late", "__all__"], False)
    assert results[7][4][0] == {"quick": {"steps": 1}}


@pytest.mark.parametrize("raises_at", range(1, 11))
def test_rllibs_episode_takes_a_failure_in_any_step(raises_at, make):
    envs = make({"raises_at": raises_at}, backend="inline")
    episode = MultiAgentEpisode(agent_to_module_mapping_fn=lambda agent, episode: "policy")
    observations, infos = envs.reset(seed=1)
    episode.add_env_reset(observations=observations[0], infos=infos[0])
    while not episode.is_done:
        actions = dict.fromkeys(episode.get_agents_to_act(), 1)
        columns = zip(
            ("observations", "rewards", "terminateds", "truncateds", "infos"), envs.step([actions]), strict=True
        )
        episode.add_env_step(actions=actions, **{name: column[0] for name, column in columns})
    assert episode.env_t == raises_at
    assert (episode.is_terminated, episode.is_truncated) == (False, True)
    assert isinstance(episode.get_infos(-1)["quick"]["failure"], RuntimeError)


def test_reset_that_fails_is_repeated_in_a_new_process(make):
    envs = make({}, env=FailsToReset)
    results = as_values(rollout(envs, 12))
    assert results[10][3][0]["__all__"]
    observations, _, _, truncateds, infos = results[11]
    assert observations[0].keys() == {"quick", "slow"}
    assert not truncateds[0]["__all__"]
    assert isinstance(infos[0]["quick"]["failure"], RuntimeError)
    assert results[12][4][0] == {"quick": {"steps": 1}}


def test_failures_raise_with_on_failure_raise(make):
    envs = make({"killed_at": 1}, on_failure="raise")
    observations, _ = envs.reset(seed=0)
    with pytest.raises(ea.ActorDiedError, match="SIGKILL"):
        envs.step(choose(observations, 0))


def test_methods_and_attributes_are_those_of_the_envs(make):
    envs = make({}, {})
    envs.reset(seed=0)
    assert envs.get_attr("steps") == (0, 0)
    assert [observation.keys() for observation in envs.call("observe", "late")] == [{"late"}] * 2
    assert envs.render() == (None, None)
    assert envs.call("steps") == (0, 0)
    assert envs.get_attr("observe") == ({}, {})  # methods are called, as by RLlib
    assert repr(envs) == "ActorVectorMultiAgentEnv(num_envs=2)"


def test_agents_that_only_the_spaces_name_are_known(make):
    envs = make({}, env=Unlisted)
    assert envs.single_observation_spaces.keys() == {"quick", "slow", "late"}
    assert envs.envs[0].possible_agents == ["quick", "slow", "late"]


def test_what_is_no_multi_agent_env_is_rejected(make):
    with pytest.raises(ea.ActorStartError) as caught:
        make({}, env=Unreliable)
    assert "expected a MultiAgentEnv of RLlib" in str(caught.value.__cause__)
    envs = make({}, env=Endless, on_failure="raise")
    observations, _ = envs.reset(seed=0)
    with pytest.raises(TypeError, match="expected the key '__all__'"):
        envs.step(choose(observations, 0))


# Env runners ----------------------------------------------------------------------------------------------


@pytest.fixture
def make_runner():
    made = []

    def make_one(runner, env, **env_config):
        config = (
            PPOConfig()
            .environment(env, env_config=env_config)
            .multi_agent(policies={"policy"}, policy_mapping_fn=lambda agent, episode, **kwargs: "policy")
            .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
            .fault_tolerance(restart_failed_sub_environments=True)
            .debugging(seed=3)
        )
        made.append(runner(config=config, worker_index=0))
        return made[-1]

    yield make_one
    for runner in made:
        runner.stop()


def contents(episodes):
    """Returns the length of each episode, whether it is over, and what its agents have seen, done, and got."""
    columns = "get_observations", "get_actions", "get_rewards"
    return [
        (
            episode.env_t,
            episode.is_done,
            {
                agent: [np.asarray(getattr(one, column)()) for column in columns]
                for agent, one in episode.agent_episodes.items()
            },
        )
        for episode in episodes
    ]


def sample(runner):
    torch.manual_seed(0)
    return contents(runner.sample(num_timesteps=90))


@pytest.mark.parametrize("killed_at", [0, 17])
def test_env_runner_samples_the_same_episodes_as_rllibs(killed_at, make_runner):
    register_env("plain", RelayOfRay)
    register_env("actors", on_actors(RelayOfRay, on_failure="replay"))
    ours = make_runner(ActorMultiAgentEnvRunner, "actors", killed_at=killed_at)
    theirs = make_runner(MultiAgentEnvRunner, "plain")
    np.testing.assert_equal(sample(ours), sample(theirs))
    assert ours.env.vector.stats().actors[0].restarts == (killed_at > 0)


def test_env_runner_makes_its_envs_again_if_failures_raise(make_runner, monkeypatch):
    # RLlib's record has the traceback, and pytest keeps records longer than the test.
    monkeypatch.setattr(logging.getLogger("ray.rllib"), "disabled", True)
    register_env("raising", on_actors(RelayOfRay, on_failure="raise"))
    runner = make_runner(ActorMultiAgentEnvRunner, "raising")
    sample(runner)
    first = runner.env
    os.kill(first.vector.actors[1].pid, signal.SIGKILL)
    assert len(sample(runner)) >= 4
    assert runner.env is not first
    assert first.closed


def test_env_runner_needs_an_env_on_actors(make_runner):
    register_env("plain", RelayOfRay)
    with pytest.raises(TypeError, match=r"expected the name .* register_env\(name, on_actors"):
        make_runner(ActorMultiAgentEnvRunner, "plain")


@pytest.mark.timeout(600)
def test_crashes_and_errors_cost_episodes_and_neither_steps_nor_the_runner():
    found = train_in_a_program("pairs", 0.05, 0.05, 2, 256)
    assert_accounted_for(found)
    assert found["steps"] >= 512
    assert found["failed"] >= 10


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ppo_learns_with_failures_in_a_tenth_of_the_steps():
    found = train_in_a_program("pairs", 0.1, 0.1, 10, 1024)
    assert_accounted_for(found)
    assert found["trained_return"] > 2 * found["untrained_return"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("iterations", "batch_size"), [(1, 128), pytest.param(4, 1024, marks=pytest.mark.soak)])
def test_training_with_a_fifth_of_the_steps_failing_ends_as_without_failures(iterations, batch_size, tmp_path):
    assert_same_training("pairs", iterations, batch_size, tmp_path)
