"""The last results of one actor's envs in a rollout: out of their rows at its start, and into them at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.mailbox.info_codec import PLAIN
from envactors.mailbox.slab import slice_of
from envactors.rollout.env_plan import KIND_TRUNCATED
from envactors.rollout.memory import TrajectoryBuffer
from envactors.vector.table import EnvTable


class RolloutLastResults:
    """The last results of one actor's envs, before, in, and after a rollout.

    The *content* of a result is its encoded info and object leaves, which have no arrays; None without any.

    Args:
        table: The envs of the vector.
        indices: Indices of the actor's envs.
        buffer: The trajectory.

    Attributes:
        incarnations: The ``incarnation`` of each env's last result, by env; see `envactors.vector.results.EnvStep`.
        contents_before_step: Contents that no worker has written in this rollout, by (step, env). Those of step 0 are
            from before the rollout, and those of later steps are of truncated episodes.
        large_contents: Contents that did not fit into the trajectory, by cell.
    """

    def __init__(self, table: EnvTable, indices: range, buffer: TrajectoryBuffer) -> None:
        self.incarnations: dict[int, int] = dict.fromkeys(indices, 0)
        self.contents_before_step: dict[tuple[int, int], bytes | None] = {}
        self.large_contents: dict[int, bytes] = {}
        self._table = table
        self._indices = indices
        self._buffer = buffer

    def read_rows(self) -> None:
        """Copy the last observations of the envs to the first row of the trajectory."""
        last_rows, mine = self._table.last_rows, slice_of(self._indices)
        self._buffer.trajectory.starts[0, mine] = last_rows.are_first(mine)
        for last, array in self._observations():
            array[0, mine] = last[last_rows.buffers(mine), self._indices]
        self.contents_before_step = {(0, index): last_rows.contents[index] for index in self._indices}

    def write_rows(self, accepted_steps: Mapping[int, int]) -> None:
        """Copy the last results to the rows of the envs. To do that again changes nothing.

        Args:
            accepted_steps: How many steps each env has taken, by env. Those without any keep their row.
        """
        last_rows, slab, trajectory = self._table.last_rows, self._table.slab, self._buffer.trajectory
        ids = [index for index, steps in accepted_steps.items() if steps]
        after = np.array([accepted_steps[index] for index in ids], np.int64)
        buffer, last_step = last_rows.buffers(ids), after - 1
        for last, array in self._observations():
            last[buffer, ids] = array[after, ids]
        if slab.layout.reward is not None:
            slab.rewards[buffer, ids] = trajectory.rewards[last_step, ids]
        slab.terminated[buffer, ids] = trajectory.terminated[last_step, ids]
        slab.truncated[buffer, ids] = trajectory.truncated[last_step, ids]
        for index, is_first in zip(ids, trajectory.starts[after, ids].tolist(), strict=True):
            content = self.content_before(accepted_steps[index], index)
            last_rows.note_written(index, content, self.incarnations[index], is_first=is_first)

    def _observations(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Yield the array in the rows, and the one in the trajectory, of each leaf that has both."""
        for last, array in zip(self._table.slab.observations, self._buffer.trajectory.observations, strict=True):
            if last is not None and array is not None:
                yield last, array

    def content_before(self, step: int, index: int) -> bytes | None:
        """Return the content of the result whose observation is the one before a step."""
        if (step, index) in self.contents_before_step:
            return self.contents_before_step[step, index]
        trajectory = self._buffer.trajectory
        cell = trajectory.cell(step - 1, index)
        if trajectory.info_encoding[cell] == PLAIN:
            return None
        return self.large_contents.get(cell) or bytes(trajectory.inline_info(cell))

    def truncate(self, step: int, index: int, incarnation: int) -> None:
        """Write the last observation as the result of a step that has failed. It ends the episode.

        The env continues in the process with that incarnation.
        """
        trajectory = self._buffer.trajectory
        trajectory.repeat_observation(step, index)
        if not trajectory.has_all_leaves:
            self.contents_before_step[step + 1, index] = self.content_before(step, index)
        trajectory.terminated[step, index] = False
        trajectory.truncated[step, index] = True
        trajectory.starts[step + 1, index] = False
        trajectory.kinds[step, index] = KIND_TRUNCATED
        trajectory.info_encoding[trajectory.cell(step, index)] = PLAIN
        self.incarnations[index] = incarnation
