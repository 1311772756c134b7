"""The results in the rows of shared memory: how they are copied and read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from envactors.actor.future import Outcome
from envactors.mailbox.info_codec import decode, encode, join
from envactors.mailbox.messages import Description
from envactors.mailbox.slab import BUFFER
from envactors.mailbox.specs import ArraySpec, Spec, flatten, stack, unflatten, zeros
from envactors.vector.requests import EnvRequest, RowResult, Selection
from envactors.vector.results import Batch, EnvStep, failure_info
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
        copies: Whether batches of all envs are copied out of the rows.

    Attributes:
        copies: As above.
    """

    def __init__(self, table: EnvTable, description: Description, *, copies: bool) -> None:
        self.copies: bool = copies
        self._table = table
        self._slab = table.slab
        self._layout = table.slab.layout
        self._reward_spec: Spec = description.reward
        self._all_ids = np.arange(self._layout.envs)
        # The array of observations, if an observation is a single array.
        self._single_array = self._slab.observations[0] if isinstance(self._layout.observation, ArraySpec) else None

    # Batches ---------------------------------------------------------------------------------------------

    def read_contents(self, ids: Sequence[int]) -> list[Decoded]:
        """Return the content of each env's complete row. Runs code of users.

        Raises:
            BaseException: Whatever unpickling raises.
        """
        table = self._table
        return [table.infos.decode(index, table.overflow.get(index)) for index in ids]

    def read_batch(self, envs: Selection, contents: Sequence[Decoded] | None) -> Batch:
        """Copy the results in the complete rows of envs.

        Args:
            envs: The envs.
            contents: The content of each row; None if all are empty.
        """
        slab = self._slab
        at, buffers = envs.at, self._table.ops.translate(_BUFFER_OF_OP)
        is_common = envs.is_all and buffers.count(buffers[0]) == len(buffers)
        buffer = buffers[0] if is_common else None
        if buffer is not None and self._single_array is not None:
            obs: Any = self._single_array[buffer].copy() if self.copies else self._single_array[buffer]
        else:
            obs = unflatten(self._layout.observation, iter(self._observations(buffer, buffers, at, contents or ())))
        if self._layout.reward is None:
            rewards = stack(self._reward_spec, [content[1][-1] for content in contents or ()])
        else:
            rewards = slab.rewards.copy() if envs.is_all else slab.rewards[at]
        infos = [{} for _ in envs.ids] if contents is None else [content[0] for content in contents]
        posted_in = self._table.posted_in
        if envs.is_all:
            flags = slab.terminated.copy(), slab.truncated.copy()
            return Batch(self._all_ids.copy(), obs, rewards, *flags, infos, posted_in.copy())
        return Batch(at.copy(), obs, rewards, slab.terminated[at], slab.truncated[at], infos, posted_in[at])

    def _observations(self, buffer: int | None, buffers: bytearray, at: Any, contents: Sequence[Decoded]) -> list[Any]:
        """Return the leaves of the observations of envs."""
        columns: list[Any] = []
        objects = 0
        ids = self._all_ids[at]
        buffer_index = np.frombuffer(buffers, np.uint8)[at]
        for array in self._slab.observations:
            if array is None:
                columns.append([content[1][objects] for content in contents])
                objects += 1
            elif buffer is not None:
                columns.append(array[buffer].copy() if self.copies else array[buffer])
            else:
                columns.append(array[buffer_index, ids])
        return columns

    # Single results --------------------------------------------------------------------------------------

    def copy_row(self, index: int) -> RowResult:
        """Copy a complete result out of its row, without running code of users."""
        return self._copy(index, self._table.ops[index] & BUFFER, self._table.content(index))

    def read_row(self, index: int) -> EnvStep:
        """Unpickle the result in a complete row; for the errors see `read`."""
        return self.read(self.copy_row(index))

    def copy_answer(self, index: int, request: EnvRequest) -> RowResult:
        """Copy what the user gets for a request; a step may have been answered with the reset in the row."""
        row, ending = self.copy_row(index), request.ending
        if ending is None:
            is_truncated = request.earlier_error is not None and request.method == "step"
            return row._replace(truncated=row.truncated or is_truncated)
        content = row.content
        if ending.content is not None:  # env code may have overwritten the marker of its info
            content = join(content, ending.content, takes_reward=self._layout.reward is None)
        return ending._replace(leaves=row.leaves, content=content, incarnation=row.incarnation)

    def copy_last(self, index: int, *, has_info: bool = True) -> RowResult | None:
        """Copy the last result of an env; None if there is none.

        Only the observation and the content are surely those of that result: a later request may have changed the rest.

        Args:
            index: The env.
            has_info: Whether the copy has the info of that result, which may be one that cannot be unpickled.
        """
        table, last = self._table, self._table.last
        if not table.episodes.has_result(index):
            return None
        content = last.contents[index] if has_info or last.has_objects else None
        return self._copy(index, last.ops[index] & BUFFER, content)

    def _copy(self, index: int, buffer: int, content: bytes | memoryview | None) -> RowResult:
        slab = self._slab
        leaves = [None if array is None else array[buffer, index, ...].copy()[()] for array in slab.observations]
        reward: Any = None
        if self._layout.reward is not None:
            reward = slab.rewards[index]
            reward = reward.copy() if isinstance(reward, np.ndarray) else float(reward)
        flags = bool(slab.terminated[index]), bool(slab.truncated[index])
        return RowResult(index, leaves, reward, *flags, content, int(self._table.posted_in[index]))

    def encode(self, index: int, step: EnvStep) -> RowResult:
        """Return a result, which conforms to the specs, as `LastRows.put_back` takes it."""
        columns = list(zip(self._slab.observations, flatten(self._layout.observation, step.obs), strict=True))
        leaves = [None if array is None else leaf for array, leaf in columns]
        objects = [leaf for array, leaf in columns if array is None]
        if self._layout.reward is None:
            objects.append(step.reward)
        content = bytes(encode(step.info, objects)) if step.info or objects else None
        return RowResult(index, leaves, step.reward, step.terminated, step.truncated, content, step.incarnation)

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
        return EnvStep(row.env_id, obs, reward, row.terminated, row.truncated, info, row.incarnation)

    # Results that report an error -------------------------------------------------------------------------

    def read_result(self, row: RowResult, request: EnvRequest, before: RowResult | None) -> EnvStep:
        """Unpickle the result of a request, and add what the vector reports with it; for the errors see `read`.

        Args:
            row: The result, as `copy_answer` returns it.
            request: The request, which may have an earlier error to report.
            before: The result before it, if the request is a step that was answered with a reset.
        """
        step = self.read(row)
        if request.earlier_error is None:
            return step
        error = request.earlier_error.read()[1]
        assert error is not None, "an earlier attempt has failed"
        last = None if before is None else self.read(before)
        return step._replace(info=failure_info(step.info, error, None if last is None else (last.obs, last.info)))

    def read_truncated(self, last: RowResult, error: Outcome, incarnation: int) -> EnvStep:
        """Unpickle the last result before a failure as that of the step that has failed; for the errors see `read`.

        Args:
            last: The last result.
            error: The error.
            incarnation: The process that the env continues in.
        """
        reward, info = zeros(self._reward_spec), {"failure": error.read()[1]}
        step = self.read(last)
        return EnvStep(step.env_id, step.obs, reward, False, True, info, incarnation)
