"""The worker's half of steps and resets: runs what stands in the rows of an actor's envs, one after the other.

row of a request, payload ──▶ EnvRow ──▶ HostedEnv.step, HostedEnv.reset ──▶ row of the result, overflow, a ring
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
from envactors.mailbox.payloads import unpack_payloads
from envactors.mailbox.pickling import content_of, copy_value, loads, pack_failure
from envactors.mailbox.slab import HALF, NO_AUTORESET, PAYLOAD, PLAIN_REWARD, RESET, RING, SEED, Slab
from envactors.mailbox.specs import ArraySpec, flatten, reader
from envactors.worker import context
from envactors.worker.host import Fields, Host, HostedEnv

# Before Python 3.12 looking up a member of an enum takes as long as a function call.
_RAISED, _RESULT = Fault.RAISED, Fault.RESULT
# A step without any of these bits takes the short way.
_UNUSUAL = RESET | SEED | PAYLOAD | NO_AUTORESET


class PayloadError(Exception):
    """A payload that cannot be read; it fails the step or reset of its env alone.

    Args:
        failure: What has failed.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class WorkerRetiredError(OSError):
    """The parent has abandoned this worker, and another one may have its rows."""


class WriteGuard:
    """Keeps a worker that cannot be killed from writing results once it was replaced by another one.

    The writer sets ``writer`` and then checks ``is_closed``; `close` sets ``is_closed`` and then checks ``writer``. At
    least one of the two sees the other's change. This takes a sixth of the time that a lock per env takes.

    Attributes:
        writer: The id of the thread that writes a result now, None if none does.
        is_closed: Whether no more results may be written.
    """

    def __init__(self) -> None:
        self.writer: int | None = None
        self.is_closed = False

    def begin_write(self) -> None:
        """Begin to write a result, in the calling thread; to end, set ``writer`` to None.

        Raises:
            WorkerRetiredError: No more results may be written.
        """
        self.writer = threading.get_ident()
        if self.is_closed:
            self.writer = None
            raise WorkerRetiredError("abandoned by the parent")

    def close(self) -> None:
        """Forbid further results; wait for one that is being written."""
        self.is_closed = True
        while self.writer not in (None, threading.get_ident()):
            time.sleep(0)  # not for long: writing a result takes about as long as a copy


class StepRunner:
    """Runs the steps and resets of one worker.

    Args:
        host: The host of the envs.
        page: The control page, on which progress is recorded.
        send: Sends a frame of the current request, given its kind and payload.
        guard: Of a worker that cannot be killed: tells it that it was abandoned.
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
        # Whether the rows are set to stream their results.
        self._stream = False

    def attach(self, slab: Slab, infos: InfoWriter, autoreset: bool) -> None:
        """Use these rows from now on; with ``autoreset`` an episode that ends is reset within the step."""
        hosted_envs = self._host.hosted_envs
        self._rows = [
            EnvRow(hosted, slab, infos, autoreset, self._send_overflow, self._guard) for hosted in hosted_envs
        ]
        self._stream = False
        self._posted = slab.posted.data
        self._completed = slab.completed.data
        self._ops = slab.ops.data
        self._slab = slab

    def take_payloads(self, call_id: int, payload: Any) -> None:
        """Keep the payloads of a `Kind.PAYLOADS` frame for the rows that are posted with this call id."""
        for position, content in unpack_payloads(payload):
            self._rows[position].payload = call_id, content

    def run_rows(self, call_id: int) -> None:
        """Run every row that is posted and not completed, for the step of this call id."""
        page = self._page
        page.is_streaming = stream = page.counters[STREAM] != 0
        if stream is not self._stream:
            self._stream = stream
            for row in self._rows:
                row.stamped = stream
        due: list[EnvRow] = []
        posted, completed, ops = self._posted, self._completed, self._ops
        for row in self._rows:
            index = row.index
            number = posted[index]
            if number != completed[index]:
                op = ops[index]
                # A payload that has not come yet belongs to a later post, which brings the next scan.
                if not op & PAYLOAD or row.payload[0] == number:
                    row.number = number
                    row.op = op
                    due.append(row)
        if due:
            self._run(due, stream)
        page.finish_step(call_id)

    def _run(self, due: Sequence[EnvRow], stream: bool) -> None:
        page, forks = self._page, self._forks
        counters, times, now, record = page.counters, page.times, time.monotonic, page.spans.add
        page.is_timing = timed = counters[TIMED] != 0
        for row in due:
            hosted, op, number = row.hosted, row.op, row.number
            # Inlined from `ControlPage.start_request`: calling it would take twice as long.
            times[SINCE] = now()
            counters[METHOD] = METHOD_RESET if op & RESET else METHOD_STEP
            counters[ENV_INDEX] = hosted.position
            counters[BEGUN] = number
            transition = failed_with = None
            try:
                transition = row.run() if op & _UNUSUAL else hosted.step(row.action(), row.autoreset, None)
            except BaseException as error:
                failed_with = error
            if context.forks != forks:
                os._exit(1)  # env code forked, and its child came back here: it must not write a result
            if timed:
                record(times[SINCE], now(), number, hosted.position, counters[METHOD])
            row.write(transition, failed_with)
            if stream or op & RING:
                self._announce(row)
        page.is_timing = False

    def _announce(self, row: EnvRow) -> None:
        """Ring after a result, unless the caller waits for more of them than there are; a failure is always told."""
        self._page.ring_for_result(self._count_complete, always=bool(row.failed or row.op & RING))

    def _count_complete(self) -> int:
        return int(np.count_nonzero(self._slab.posted == self._slab.completed))

    def _send_overflow(self, index: int, payload: bytes | bytearray) -> None:
        self._send(Kind.OVERFLOW, bundle.pack([(index, payload)]))
        self._page.counters[OVERFLOWS] += 1


class EnvRow:
    """The row of one env in the slab: the request that stands in it, and the place for its result.

    Args:
        hosted: The env.
        slab: The slab.
        infos: Encodes infos, object leaves and failures.
        autoreset: Whether an episode that ends is reset within the step.
        send_overflow: Sends what does not fit, by the env's index in the vector.
        guard: Of a worker that cannot be killed: tells it that it was abandoned.

    Attributes:
        index: The env's index in the vector.
        number: The call id of the request.
        op: What is asked, in the bits of `envactors.mailbox.slab`.
        payload: The call id that the last payload belongs to, and its content: pickled, an object, or a failure.
        action: Returns the action of a step; the env may modify it.
        autoreset: Whether a step that ends the episode resets.
        failed: Whether the last result is a failure.
        stamped: Whether to write the time of completion, as results that stream need it.
    """

    def __init__(
        self,
        hosted: HostedEnv,
        slab: Slab,
        infos: InfoWriter,
        autoreset: bool,
        send_overflow: Callable[[int, bytes | bytearray], None],
        guard: WriteGuard | None,
    ) -> None:
        self.hosted = hosted
        self.index = index = hosted.index
        self.autoreset = autoreset
        self.number = self.op = 0
        self.payload: tuple[int, Any] = 0, None
        self.failed = self.stamped = False
        self.action = _no_action if slab.layout.action is None else reader(slab.layout.action, slab.actions, index)
        self._encode = infos.encode
        self._fail = infos.fail
        self._mark_plain = infos.plain_marker(index)
        self._copies = infos.passes_objects
        self._send_overflow = send_overflow
        self._guard = guard
        # Single numbers are written through memoryviews in a third of the time that arrays take.
        self._terminated, self._truncated = slab.terminated.data, slab.truncated.data
        self._rewards: Any = slab.rewards.data if slab.layout.reward == PLAIN_REWARD else slab.rewards
        self._completed, self._checks = slab.completed.data, slab.checks.data
        self._when: Any = slab.when.data
        self._seeds = slab.seeds.data
        self._spec = slab.layout.observation
        self._has_object_reward = slab.layout.reward is None
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
        content = self._read_payload(resets=bool(op & RESET)) if op & PAYLOAD else None
        if op & RESET:
            large_seed, options = content or (None, None)
            return self.hosted.reset(seed if large_seed is None else large_seed, options)
        action = content if op & PAYLOAD else self.action()
        return self.hosted.step(action, self.autoreset and not op & NO_AUTORESET, seed)

    def _read_payload(self, *, resets: bool) -> Any:
        (_, content), self.payload = self.payload, (0, None)
        if isinstance(content, Failure):
            raise PayloadError(content)
        if self._copies:
            return content
        try:
            value = loads(content)
            if resets:
                value = value[0], content_of(value[1])
        except BaseException as error:  # unpickling runs any code
            raise PayloadError(pack_failure(error, Fault.ARGUMENTS)) from error
        return value

    def write(self, transition: Fields | None, error: BaseException | None) -> None:
        """Write the result into the row; what does not fit there is sent, so that no later env can lose it."""
        if transition is None or self._array_halves is None or transition[4] or type(transition[4]) is not dict:
            self._write_beside(transition, error)
            return
        index, hosted, guard, half = self.index, self.hosted, self._guard, self.op & HALF
        if guard is not None:
            guard.begin_write()
        try:
            obs, self._rewards[index], self._terminated[index], self._truncated[index], _ = transition
            self._array_halves[half][...] = obs
            if hosted.journal:
                self._checks[half, index] = hosted.check
            self._mark_plain()
            self.failed = False
            if self.stamped:
                self._when[index] = time.monotonic()
            self._completed[index] = self.number
        except BaseException as unfit:
            error = unfit
        finally:
            if guard is not None:
                guard.writer = None
        if error is not None:
            self._write_beside(None, error)

    def _write_beside(self, transition: Fields | None, error: BaseException | None) -> None:
        """Write a result that has more than the row has place for, or a failure."""
        fault = _RAISED
        leaves: list[Any] = []
        if transition is not None:
            try:
                obs, reward, terminated, truncated, info = transition
                leaves = flatten(self._spec, obs)
                if self._copies:
                    fault = _RESULT
                    info, reward, leaves = self._copy(info, reward, leaves)
            except BaseException as unfit:
                error = unfit
                transition = None
        failure = None if error is None else _as_failure(error, fault)
        index, guard = self.index, self._guard
        overflow: bytes | bytearray | None = None
        if guard is not None:
            guard.begin_write()  # no code of users runs from here on: who closes the guard waits for the end
        try:
            if transition is not None:
                try:
                    overflow = self._write_result(leaves, reward, terminated, truncated, info)
                except BaseException as unfit:
                    failure = _as_failure(unfit, _RAISED)
            self.failed = failure is not None
            if failure is not None:
                overflow = self._fail(index, failure)
            if overflow is not None:
                self._send_overflow(index, overflow)
            if self.stamped:
                self._when[index] = time.monotonic()
            self._completed[index] = self.number
        finally:
            if guard is not None:
                guard.writer = None

    def _write_result(
        self, leaves: list[Any], reward: Any, terminated: Any, truncated: Any, info: Any
    ) -> bytes | bytearray | None:
        """Write a result into the row; return what does not fit there."""
        index, half = self.index, self.op & HALF
        self._terminated[index] = terminated
        self._truncated[index] = truncated
        objects = self._write_leaves(half, leaves, reward)
        if self.hosted.journal:
            self._checks[half, index] = self.hosted.check
        if not info and not objects and type(info) is dict:
            self._mark_plain()
            return None
        try:
            return self._encode(index, info, objects)
        except BaseException as error:
            raise PayloadError(pack_failure(error, _RESULT)) from error

    def _copy(self, info: Any, reward: Any, leaves: list[Any]) -> tuple[Any, Any, list[Any]]:
        """Return copies of what passes as objects."""
        rows = self._halves[0]
        leaves = [copy_value(leaf) if row is None else leaf for row, leaf in zip(rows, leaves, strict=True)]
        return copy_value(info) if info else info, copy_value(reward) if self._has_object_reward else reward, leaves

    def _write_leaves(self, half: int, leaves: list[Any], reward: Any) -> list[Any]:
        """Write an observation of several leaves, and the reward; return what passes as objects."""
        objects = []
        for row, leaf in zip(self._halves[half], leaves, strict=True):
            if row is None:
                objects.append(leaf)
            else:
                row[...] = leaf
        if self._has_object_reward:
            objects.append(reward)
        else:
            self._rewards[self.index] = reward
        return objects


def _as_failure(error: BaseException, fault: Fault) -> Failure:
    return error.failure if isinstance(error, PayloadError) else pack_failure(error, fault)


def _no_action() -> None:
    """Stand for the action of an env whose actions come as payload; nothing asks for it."""
