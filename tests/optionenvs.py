"""Envs of each library that record their events; workers import this module, and no framework with it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from alfenvs import AlfEnv

import envactors as ea


class Event(NamedTuple):
    """Something that happened to an env, between two times (`time.monotonic`)."""

    what: str
    actor: str
    incarnation: int
    begin: float
    end: float
    seed: int | None


class Witness:
    """Writes its events to a file."""

    def __init__(self, log):
        self.log, self.hangs = log, False
        self.note("made")

    def note(self, what, begin=None, seed=None):
        context, now = ea.current_actor(), time.monotonic()
        event = Event(what, context.name, context.incarnation, now if begin is None else begin, now, seed)
        with Path(self.log).open("a") as file:
            file.write(json.dumps(event) + "\n")

    def act(self):
        """Note a step that takes a while, or hang."""
        begin = time.monotonic()
        time.sleep(600.0 if self.hangs else 0.01)
        self.note("step", begin)

    def begin(self, seed=None):
        """Note a reset that takes a while."""
        begin = time.monotonic()
        time.sleep(0.01)
        self.note("reset", begin, seed)

    def start_to_hang(self):
        self.hangs = True

    def where(self):
        return os.getpid()

    def variable(self, name):
        return os.environ.get(name)


def events(log):
    """Return what was noted."""
    return [Event(*json.loads(line)) for line in Path(log).read_text().splitlines()]


class Box:
    """The attributes of a space that specs need, where Gymnasium is not installed."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)

    def sample(self):
        return np.zeros(self.shape, self.dtype)


class Counting(Witness):
    """An env of Gymnasium: observations count steps over all episodes."""

    render_mode = None

    def __init__(self, log, length):
        from gymnasium import spaces

        super().__init__(log)
        self.observation_space = spaces.Box(0, 1e6, (1,), np.float64)
        self.action_space = spaces.Discrete(3)
        self.metadata = {}
        self.length, self.count, self.steps = length, 0, 0

    @property
    def unwrapped(self):
        return self

    def get_wrapper_attr(self, name):
        return getattr(self, name)

    def reset(self, seed=None, options=None):
        self.begin(seed)
        self.steps = 0
        return np.array([float(self.count)]), {}

    def step(self, action):
        self.act()
        self.count, self.steps = self.count + 1, self.steps + 1
        return np.array([float(self.count)]), 1.0, self.steps >= self.length, False, {}

    def close(self):
        pass


class Parallel(Witness):
    """A ``ParallelEnv`` of one agent."""

    render_mode = None
    possible_agents = ("a",)

    def __init__(self, log, length):
        from gymnasium import spaces

        super().__init__(log)
        self.spaces = spaces.Box(0, 1e6, (1,), np.float64), spaces.Discrete(3)
        self.metadata = {}
        self.length, self.agents, self.steps = length, [], 0

    def observation_space(self, agent):
        return self.spaces[0]

    def action_space(self, agent):
        return self.spaces[1]

    def reset(self, seed=None, options=None):
        self.begin(seed)
        self.agents, self.steps = ["a"], 0
        return {"a": np.zeros(1)}, {"a": {}}

    def step(self, actions):
        self.act()
        self.steps += 1
        over = self.steps >= self.length
        self.agents = [] if over else ["a"]
        return {"a": np.full(1, float(self.steps))}, {"a": 1.0}, {"a": over}, {"a": False}, {"a": {}}

    def close(self):
        pass


class Managed(Witness):
    """An env of DI-engine."""

    def __init__(self, log, length):
        super().__init__(log)
        self.length, self.steps, self.seeded = length, 0, None
        self.observation_space, self.action_space = Box((1,), np.float64), Box((), np.int64)
        self.reward_space = Box((1,), np.float64)

    def seed(self, seed, dynamic_seed=None):
        self.seeded = seed

    def reset(self):
        self.begin(self.seeded)
        self.steps, self.seeded = 0, None
        return np.zeros(1)

    def step(self, action):
        self.act()
        self.steps += 1
        return np.full(1, float(self.steps)), np.ones(1), self.steps >= self.length, {}

    def close(self):
        pass


class Alf(Witness, AlfEnv):
    """An env of ALF."""

    def __init__(self, log, length, env_id):
        AlfEnv.__init__(self, env_id, length)
        Witness.__init__(self, log)
        self.seeded = None

    def seed(self, seed):
        self.seeded = seed

    def reset(self):
        self.begin(self.seeded)
        self.seeded = None
        return super().reset()

    def step(self, action):
        self.act()
        return super().step(action)
