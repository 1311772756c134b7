"""`reset` of each drop-in works after an exception at any line of its `step` and `reset`, and mixes up no result."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from helpers import FORK_SERVER
from interrupting import UNCOVERED

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
