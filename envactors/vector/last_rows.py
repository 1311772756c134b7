"""The last result of each env in rows: which buffer has it, and the parts of it that no row keeps.

Each row has two buffers. One has the last result, which the user has got, and may get again after a failure; the posted
request writes to the other one. `envactors.vector.inline_results` has the last results of in-process envs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from envactors.mailbox.slab import BUFFER, NO_AUTORESET, RESET, TRUNCATED
from envactors.vector.episodes import Episodes
from envactors.vector.requests import RowResult
from envactors.vector.rows import Rows
from envactors.vector.selection import Selection


class LastRows:
    """The last result of each env.

    A result becomes the last one

    - when it is delivered (`take_rows`, or `take_row` in `EnvTable.set_idle`), or dropped by a call of ``reset``,
    - when its copy goes to a future, or a reset in the next process completes the answer (`take_row` in `EnvGroup`),
    - when it cannot be unpickled, and the error is raised (`take_row` in `EnvRecovery`),
    - with a restored snapshot (`write`), or at the end of a rollout (`note_written`).

    A request that has failed changes nothing here, unless its answer is the last result, truncated (`truncate`).

    Args:
        rows: The rows.
        episodes: The episodes of the envs.

    Attributes:
        has_objects: Whether observations or rewards have leaves without a place in rows.
        ops: The operation that has returned the result of each env, with the bits of `envactors.mailbox.slab`: its
            buffer is in `BUFFER`, and `RESET` is set also after a reset within a step. `TRUNCATED` marks the answer to
            a failed step. It has the observation in the buffer, reward 0, and is truncated; the reward and the flags in
            the buffer are those of the result before.
        incarnations: The ``incarnation`` of each env's result; see `EnvStep`.
        contents: The info and the object leaves of each env, pickled; None if there are none, or they are not kept.
    """

    def __init__(self, rows: Rows, episodes: Episodes) -> None:
        slab, count = rows.slab, len(rows.ops)
        self.has_objects: bool = any(leaf is None for leaf in (*slab.observations, slab.layout.reward))
        self.ops: bytearray = bytearray(count)
        self.incarnations: memoryview[int] = np.zeros(count, np.int64).data
        self.contents: list[bytes | None] = [None] * count
        self._rows = rows
        self._slab = slab
        self._resets_within_step = episodes.autoreset.resets_within_step
        self._keeps_contents = episodes.on_failure != "raise" or self.has_objects
        self._op_array = np.frombuffer(self.ops, np.uint8)

    def are_first(self, at: Any) -> Any:
        """Return whether observations are the first of their episodes; ``at`` is an index into arrays of all envs."""
        return self._op_array[at] & RESET != 0

    def buffers(self, at: Any) -> Any:
        """Return the buffers with the results of envs."""
        return self._op_array[at] & BUFFER

    def take_row(self, index: int) -> None:
        """Make the result in the complete row of an env the last one."""
        op = self._rows.ops[index]
        was_reset = self._resets_within_step and not op & NO_AUTORESET and self._slab.ends_episode(index, op)
        self.ops[index] = op | RESET if was_reset else op
        self.incarnations[index] = self._rows.posted_incarnations[index]
        self._keep_content(index, self._rows.content(index))

    def take_rows(self, envs: Selection, terminated: Any, truncated: Any, *, have_contents: bool) -> None:
        """Make the results of these envs, all on the fast path, their last results.

        Args:
            envs: The envs.
            terminated: Whether the episode of each has ended.
            truncated: Whether it was cut off.
            have_contents: Whether any row may have an info or object leaves.
        """
        if envs.is_all:  # as plain memory, which takes a quarter of the time of arrays
            self.ops[:] = self._rows.ops
            self.incarnations[:] = self._rows.posted_incarnations
        else:
            for index in envs.ids:
                self.ops[index] = self._rows.ops[index]
                self.incarnations[index] = self._rows.posted_incarnations[index]
        if self._resets_within_step and (True in terminated.tobytes() or True in truncated.tobytes()):
            self._op_array[envs.array_index] |= (terminated | truncated) * np.uint8(RESET)
        if self._keeps_contents and (have_contents or any(self.contents)):
            for index in envs.ids:
                self._keep_content(index, self._rows.content(index))

    def write(self, index: int, row: RowResult, *, is_first: bool) -> None:
        """Write a result into the buffer of the last one, while the worker runs nothing for the env."""
        slab, cell = self._slab, (self.ops[index] & BUFFER, index)
        for array, leaf in zip(slab.observations, row.leaves, strict=True):
            if array is not None:
                array[cell] = leaf
        if slab.layout.reward is not None:
            slab.rewards[cell] = row.reward
        slab.terminated[cell], slab.truncated[cell] = row.terminated, row.truncated
        self.note_written(index, row.content, row.incarnation, is_first=is_first)

    def note_written(self, index: int, content: bytes | memoryview | None, incarnation: int, *, is_first: bool) -> None:
        """Complete a last result that was written into its buffer: record the parts that the buffer does not have."""
        self.ops[index] = self.ops[index] & BUFFER | (RESET if is_first else 0)
        self.incarnations[index] = incarnation
        self._keep_content(index, content)

    def truncate(self, index: int, incarnation: int) -> None:
        """Make the answer to a failed step the last result: the one before it, truncated; see `TRUNCATED`.

        The env continues in the process with that incarnation.
        """
        self.ops[index] = self.ops[index] & BUFFER | TRUNCATED
        self.incarnations[index] = incarnation

    def _keep_content(self, index: int, content: bytes | memoryview | None) -> None:
        """Keep the content of a result, if it may have to be returned again."""
        if self._keeps_contents:
            self.contents[index] = None if content is None else bytes(content)
