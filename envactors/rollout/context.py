"""The context that a policy receives besides the observations, with the random numbers of each step."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt


class PolicyContext:
    """Describes the step that a policy chooses actions for.

    Args:
        env_ids: Ids of the envs whose observations the policy gets; int64, shape (n,).
        starts: Whether each observation is the first of its episode; bool, shape (n,).
        step: Step within the rollout, from 0.
        rng: Generator, or a function that returns the generator of a step.

    Attributes:
        env_ids: Ids of the envs whose observations the policy gets; int64, shape (n,).
        starts: Whether each observation is the first of its episode; bool, shape (n,).
        step: Step within the rollout, from 0.
    """

    __slots__ = ("_rng", "env_ids", "starts", "step")

    def __init__(
        self,
        env_ids: npt.NDArray[np.int64],
        starts: npt.NDArray[np.bool_],
        step: int,
        rng: np.random.Generator | Callable[[int], np.random.Generator],
    ) -> None:
        self.env_ids: npt.NDArray[np.int64] = env_ids
        self.starts: npt.NDArray[np.bool_] = starts
        self.step: int = step
        self._rng = rng

    @property
    def rng(self) -> np.random.Generator:
        """Generator that draws the same numbers whenever this step of this rollout is repeated."""
        if not isinstance(self._rng, np.random.Generator):
            self._rng = self._rng(self.step)
        return self._rng

    def __repr__(self) -> str:
        return f"PolicyContext(env_ids={self.env_ids!r}, starts={self.starts!r}, step={self.step})"


def generator_of(seed: int, step: int, rollout: int, first_env: int) -> np.random.Generator:
    """Return the generator of one step of one rollout for the envs of one process."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, step, rollout, first_env]))


class StepGenerators:
    """Makes the generators of the steps of one worker; each draws what that of `generator_of` draws.

    Making one takes about 10 us, longer than many policies. The last one is therefore set to the next step, which takes
    about 1 us, unless the policy has kept a reference to it.

    Args:
        seed: Seed of the policy.
        first_env: Index of the worker's first env.

    Attributes:
        rollout: Index of the rollout.
    """

    def __init__(self, seed: int, first_env: int) -> None:
        self.rollout = 0
        self._seed = seed
        self._first_env = first_env
        self._generator: np.random.Generator | None = None
        self._bits: np.random.BitGenerator | None = None
        # The reference counts while nobody else refers to the two.
        self._unshared: tuple[int, ...] = (0, 0)

    def __call__(self, step: int) -> np.random.Generator:
        """Return the generator of a step."""
        generator, bits = self._generator, self._bits
        if generator is None or bits is None or self._count_references(generator, bits) != self._unshared:
            return self._make(step)
        self._counter[1] = step
        self._counter[2] = self.rollout
        bits.state = self._state
        return generator

    def _make(self, step: int) -> np.random.Generator:
        self._generator = generator = generator_of(self._seed, step, self.rollout, self._first_env)
        self._bits = bits = generator.bit_generator
        self._state = bits.state
        self._counter = self._state["state"]["counter"]
        self._unshared = self._count_references(generator, bits)
        return generator

    @staticmethod
    def _count_references(*objects: object) -> tuple[int, ...]:
        return tuple(map(sys.getrefcount, objects))
