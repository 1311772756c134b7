"""Batches of results, and the last result of each env."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.arrays.specs import ArraySpec, Spec, conform, spec_of_value, stack
from envactors.errors import SpaceMismatchError
from envactors.vector.batch import Batch, EnvStep
from envactors.vector.rows import RowReader


class Batcher:
    """Makes batches of single results.

    Args:
        observation: The spec of one env's observation; None if it is learnt from the first one.
        reward: The spec of one env's reward.

    Attributes:
        observation_spec: The spec of one env's observation; None until one is known.
    """

    def __init__(self, observation: Spec | None, reward: ArraySpec | Spec) -> None:
        self.observation_spec = observation
        self._learns = observation is None
        self._reward_spec = reward

    def conform(self, step: EnvStep) -> EnvStep:
        """Check an observation against those of other envs; a worker knows no more than its own env.

        Raises:
            SpaceMismatchError: It has another structure, shape or dtype.
        """
        if not self._learns:
            return step
        if self.observation_spec is None:
            self.observation_spec = spec_of_value(step.obs)
        return step._replace(obs=conform(self.observation_spec, step.obs, f"the observation of env {step.env_id}"))

    def conform_all(self, steps: Sequence[EnvStep]) -> tuple[list[EnvStep], dict[int, BaseException]]:
        """Return the results that conform, and the errors of the others by env."""
        conforming: list[EnvStep] = []
        errors: dict[int, BaseException] = {}
        for step in steps:
            try:
                conforming.append(self.conform(step))
            except SpaceMismatchError as error:
                errors[step.env_id] = error
        return conforming, errors

    def batch(self, steps: Sequence[EnvStep]) -> Batch:
        """Return results as a batch, in their order."""
        observations = [step.obs for step in steps]
        spec = self.observation_spec
        return Batch(
            np.array([step.env_id for step in steps], np.int64),
            observations if spec is None else stack(spec, observations),
            stack(self._reward_spec, [step.reward for step in steps]),
            np.array([step.terminated for step in steps], np.bool_),
            np.array([step.truncated for step in steps], np.bool_),
            [step.info for step in steps],
            np.array([step.incarnation for step in steps], np.int64),
        )


class LastResults:
    """The last complete result of each env, for results that stand in for a lost one.

    Args:
        count: How many envs there are.

    Attributes:
        reader: Reads results out of the rows of shared memory; None without any.
    """

    def __init__(self, count: int) -> None:
        # The last result that came in a frame.
        self._steps: list[EnvStep | None] = [None] * count
        # The number of a later one that stands in the rows; 0 for none.
        self._numbers = np.zeros(count, np.int64)
        self.reader: RowReader | None = None

    def keep_step(self, step: EnvStep) -> None:
        """Keep a result that came in a frame."""
        self._steps[step.env_id] = step
        self._numbers[step.env_id] = 0

    def keep_rows(self, index: Any, numbers: npt.NDArray[np.int64]) -> None:
        """Note that the last results of envs stand in the rows under these numbers."""
        self._numbers[index] = numbers

    def newest(self, env_id: int) -> EnvStep | None:
        """Return the last complete result of an env, None if it has none."""
        number = int(self._numbers[env_id])
        return self._steps[env_id] if number == 0 or self.reader is None else self.reader.last(env_id, number)
