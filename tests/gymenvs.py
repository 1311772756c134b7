"""Gymnasium envs of the drop-ins' tests; workers import this module, and no framework with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

HIGH = np.float32(1000)


class Teller(gymnasium.Env):
    """Shows its index, its count of steps and its action; `wants` says how to misbehave."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012 # Gymnasium's way

    def __init__(self, index=0, length=5, terminates=True, render_mode=None):
        self.observation_space = spaces.Box(-HIGH, HIGH, (3,), np.float32)
        self.action_space = spaces.Discrete(10)
        self.index, self.length, self.terminates, self.render_mode = index, length, terminates, render_mode
        self.count = 0
        self.wants = None
        self.mark = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._obs(0), {"seed": seed, "options": options}

    def step(self, action):
        wants, self.wants = self.wants, None
        if wants == "raise":
            raise Complaint(self.index, "as asked")
        if wants == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(wants, tuple):
            wait_for, touch = wants
            while not Path(wait_for).exists():
                time.sleep(0.002)
            Path(touch).touch()
        self.count += 1
        over = self.count == self.length
        terminates, truncates = {"both": (True, True), True: (True, False), False: (False, True)}[self.terminates]
        return (
            self._obs(action),
            0.5 * self.count,
            over and terminates,
            over and truncates,
            {"n": self.count},
        )

    def _obs(self, action):
        return np.array([self.index, self.count, action], np.float32)

    def render(self):
        return np.full((4, 4, 3), self.index + 1, np.uint8)

    def add(self, number, *, times=1):
        return self.index + number * times

    def has_loaded(self, name):
        return name in sys.modules

    def close(self):
        if self.mark is not None:
            Path(self.mark).touch()


class Complaint(Exception):
    """An env's own exception, which takes two arguments."""

    def __init__(self, index, what):
        super().__init__(f"{index}: {what}")
        self.index = index


class Named(gymnasium.Wrapper):
    """A wrapper with an attribute of its own."""

    lock = None

    def __init__(self, env):
        super().__init__(env)
        self.lock = open(os.devnull)  # noqa: SIM115, PTH123 # something that does not pickle

    def close(self):
        self.lock.close()
        super().close()


class Mixed(gymnasium.Env):
    """Shows a sample of its space."""

    def __init__(self, space):
        self.observation_space, self.action_space = space, spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


class Mirror(gymnasium.Env):
    """Shows the action that it was given, which must be one of its space."""

    def __init__(self, space):
        self.observation_space = self.action_space = space

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return action, 0.0, False, False, {}


class Joined(gymnasium.Env):
    """Shows its action below another name; both are nested."""

    def __init__(self):
        self.action_space = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)])
        self.observation_space = spaces.Dict(seen=self.action_space, more=spaces.Tuple([spaces.MultiBinary(2)]))

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return {"seen": action, "more": (np.ones(2, np.int8),)}, 0.0, False, False, {}


class Costly(Teller):
    """Has two rewards."""

    reward_space = spaces.Box(-1, 1, (2,), np.float64)

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, np.array([0.25, -0.5]), *rest


def stacked_cartpole(normalized=True):
    """An env with stacked frames, and with statistics that continue across episodes."""
    env = gymnasium.make("CartPole-v1", max_episode_steps=60)
    env = gymnasium.wrappers.FrameStackObservation(env, 3)
    return gymnasium.wrappers.NormalizeObservation(env) if normalized else env


def whole_state(env):
    """The state of an env that can be pickled, wrappers included."""
    return env.__dict__


def put_state(env, state):
    env.__dict__.update(state)
