"""The rows of a vector, as the parent knows them: the last post of each one, and the result that has come back.

The row of an env is its part of the shared memory. To *post* a request, the parent writes it into the row, and a new
call id last. The worker that has run the request writes the result, and the same call id last. For example, env 3 is
posted a step with call id 17, whose info is too large for the row:

    ``posted_ids[3]``  ``written_ids[3]``  ``overflow``
    17                 16                  {}            the worker runs the step, or has not begun it
    17                 17                  {}            the row is *written*, but the info has not come
    17                 17                  {3: ...}      the row is *complete*: the whole result is there

A row that has missed its deadline is not complete, whatever the worker writes, until its process has ended. All this
says something about `POSTED` envs only, since the end of a process and the begin of a rollout mark all rows as written.

Nothing here knows why a row was posted, or whether the user has got the result: `envactors.vector.table` has the
requests, and the status of each env. The memory itself is `envactors.mailbox.slab`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from envactors.mailbox.info_codec import INLINE_INFO, OVERFLOW, PLAIN, Infos
from envactors.mailbox.slab import NO_AUTORESET, STREAMED, Slab, slice_of
from envactors.vector.selection import Selection

# For `bytes.translate`: whether each operation streams.
_STREAMS_OF_OP: Final = bytes(op & STREAMED != 0 for op in range(256))


class Rows:
    """The record of all rows. `EnvTable` and rollouts change it, under the lock of the vector.

    Some attributes have two forms of the same memory: an array, which is faster for all envs, and a `memoryview` of
    plain integers, which is faster for one.

    Args:
        slab: The memory of the rows.
        infos: Reads the parts of results that have no fixed size.

    Attributes:
        slab, infos: As above.

        The last post of each env:

        ops: The operation, in the bits of `envactors.mailbox.slab`; `NOT_POSTED` if the last request was not posted:
            it waits, or was canceled.
        seeds: The seed of an operation with `SEED` or `PAYLOAD`; None if it has none.
        posted_ids: The call id of the post, or of a later rollout. ``slab.posted_ids`` has the same numbers for the
            workers, which cannot overwrite this copy.
        posted_incarnations: The process that the env was posted to.

        The results that have come back:

        written_ids: The call id of the last result in each row: the memory of ``slab.written_ids``. Workers write it,
            and the parent while they run no row.
        overflow: The parts of results that did not fit into rows, by env.
        overdue: The envs that missed a deadline. Their results are ignored until their process has ended.

        And:

        incarnations: The current process of each env.
    """

    def __init__(self, slab: Slab, infos: Infos) -> None:
        count = slab.layout.envs
        self.slab = slab
        self.infos = infos
        self.ops: bytearray = bytearray(count)
        self.seeds: list[int | None] = [None] * count
        self._posted_id_array, self._incarnation_array = np.zeros((2, count), np.int64)
        self.posted_incarnations: memoryview[int] = np.zeros(count, np.int64).data
        self.posted_ids: memoryview[int] = self._posted_id_array.data
        self.incarnations: memoryview[int] = self._incarnation_array.data
        self.written_ids: memoryview[int] = slab.written_ids.data
        self.overflow: dict[int, memoryview] = {}
        self.overdue: set[int] = set()
        self._slab_ops: memoryview[int] = slab.ops.data

    # Facts -----------------------------------------------------------------------------------------------

    def is_complete(self, index: int) -> bool:
        """Return whether the whole result of a posted env has come, and before the deadline."""
        if self.written_ids[index] != self.posted_ids[index] or index in self.overdue:
            return False
        # Only now, since the worker writes the encoding before the call id.
        return self.infos.encodings[index] < OVERFLOW or index in self.overflow

    def count_written(self) -> int:
        """Return how many rows are written; those of envs that are not posted count."""
        return int(np.count_nonzero(self.slab.written_ids == self._posted_id_array))

    def any_streams(self) -> bool:
        """Return whether the last post of any env streams; see `STREAM` of `envactors.mailbox.control_page`.

        Those of envs that are idle by now count, too, so this may be True too often.
        """
        return 1 in self.ops.translate(_STREAMS_OF_OP)

    def lacks_autoreset(self, index: int) -> bool:
        """Return whether the step in a complete row ended its episode, and left the autoreset to the next process."""
        return bool(self.ops[index] & NO_AUTORESET) and self.slab.ends_episode(index, self.ops[index])

    def content(self, index: int) -> bytes | memoryview | None:
        """Return the info and the object leaves in a complete row, pickled; None if there are none.

        Also None if env code has overwritten the encoding since the row was found complete.
        """
        encoding = self.infos.encodings[index]
        if encoding == PLAIN:
            return None
        return bytes(self.slab.inline_info(index)) if encoding == INLINE_INFO else self.overflow.get(index)

    # Changes ---------------------------------------------------------------------------------------------

    def post(self, envs: Selection, ops: bytearray, call_id: int) -> None:
        """Write the operations of requests whose actions are in the rows, and their call id after all else.

        A worker that is running other rows may run these as soon as they have the call id.
        """
        if self.overflow:
            for index in envs.ids:
                self.overflow.pop(index, None)
        if envs.is_all:
            self.ops[:] = self._slab_ops[:] = ops
            self.posted_incarnations[:] = self.incarnations
            self._posted_id_array.fill(call_id)
            self.slab.posted_ids.fill(call_id)
            return
        for index in envs.ids:
            self.ops[index] = self._slab_ops[index] = ops[index]
            self.posted_incarnations[index] = self.incarnations[index]
            self.posted_ids[index] = self.slab.posted_ids[index] = call_id

    def begin_process(self, envs: range, incarnation: int) -> None:
        """Record the new process of an actor."""
        self._incarnation_array[slice_of(envs)] = incarnation

    def end_process(self, envs: range) -> None:
        """Leave no rows for the next process of an actor: it would run all that are posted and not completed."""
        at = slice_of(envs)
        self.overdue.difference_update(envs)
        self.slab.written_ids[at] = self.slab.posted_ids[at] = self._posted_id_array[at]

    def begin_rollout(self, envs: range, call_id: int) -> None:
        """Record that the current process of an actor begins or continues a rollout, and that it has no rows to run."""
        at = slice_of(envs)
        self.posted_incarnations[at] = self.incarnations[at]
        self._posted_id_array[at] = self.slab.written_ids[at] = self.slab.posted_ids[at] = call_id
