"""Run steps and resets in the worker: read the rows that the parent has posted, run them in order, write the results.

    row of a request, payload ──▶ EnvRow ──▶ HostedEnv.step, HostedEnv.reset ──▶ row of the result, overflow, a ring

Calls do not come through rows: they are frames, which `envactors.worker.main` runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envactors.mailbox import bundle
from envactors.mailbox.control_page import (
    BEGUN,
    ENV_INDEX,
    METHOD,
    METHOD_RESET,
    METHOD_STEP,
    OVERFLOWS,
    SINCE,
    STREAM,
    TIMED,
    ControlPage,
)
from envactors.mailbox.info_codec import InfoWriter
from envactors.mailbox.messages import Failure, Fault, Kind
from envactors.mailbox.pickling import content_of, copy_value, loads, pack_failure
from envactors.mailbox.slab import HALF, NO_AUTORESET, PAYLOAD, PLAIN_REWARD, RESET, RING, SEED, Slab
from envactors.mailbox.specs import ArraySpec, flatten, reader
from envactors.worker import context
from envactors.worker.host import Fields, Host, HostedEnv

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


class WorkerRetiredError(OSError):
    """The parent has abandoned this worker, and another one may own its rows."""


class WriteGuard:
    """Keeps a worker that cannot be killed from writing results once another one has replaced it.

    The writer sets ``writer`` and then checks ``is_closed``; `close` sets ``is_closed`` and then checks ``writer``. At
    least one of the two sees the other's change. This takes a sixth of the time that a lock per env takes.

    Attributes:
        writer: The id of the thread that is writing a result, None if none is.
        is_closed: Whether no more results may be written.
    """

    def __init__(self) -> None:
        self.writer: int | None = None
        self.is_closed: bool = False

    def begin_write(self) -> None:
        """Begin to write a result in the calling thread; to end, set ``writer`` to None.

        Raises:
            WorkerRetiredError: No more results may be written.
        """
        self.writer = threading.get_ident()
        if self.is_closed:
            self.writer = None
            raise WorkerRetiredError("abandoned by the parent")

    def close(self) -> None:
        """Forbid further results, and wait for the one that is being written."""
        self.is_closed = True
        while self.writer not in (None, threading.get_ident()):
            time.sleep(0)  # not for long: writing a result takes about as long as a copy


class StepRunner:
    """Runs the steps and resets of one worker.

    Args:
        host: The host of the envs.
        page: The control page, on which progress is recorded.
        send: Sends a frame of the current request, given its kind and payload.
        guard: The guard of a worker that cannot be killed; None for others.
    """

    def __init__(
        self, host: Host, page: ControlPage, send: Callable[[Kind, Any], None], guard: WriteGuard | None
    ) -> None:
        self._host = host
        self._page = page
        self._send = send
        self._guard = guard
        # The value at the start; see `envactors.worker.context.forks`.
        self._forks = context.forks
        self._rows: list[EnvRow] = []

    def attach(self, slab: Slab, infos: InfoWriter, autoreset: bool) -> None:
        """Use these rows from now on; with ``autoreset`` an episode that ends is reset within the step."""
        self._rows = [
            EnvRow(hosted, slab, infos, autoreset, self._page, self._send_overflow, self._guard)
            for hosted in self._host.hosted_envs
        ]
        self._posted = slab.posted.data
        self._completed = slab.completed.data
        self._ops = slab.ops.data
        self._slab = slab

    def take_payloads(self, call_id: int, payload: Any) -> None:
        """Keep the payloads of a `Kind.PAYLOADS` frame for the rows that are posted with this call id."""
        for position, content in payload if isinstance(payload, list) else bundle.unpack(payload):
            self._rows[position].payload = call_id, content

    def run_rows(self, call_id: int) -> None:
        """Run every row that is posted and not completed, for the step of this call id."""
        page = self._page
        page.is_streaming = page.counters[STREAM] != 0
        due: list[EnvRow] = []
        posted, completed, ops = self._posted, self._completed, self._ops
        for row in self._rows:
            index = row.index
            posted_id = posted[index]
            if posted_id != completed[index]:
                op = ops[index]
                # A payload that has not come yet belongs to a later post, which brings the next scan.
                if not op & PAYLOAD or row.payload[0] == posted_id:
                    row.call_id = posted_id
                    row.op = op
                    due.append(row)
        if due:
            self._run(due)
        page.finish_step(call_id)

    def _run(self, due: Sequence[EnvRow]) -> None:
        page, forks, stream = self._page, self._forks, self._page.is_streaming
        counters, times, now, record = page.counters, page.times, time.monotonic, page.spans.add
        page.is_timing = timed = counters[TIMED] != 0
        for row in due:
            hosted, op, call_id = row.hosted, row.op, row.call_id
            # Inlined from `ControlPage.start_request`: calling it would take twice as long.
            times[SINCE] = now()
            counters[METHOD] = METHOD_RESET if op & RESET else METHOD_STEP
            counters[ENV_INDEX] = hosted.position
            counters[BEGUN] = call_id
            fields = failed_with = None
            try:
                # Inlined from `HostedEnv.step`.
                fields = row.run() if op & _UNUSUAL else hosted.take(hosted.env.step(row.action()), row.autoreset, None)
            except BaseException as error:
                failed_with = error
            if context.forks != forks:
                os._exit(1)  # env code forked, and its child came back here: it must not write a result
            if timed:
                record(times[SINCE], now(), call_id, hosted.position, counters[METHOD])
            has_failed = row.write(fields, failed_with)
            if stream or op & RING:
                page.ring_for_result(self._count_complete, always=bool(has_failed or op & RING))
        page.is_timing = False

    def _count_complete(self) -> int:
        return int(np.count_nonzero(self._slab.posted == self._slab.completed))

    def _send_overflow(self, index: int, payload: bytes | bytearray) -> None:
        self._send(Kind.OVERFLOW, bundle.pack([(index, payload)]))
        self._page.counters[OVERFLOWS] += 1


class EnvRow:
    """The row of one env in the slab: it reads the request there and writes the result.

    Args:
        hosted: The env.
        slab: The slab.
        infos: Encodes infos, object leaves and failures.
        autoreset: Whether an episode that ends is reset within the step.
        page: The control page, which tells whether results are streamed.
        send_overflow: Sends what does not fit, by the env's index in the vector.
        guard: The guard of a worker that cannot be killed; None for others.

    Attributes:
        index: The env's index in the vector.
        call_id: The call id of the request.
        op: The operation, in the bits of `envactors.mailbox.slab`.
        payload: The call id that the last payload belongs to, and its content: pickled, or an object.
        action: Returns the action of a step; the env may modify it.
        autoreset: Whether a step that ends the episode resets.
    """

    index: int

    def __init__(
        self,
        hosted: HostedEnv,
        slab: Slab,
        infos: InfoWriter,
        autoreset: bool,
        page: ControlPage,
        send_overflow: Callable[[int, bytes | bytearray], None],
        guard: WriteGuard | None,
    ) -> None:
        self.hosted = hosted
        self.index = index = hosted.index
        self.autoreset = autoreset
        self.call_id = 0
        self.op = 0
        self.payload: tuple[int, Any] = 0, None
        self._page = page
        self._encode = infos.encode
        self._fail = infos.fail
        self._mark_plain = infos.plain_marker(index)
        self._copies = infos.passes_objects
        self._send_overflow = send_overflow
        self._guard = guard
        layout = slab.layout
        # Actions without a spec come as payload.
        self.action: Any = None if layout.action is None else reader(layout.action, slab.actions, index)
        # Single numbers are written through memoryviews in a third of the time that arrays take.
        is_plain_reward = layout.reward == PLAIN_REWARD
        self._rewards: Any = slab.rewards.data if is_plain_reward else slab.rewards
        self._has_object_reward = layout.reward is None
        self._terminated, self._truncated = slab.terminated.data, slab.truncated.data
        self._when: Any = slab.when.data
        self._seeds = slab.seeds.data
        self._checks = slab.checks.data
        self._completed = slab.completed.data
        self._spec = layout.observation
        # The two halves of the observation: for each a view per leaf, None for object leaves.
        self._halves = [
            [None if leaf is None else leaf[half, index, ...] for leaf in slab.observations] for half in (0, 1)
        ]
        # The same two halves if the observation is one array, else None.
        is_array = isinstance(self._spec, ArraySpec) and self._spec.batchable and not self._has_object_reward
        self._array_halves: Any = [row for (row,) in self._halves] if is_array else None

    def run(self) -> Fields:
        """Run a reset, or a step that is out of the ordinary.

        Raises:
            PayloadError: The payload cannot be read.
            BaseException: What the env raises.
        """
        op = self.op
        seed = self._seeds[self.index] if op & SEED else None
        content = self._read_payload() if op & PAYLOAD else None
        if op & RESET:
            large_seed, options = content or (None, None)
            return self.hosted.reset(seed if large_seed is None else large_seed, options)
        action = content if op & PAYLOAD else self.action()
        return self.hosted.step(action, self.autoreset and not op & NO_AUTORESET, seed)

    def _read_payload(self) -> Any:
        """Return the action of a step, or the (large seed, options) of a reset."""
        (_, content), self.payload = self.payload, (0, None)
        if self._copies:
            return content
        try:
            value = loads(content)
            if self.op & RESET and not isinstance(value, Failure):
                value = value[0], content_of(value[1])
        except BaseException as error:  # unpickling runs any code
            raise PayloadError(pack_failure(error, Fault.ARGUMENTS)) from error
        if isinstance(value, Failure):  # a node could not send it
            raise PayloadError(value)
        return value

    def write(self, fields: Fields | None, error: BaseException | None) -> bool:
        """Write the result, or the error, into the row; what does not fit there is sent first.

        The guard is held only while values are copied, never while code of users runs, since closing it waits.

        Returns:
            Whether it is a failure.
        """
        index, half, guard = self.index, self.op & HALF, self._guard
        beside = overflow = None
        if fields is not None and (self._array_halves is None or fields[4] or type(fields[4]) is not dict):
            try:
                beside = self._set_apart(fields)
            except BaseException as unfit:
                error = unfit
        failure = None if error is None else as_failure(error, self._page)
        if guard is not None:
            guard.begin_write()
        try:
            if fields is not None and failure is None:
                try:
                    obs, reward, self._terminated[index], self._truncated[index], _ = fields
                    if self.hosted.journal:
                        self._checks[half, index] = self.hosted.check
                    if beside is None:
                        self._rewards[index] = reward
                        self._array_halves[half][...] = obs
                        self._mark_plain()
                    else:
                        overflow = self._write_unusual(half, reward, *beside)
                except BaseException as unfit:
                    failure = as_failure(unfit, self._page)
            if failure is not None:
                overflow = self._fail(index, failure)
            if overflow is not None:
                self._send_overflow(index, overflow)
            if self._page.is_streaming:
                self._when[index] = time.monotonic()
            self._completed[index] = self.call_id
            return failure is not None
        finally:
            if guard is not None:
                guard.writer = None

    def _set_apart(self, fields: Fields) -> tuple[list[Any], Any, list[Any]]:
        """Return the leaves of an observation, the info, and what else has no place in the row.

        The last two are copies if they pass as objects.
        """
        leaves = flatten(self._spec, fields[0])
        info = fields[4]
        objects = [leaf for row, leaf in zip(self._halves[0], leaves, strict=True) if row is None]
        if self._has_object_reward:
            objects.append(fields[1])
        if self._copies:
            try:
                info = copy_value(info)
                objects = [copy_value(content) for content in objects]
            except BaseException as error:
                raise PayloadError(pack_failure(error, Fault.RESULT)) from error
        return leaves, info, objects

    def _write_unusual(
        self, half: int, reward: Any, leaves: list[Any], info: Any, objects: list[Any]
    ) -> bytes | bytearray | None:
        """Write a result that is more than one array, a number and two flags; return what does not fit."""
        for row, leaf in zip(self._halves[half], leaves, strict=True):
            if row is not None:
                row[...] = leaf
        if not self._has_object_reward:
            self._rewards[self.index] = reward
        if not info and not objects and type(info) is dict:
            self._mark_plain()
            return None
        try:
            return self._encode(self.index, info, objects)
        except BaseException as error:
            raise PayloadError(pack_failure(error, Fault.RESULT)) from error


def as_failure(error: BaseException, page: ControlPage) -> Failure:
    """Return the failure of an env that raised, or whose arguments or result cannot travel."""
    if isinstance(error, PayloadError):
        return error.failure
    return pack_failure(error, Fault.RESET if page.counters[METHOD] == METHOD_RESET else Fault.RAISED)
