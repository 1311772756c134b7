"""What envs may return that is unusual: info dicts that are used again, and keys that the space lacks."""

from __future__ import annotations

import threading

import gymnasium
import numpy as np
import pytest

import envactors as ea

BACKENDS = pytest.mark.parametrize("backend", ["process", "thread", "inline"])


class OneInfo(gymnasium.Env):
    """Has one info for all results, which each of them changes."""

    observation_space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(0, 9, (2,), np.float32)})
    action_space = gymnasium.spaces.Discrete(9)

    def __init__(self):
        self.obs = {"x": np.zeros(2, np.float32), "extra": object}
        self.info = {"array": np.zeros(2), "nested": {"list": []}}

    def _show(self, value):
        self.obs["x"][:] = value
        self.info["array"][:] = value
        self.info["nested"]["list"][:] = [value]
        return self.obs

    def reset(self, *, seed=None, options=None):
        return self._show(9), self.info

    def step(self, action):
        return self._show(action), 0.0, True, False, self.info


@BACKENDS
def test_a_reset_within_a_step_leaves_the_end_of_the_episode_as_it_was(backend):
    with ea.VectorEnv([OneInfo] * 2, autoreset="same_step", backend=backend) as envs:
        envs.reset()
        obs, _, _, _, infos = envs.step([1, 2])
        assert obs["x"].tolist() == [[9, 9]] * 2
        for action, info in zip([1, 2], infos, strict=True):
            assert (info["array"].tolist(), info["nested"]) == ([9, 9], {"list": [9]})
            last = info["final_info"]
            assert (last["array"].tolist(), last["nested"]) == ([action] * 2, {"list": [action]})
            assert info["final_obs"]["x"].tolist() == [action] * 2


@BACKENDS
def test_keys_that_the_space_lacks_are_ignored(backend):
    with ea.VectorEnv([OneInfo] * 2, backend=backend) as envs:
        assert list(envs.reset()[0]) == ["x"]
        assert list(envs.step([1, 2])[0]) == ["x"]


def test_what_cannot_be_pickled_is_named():
    class Locked(OneInfo):
        action_space = None

        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    with ea.VectorEnv([Locked] * 2) as envs:
        with pytest.raises(ea.SerializationError, match=r"arguments of reset for .*env 1.* cannot be pickled: TypeE"):
            envs.reset(options=[None, {"x": threading.Lock()}])
        envs.reset()
        with pytest.raises(ea.SerializationError, match=r"arguments of step for .*env 0.* cannot be pickled: TypeE"):
            envs.step([threading.Lock(), 1])
        with pytest.raises(ea.SerializationError, match=r"the result of get\('lock'\) cannot be pickled"):
            envs.get_attr("lock")
        with pytest.raises(ea.SerializationError, match=r"the arguments of set\('lock'\) .*cannot be pickled: TypeE"):
            envs.set_attr("lock", threading.Lock())
        assert envs.step([1, 2])[3].tolist() == [False, False]


@BACKENDS
@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_info_that_cannot_be_pickled_is_a_serialization_error(method, backend):
    class Locked(OneInfo):
        where = None

        def reset(self, *, seed=None, options=None):
            obs, info = super().reset(seed=seed)
            return obs, {"lock": threading.Lock()} if self.where == "reset" else info

        def step(self, action):
            info = {"lock": threading.Lock()} if self.where == "step" else {}
            return *super().step(action)[:4], info

    with ea.VectorEnv([Locked] * 2, backend=backend) as envs:
        envs.reset()
        envs.set_attr("where", method, env_ids=[1])
        with pytest.raises(ea.VectorStepError, match=f"1 of 2 envs failed in {method}") as told:
            envs.reset() if method == "reset" else envs.step([1, 2])
        assert type(told.value.failures[1]) is ea.SerializationError
        assert "cannot pickle '_thread.lock' object" in str(told.value.failures[1])
