"""Envs for LeRobot's evaluation: one that succeeds after a few steps, and ones whose constructor fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

import gymnasium
import numpy as np
import psutil


class Task(gymnasium.Env):
    """Its episodes have as many steps as the seed says; notes in a folder how many processes of envs are alive."""

    observation_space = gymnasium.spaces.Dict({"agent_pos": gymnasium.spaces.Box(-100, 100, (2,))})
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self, folder=None, fault=None):
        self.metadata = {"render_fps": 10}
        self._max_episode_steps = 8
        self.task = self.task_description = "wait"
        self.gpu = os.environ.get("MUJOCO_EGL_DEVICE_ID")
        if folder is not None:
            (Path(folder) / f"pid-{os.getpid()}").touch()
            alive = sum(psutil.pid_exists(int(path.name[4:])) for path in Path(folder).glob("pid-*"))
            (Path(folder) / f"alive-{alive}").touch()
        if fault == "hang":
            time.sleep(3600)
        if fault == "raise":
            raise OSError("no EGL device")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.last = 0, 2 + (seed or 0) % 5
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        ended = self.steps >= self.last
        return self._observation(), float(action[0]), ended, False, {"is_success": ended and self.last > 3}

    def _observation(self):
        return {"agent_pos": np.array([self.steps, self.last], dtype=np.float32)}


def most_alive(folder):
    """Return the largest number of processes of envs that were alive at once."""
    return max(int(path.name[6:]) for path in Path(folder).glob("alive-*"))
