"""Envs whose results are large. Workers import this module, and should not have to import pytest."""

from __future__ import annotations

import numpy as np

import envactors as ea
from envactors.testing import EchoEnv


class Talkative(EchoEnv):
    """Adds a text of this many bytes to the info of each step with action 7."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {**info, "text": bytes(self.size)} if action == 7 else info


class Wide(EchoEnv):
    """Has observations of 400 KB."""

    observation_space = ea.ArraySpec((50_000,), np.dtype(np.float64))

    def _wide(self, obs):
        return np.full(50_000, obs[1])

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return self._wide(obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return self._wide(obs), *rest


class Huge(EchoEnv):
    """Would have observations of 16 MB."""

    observation_space = ea.ArraySpec((1 << 21,), np.dtype(np.float64))
