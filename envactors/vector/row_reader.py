"""The results in the rows of shared memory: how they are copied and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from envactors.actor.actor import Actor
from envactors.actor.future import LazyOutcome, Outcome
from envactors.mailbox.info_codec import decode, encode
from envactors.mailbox.messages import Description
from envactors.mailbox.pickling import try_to_read
from envactors.mailbox.slab import BUFFER, TRUNCATED
from envactors.mailbox.specs import ArraySpec, Spec, flatten, stack, unflatten, zeros
from envactors.vector.requests import RowResult
from envactors.vector.results import Delivered, EnvStep, failure_info
from envactors.vector.selection import Selection
from envactors.vector.table import EnvTable

# For `bytes.translate`: the buffer of each operation.
_BUFFER_OF_OP: Final = bytes(op & BUFFER for op in range(256))

# The info of a result, and the leaves of its observation and reward that are objects.
Decoded: TypeAlias = tuple[Any, list[Any]]


class RowReader:
    """Reads results out of rows.

    Args:
        table: The envs.
        description: The specs of one env.
        copies: Whether all observations are copied. If not, a batch of all envs has views of the rows, unless its
            results are in both buffers.

    Attributes:
        copies: As above.
    """

    def __init__(self, table: EnvTable, description: Description, *, copies: bool) -> None:
        self.copies: bool = copies
        self._table = table
        self._rows = table.rows
        self._slab = table.slab
        self._layout = table.slab.layout
        self._reward_spec: Spec = description.reward
        # The columns of each buffer; and those of both, joined to one array each, whose second half is the second
        # buffer. One index into such an array takes a tenth of the time of two into one of the slab. Objects have None
        # for that.
        slab, n = self._slab, self._layout.envs
        columns: list[Any] = [slab.rewards, slab.terminated, slab.truncated, *slab.observations]
        self._separate: list[list[Any]] = [[each if each is None else each[i] for each in columns] for i in (0, 1)]
        self._joined: list[Any] = [each if each is None else each.reshape(2 * n, *each.shape[2:]) for each in columns]
        # Where the joined columns have the first and the second buffer of each env.
        self._first, self._second = np.arange(2 * n).reshape(2, n)
        # Whether observations are single arrays.
        self._are_arrays = isinstance(self._layout.observation, ArraySpec) and slab.observations[0] is not None

    # Batches ---------------------------------------------------------------------------------------------

    def read_contents(self, ids: Sequence[int]) -> list[Decoded]:
        """Return the content of each env's complete row. Runs code of users.

        Raises:
            BaseException: Whatever unpickling raises.
            ValueError: A row lacks its objects, since env code has overwritten the encoding.
        """
        rows = self._rows
        contents = [rows.infos.decode(index, rows.overflow.get(index)) for index in ids]
        if self._table.last_rows.has_objects and not all(objects for _, objects in contents):
            raise ValueError("a row has no objects")
        return contents

    def read_results(self, envs: Selection, contents: Sequence[Decoded] | None) -> Delivered:
        """Copy the results in the complete rows of envs.

        Args:
            envs: The envs.
            contents: The content of each row; None if all are empty.
        """
        buffers = self._rows.ops.translate(_BUFFER_OF_OP)
        # All results are in the same buffer, so this copies its columns, which is faster than to index them.
        if envs.is_all and buffers.count(buffers[0]) == len(buffers):
            rewards, terminated, truncated, *leaves = self._separate[buffers[0]]
            rewards, terminated, truncated = rewards.copy(), terminated.copy(), truncated.copy()
            if self.copies:
                leaves = [leaf if leaf is None else leaf.copy() for leaf in leaves]
        else:
            cells = np.where(np.frombuffer(buffers, np.bool_), self._second, self._first)[envs.array_index]
            rewards, terminated, truncated, *leaves = [each if each is None else each[cells] for each in self._joined]
        # The parts that have no column are in the contents.
        if self._layout.reward is None:
            rewards = stack(self._reward_spec, [content[1][-1] for content in contents or ()])
        infos = [{} for _ in envs.ids] if contents is None else [content[0] for content in contents]
        if self._are_arrays:
            obs: Any = leaves[0]
        else:
            objects = zip(*(content[1] for content in contents or ()), strict=True)
            filled = (list(next(objects, ())) if leaf is None else leaf for leaf in leaves)
            obs = unflatten(self._layout.observation, filled)
        incarnations = np.array(self._rows.posted_incarnations)[envs.array_index]
        return obs, rewards, terminated, truncated, infos, incarnations

    # Single results --------------------------------------------------------------------------------------

    def copy_row(self, index: int) -> RowResult:
        """Copy a complete result out of its row, without running code of users."""
        rows = self._rows
        return self._copy(index, rows.ops[index], rows.content(index), rows.posted_incarnations[index])

    def copy_last(self, index: int, *, with_info: bool = True) -> RowResult | None:
        """Copy the last result of an env; None if there is none.

        Args:
            index: The env.
            with_info: False to leave out the info, which may be one that cannot be unpickled, if no object leaves are
                pickled with it.
        """
        table, last = self._table, self._table.last_rows
        if not table.episodes.has_result(index):
            return None
        content = last.contents[index] if with_info or last.has_objects else None
        return self._copy(index, last.ops[index], content, last.incarnations[index])

    def _copy(self, index: int, op: int, content: bytes | memoryview | None, incarnation: int) -> RowResult:
        slab, cell = self._slab, (op & BUFFER, index)
        # Unlike `cell`, this index gives an array even for a leaf that is one number.
        leaves = [None if array is None else array[op & BUFFER, index, ...].copy()[()] for array in slab.observations]
        if op & TRUNCATED:
            zero = zeros(self._reward_spec)
            zero = float(zero) if isinstance(zero, np.generic) else zero
            return RowResult(index, leaves, zero, False, True, content, incarnation)
        reward: Any = None
        if self._layout.reward is not None:
            reward = slab.rewards[cell]
            reward = reward.copy() if isinstance(reward, np.ndarray) else float(reward)
        terminated, truncated = bool(slab.terminated[cell]), bool(slab.truncated[cell])
        return RowResult(index, leaves, reward, terminated, truncated, content, incarnation)

    def encode(self, index: int, step: EnvStep) -> RowResult:
        """Return a result, which conforms to the specs, as `LastRows.write` takes it."""
        columns = list(zip(self._slab.observations, flatten(self._layout.observation, step.obs), strict=True))
        leaves = [None if array is None else leaf for array, leaf in columns]
        objects = [leaf for array, leaf in columns if array is None]
        if self._layout.reward is None:
            objects.append(step.reward)
        content = bytes(encode(step.info, objects)) if step.info or objects else None
        return RowResult(index, leaves, step.reward, step.terminated, step.truncated, content, step.incarnation)

    def lazy_outcome(
        self, actor: Actor, index: int, read: Callable[[], EnvStep], is_valid: Callable[[], bool] = lambda: True
    ) -> Outcome:
        """Return an outcome that unpickles the result of an env when it is read, in the reading thread.

        That runs code of users. An exception of it becomes an error of the actor.

        Args:
            actor: The actor of the env.
            index: The env.
            read: Unpickles the result.
            is_valid: Returns whether the result is still that of the env's request; see `try_to_read`.
        """
        activity = self._table.activity(index)
        incarnation, pid = self._rows.posted_incarnations[index], actor.pid

        def read_or_explain() -> tuple[EnvStep | None, BaseException | None]:
            step, error = try_to_read(read, is_valid)
            return step, None if error is None else actor.errors.unreadable(activity, incarnation, pid, error)

        return LazyOutcome(read_or_explain, is_failure=False)

    def read(self, row: RowResult) -> EnvStep:
        """Unpickle a result. Runs code of users.

        Raises:
            BaseException: Whatever unpickling raises.
        """
        info, objects = ({}, []) if row.content is None else decode(row.content)
        reward = objects[-1] if row.reward is None and objects else row.reward
        others = iter(objects)
        leaves = [next(others, None) if leaf is None else leaf for leaf in row.leaves]
        obs = unflatten(self._layout.observation, iter(leaves))
        if row.error is not None:
            before = None if row.before is None else self.read(row.before)
            info = failure_info(info, row.error, before and (before.obs, before.info))
        return EnvStep(row.env_id, obs, reward, row.terminated, row.truncated, info, row.incarnation)

    def read_truncated(self, last: RowResult, error: Outcome) -> EnvStep:
        """Unpickle the answer to a failed step, of which `LastRows.truncate` has made the last result, with its error.

        For the errors see `read`.
        """
        return self.read(last)._replace(info=failure_info({}, error))
