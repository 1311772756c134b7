"""Where no process can be lost, ``on_failure="replay"`` does as ``"renew"``."""

from __future__ import annotations

import pytest
from helpers import Echo

import envactors as ea


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_an_env_that_raises_continues_with_a_new_episode(backend):
    with ea.VectorEnv([Echo] * 2, backend=backend, on_failure="replay") as envs:
        envs.reset(seed=1)
        envs.set_attr("wants", [("raise", (LookupError, "lost")), None])
        _, rewards, _, truncated, infos = envs.step([5, 5])
        assert (rewards.tolist(), truncated.tolist()) == ([0.0, 1.0], [True, False])
        assert isinstance(infos[0]["failure"], LookupError)
        assert envs.step([5, 5])[1].tolist() == [0.0, 2.0]
        assert envs.step([5, 5])[1].tolist() == [1.0, 3.0]
