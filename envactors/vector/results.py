"""What the facade hands out: read out of the rows of shared memory, or batched; and the last result of each env."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.arrays.slab import Slab
from envactors.arrays.specs import ArraySpec, Spec, conform, spec_of_value, stack, unflatten
from envactors.errors import SpaceMismatchError


class EnvStep(NamedTuple):
    """One env's step, as the futures of `VectorEnv.submit` give it.

    Attributes:
        env_id: Which env.
        obs: Its observation, arrays in the shape and dtype of the observation spec.
        reward: A float, or a float64 array where the env's rewards are vectors.
        terminated: Whether the episode reached its end.
        truncated: Whether the episode was cut.
        info: The env's own dict.
        incarnation: The process that the result comes from.
    """

    env_id: int
    obs: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    incarnation: int


class Batch(NamedTuple):
    """Results of several envs; row ``k`` belongs to env ``env_ids[k]``.

    Attributes:
        env_ids: int64, shape (n,).
        obs: Per leaf of the observation spec an array of shape (n, ...); a list for what cannot be batched.
        rewards: float64, shape (n,) and the reward spec's.
        terminated: bool, shape (n,).
        truncated: bool, shape (n,).
        infos: Each env's own dict.
        incarnations: int64, shape (n,).
    """

    env_ids: npt.NDArray[np.int64]
    obs: Any
    rewards: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]
    incarnations: npt.NDArray[np.int64]


# What came beside the rows of a result: its info, and the leaves of its observation that are no arrays.
Content = tuple[Any, list[Any]]
NO_CONTENT: Content = ({}, [])


class RowReader:
    """Reads results of envs, one by one or batched.

    Args:
        rows: The rows of all envs.
        copy: Whether batches of all envs are copied out of the rows.

    Attributes:
        contents: What came beside the rows of each env's last result.
    """

    def __init__(self, rows: Slab, *, copy: bool) -> None:
        self.rows = rows
        self.contents: list[Content] = [NO_CONTENT] * len(rows.requested)
        self._copy = copy
        # The last bytes of the rows' numbers: most often they are all equal, which bytes tell in a tenth of the time
        # that a reduction takes.
        numbers = rows.asked.view(np.uint8).reshape(-1, 8)
        self._low_bytes = numbers[:, 0 if sys.byteorder == "little" else 7]
        # The one array of observations, if there is only one.
        self._only = rows.observations[0] if isinstance(rows.layout.observation, ArraySpec) else None

    def observations(self, env_ids: Sequence[int], contents: Sequence[Content] | None, *, all_envs: bool) -> Any:
        """Return the observations of some envs, batched per leaf.

        Args:
            env_ids: The envs.
            contents: What came beside their rows; None if nothing did.
            all_envs: Whether these are all envs in order; then ``copy=False`` returns views.
        """
        low = self._low_bytes.tobytes()
        half, in_one_piece = low[0] & 1, all_envs and low.count(low[0]) == len(low)
        if in_one_piece and self._only is not None:
            return self._only[half].copy() if self._copy else self._only[half]
        ids = np.array(env_ids, np.int64)
        halves = self.rows.asked[ids] & 1
        in_one_piece = all_envs and bool((halves == half).all())

        def batches() -> Iterator[Any]:
            number = 0
            for array in self.rows.observations:
                if array is None:
                    yield [content[1][number] for content in contents or ()]
                    number += 1
                elif in_one_piece:
                    yield array[half].copy() if self._copy else array[half]
                else:
                    yield array[halves, ids]

        return unflatten(self.rows.layout.observation, batches())

    def step(self, env_id: int, incarnation: int, number: int | None = None) -> EnvStep:
        """Return an env's result.

        Args:
            env_id: The env.
            incarnation: The process that the result comes from.
            number: The number of the result, for that of its observation; None for the last request's.
        """
        rows, others = self.rows, iter(self.contents[env_id][1])
        half = int(rows.asked[env_id] if number is None else number) & 1
        reward: npt.NDArray[Any] = rows.rewards[env_id]
        leaves = (next(others) if array is None else array[half, env_id, ...].copy()[()] for array in rows.observations)
        return EnvStep(
            env_id,
            unflatten(rows.layout.observation, leaves),
            reward.copy() if reward.shape else float(reward),
            bool(rows.terminated[env_id]),
            bool(rows.truncated[env_id]),
            self.contents[env_id][0],
            incarnation,
        )


class Batcher:
    """Makes batches of single results.

    Args:
        observation: The spec of one env's observation; None if it is learnt from the first one.
        reward: The spec of one env's reward.

    Attributes:
        observation_spec: The spec of one env's observation; None until one is known.
    """

    def __init__(self, observation: Spec | None, reward: Spec) -> None:
        self.observation_spec = observation
        self._learns = observation is None
        self._reward_spec = reward

    def conform_all(self, steps: Sequence[EnvStep]) -> tuple[list[EnvStep], dict[int, BaseException]]:
        """Check observations against those of other envs; a worker knows no more than its own env.

        Returns:
            The results that conform, and the errors of the others by env.
        """
        if not self._learns:
            return list(steps), {}
        conforming: list[EnvStep] = []
        errors: dict[int, BaseException] = {}
        for step in steps:
            if self.observation_spec is None:
                self.observation_spec = spec_of_value(step.obs)
            try:
                obs = conform(self.observation_spec, step.obs, f"the observation of env {step.env_id}")
                conforming.append(step._replace(obs=obs))
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
        reader: Reads results out of the rows of shared memory; None without any.
    """

    def __init__(self, count: int, reader: RowReader | None) -> None:
        # The last result that came in a frame.
        self._steps: list[EnvStep | None] = [None] * count
        # The number of a later one that stands in the rows; 0 for none.
        self._numbers = np.zeros(count, np.int64)
        self._reader = reader

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
        if number == 0 or self._reader is None:
            return self._steps[env_id]
        step = self._reader.step(env_id, 0, number)
        return step._replace(info=dict(step.info))
