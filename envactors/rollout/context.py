"""What a policy is told beside the observations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt


class PolicyContext:
    """What a policy is told of the step that it chooses actions for.

    Args:
        env_ids: int64, shape (n,): the envs whose observations it gets.
        starts: bool, shape (n,): whether an observation is the first one of its episode.
        step: The step within the rollout, from 0.
        rng: A generator, or a function that makes it.

    Attributes:
        env_ids: int64, shape (n,): the envs whose observations it gets.
        starts: bool, shape (n,): whether an observation is the first one of its episode.
        step: The step within the rollout, from 0.
    """

    __slots__ = ("_rng", "env_ids", "starts", "step")

    def __init__(
        self,
        env_ids: npt.NDArray[np.int64],
        starts: npt.NDArray[np.bool_],
        step: int,
        rng: np.random.Generator | Callable[[], np.random.Generator],
    ) -> None:
        self.env_ids: npt.NDArray[np.int64] = env_ids
        self.starts: npt.NDArray[np.bool_] = starts
        self.step: int = step
        self._rng = rng

    @property
    def rng(self) -> np.random.Generator:
        """Draws the same numbers whenever this step of this rollout is repeated."""
        if not isinstance(self._rng, np.random.Generator):
            self._rng = self._rng()  # making it takes longer than many a policy
        return self._rng

    def __repr__(self) -> str:
        return f"PolicyContext(env_ids={self.env_ids!r}, starts={self.starts!r}, step={self.step})"


def generator_of(seed: int, step: int, rollout: int, first_env: int) -> np.random.Generator:
    """Return the generator of one step of one rollout for the envs of one process."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, step, rollout, first_env]))
