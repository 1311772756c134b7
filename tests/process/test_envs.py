"""The suite that every env has to pass, over two of them; how processes start does not matter to it."""

from __future__ import annotations

import gymnasium

from envactors.testing import EchoEnv, EnvConformance


class TestEchoEnv(EnvConformance):
    def make_env(self):
        return EchoEnv(0, 7)


class TestCartPole(EnvConformance):
    def make_env(self):
        return gymnasium.make("CartPole-v1")
