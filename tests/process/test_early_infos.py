"""Infos of workers that are done are decoded while others still run."""

from __future__ import annotations

import time

import numpy as np
import pytest
from helpers import SOON, ExplodesOnArrival

import envactors as ea
from envactors.testing import EchoEnv


class Arrival:
    """Arrives as the time at which it is unpickled."""

    def __reduce__(self):
        return time.monotonic, ()


class Paced(EchoEnv):
    """The second env takes longer; the info says when it ended, or when it was decoded."""

    def __init__(self, index):
        super().__init__()
        self.index = index

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        if self.index == 1:
            time.sleep(0.3)
            return obs, reward, terminated, truncated, {"ended": np.float64(time.monotonic())}
        return obs, reward, terminated, truncated, {"decoded": Arrival(), "action": int(action)}


class Exploding(Paced):
    def step(self, action):
        *rest, info = super().step(action)
        return (*rest, info if self.index == 1 else {"what": ExplodesOnArrival()})


@pytest.mark.parametrize("env_ids", [None, [1, 0], [0, 1]])
def test_infos_of_the_first_worker_are_decoded_while_the_second_one_runs(env_ids):
    with ea.VectorEnv([lambda i=i: Paced(i) for i in range(2)]) as envs:
        envs.reset(seed=0)
        order = env_ids or [0, 1]
        for action in range(3):
            infos = envs.step([action] * 2, env_ids=env_ids, timeout=SOON)[4]
            first, second = infos[order.index(0)], infos[order.index(1)]
            assert first["decoded"] < second["ended"]
            assert first["action"] == action  # not that of the step before


def test_an_info_that_cannot_be_decoded_fails_its_env_alone():
    with ea.VectorEnv([lambda i=i: Exploding(i) for i in range(2)]) as envs:
        envs.reset(seed=0)
        with pytest.raises(ea.VectorStepError) as raised:
            envs.step([1, 1], timeout=SOON)
        assert list(raised.value.failures) == [0]
        assert "ended" in raised.value.batch.infos[0]
