"""What the page on other packages imports in workers: an old env, and its adapter."""

import numpy as np


class OldMaze:
    """An env of gym 0.25: ``seed()``, ``reset()``, and ``step()`` with one flag."""

    def seed(self, seed):
        self.random = np.random.RandomState(seed)

    def reset(self):
        self.place, self.steps = self.random.uniform(-1.0, 1.0, 2).astype(np.float32), 0
        return self.place

    def step(self, action):
        self.place, self.steps = self.place + np.float32(0.1) * np.float32(action), self.steps + 1
        cut = self.steps == 20
        done = bool(np.abs(self.place).max() > 2.0) or cut
        return self.place, -1.0, done, {"TimeLimit.truncated": cut}


class Space:
    """Replaces a space of gym."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)

    def sample(self):
        return np.zeros(self.shape, self.dtype)


class Maze:
    """The same env with today's interface."""

    observation_space, action_space = Space((2,), np.float32), Space((2,), np.float32)

    def __init__(self):
        self.old = OldMaze()
        self.old.seed(None)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.old.seed(seed)
        return self.old.reset(), {}

    def step(self, action):
        obs, reward, done, info = self.old.step(action)
        cut = info.pop("TimeLimit.truncated", False)
        return obs, reward, done and not cut, cut, info
