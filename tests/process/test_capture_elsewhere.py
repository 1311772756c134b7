"""Snapshots of Gymnasium envs that are restored in another process."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import gymnasium
import pytest
from wrapped import make, run

import envactors as ea
from envactors.state import gymnasium_snapshot

SNAPSHOT = gymnasium_snapshot()


def test_no_engine_is_imported_with_the_package():
    code = "import sys, envactors.state; assert not {'gymnasium', 'ale_py', 'mujoco'} & {*sys.modules}"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


class Player:
    """Runs in a process of its own: an env, and what it returns."""

    def __init__(self, factory):
        self.env = factory()

    def start(self):
        self.env.reset(seed=1)
        return run(self.env, 40, 2)

    def get_state(self):
        return SNAPSHOT.get(self.env)

    def set_state(self, state):
        SNAPSHOT.set(self.env, state)

    def run(self, steps):
        return run(self.env, steps, 3)


@pytest.mark.parametrize("name", ["CartPole-v1", "Ant-v5"])
def test_another_process_continues_bit_for_bit(name):
    if name == "Ant-v5":
        pytest.importorskip("mujoco")

    @dataclasses.dataclass
    class Local:  # of a class that only its factory knows
        total: float = 0.0

    class Summing(gymnasium.Wrapper):
        def __init__(self, env):
            super().__init__(env)
            self.sums = [Local()]

        def step(self, action):
            obs, reward, *rest = self.env.step(action)
            self.sums[0].total += reward
            return obs, self.sums[0].total, *rest

    stack = ["frame stack", "normal observation", "time limit", "noise", "clipped", "statistics"]
    with ea.spawn(lambda: Player(lambda: Summing(make(name, stack)))) as actor:
        actor.start().result()
        state = actor.get_state().result()
        expected = actor.run(100).result()
        pid = actor.pid
        actor.renew().result()
        assert actor.pid != pid
        actor.set_state(state).result()
        assert actor.run(100).result() == expected
