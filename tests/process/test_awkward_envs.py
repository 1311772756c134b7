"""Envs that reuse their values, change their arguments, or fail, on every backend: results are those of processes."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from helpers import FORK_SERVER

import envactors as ea
from envactors.testing import EchoEnv

ALWAYS = ea.RestartPolicy(max_restarts=100, backoff=0)


class Reusing:
    """Returns the same mutable values again and again; raises at action 9, and ends its episode at action 8."""

    observation_space = gymnasium.spaces.Box(-9, 99, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(10)

    def __init__(self):
        self.obs, self.info, self.ends = np.zeros(1), {}, np.zeros((), np.bool_)

    def observe(self):
        return self.obs

    def reset(self, *, seed=None, options=None):
        self.change(0)
        self.info.clear()
        return self.observe(), self.info

    def step(self, action):
        if action == 9:
            self.info["value"] = 9
            raise ValueError("nine")
        if action > 1:
            self.change(int(action))
        self.ends[()] = action == 8
        return self.observe(), self.reward(float(action)), self.ends, False, self.info

    def reward(self, value):
        return value

    def change(self, value):
        self.obs[:] = value
        self.ends[()] = value > 0
        self.info["value"] = value


class SharingDicts(Reusing):
    """Has observations that are dicts, and rewards that are arrays of another dtype."""

    observation_space = gymnasium.spaces.Dict(
        {"one": gymnasium.spaces.Box(-9, 99, (1,), np.float64), "two": gymnasium.spaces.Discrete(100)}
    )
    reward_space = gymnasium.spaces.Box(-9, 99, (2,), np.float32)

    def __init__(self):
        super().__init__()
        self.rewards, self.dict = np.zeros(2, np.float32), {"one": self.obs, "two": 0}

    def observe(self):
        self.dict["two"] = int(self.obs[0])
        return self.dict

    def reward(self, value):
        self.rewards[:] = value
        return self.rewards

    def change(self, value):
        super().change(value)
        self.rewards[:] = value
        self.observe()


class Lists(Reusing):
    """Has observations that are lists, and no spaces."""

    observation_space = action_space = None

    def __init__(self):
        super().__init__()
        self.list = [0]

    def observe(self):
        return self.list

    def change(self, value):
        super().change(value)
        self.list[:] = [f"value {value}"]


class ScalarRewards(Reusing):
    reward_space = gymnasium.spaces.Box(-9, 99, (), np.float32)

    def reward(self, value):
        return np.float32(value) / np.float32(3)


class Refusing(EchoEnv):
    """Refuses to reset with the seeds 3 and 4, and empties its options before that."""

    def reset(self, *, seed=None, options=None):
        given = dict(options or {})
        (options or {}).clear()
        if seed in (3, 4) or given.get("refuses"):
            raise ValueError(f"no level for seed {seed}")
        obs, info = super().reset(seed=seed)
        return obs, {**info, "options": given}


def step_all(envs):
    """Step, with results that are received later, and with calls in between that change what envs have returned."""
    yield envs.reset(seed=1)
    for actions in ([1, 2], [3, 1]):
        yield envs.step(actions)
    for env_id in (0, 1):
        envs.send([4 + env_id], env_ids=[env_id])
        envs.call("change", 77)
        yield envs.recv()
    futures = envs.submit([6, 7])
    envs.call("change", 77)
    yield [future.result() for future in futures]
    for actions in ([8, 1], [1, 1], [1, 8], [2, 2]):
        yield envs.step(actions)


def fail_in_steps(envs):
    yield envs.reset(seed=1)
    yield envs.step([1, 2])
    for actions in ([9, 1], [2, 2], [2, 9], [9, 9], [8, 2], [9, 8], [3, 3]):
        try:
            yield envs.step(actions)
        except ea.VectorStepError as error:
            yield error.failures, error.batch


def fail_in_resets(envs):
    for seed, options in [(2, None), (3, {"level": 1}), (None, {"level": [2]}), (3, None), (None, None), (4, {"l": 1})]:
        try:
            yield envs.reset(seed=seed, options=options)
        except ea.VectorStepError as error:
            yield error.failures, error.batch


# The env, what is done with it, how failures are handled, and whether episodes are seeded.
CASES = [
    (Reusing, step_all, "raise", False),
    (Reusing, fail_in_steps, "raise", False),
    (Reusing, fail_in_steps, "renew", False),
    (SharingDicts, step_all, "raise", False),
    (SharingDicts, fail_in_steps, "renew", False),
    (Lists, step_all, "raise", False),
    (Lists, fail_in_steps, "raise", False),
    (Lists, fail_in_steps, "renew", False),
    (ScalarRewards, step_all, "renew", False),
    (Refusing, fail_in_resets, "raise", False),
    (Refusing, fail_in_resets, "raise", True),
    (Refusing, fail_in_resets, "renew", False),
    (Refusing, fail_in_resets, "renew", True),
]


def plain(value):
    """Return a result as values that can be compared, with the dtypes of arrays."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, BaseException):
        return type(value).__name__, str(value)
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize(("factory", "run", "on_failure", "seed_episodes"), CASES)
def test_an_awkward_env_has_equal_results_on_every_backend(factory, run, on_failure, seed_episodes, autoreset):
    def collect(backend):
        options = {"on_failure": on_failure, "autoreset": autoreset, "seed_episodes": seed_episodes}
        factories = [factory] * (3 if factory is Refusing else 2)
        with ea.VectorEnv(factories, backend=backend, restart=ALWAYS, **options) as envs:
            return [plain(result) for result in list(run(envs))]  # once all results were made

    expected = collect(FORK_SERVER)
    assert collect("thread") == expected
    assert collect("inline") == expected
