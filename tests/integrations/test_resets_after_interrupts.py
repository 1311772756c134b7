"""After an exception at any line of a drop-in, its `reset` and its `step` work, and mix up no result."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from alfenvs import AlfEnv
from helpers import FORK_SERVER
from interrupting import UNCOVERED
from pettingzoo import ParallelEnv

import envactors as ea

DROPINS = str(Path(ea.__file__).parent / "integrations")
ALWAYS = ea.RestartPolicy(max_restarts=10**6, backoff=0)


class Counter(gymnasium.Env):
    """Its observations are its seed and the count of its steps."""

    observation_space = gymnasium.spaces.Box(0, 1000, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = np.array([seed or 0, 0], np.float32)
        return self.at.copy(), {}

    def step(self, action):
        self.at[1] += 1
        return self.at.copy(), 1.0, False, False, {}


class Hit(Exception):
    """Comes at a line of a drop-in."""


def interrupted(function, at):
    """Call a function and raise at its line ``at`` in a drop-in; return whether it had that many lines."""
    left = at

    def trace(frame, event, _arg):
        nonlocal left
        if not frame.f_code.co_filename.startswith(DROPINS):
            return None
        if event == "line" and frame.f_code.co_code[frame.f_lasti] not in UNCOVERED:
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise Hit
        return trace

    sys.settrace(trace)
    try:
        with contextlib.suppress(Hit):
            function()
    finally:
        sys.settrace(None)
    assert sys.exc_info()[1] is None
    return left <= 0


class Gymnasium:
    """ActorVectorEnv."""

    def __init__(self, backend):
        module = importlib.import_module("envactors.integrations.gymnasium")
        self.envs = module.ActorVectorEnv([Counter] * 2, backend=backend, restart=ALWAYS)

    def reset(self, seed):
        return self.envs.reset(seed=seed)[0]

    def step(self):
        return self.envs.step(np.array([0, 1]))[0]

    def step_of_other_types(self):
        return self.envs.step([0, 1])[0]

    def call(self):
        return self.envs.get_attr("at")


class StableBaselines:
    """ActorVecEnv."""

    def __init__(self, backend):
        pytest.importorskip("stable_baselines3")
        module = importlib.import_module("envactors.integrations.sb3")
        self.envs = module.ActorVecEnv([Counter] * 2, backend=backend, restart=ALWAYS)

    def reset(self, seed):
        self.envs.seed(seed)
        return self.envs.reset()

    def step(self):
        return self.envs.step(np.array([0, 1]))[0]


class TorchRL:
    """ActorEnv."""

    def __init__(self, backend):
        pytest.importorskip("torchrl")
        module = importlib.import_module("envactors.integrations.torchrl")
        self.envs = module.ActorEnv([Counter] * 2, backend=backend, restart=ALWAYS)

    def reset(self, seed):
        self.last = self.envs.reset(seed=seed)
        return self.last["observation"].numpy()

    def step(self):
        self.last = self.envs.step(self.envs.rand_action(self.last))["next"]
        return self.last["observation"].numpy()


class CounterOfAgents(ParallelEnv):
    """A `Counter` of one agent."""

    metadata = {"name": "counter"}  # noqa: RUF012
    possible_agents = ["a"]  # noqa: RUF012

    def __init__(self):
        self.env, self.agents = Counter(), ["a"]

    def observation_space(self, agent):
        return Counter.observation_space

    def action_space(self, agent):
        return Counter.action_space

    def reset(self, seed=None, options=None):
        return {"a": self.env.reset(seed=seed)[0]}, {"a": {}}

    def step(self, actions):
        return {"a": self.env.step(actions["a"])[0]}, {"a": 1.0}, {"a": False}, {"a": False}, {"a": {}}


class PettingZoo:
    """ActorParallelEnv."""

    def __init__(self, backend):
        module = importlib.import_module("envactors.integrations.pettingzoo")
        self.envs = module.ActorParallelEnv([CounterOfAgents] * 2, backend=backend, restart=ALWAYS)

    def reset(self, seed):
        return self.envs.reset(seed=seed)[0]["a"]

    def step(self):
        return self.envs.step({"a": np.array([0, 1])})[0]["a"]


class PettingZooCopies(PettingZoo):
    """Each copy of an ActorParallelEnv."""

    def reset(self, seed):
        return np.array([copy.reset(seed=seed + i)[0]["a"] for i, copy in enumerate(self.envs.copies)])

    def step(self):
        return np.array([copy.step({"a": 0})[0]["a"] for copy in self.envs.copies])


class CounterOfDing:
    """A `Counter` for DI-engine."""

    observation_space = Counter.observation_space
    action_space = Counter.action_space
    reward_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)

    def __init__(self):
        self.env, self.seeded = Counter(), 0

    def seed(self, seed, dynamic_seed=None):
        self.seeded = seed

    def reset(self):
        return self.env.reset(seed=self.seeded)[0]

    def step(self, action):
        return self.env.step(action)[0], np.ones(1, np.float32), False, {}

    def close(self):
        pass


class Ding:
    """SyncActorEnvManager."""

    def __init__(self, backend):
        module = importlib.import_module("envactors.integrations.ding")
        self.envs = module.SyncActorEnvManager([CounterOfDing] * 2, backend=backend, episode_num=float("inf"))
        self.envs.launch()

    def reset(self, seed):
        self.envs.seed(seed)
        self.envs.reset()
        return np.array(list(self.envs.ready_obs.values()))

    def step(self):
        steps = self.envs.step({0: np.int64(0), 1: np.int64(1)})
        return np.array([steps[i].obs for i in range(2)])


class Alf:
    """ActorParallelEnvironment."""

    def __init__(self, backend):
        module = importlib.import_module("envactors.integrations.alf")
        factories = [functools.partial(AlfEnv, length=10**6)] * 2
        self.envs = module.ActorParallelEnvironment(factories, backend=backend)

    def reset(self, seed):
        return np.asarray(self.envs.reset().observation)[:, :3:2]

    def step(self):
        return np.asarray(self.envs.step(np.zeros(2, np.int64)).observation)[:, :3:2]


ALL = [Gymnasium, StableBaselines, TorchRL, PettingZoo, PettingZooCopies, Ding, Alf]


@pytest.mark.parametrize("backend", [FORK_SERVER, "inline"])
@pytest.mark.parametrize("kind", [Gymnasium, StableBaselines, TorchRL])
def test_reset_works_after_an_exception_at_any_line(kind, backend):
    driver = kind(backend)
    try:
        names = [name for name in vars(kind) if not name.startswith("__")]
        driver.reset(0)
        for name in names:
            call = getattr(driver, name)
            for at in itertools.count(1):
                went_on = interrupted(lambda: call(500) if name == "reset" else call(), at)  # noqa: B023
                obs = driver.reset(at)
                assert obs.tolist() == [[at, 0], [at + 1, 0]], (name, at)
                assert driver.step()[:, 1].tolist() == [1, 1], (name, at)
                if not went_on:
                    break
            assert at > 3, name
    finally:
        driver.envs.close()


# In line, the adapters of the other drop-ins would be interrupted, too.
@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, FORK_SERVER) for kind in ALL), *((kind, "inline") for kind in (Gymnasium, StableBaselines, TorchRL))],
)
def test_step_continues_after_an_exception_at_any_line_of_a_step(kind, backend):
    driver = kind(backend)
    try:
        driver.reset(0)
        before = driver.step()[:, 1]
        for at in itertools.count(1):
            went_on = interrupted(driver.step, at)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                obs = driver.step()[:, 1]
            assert set((obs - before).tolist()) <= {1, 2}, at
            assert all("interrupted" in str(one.message) for one in caught), at
            assert len(caught) <= (2 if kind is PettingZooCopies else 1), at
            before = driver.step()[:, 1]
            assert before.tolist() == (obs + 1).tolist(), at
            if not went_on:
                break
        assert at > 3
    finally:
        driver.envs.close()


def test_sb3_learns_on_after_ctrl_c():
    """As with DummyVecEnv: `learn(reset_num_timesteps=False)` continues."""
    ppo = pytest.importorskip("stable_baselines3").PPO
    module = importlib.import_module("envactors.integrations.sb3")

    class Slow(Counter):
        def step(self, action):
            time.sleep(0.005)
            return super().step(action)

    envs = module.ActorVecEnv([Slow] * 2, backend=FORK_SERVER)
    try:
        model = ppo("MlpPolicy", envs, n_steps=64, batch_size=64, device="cpu")
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            model.learn(100_000)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.learn(256, reset_num_timesteps=False)
        assert len([one for one in caught if "interrupted" in str(one.message)]) <= 1
        assert model.num_timesteps >= 256
    finally:
        envs.close()
