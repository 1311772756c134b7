"""Reading results out of the rows of shared memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.arrays.slab import Slab
from envactors.arrays.specs import ArraySpec, unflatten
from envactors.vector.batch import EnvStep

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
        numbers = rows.requested.view(np.uint8).reshape(-1, 8)
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
        halves = self.rows.requested[ids] & 1
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

    def step(self, env_id: int, incarnation: int) -> EnvStep:
        """Return an env's result."""
        rows = self.rows
        reward: npt.NDArray[Any] = rows.rewards[env_id]
        return EnvStep(
            env_id,
            self._observation(env_id, int(rows.requested[env_id]) & 1),
            reward.copy() if reward.shape else float(reward),
            bool(rows.terminated[env_id]),
            bool(rows.truncated[env_id]),
            self.contents[env_id][0],
            incarnation,
        )

    def last(self, env_id: int, number: int) -> EnvStep:
        """Return an env's last delivered result, as far as a stand-in for a lost one needs it."""
        reward: npt.NDArray[Any] = self.rows.rewards[env_id]
        obs, info = self._observation(env_id, number & 1), dict(self.contents[env_id][0])
        return EnvStep(env_id, obs, reward.copy() if reward.shape else 0.0, False, False, info, 0)

    def _observation(self, env_id: int, half: int) -> Any:
        others = iter(self.contents[env_id][1])
        return unflatten(
            self.rows.layout.observation,
            (
                next(others) if array is None else array[half, env_id, ...].copy()[()]
                for array in self.rows.observations
            ),
        )
