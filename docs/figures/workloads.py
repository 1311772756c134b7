"""Envs whose steps use a known amount of one resource, for figures.

Each function creates one env and imports what it needs: Gymnasium, and for `pong` also ``ale-py`` and
``opencv-python-headless``, for `humanoid` also ``mujoco``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import gymnasium

# Iterations of the loop below that take 0.1 ms on a 2.x GHz server core with CPython 3.11. The number is fixed, so that
# all subjects of a comparison do the same work, on every machine and under any load.
_TURNS_PER_100_US = 1400
_FRAMES = 4
_SLEEP_SECONDS = 0.002


def nothing() -> gymnasium.Env[Any, Any]:
    """Return an env that does nothing; observations are 4 float32."""
    return _workload(np.zeros(4, np.float32))


def image() -> gymnasium.Env[Any, Any]:
    """Return an env that does nothing; observations are 4 frames of 84 x 84 uint8."""
    return _workload(np.zeros((4, 84, 84), np.uint8))


def busy_100us() -> gymnasium.Env[Any, Any]:
    """Return an env that does a fixed amount of work per step, about 0.1 ms."""
    return _workload(np.zeros(4, np.float32), lambda _: compute(_TURNS_PER_100_US))


def busy_1ms() -> gymnasium.Env[Any, Any]:
    """Return an env that does a fixed amount of work per step, about 1 ms."""
    return _workload(np.zeros(4, np.float32), lambda _: compute(10 * _TURNS_PER_100_US))


def sleeping() -> gymnasium.Env[Any, Any]:
    """Return an env whose steps sleep for an exponentially distributed time, 2 ms on average, seeded by ``reset``."""
    return _workload(np.zeros(4, np.float32), lambda rng: time.sleep(rng.exponential(_SLEEP_SECONDS)))


def pong() -> gymnasium.Env[Any, Any]:
    """Return Atari Pong with the usual preprocessing: every fourth frame, grayscale, 84 x 84, the last 4 stacked."""
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    # The wrapper skips frames, so the env must not.
    env = gymnasium.make("ALE/Pong-v5", frameskip=1)
    return gymnasium.wrappers.FrameStackObservation(
        gymnasium.wrappers.AtariPreprocessing(env, frame_skip=4), stack_size=_FRAMES
    )


def humanoid() -> gymnasium.Env[Any, Any]:
    """Return MuJoCo's Humanoid-v5."""
    import gymnasium

    return gymnasium.make("Humanoid-v5")


def compute(turns: int) -> int:
    """Run ``turns`` iterations of arithmetic, each of which depends on the one before."""
    number = 1
    for _ in range(turns):
        number = (number * 1103515245 + 12345) & 0x7FFFFFFF
    return number


def _workload(
    obs: npt.NDArray[Any], work: Callable[[np.random.Generator], object] | None = None
) -> gymnasium.Env[Any, Any]:
    env: gymnasium.Env[Any, Any] = _workload_class()(obs, work)
    return env


@functools.cache
def _workload_class() -> type:
    import gymnasium

    class Workload(gymnasium.Env[Any, Any]):
        """Env that returns the same observation after each piece of work."""

        def __init__(self, obs: npt.NDArray[Any], work: Callable[[np.random.Generator], object] | None) -> None:
            low, high = (0, 255) if obs.dtype == np.uint8 else (-1.0, 1.0)
            self.observation_space = gymnasium.spaces.Box(low, high, obs.shape, obs.dtype.type)
            self.action_space = gymnasium.spaces.Discrete(2)
            self._obs = obs
            self._work = work

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed, options=options)
            return self._obs, {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            del action
            if self._work is not None:
                self._work(self.np_random)
            return self._obs, 0.0, False, False, {}

    return Workload
