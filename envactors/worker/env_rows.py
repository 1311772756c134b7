"""The rows of a worker's envs: run what they have been posted, and write the results.

request in a row, payload ──▶ EnvRow ──▶ HostedEnv.step, HostedEnv.reset ──▶ result in the row, overflow, a ring
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from envactors.mailbox.control_page import (
    BEGUN,
    ENV_INDEX,
    METHOD,
    METHOD_RESET,
    METHOD_STEP,
    RING_AT,
    SINCE,
    TIMED,
    ControlPage,
)
from envactors.mailbox.info_codec import PLAIN, Infos
from envactors.mailbox.messages import Failure, Fault
from envactors.mailbox.pickling import content_of, loads, pack_failure
from envactors.mailbox.slab import BUFFER, NO_AUTORESET, PAYLOAD, PLAIN_REWARD, RESET, RING, SEED, STREAMED, Slab
from envactors.mailbox.specs import ArraySpec, flattener, reader
from envactors.worker import context
from envactors.worker.host import Fields, HostedEnv, checksum

# A step without any of these bits takes the fast path.
_UNUSUAL = RESET | SEED | PAYLOAD | NO_AUTORESET


class PayloadError(Exception):
    """Arguments or a result that cannot travel; that fails the step or reset of their env alone.

    Args:
        failure: What has failed.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


def run_all(due: Iterable[tuple[EnvRow, int, int]]) -> None:
    """Run rows.

    Most steps return one array and a reward as their specs say, two bools, and an empty info. This writes them without
    a call; `EnvRow.finish` does all else.

    Args:
        due: Each row with its operation, in the bits of `envactors.mailbox.slab`, and the call id of its request.
    """
    forks, now, array, begun = context.forks, time.monotonic, np.ndarray, None
    float64 = PLAIN_REWARD.dtype
    for row, op, call_id in due:
        index = row.index
        # Inlined from `ControlPage.record_env`.
        row.times[SINCE] = now()
        row.counters[ENV_INDEX] = row.position
        if row.page is not begun or op & RESET or row.counters[BEGUN] != call_id:
            is_noted, begun = row.begin(op, call_id), row.page
        result = failed_with = has_failed = None
        try:
            if not op & _UNUSUAL:
                result = row.hosted.env.step(row.action())
            if type(result) is tuple and len(result) == 5:
                obs, reward, terminated, truncated, info = result
                if (
                    (type(obs) is array and obs.shape == row.shape and obs.dtype == row.dtype)
                    and (
                        row.reward_shape is None
                        if type(reward) is float
                        else type(reward) is array and reward.shape == row.reward_shape and reward.dtype == float64
                    )
                    and type(terminated) is type(truncated) is bool
                    and (type(info) is dict and not info and context.forks == forks)
                    and not (row.resets_within_step and (terminated or truncated))
                ):
                    if is_noted:
                        row.note(obs, op, call_id)
                    cell = row.cells[op & BUFFER]
                    row.terminated[cell] = terminated
                    row.truncated[cell] = truncated
                    row.rewards[cell] = reward
                    row.plain_buffers[op & BUFFER][...] = obs
                    row.encodings[index] = PLAIN
                    row.written_ids[index] = call_id
                    has_failed = False
        except BaseException as error:
            failed_with = error
        if has_failed is None:
            has_failed = row.finish(op, call_id, result, failed_with, forks)
            begun = None  # the page may name another method
        if row.page.is_streaming or op & RING or row.counters[RING_AT]:
            row.page.ring_for_result(row.count_written, always=bool(has_failed or op & RING))


class EnvRow:
    """The row of one env in the slab: it reads the request there and writes the result.

    Args:
        hosted: The env.
        slab: The slab.
        infos: Encodes infos, object leaves and failures.
        resets_within_step: Whether a step that ends the episode also resets the env.
        page: The control page, which tells whether results are streamed.
        send_overflow: Sends what does not fit, by the env's index in the vector.

    Attributes:
        index: The env's index in the vector.
        position: Its position in the actor.
        page: The control page.
        counters, times: Its memory.
        payload: The call id that the last payload belongs to, and its content, pickled.
        action: Returns the action of a step; the env may modify it.
        resets_within_step: As above.
        written_ids, encodings: Columns of the slab.
        terminated, truncated, rewards: Its columns with two buffers, the second after the first.
        cells: Where each buffer of these has the env.
        plain_buffers: The two buffers of the observation, if it is one array and the reward is in the row; else None.
        shape, dtype: Those of such an observation; else None.
        reward_shape: The shape of an array of rewards; None for numbers.
    """

    index: int

    def __init__(
        self,
        hosted: HostedEnv,
        slab: Slab,
        infos: Infos,
        resets_within_step: bool,
        page: ControlPage,
        send_overflow: Callable[[int, bytes | bytearray], None],
    ) -> None:
        self.hosted = hosted
        self.index = index = hosted.index
        self.position: int = hosted.position
        self.resets_within_step = resets_within_step
        self.payload: tuple[int, Any] = 0, None
        self.page = page
        self.counters: memoryview[int] = page.counters
        self.times: memoryview[float] = page.times
        self._infos = infos
        self.encodings: memoryview[int] = infos.encodings
        self._send_overflow = send_overflow
        layout = slab.layout
        # Actions without a spec come as payload.
        self.action: Any = None if layout.action is None else reader(layout.action, slab.actions, index)
        # Single numbers are written through memoryviews in a third of the time that arrays take.
        self.reward_shape: Any = (layout.reward or PLAIN_REWARD).shape or None
        rewards = slab.rewards.reshape(2 * layout.envs, *slab.rewards.shape[2:])
        self.rewards: Any = rewards.data if self.reward_shape is None else rewards
        self.terminated: memoryview[Any] = slab.terminated.reshape(-1).data
        self.truncated: memoryview[Any] = slab.truncated.reshape(-1).data
        self.cells: list[int] = [index, layout.envs + index]
        self.written_ids: memoryview[int] = slab.written_ids.data
        self._slab = slab
        self._spec = layout.observation
        self._flatten = flattener(self._spec)
        # The two buffers of the observation: for each a view per leaf, None for object leaves.
        self._buffers = [
            [None if leaf is None else leaf[buffer, index, ...] for leaf in slab.observations] for buffer in (0, 1)
        ]
        self.plain_buffers: Any = None
        self.shape: Any = None
        self.dtype: Any = None
        if isinstance(self._spec, ArraySpec) and self._spec.batchable and layout.reward is not None:
            self.plain_buffers = [row for (row,) in self._buffers]
            self.shape, self.dtype = self._spec.shape, self._spec.dtype

    def run(self, op: int) -> Fields:
        """Run a reset, or a step that is out of the ordinary; ``op`` has the bits of `envactors.mailbox.slab`.

        Raises:
            PayloadError: The payload cannot be read.
            BaseException: What the env raises.
        """
        seed = int(self._slab.seeds[self.index]) if op & SEED else None
        content = self._read_payload(op) if op & PAYLOAD else None
        if op & RESET:
            large_seed, options = content or (None, None)
            return self.hosted.reset(seed if large_seed is None else large_seed, options)
        action = content if op & PAYLOAD else self.action()
        if not op & NO_AUTORESET:
            return self.hosted.step(action, self.resets_within_step, seed)
        result = self.hosted.env.step(action)
        obs, reward, terminated, truncated, info = self.hosted.take(result, False, None)
        if terminated or truncated:  # the next process does the reset, and the caller adds its results
            info = {"final_obs": result[0], "final_info": info}
        return obs, reward, terminated, truncated, info

    def _read_payload(self, op: int) -> Any:
        """Return the action of a step, or the (large seed, options) of a reset."""
        (_, content), self.payload = self.payload, (0, None)
        try:
            value = loads(content)
            if op & RESET and not isinstance(value, Failure):
                value = value[0], content_of(value[1])
        except BaseException as error:  # it runs any code
            raise PayloadError(pack_failure(error, Fault.ARGUMENTS)) from error
        if isinstance(value, Failure):  # a node could not send it
            raise PayloadError(value)
        return value

    def begin(self, op: int, call_id: int) -> bool:
        """Record on the control page that this runs now; return whether plain results need `note`."""
        page, counters = self.page, self.counters
        counters[METHOD] = METHOD_RESET if op & RESET else METHOD_STEP
        counters[BEGUN] = call_id
        page.is_timing = counters[TIMED] != 0
        return page.is_timing or bool(op & STREAMED) or self.hosted.journal

    def note(self, obs: Any, op: int, call_id: int) -> None:
        """Write what few plain results have beside them: times, and the checksum over the observations."""
        page, hosted = self.page, self.hosted
        if page.is_timing:
            page.spans.add(self.times[SINCE], time.monotonic(), call_id, self.position, METHOD_STEP)
        if hosted.journal:
            hosted.checksum = self._slab.checksums[op & BUFFER, self.index] = checksum(obs, hosted.checksum)
        if op & STREAMED:
            self._slab.when[self.index] = time.monotonic()

    def finish(self, op: int, call_id: int, result: Any, error: BaseException | None, forks: int) -> bool:
        """Run a request unless it is a plain step, and write the result if `run_all` has not.

        Args:
            op: The operation, in the bits of `envactors.mailbox.slab`.
            call_id: The call id of its request.
            result: What a plain step of the env has returned.
            error: What it has raised; None for nothing.
            forks: The count of forks before it.

        Returns:
            Whether it is a failure.
        """
        fields = None
        if error is None:
            try:
                fields = self.run(op) if op & _UNUSUAL else self.hosted.take(result, self.resets_within_step, None)
            except BaseException as raised:
                error = raised
        if context.forks != forks:
            os._exit(1)  # env code forked, and its child came back here: it must not write a result
        if error is not None and self.is_written(call_id):
            raise error  # an interrupt after the result was written, which may be read by now
        if self.page.is_timing:
            times, method = self.times, self.counters[METHOD]
            self.page.spans.add(times[SINCE], time.monotonic(), call_id, self.position, method)
        return self.write(op, call_id, fields, error)

    def write(self, op: int, call_id: int, fields: Fields | None, error: BaseException | None) -> bool:
        """Write the result, or the error, into the row; what does not fit there is sent first.

        Returns:
            Whether it is a failure.
        """
        index, buffer = self.index, op & BUFFER
        content = overflow = None
        if fields is not None:
            try:
                leaves, content = self._set_apart(fields)
                self._write_arrays(buffer, leaves, fields)
            except BaseException as unfit:
                error = unfit
        failure = None if error is None else as_failure(error, self.page, fields)
        if failure is not None:
            overflow = self._infos.fail(index, failure)
        elif content is None:
            self.encodings[index] = PLAIN
        else:
            overflow = self._infos.put(index, content)
        if overflow is not None:
            self._send_overflow(index, overflow)
        if op & STREAMED:
            self._slab.when[index] = time.monotonic()
        self.written_ids[index] = call_id
        return failure is not None

    def is_written(self, call_id: int) -> bool:
        """Return whether the result of a request was written."""
        return bool(self.written_ids[self.index] == call_id)

    def count_written(self) -> int:
        """Return how many rows of the vector are written."""
        return int(np.count_nonzero(self._slab.posted_ids == self._slab.written_ids))

    def _set_apart(self, fields: Fields) -> tuple[Sequence[Any], Any]:
        """Return the leaves of an observation, and the info with what has no place in the row; None without any.

        Raises:
            PayloadError: They cannot travel.
        """
        leaves = self._flatten(fields[0])
        info = fields[4]
        objects = [leaf for row, leaf in zip(self._buffers[0], leaves, strict=True) if row is None]
        if self._slab.layout.reward is None:
            objects.append(fields[1])
        if type(info) is dict and not info and not objects:
            return leaves, None
        try:
            return leaves, self._infos.pack(info, objects)
        except BaseException as error:
            raise unfit_result(error, fields) from error

    def _write_arrays(self, buffer: int, leaves: Sequence[Any], fields: Fields) -> None:
        """Write what has a place in the row."""
        cell = self.cells[buffer]
        _, reward, self.terminated[cell], self.truncated[cell], _ = fields
        if self.hosted.journal:
            self._slab.checksums[buffer, self.index] = self.hosted.checksum
        for row, leaf in zip(self._buffers[buffer], leaves, strict=True):
            if row is not None:
                row[...] = leaf
        if self._slab.layout.reward is not None:
            self.rewards[cell] = reward


def unfit_result(error: BaseException, fields: Fields) -> PayloadError:
    """Return the error of a result that cannot travel. It tells that the episode has ended, if so."""
    return PayloadError(pack_failure(error, Fault.LAST_RESULT if _has_ended(fields) else Fault.RESULT))


def as_failure(error: BaseException, page: ControlPage, fields: Fields | None = None) -> Failure:
    """Return the failure of an env that raised, or whose arguments or result cannot travel.

    Args:
        error: The error.
        page: The control page.
        fields: The result, if that is what cannot be written.
    """
    if type(error) is PayloadError:  # `isinstance` reads ``__class__``, which may raise
        return error.failure
    is_over = page.counters[METHOD] == METHOD_RESET or (fields is not None and _has_ended(fields))
    return pack_failure(error, Fault.RESET if is_over else Fault.RAISED)


def _has_ended(fields: Fields) -> bool:
    """Return whether a result ends the episode as far as its flags, which may be anything, tell."""
    with contextlib.suppress(Exception):
        return bool(fields[2] or fields[3])
    return False
