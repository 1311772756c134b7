"""Envs whose steps cost a known amount of one thing, for measuring: ``envactors bench MODULE:FACTORY``.

Each function makes one env. They need Gymnasium, `pong` also ``ale-py`` and ``opencv-python-headless``, and `humanoid`
``mujoco``; nothing of that is imported before an env is made.
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

# How many turns of the loop below take 0.1 ms, on a core of a 2.x GHz server with CPython 3.11. It is the same number
# on every machine and in every process: sides that are compared do the same work, whatever else goes on meanwhile.
_TURNS_PER_100_US = 1400
_FRAMES = 4
_SLEEP_SECONDS = 0.002


def nothing() -> gymnasium.Env[Any, Any]:
    """An env that does nothing; it shows 4 float32."""
    return _workload(np.zeros(4, np.float32))


def image() -> gymnasium.Env[Any, Any]:
    """An env that does nothing; it shows 4 frames of 84 x 84 uint8."""
    return _workload(np.zeros((4, 84, 84), np.uint8))


def busy_100us() -> gymnasium.Env[Any, Any]:
    """An env that computes for about 0.1 ms a step, always the same amount."""
    return _workload(np.zeros(4, np.float32), lambda _: compute(_TURNS_PER_100_US))


def busy_1ms() -> gymnasium.Env[Any, Any]:
    """An env that computes for about 1 ms a step, always the same amount."""
    return _workload(np.zeros(4, np.float32), lambda _: compute(10 * _TURNS_PER_100_US))


def sleeping() -> gymnasium.Env[Any, Any]:
    """An env that waits 2 ms a step in the mean, distributed exponentially; the seed of the reset decides."""
    return _workload(np.zeros(4, np.float32), lambda rng: time.sleep(rng.exponential(_SLEEP_SECONDS)))


def pong() -> gymnasium.Env[Any, Any]:
    """Atari's Pong as agents see it: every fourth frame, grey, 84 x 84, the last 4 of them."""
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    # The wrapper skips the frames, so the env must not.
    env = gymnasium.make("ALE/Pong-v5", frameskip=1)
    return gymnasium.wrappers.FrameStackObservation(
        gymnasium.wrappers.AtariPreprocessing(env, frame_skip=4), stack_size=_FRAMES
    )


def humanoid() -> gymnasium.Env[Any, Any]:
    """MuJoCo's humanoid."""
    import gymnasium

    return gymnasium.make("Humanoid-v5")


def compute(turns: int) -> int:
    """Does arithmetic that takes as long as ``turns`` says, and that nothing can shorten."""
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
        """Shows the same observation for ever, and works before."""

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
