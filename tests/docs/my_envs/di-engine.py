"""What the page for users of DI-engine imports: an env with the interface of a ``BaseEnv``."""

from collections import namedtuple

import numpy as np

Timestep = namedtuple("Timestep", "obs reward done info")  # noqa: PYI024


class Walk:
    def reset(self):
        self.at = 0
        return np.array([self.at], np.float32)

    def step(self, action):
        self.at += action
        return Timestep(np.array([self.at], np.float32), float(self.at), abs(self.at) >= 3, {})

    def seed(self, seed, dynamic_seed=None): ...

    def close(self): ...
