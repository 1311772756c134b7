"""Some envs of a vector, or all of them: what is stepped together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Selection:
    """Some envs of a vector.

    Columns over all envs are read and written range by range, which takes one operation if all envs are selected.

    Args:
        env_ids: Their ids.
        is_all: Whether these are all envs in order.

    Attributes:
        env_ids: Their ids, in the user's order.
        ranges: The ranges of consecutive ids, in ascending order.
        index: The ids as an array; None if these are all envs in order.
    """

    def __init__(self, env_ids: list[int], *, is_all: bool = False) -> None:
        self.env_ids = env_ids
        self.ranges: list[slice] = []
        self.index: npt.NDArray[np.int64] | None = None if is_all else np.array(env_ids, np.int64)
        for env_id in sorted(env_ids):
            if self.ranges and self.ranges[-1].stop == env_id:
                self.ranges[-1] = slice(self.ranges[-1].start, env_id + 1)
            else:
                self.ranges.append(slice(env_id, env_id + 1))
