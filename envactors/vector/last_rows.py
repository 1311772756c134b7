"""The last result of each env in rows: which buffer has it, and the parts of it that no row keeps.

`envactors.vector.inline_results` has the last results of in-process envs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from envactors.mailbox.slab import BUFFER, NO_AUTORESET, RESET, Slab
from envactors.vector.episodes import Episodes
from envactors.vector.requests import RowResult
from envactors.vector.selection import Selection

# A bit of `LastRows.ops` that no operation has: a failed step was answered with the observation in the buffer, with
# reward 0, truncated. The buffer keeps the reward and the flags of the result before it.
TRUNCATED: Final = 128


class LastRows:
    """The last result of each env, which may have to be returned again.

    Requests are written to the other buffer of the row, so one without a result changes nothing here. A result becomes
    the last one when it is delivered or dropped, or when the env continues from it without that.

    Args:
        slab: The rows.
        posted_ops: Each env's last posted operation.
        posted_in: The process that each was posted to.
        content: Returns the info and the object leaves in an env's complete row, pickled; None if there are none.
        episodes: The episodes of the envs.

    Attributes:
        has_objects: Whether observations or rewards have leaves without a place in rows.
        ops: The operation that has returned the result of each env, with the bits of `envactors.mailbox.slab`: its
            buffer is in `BUFFER`, and `RESET` is set also after a reset within a step. `TRUNCATED` may be set, too.
        incarnations: The ``incarnation`` of each env's result; see `EnvStep`.
        contents: The info and the object leaves of each env, pickled; None if there are none, or they are not kept.
    """

    def __init__(
        self, slab: Slab, posted_ops: bytearray, posted_in: memoryview, content: Callable[..., Any], episodes: Episodes
    ) -> None:
        self.has_objects: bool = any(leaf is None for leaf in (*slab.observations, slab.layout.reward))
        self.ops: bytearray = bytearray(len(posted_ops))
        self.incarnations: memoryview[int] = np.zeros(len(posted_ops), np.int64).data
        self.contents: list[bytes | None] = [None] * len(posted_ops)
        self._slab = slab
        self._posted_ops = posted_ops
        self._posted_in: memoryview[int] = posted_in
        self._content_of = content
        self._resets_within_step = episodes.autoreset.resets_within_step
        self._keeps_contents = episodes.on_failure != "raise" or self.has_objects
        self._op_array = np.frombuffer(self.ops, np.uint8)

    def are_first(self, at: Any) -> Any:
        """Return whether observations are the first of their episodes; for ``at`` see `Selection`."""
        return self._op_array[at] & RESET != 0

    def buffers(self, at: Any) -> Any:
        """Return the buffers with the results of envs."""
        return self._op_array[at] & BUFFER

    def keep(self, index: int) -> None:
        """Make the result in the complete row of an env the last one."""
        op = self._posted_ops[index]
        was_reset = self._resets_within_step and not op & NO_AUTORESET and self._slab.ends_episode(index, op)
        self.ops[index] = op | RESET if was_reset else op
        self.incarnations[index] = self._posted_in[index]
        self._keep_content(index, self._content_of(index))

    def keep_all(self, envs: Selection, terminated: Any, truncated: Any, *, have_contents: bool) -> None:
        """Make the results in the complete rows of envs on the fast path the last ones.

        Args:
            envs: The envs.
            terminated: Whether the episode of each has ended.
            truncated: Whether it was cut off.
            have_contents: Whether any row may have an info or object leaves.
        """
        if envs.is_all:  # as plain memory, which takes a quarter of the time of arrays
            self.ops[:] = self._posted_ops
            self.incarnations[:] = self._posted_in
        else:
            for index in envs.ids:
                self.ops[index] = self._posted_ops[index]
                self.incarnations[index] = self._posted_in[index]
        if self._resets_within_step and (True in terminated.tobytes() or True in truncated.tobytes()):
            self._op_array[envs.at] |= (terminated | truncated) * np.uint8(RESET)
        if self._keeps_contents and (have_contents or any(self.contents)):
            for index in envs.ids:
                self._keep_content(index, self._content_of(index))

    def overwrite(self, index: int, row: RowResult, *, is_first: bool) -> None:
        """Write a result over the last one of an env that has no request in its worker."""
        slab, cell = self._slab, (self.ops[index] & BUFFER, index)
        for array, leaf in zip(slab.observations, row.leaves, strict=True):
            if array is not None:
                array[cell] = leaf
        if slab.layout.reward is not None:
            slab.rewards[cell] = row.reward
        slab.terminated[cell], slab.truncated[cell] = row.terminated, row.truncated
        self.record(index, row.content, row.incarnation, is_first=is_first)

    def record(self, index: int, content: bytes | memoryview | None, incarnation: int, *, is_first: bool) -> None:
        """Record the parts that no row keeps of a result that was written over the last one."""
        self.ops[index] = self.ops[index] & BUFFER | (RESET if is_first else 0)
        self.incarnations[index] = incarnation
        self._keep_content(index, content)

    def truncate(self, index: int, incarnation: int) -> None:
        """Make the answer to a failed step the last result, with the content of the one before it.

        The env continues in the process with that incarnation.
        """
        self.ops[index] = self.ops[index] & BUFFER | TRUNCATED
        self.incarnations[index] = incarnation

    def _keep_content(self, index: int, content: bytes | memoryview | None) -> None:
        """Keep the content of a result, if it may have to be returned again."""
        if self._keeps_contents:
            self.contents[index] = None if content is None else bytes(content)
