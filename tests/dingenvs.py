"""Envs as DI-engine has them, without it; workers import this module."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import envactors as ea
from envactors.testing import FAULTS


class Timestep(NamedTuple):
    """A timestep, of a class that is not DI-engine's."""

    obs: Any
    reward: Any
    done: Any
    info: Any


class Space:
    """The attributes of a space that an env manager reads."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.drawn = 0

    def seed(self, seed):
        self.drawn = seed

    def sample(self):
        self.drawn += 1
        return np.full(self.shape, self.drawn, self.dtype)


class Bare:
    """What every env of DI-engine's managers has: reset, step, seed, close; observations are (index, count, seed)."""

    def __init__(self, index=0, length=3):
        self.index, self.length = index, length
        self.count, self.seeded, self.resets, self.steps = 0, 0, [], 0
        self.made = time.time_ns()

    def obs(self):
        return np.array([self.index, self.count, self.seeded], np.float32)

    def reset(self, **param):
        self.resets.append(param)
        self.count = 0
        misbehave(param.get("first"), param.get("mark"))
        misbehave(param.get("always"), None)
        return self.obs()

    def step(self, action):
        self.steps += 1
        if isinstance(action, tuple):
            given = misbehave(action, None)
            if given is not None:
                return given
        self.count += 1
        reward = np.array([self.count / 2], np.float32)
        return Timestep(self.obs(), reward, self.count >= self.length, {})

    def seed(self, seed, dynamic_seed=None):
        if seed == 13:
            raise RuntimeError("13 brings bad luck")
        self.seeded = seed
        self.dynamic_seed = dynamic_seed

    def close(self):
        pass


class Env(Bare):
    """An env with spaces and more methods."""

    def __init__(self, index=0, length=3, closed=None):
        super().__init__(index, length)
        self.observation_space = Space((3,), np.float32)
        self.action_space = Space((2,), np.float32)
        self.reward_space = Space((1,), np.float32)
        self.closed, self._hidden, self.replay_path = closed, f"hidden {index}", None

    @property
    def pid(self):
        return os.getpid()

    @property
    def who(self):
        return ea.current_actor().incarnation

    def user_defined(self, n=1):
        return self.index + n

    def render(self, mode):
        return f"{mode} {self.index}"

    def enable_save_replay(self, path):
        self.replay_path = path

    def enable_save_figure(self, path):
        self.figure_path = path

    def reward_shaping(self, transitions):
        return [*transitions, self.index]

    def close(self):
        if self.closed is not None:
            Path(self.closed).touch()


class Late(Env):
    """An env that knows its observation space only after a reset."""

    @property
    def observation_space(self):
        if not self.resets:
            raise AttributeError("reset it first")
        return self._space

    @observation_space.setter
    def observation_space(self, space):
        self._space = space


class Rewarding(Env):
    """Env that returns any requested reward."""

    def step(self, action):
        return super().step(action)._replace(reward=action[1]) if action[0] == "reward" else super().step(action)


class Nested(Bare):
    """An env with dicts as observations, and with keys in its infos that are not identifiers."""

    def reset(self, **param):
        return {"agent": super().reset(**param), "time": np.float32(0)}

    def step(self, action):
        obs, reward, done, _ = super().step(action)
        info = {"TimeLimit.truncated": True, "1st": 2, "name": "left out", "count": self.count}
        return Timestep({"agent": obs, "time": np.float32(self.count)}, reward, done, info)


class Teller(Bare):
    """Remembers its last action, a mapping."""

    def step(self, action):
        self.told = dict(action.items())
        return super().step(None)


class Unreadable:
    """An object that the caller cannot unpickle."""

    def __reduce__(self):
        return unpickle, (os.getpid(),)


def unpickle(pid):
    if os.getpid() != pid:
        raise ValueError("not in this process")
    return Unreadable()


class Complaint(Exception):
    """An exception that `__init__` alone cannot rebuild."""

    def __init__(self, what, code):
        super().__init__(f"{what} ({code})")
        self.code = code


def misbehave(how, mark):
    """Misbehaves on request; with a mark, only until that file exists."""
    if how is None or (mark is not None and Path(mark).exists()):
        return None
    if mark is not None:
        Path(mark).touch()
    what, *arguments = how
    if what == "raise":
        raise Complaint("asked to", *arguments)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "sleep":
        time.sleep(1000)
    if what == "hang":
        FAULTS["hang_in_c"]()
    if what == "sleep in C":
        ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the interpreter's lock
    if what == "wait":
        while not Path(arguments[0]).exists():
            time.sleep(0.002)
    if what == "return":
        return Timestep(*arguments)
    if what == "unreadable":
        return Timestep(Unreadable(), 0.0, False, {})
    return None
