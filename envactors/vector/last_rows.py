"""The last result of each env in rows: which buffer has its observation, and the parts of it that no row keeps.

`envactors.vector.last_results` has the last results of in-process envs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envactors.mailbox.slab import BUFFER, NO_AUTORESET, RESET, Slab
from envactors.vector.episodes import Episodes
from envactors.vector.requests import RowResult, Selection


class LastRows:
    """The last result of each env, which may have to be returned again.

    Requests are written to the other buffer of the row, so one without a result changes nothing here. A result becomes
    the last one when it is delivered or dropped, or when the env continues without that. An unreadable result does not.

    Args:
        slab: The rows.
        posted: Each env's last posted operation.
        content_of: Returns the info and the object leaves in an env's complete row, pickled; None if there are none.
        episodes: The episodes of the envs.

    Attributes:
        has_objects: Whether observations or rewards have leaves without a place in rows.
        ops: The operation that has returned the observation of each env, with the bits of `envactors.mailbox.slab`: its
            buffer is in `BUFFER`, and `RESET` is set also after a reset within a step.
        contents: The info and the object leaves of each env, pickled; None if there are none, or they are not kept.
    """

    def __init__(self, slab: Slab, posted: bytearray, content_of: Callable[[int], Any], episodes: Episodes) -> None:
        self.has_objects: bool = any(leaf is None for leaf in (*slab.observations, slab.layout.reward))
        self.ops: bytearray = bytearray(len(posted))
        self.contents: list[bytes | None] = [None] * len(posted)
        self._slab = slab
        self._posted = np.frombuffer(posted, np.uint8)
        self._content_of = content_of
        self._resets_at_end = episodes.autoreset == "same_step"
        self._keeps_contents = episodes.on_failure != "raise" or self.has_objects
        self._op_array = np.frombuffer(self.ops, np.uint8)

    def are_first(self, at: Any) -> Any:
        """Return whether observations are the first of their episodes; for ``at`` see `Selection`."""
        return self._op_array[at] & RESET != 0

    def buffers(self, at: Any) -> Any:
        """Return the buffers with the observations of envs."""
        return self._op_array[at] & BUFFER

    def take(self, index: int) -> None:
        """Make the result in the complete row of an env the last one."""
        op, slab = int(self._posted[index]), self._slab
        has_ended = slab.terminated[index] or slab.truncated[index]
        self.ops[index] = op | RESET if self._resets_at_end and has_ended and not op & NO_AUTORESET else op
        self._keep(index, self._content_of(index))

    def take_all(self, envs: Selection, terminated: Any, truncated: Any, *, have_contents: bool) -> None:
        """Make the results in the complete rows of envs on the fast path the last ones.

        Args:
            envs: The envs.
            terminated: Whether the episode of each has ended.
            truncated: Whether it was cut off.
            have_contents: Whether any row may have an info or object leaves.
        """
        self._op_array[envs.at] = self._posted[envs.at]
        if self._resets_at_end and (True in terminated.tobytes() or True in truncated.tobytes()):
            self._op_array[envs.at] |= (terminated | truncated) * np.uint8(RESET)
        if self._keeps_contents and (have_contents or any(self.contents)):
            for index in envs.ids:
                self._keep(index, self._content_of(index))

    def put_back(self, index: int, row: RowResult, *, is_first: bool) -> None:
        """Write a result over the last one of an env whose worker runs nothing."""
        slab = self._slab
        for array, leaf in zip(slab.observations, row.leaves, strict=True):
            if array is not None:
                array[self.ops[index] & BUFFER, index] = leaf
        if slab.layout.reward is not None:
            slab.rewards[index] = row.reward
        slab.terminated[index], slab.truncated[index] = row.terminated, row.truncated
        self.record(index, row.content, is_first=is_first)

    def record(self, index: int, content: bytes | memoryview | None, *, is_first: bool) -> None:
        """Record everything about the last result of an env that is not in its row."""
        self.ops[index] = self.ops[index] & BUFFER | (RESET if is_first else 0)
        self._keep(index, content)

    def repeat(self, index: int) -> None:
        """Record that the last observation of an env is returned once more, as that of a step."""
        self.ops[index] &= BUFFER

    def _keep(self, index: int, content: bytes | memoryview | None) -> None:
        """Keep the content of a result, if it may have to be returned again."""
        if self._keeps_contents:
            self.contents[index] = None if content is None else bytes(content)
