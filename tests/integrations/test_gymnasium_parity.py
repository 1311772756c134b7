"""The facade against Gymnasium's own loop: equal seeds and actions, equal results."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from helpers import FORK_SERVER

import envactors as ea

gymnasium = pytest.importorskip("gymnasium")

ENVS = {
    "CartPole-v1": {},
    "Pendulum-v1": {"max_episode_steps": 40},
    "MountainCarContinuous-v0": {"max_episode_steps": 40},
    "Blackjack-v1": {},
    "FrozenLake-v1": {},
}


def assert_equal(ours, theirs):
    if isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    else:
        theirs = np.asarray(theirs)
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("envs_per_actor", [1, 3])
@pytest.mark.parametrize("backend", [FORK_SERVER, "thread", "inline"], ids=["process", "thread", "inline"])
@pytest.mark.parametrize("env_id", ENVS)
def test_equal_seeds_and_actions_give_equal_results(env_id, backend, envs_per_actor, autoreset):
    count, steps = 3, 150
    factories = [functools.partial(gymnasium.make, env_id, **ENVS[env_id])] * count
    mode = {"next_step": "NextStep", "same_step": "SameStep"}[autoreset]
    reference = gymnasium.vector.SyncVectorEnv(factories, autoreset_mode=gymnasium.vector.AutoresetMode(mode))
    reference.action_space.seed(1)
    ended = 0
    with ea.VectorEnv(factories, autoreset=autoreset, backend=backend, envs_per_actor=envs_per_actor) as envs:
        assert_equal(envs.reset(seed=42)[0], reference.reset(seed=42)[0])
        for _ in range(steps):
            actions = reference.action_space.sample()
            *ours, infos = envs.step(actions)
            *theirs, their_infos = reference.step(actions)
            assert_equal(tuple(ours), tuple(theirs))
            over = ours[2] | ours[3]
            ended += int(over.sum())
            for i in np.flatnonzero(over) if autoreset == "same_step" else ():
                assert_equal(
                    tuple(map(np.asarray, _leaves(infos[i]["final_obs"]))),
                    tuple(map(np.asarray, _leaves(their_infos["final_obs"][i]))),
                )
                assert infos[i]["final_info"].keys() <= their_infos["final_info"].keys()
    reference.close()
    assert ended > 0, "no episode ended: this compared no autoreset"


def _leaves(obs):
    return [np.asarray(leaf, np.float64) for leaf in obs] if isinstance(obs, tuple) else [np.asarray(obs, np.float64)]


def test_specs_come_from_the_spaces():
    with ea.VectorEnv([lambda: gymnasium.make("Blackjack-v1")]) as envs:
        assert [spec.shape for spec in envs.observation_spec] == [()] * 3
        assert [int(spec.high) for spec in envs.observation_spec] == [31, 10, 1]
        assert envs.action_spec == ea.ArraySpec((), np.int64, np.asarray(0), np.asarray(1))
    with ea.VectorEnv([lambda: gymnasium.make("Pendulum-v1")]) as envs:
        assert envs.action_spec == ea.ArraySpec((1,), np.float32, np.float32([-2]), np.float32([2]))
        envs.reset(seed=0)
        for wrong in (np.zeros((1, 2), np.float32), np.zeros((1, 1), "U1"), [[1j]]):
            with pytest.raises(ea.SpaceMismatchError, match=r"expected (\(1, 1\)|float32)"):
                envs.step(wrong)


class Nested(gymnasium.Env):
    """Dicts in tuples in dicts, and a leaf that cannot be batched."""

    observation_space = gymnasium.spaces.Dict(
        {
            "pair": gymnasium.spaces.Tuple(
                [
                    gymnasium.spaces.Box(0, 1, (2, 2), np.float32),
                    gymnasium.spaces.Dict({"deep": gymnasium.spaces.MultiBinary(3)}),
                ]
            ),
            # The default is a set of characters, and older versions of Gymnasium sample in its order: one per process.
            "words": gymnasium.spaces.Text(8, charset="abcdefgh"),
        }
    )
    action_space = gymnasium.spaces.Dict({"go": gymnasium.spaces.Discrete(3), "how": gymnasium.spaces.Box(-1, 1, (2,))})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert isinstance(action["go"], np.integer)
        assert action["how"].shape == (2,)
        return self.observation_space.sample(), float(action["go"]), False, False, {"how": action["how"]}


def test_nested_observations_and_actions():
    reference = Nested()
    with ea.VectorEnv([Nested] * 2) as envs:
        obs, _ = envs.reset(seed=9)
        expected = [reference.reset(seed=9 + i)[0] for i in range(2)]
        assert obs["pair"][0].shape == (2, 2, 2)
        assert obs["pair"][0].dtype == np.float32
        assert obs["pair"][1]["deep"].shape == (2, 3)
        assert obs["words"] == [one["words"] for one in expected]
        for i in range(2):
            assert np.array_equal(obs["pair"][0][i], expected[i]["pair"][0])
            assert np.array_equal(obs["pair"][1]["deep"][i], expected[i]["pair"][1]["deep"])
        batched = {"go": np.array([1, 2]), "how": np.array([[0.5, 0], [0, -0.5]])}
        listed = [{"go": 1, "how": [0.5, 0]}, {"go": 2, "how": [0, -0.5]}]
        for actions in (batched, listed):
            _, rewards, *_, infos = envs.step(actions)
            assert rewards.tolist() == [1.0, 2.0]
            assert infos[1]["how"].tolist() == [0, -0.5]
        for wrong in ({"go": [1, 2]}, {"go": [1, 2], "how": [1, 2]}, [{"go": 1}, {"go": 2}]):
            with pytest.raises(ea.SpaceMismatchError, match="expected"):
                envs.step(wrong)
