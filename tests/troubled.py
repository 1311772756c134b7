"""Envs with one defect each, for the tests of ``envactors check``."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, ClassVar

import numpy as np

from envactors.testing import EchoEnv


class UnpicklableEnv(EchoEnv):
    """An env whose state holds a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.lock: object = threading.Lock()


class NondeterministicEnv(EchoEnv):
    """An env that draws random numbers from a generator that ``reset`` does not seed."""

    def step(self, action: Any) -> Any:
        """Step as `EchoEnv` does, but with a random reward."""
        obs, _, *rest = super().step(action)
        return obs, float(np.random.default_rng().random()), *rest


class ProcessBoundEnv(EchoEnv):
    """An env whose results depend on the process that runs it."""

    def step(self, action: Any) -> Any:
        """Step as `EchoEnv` does, but with the process id as reward."""
        obs, _, *rest = super().step(action)
        return obs, float(os.getpid()), *rest


class SlowResetEnv(EchoEnv):
    """An env whose resets take 0.3 s."""

    def reset(self, **arguments: Any) -> Any:
        """Reset after 0.3 s."""
        time.sleep(0.3)
        return super().reset(**arguments)


class LeakyEnv(EchoEnv):
    """An env that leaks 1 MiB and a file descriptor per episode."""

    kept: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__(episode_length=20)

    def reset(self, **arguments: Any) -> Any:
        """Reset, and leak memory and a descriptor."""
        self.kept.append((os.urandom(1 << 20), os.dup(0)))
        return super().reset(**arguments)


class OutOfSpaceEnv(EchoEnv):
    """An env whose third observation does not have the dtype of its space."""

    def step(self, action: Any) -> Any:
        """Step as `EchoEnv` does, but return floats once."""
        obs, *rest = super().step(action)
        return (obs.astype(np.float64) if self.steps == 2 else obs), *rest
