"""Observations that NumPy exports no buffers of are replayed like any other."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import envactors as ea

# Makes observations of a count.
KINDS = {
    "times": lambda count: np.array([count, 7], "datetime64[s]"),
    "durations": lambda count: np.array(count, "timedelta64[ms]"),
    "records": lambda count: np.array([(count, 1.5)], [("time", "datetime64[s]"), ("value", float)]),
    "objects": lambda count: np.array([f"count {count}", (count,)], object),
}


class Timed:
    def __init__(self, make):
        self.make = make
        self.count = 0

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.make(0), {}

    def step(self, action):
        self.count += action
        return self.make(self.count), 0.0, False, False, {}


@pytest.mark.parametrize("kind", KINDS)
def test_envs_with_observations_of_times_and_objects_are_replayed(kind):
    make = KINDS[kind]
    with ea.VectorEnv([lambda: Timed(make)], on_failure="replay", restart=ea.RestartPolicy(backoff=0.0)) as envs:
        assert envs.reset(seed=1)[0][0].tolist() == make(0).tolist()
        for _ in range(3):
            envs.step([2])
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        obs, _, _, truncated, infos = envs.step([2])
        assert obs[0].tolist() == make(8).tolist()
        assert not truncated[0]
        assert "failure" not in infos[0]
