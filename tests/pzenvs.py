"""PettingZoo envs of the drop-in's tests; workers import this module."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.utils.wrappers import BaseParallelWrapper

KNIGHTS = "pettingzoo.butterfly.knights_archers_zombies_v11"
AGENTS = ["ant", "bee", 7, "moth"]  # any hashable may be an agent


class Complaint(Exception):
    pass


class Party(ParallelEnv):
    """Agents with different spaces that leave one by one; "moth" comes in the second step."""

    metadata = {"name": "party_v0", "render_modes": ["rgb_array"]}  # noqa: RUF012 # PettingZoo's way
    possible_agents = AGENTS

    def __init__(self, render_mode=None):
        insect = spaces.Box(-100, 100, (3,), np.float32)
        cell = spaces.Dict({"observation": spaces.Box(0, 255, (2, 2), np.uint8), "action_mask": spaces.MultiBinary(3)})
        self.observation_spaces = {"ant": insect, "bee": cell, 7: spaces.Discrete(1000), "moth": insect}
        self.action_spaces = {
            "ant": spaces.Discrete(4),
            "bee": spaces.Discrete(3),
            7: spaces.Box(-1, 1, (2,), np.float32),
            "moth": spaces.Discrete(4),
        }
        self.render_mode = render_mode
        self.rng = np.random.default_rng()
        self.agents = []
        self.wants = None
        self.level = 0

    def observation_space(self, agent):
        return self.observation_spaces[agent]

    def action_space(self, agent):
        return self.action_spaces[agent]

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.count, self.options, self.given = 0, options, []
        self.agents = ["ant", "bee", 7]
        self.ends = {name: int(self.rng.integers(2, 7)) for name in AGENTS}
        return self._observe(), {name: {} for name in self.agents}

    def _observe(self):
        values = {}
        for name in self.agents:
            if name == "bee":
                values[name] = {
                    "observation": self.rng.integers(0, 256, (2, 2), np.uint8),
                    "action_mask": self.rng.integers(0, 2, 3, np.int8),
                }
            elif name == 7:
                values[name] = np.int64(self.rng.integers(0, 1000))
            else:
                values[name] = self.rng.random(3, np.float32)
        return values

    def step(self, actions):
        assert list(actions) == self.agents
        self.count += 1
        if self.wants == "raise":
            raise Complaint("as asked")
        if self.count == 2:
            self.agents = [*self.agents, "moth"]
        observations = self._observe()
        done = [name for name in self.agents if self.count >= self.ends[name]]
        rewards = {name: float(self.rng.random() + np.sum(actions.get(name, 0))) for name in self.agents}
        terminations = {name: name in done and name != "bee" for name in self.agents}
        truncations = {name: name in done and name == "bee" for name in self.agents}
        infos = {name: {"count": self.count} if name == "ant" else {} for name in self.agents}
        if self.count % 3 == 0:
            infos["common"] = "of all"
        self.agents = [name for name in self.agents if name not in done]
        return observations, rewards, terminations, truncations, infos

    def state(self):
        return np.array([self.count, len(self.agents)], np.float32)

    def climb(self, levels=1):
        self.level += levels
        return os.getpid()

    def render(self):
        return np.full((2, 2, 3), self.count, np.uint8)


def die_once(fuse):
    """Kills this process if there is a file, which only one process can remove."""
    try:
        fuse.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Fused(BaseParallelWrapper):
    """Removes a file and crashes in the middle of a step, if the file exists."""

    def __init__(self, env, fuse):
        super().__init__(env)
        self.fuse = Path(fuse)

    def step(self, actions):
        die_once(self.fuse)
        return super().step(actions)


class Words(Party):
    """Its observations have no fixed size."""

    possible_agents = ["ant", "bee"]  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.observation_spaces = dict.fromkeys(self.possible_agents, spaces.Text(10))

    def reset(self, seed=None, options=None):
        self.agents = ["ant", "bee"]
        return {"ant": "hello", "bee": "you"}, {"ant": {}, "bee": {}}

    def step(self, actions):
        self.agents = ["bee"]
        return (
            {"ant": "bye", "bee": "still"},
            dict.fromkeys(actions, 1.0),
            {"ant": True, "bee": False},
            dict.fromkeys(actions, False),
            {"ant": {}, "bee": {}},
        )


def _quietly(module):
    """Imports a module of PettingZoo's envs, and with it pygame, without a greeting and without a screen."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return __import__(module, fromlist=["parallel_env"])


def knights(obs_method="vector"):
    """Knights and archers, some of which leave long before the others."""
    module = _quietly(KNIGHTS)
    return module.parallel_env(
        spawn_delay=1, max_zombies=60, num_knights=3, line_death=True, max_cycles=80, obs_method=obs_method
    )


def pistons():
    """Images, and continuous actions."""
    return _quietly("pettingzoo.butterfly.pistonball_v6").parallel_env(n_pistons=3, max_cycles=12)


def stones():
    """Two players, who see each other's last move."""
    return _quietly("pettingzoo.classic.rps_v2").parallel_env(max_cycles=7)
