"""The worker's half of a batch step: runs steps and resets of an actor's envs, one after the other.

    rows of shared memory ──▶ EnvRow  ─┐                     ┌─▶ row of results, overflow, a ring
                                       ├─▶ HostedEnv.step ───┤
    items of a STEPS frame ─▶ EnvItem ─┘   HostedEnv.reset   └─▶ outcome in a frame

Requests of both carriers run in the same loop.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envactors.arrays.slab import RESET, Slab
from envactors.arrays.specs import ArraySpec, flatten, reader
from envactors.wire import bundle
from envactors.wire.control_page import (
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
from envactors.wire.info_codec import InfoWriter
from envactors.wire.messages import Failure, Fault, Kind, Reset, Step
from envactors.wire.pickling import pack_failure
from envactors.wire.steps import OutcomePacker
from envactors.worker import context
from envactors.worker.host import Fields, Host, HostedEnv

# How long outcomes of a frame that does not stream are kept to be sent with others, in seconds: the process may end in
# the step of a later env, and what the envs before it have done is lost with it then.
_LONGEST_KEPT = 2e-4
# Before Python 3.12 looking up a member of an enum takes as long as a function call.
_RAISED, _RESULT = Fault.RAISED, Fault.RESULT


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

    def close(self) -> None:
        """Forbid further results; wait for one that is being written."""
        self.is_closed = True
        while self.writer not in (None, threading.get_ident()):
            time.sleep(0)  # not for long: writing a result takes about as long as a copy


class StepRunner:
    """Runs the batch steps of one worker.

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
        self._rows = [EnvRow(hosted, slab, infos, autoreset, self._send_overflow) for hosted in self._host.hosted_envs]
        self._stream = False
        self._requested, self._completed, self._ops = slab.requested.data, slab.completed.data, slab.ops.data
        self._seeds = slab.seeds.data if slab.layout.seeded else None
        self._slab = slab

    def run_rows(self, call_id: int) -> None:
        """Run every row that is requested and not completed, for the step of this call id."""
        page = self._page
        page.is_streaming = stream = page.counters[STREAM] != 0
        if stream is not self._stream:
            self._stream = stream
            for row in self._rows:
                row.stamped = stream
        due: list[EnvRow] = []
        requested, completed, ops, seeds = self._requested, self._completed, self._ops, self._seeds
        for row in self._rows:
            index = row.index
            number = requested[index]
            if number != completed[index]:
                row.number, row.resets = number, ops[index] == RESET
                if seeds is not None:
                    row.seed = row.next_seed = seeds[index]
                due.append(row)
        if due:
            self._run(call_id, due, self._announce if stream else None)
        else:
            page.counters[BEGUN] = call_id  # all rows were completed with the previous step
        page.finish_step(call_id)

    def _announce(self, row: EnvRow | EnvItem) -> None:
        """Ring after a result, unless the caller waits for more of them than there are; a failure is always told."""
        self._page.ring_for_result(self._count_all if row.failed else self._count_complete)

    def _count_complete(self) -> int:
        return int(np.count_nonzero(self._slab.requested == self._slab.completed))

    def _count_all(self) -> int:
        return self._slab.layout.envs

    def run_items(
        self, call_id: int, items: Sequence[tuple[int, Step | Reset | Failure]], packer: OutcomePacker, stream: bool
    ) -> None:
        """Run the items of a frame, each with its env's position, and send their outcomes."""
        kept_since = time.monotonic()

        def send(_: EnvRow | EnvItem | None = None) -> None:
            if packer:
                self._send(Kind.OUTCOMES, packer.take_payload())

        def send_if_old(_: EnvRow | EnvItem) -> None:
            nonlocal kept_since
            if (now := time.monotonic()) - kept_since > _LONGEST_KEPT:
                kept_since = now
                send()

        due: list[EnvItem] = []
        for position, item in items:
            hosted = self._host.hosted_envs[position]
            if isinstance(item, Failure):  # it could not be unpickled
                packer.add_failure(position, hosted.check, item)
            else:
                due.append(EnvItem(hosted, item, packer))
        if due:
            self._run(call_id, due, send if stream else send_if_old if packer.pickles else None)
        send()

    def _run(
        self,
        call_id: int,
        due: Sequence[EnvRow] | Sequence[EnvItem],
        after_each: Callable[[EnvRow | EnvItem], None] | None,
    ) -> None:
        page, guard, forks, thread = self._page, self._guard, self._forks, threading.get_ident()
        counters, times, now, record = page.counters, page.times, time.monotonic, page.spans.add
        page.is_timing = timed = counters[TIMED] != 0
        for request in due:
            hosted = request.hosted
            # Inlined from `ControlPage.start_request`: calling it would take twice as long.
            times[SINCE] = now()
            counters[METHOD] = METHOD_RESET if request.resets else METHOD_STEP
            counters[ENV_INDEX] = hosted.position
            counters[BEGUN] = call_id
            transition = failed_with = None
            try:
                if request.resets:
                    transition = hosted.reset(request.seed, request.options, request.root_seed)
                else:
                    transition = hosted.step(request.action(), request.autoreset, request.next_seed)
            except BaseException as error:
                failed_with = error
            if context.forks != forks:
                os._exit(1)  # env code forked, and its child came back here: it must not write a result
            if timed:
                record(times[SINCE], now(), call_id, hosted.position, counters[METHOD])
            if guard is None:
                request.write(transition, failed_with)
            else:
                guard.writer = thread
                try:
                    if guard.is_closed:
                        raise WorkerRetiredError("abandoned by the parent")
                    request.write(transition, failed_with)
                finally:
                    guard.writer = None
            if after_each is not None:
                after_each(request)
        page.is_timing = False

    def _send_overflow(self, index: int, payload: bytes | bytearray) -> None:
        self._send(Kind.OVERFLOW, bundle.pack([(index, payload)]))
        self._page.counters[OVERFLOWS] += 1


class EnvRow:
    """The row of one env in the slab, with the request that is made of it, and the destination of its result.

    Args:
        hosted: The env.
        slab: The slab.
        infos: Encodes infos, object leaves and failures.
        autoreset: Whether an episode that ends is reset within the step.
        send_overflow: Sends what does not fit, by the env's index in the vector.

    Attributes:
        index: The env's index in the vector.
        number: The number of the requested transition.
        resets: Whether it is a reset.
        action: Returns the action of a step; the env may modify it.
        autoreset: Whether a step that ends the episode resets.
        failed: Whether the last result is a failure.
        stamped: Whether to write the time of completion, as results that stream need it.
        seed: The seed of a reset.
        next_seed: The seed of a reset within a step.
    """

    seed: int | None = None
    next_seed: int | None = None
    options: dict[str, Any] | None = None
    root_seed: int | None = None

    def __init__(
        self,
        hosted: HostedEnv,
        slab: Slab,
        infos: InfoWriter,
        autoreset: bool,
        send_overflow: Callable[[int, bytes | bytearray], None],
    ) -> None:
        self.hosted = hosted
        self.index = index = hosted.index
        self.autoreset = autoreset
        self.number, self.resets, self.failed, self.stamped = 0, False, False, False
        self.action = reader(slab.layout.action, slab.actions, index)
        self._encode, self._fail, self._mark_plain = infos.encode, infos.fail, infos.plain_marker(index)
        self._send_overflow = send_overflow
        # Single numbers are written through memoryviews in a third of the time that arrays take.
        self._terminated, self._truncated = slab.terminated.data, slab.truncated.data
        plain = slab.layout.reward == ArraySpec((), np.dtype(np.float64))
        self._rewards: Any = slab.rewards.data if plain else slab.rewards
        self._completed, self._checks = slab.completed.data, slab.checks.data
        self._when: Any = slab.when.data
        self._spec = slab.layout.observation
        # The two rows of the observation, which are written in turn: for each a view per leaf, None for object leaves.
        self._halves = [
            [None if leaf is None else leaf[half, index, ...] for leaf in slab.observations] for half in (0, 1)
        ]
        # The same two rows if the observation is one array, else None.
        self._array_halves: Any = [row for (row,) in self._halves] if isinstance(self._spec, ArraySpec) else None

    def write(self, transition: Fields | None, error: BaseException | None) -> None:
        """Write the result into the row; what does not fit there is sent, so that no later env can lose it."""
        index, number, hosted = self.index, self.number, self.hosted
        half, fault, overflow = number & 1, _RAISED, None
        if transition is not None:
            try:
                obs, self._rewards[index], self._terminated[index], self._truncated[index], info = transition
                object_leaves = None
                if self._array_halves is not None:
                    self._array_halves[half][...] = obs
                else:
                    object_leaves = self._write_leaves(half, obs)
                if hosted.journal:
                    self._checks[half, index] = hosted.check
                if not info and not object_leaves and type(info) is dict:
                    self._mark_plain()
                else:
                    fault = _RESULT
                    overflow = self._encode(index, info, object_leaves or [])
            except BaseException as unfit:
                error = unfit
        self.failed = error is not None
        if error is not None:
            overflow = self._fail(index, pack_failure(error, fault))
        if overflow is not None:
            self._send_overflow(index, overflow)
        if self.stamped:
            self._when[index] = time.monotonic()
        self._completed[index] = number

    def _write_leaves(self, half: int, obs: Any) -> list[Any]:
        """Write an observation of several leaves; return the object leaves."""
        object_leaves = []
        for row, leaf in zip(self._halves[half], flatten(self._spec, obs), strict=True):
            if row is None:
                object_leaves.append(leaf)
            else:
                row[...] = leaf
        return object_leaves


class EnvItem:
    """One item of a STEPS frame, with the same attributes and methods as `EnvRow`.

    Args:
        hosted: The env.
        item: The step or the reset.
        packer: Collects the outcomes of the frame.
    """

    autoreset = failed = False
    seed: int | None = None
    next_seed: int | None = None
    options: dict[str, Any] | None = None
    root_seed: int | None = None

    def __init__(self, hosted: HostedEnv, item: Step | Reset, packer: OutcomePacker) -> None:
        self.hosted, self.resets = hosted, isinstance(item, Reset)
        self._item, self._packer = item, packer
        if isinstance(item, Reset):
            self.seed, self.options, self.root_seed = item.seed, item.options, item.root_seed
        else:
            self.autoreset, self.next_seed = item.autoreset, item.next_seed

    def action(self) -> Any:
        """Return the action of a step."""
        assert isinstance(self._item, Step), "resets have no action"
        return self._item.action

    def write(self, transition: Fields | None, error: BaseException | None) -> None:
        """Add the outcome to the packer; an outcome that cannot be packed fails only this env."""
        position, check, fault = self.hosted.position, self.hosted.check, _RAISED
        if transition is not None:
            try:
                obs, reward, terminated, truncated, info = transition
                transition = obs, reward, bool(terminated), bool(truncated), info
                fault = _RESULT
                reset_within = self.autoreset and (transition[2] or transition[3])
                self._packer.add_transition(position, check, transition, reset_within=reset_within)
            except BaseException as unfit:
                error = unfit
        if error is not None:
            self._packer.add_failure(position, check, pack_failure(error, fault))
