"""The env code of the recipes for CleanRL and skrl, with crashes."""

from __future__ import annotations

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402
from trainingfaults import Failing  # noqa: E402

from envactors.integrations.gymnasium import ActorVectorEnv  # noqa: E402


def make_env(at):
    def thunk():
        return gymnasium.wrappers.RecordEpisodeStatistics(Failing(gymnasium.make("CartPole-v1"), at, 1))

    return thunk


def collect(envs, actions):
    """What the loop of CleanRL's ppo.py stores and logs."""
    next_obs, _ = envs.reset(seed=1)
    stored, returns = [], []
    for action in actions:
        next_obs, reward, terminations, truncations, infos = envs.step(action)
        stored.append((next_obs, reward, np.logical_or(terminations, truncations)))
        if "episode" in infos.get("final_info", {}):
            returns.extend(infos["final_info"]["episode"]["r"][infos["final_info"]["_episode"]].tolist())
    envs.close()
    return [np.stack(column) for column in zip(*stored, strict=True)], returns


@pytest.fixture
def actions():
    return np.random.default_rng(0).integers(2, size=(120, 3))


def test_cleanrl_stores_and_logs_the_same_as_without_a_crash(actions):
    factories = [make_env(30), make_env(0), make_env(55)]
    ours = ActorVectorEnv(factories, autoreset_mode="SameStep", on_failure="replay")
    stored, returns = collect(ours, actions)
    expected, expected_returns = collect(SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP), actions)
    for one, other in zip(stored, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert returns == expected_returns
    assert len(returns) > 5
    assert [actor.incarnation for actor in ours.actors] == [1, 0, 1]


def test_cleanrl_continues_when_failures_renew(actions):
    ours = ActorVectorEnv([make_env(5), make_env(0)], autoreset_mode="SameStep", on_failure="renew")
    (obs, rewards, dones), returns = collect(ours, actions[:60, :2])
    assert dones[4, 0]
    assert rewards[4, 0] == 0
    assert np.isfinite(obs).all()
    assert returns


@pytest.mark.filterwarnings("ignore:`np.bool8`:DeprecationWarning")  # of skrl with NumPy 1.24
def test_skrl_steps_a_wrapped_vector_with_a_crash():
    torch = pytest.importorskip("torch")
    wrappers = pytest.importorskip("skrl.envs.wrappers.torch")
    env = wrappers.wrap_env(ActorVectorEnv([make_env(5), make_env(0)], on_failure="renew"), verbose=False)
    assert env.num_envs == 2
    obs, _ = env.reset()
    assert obs.shape == (2, 4)
    cut = []
    for _ in range(8):
        obs, rewards, _, truncated, _ = env.step(torch.zeros(2, 1, dtype=torch.long))
        cut.append(truncated[:, 0].tolist())
        assert (obs.shape, rewards.shape) == ((2, 4), (2, 1))
    assert cut == [[False, False]] * 4 + [[True, False]] + [[False, False]] * 3
    env.close()
