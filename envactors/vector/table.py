"""The table of a vector's envs: for each env the status of its request, and the parent's record of its row.

    IDLE ──▶ QUEUED ──▶ POSTED ──▶ DONE or FAILED ──delivered──▶ IDLE
                ▲          │
                └──────────┘

An env whose actor is free skips `QUEUED`. A posted request that must run again, after a crash or an exception of the
env, returns to `QUEUED`.

A posted row is *complete* once the worker has written the call id of the request into it, and has sent the parts of the
result that do not fit there. That changes no status: the vector delivers the row directly, or
`EnvGroup.collect_completed` makes it `DONE` or `FAILED` first.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.actor.activity import Activity
from envactors.actor.actor import Actor
from envactors.actor.change import ChangeLock
from envactors.actor.future import ActorFuture, Outcome
from envactors.mailbox.info_codec import OVERFLOW, Infos
from envactors.mailbox.messages import Attach, Pickled
from envactors.mailbox.pickling import dumps
from envactors.mailbox.slab import BUFFER, NO_AUTORESET, PAYLOAD, RESET, RING, SEED, Slab, slice_of
from envactors.mailbox.step_buffer import StepBuffer
from envactors.options import Deadlines
from envactors.replay import Journal, PostedRequest
from envactors.vector.episodes import Episodes
from envactors.vector.options import Autoreset, OnFailure
from envactors.vector.waiting import ResultWaiters

IDLE: Final = 0
QUEUED: Final = 1  # the request waits in the queue of the actor
POSTED: Final = 2  # the request is in the row, which may be complete
DONE: Final = 3  # the result is in `EnvTable.outcomes`, or else in the row
FAILED: Final = 4  # the failure is in `EnvTable.outcomes`

# The largest seed that fits into a row.
_LARGEST_SEED: Final = (1 << 64) - 1


@dataclasses.dataclass(slots=True, eq=False)
class EnvRequest:
    """The request of an env.

    A plain step needs no `EnvRequest`: its action is in the row, and the vector delivers its result.

    Attributes:
        method: The method that the user called.
        resets: Whether the worker runs a reset, even if the user called ``step``.
        future: The future of the outcome; None if the vector delivers it.
        seed: The user's seed for a reset.
        payload: The pickled action, or the pickled options of a reset; None if the row contains all of the request.
        failure: The failure of an earlier attempt, which the result reports.
        ending: The `RowResult` of the step that ended the episode, if the process is replaced before the autoreset
            that belongs to this step.
    """

    method: Literal["step", "reset"]
    resets: bool = False
    future: ActorFuture | None = None
    seed: int | None = None
    payload: bytes | None = None
    failure: Outcome | None = None
    ending: Any = None  # a `RowResult`, whose module imports this one


# Tables for `bytes.translate`: the buffer of each operation, and the other buffer for each buffer.
_BUFFER_OF_OP: Final = bytes(op & BUFFER for op in range(256))
_OTHER_BUFFER: Final = bytes(buffer ^ BUFFER for buffer in range(256))

# The request of each env without an entry in `EnvTable.requests`.
_PLAIN_STEP: Final = EnvRequest("step")


class Selection(NamedTuple):
    """Some envs of a vector.

    Attributes:
        ids: Their ids, in the user's order.
        at: The same as an index of arrays with one entry per env: a slice of all, an array, or a list.
        is_all: Whether these are all envs in ascending order.
        groups: The `EnvGroup` of each actor and its ids in ascending order. Methods of `EnvTable` do not need them.
        actors: The actors of the groups.
    """

    ids: list[int]
    at: Any
    is_all: bool = False
    groups: Sequence[tuple[Any, list[int]]] = ()
    actors: Sequence[Actor] = ()


class EnvTable:
    """The requests of all envs, and the parent's own record of their rows. Only its methods change that state.

    Callers hold the lock, except to read facts that they check again under the lock. Between changes this holds:

    - A `QUEUED` env is in a `QueuedRows` job in the queue of its actor.
    - The row of a `POSTED` env was posted to the current process of its actor, with the call id in ``call_ids``.
    - An `IDLE` env has no entry in ``requests``. Only a `DONE` or `FAILED` env has one in ``outcomes``.
    - The future of a request that was removed from ``requests`` is done.

    Args:
        lock: The lock of all actors.
        slab: The rows.
        infos: Reads the parts of results that have no fixed size.
        episodes: The episodes of the envs.
        deadlines: How long requests may run.

    Attributes:
        attach: The part of the first message that tells a worker where the rows are.
        autoreset, on_failure: As of the episodes.
        keeps_journals: Whether steps and resets are recorded, for replays or for crash bundles.
        replays: Whether lost episodes are brought back by replay.
        status: The status of each env.
        version: Grows with each transition. A thread that copies results without the lock reads the version under the
            lock, before and after. If it has not changed, the copies are valid.
        call_ids: int64, shape (n,): the call id of each env's last post. Workers cannot overwrite it.
        call_id_of: The same memory; single values are read in a third of the time.
        completed_of: The call ids that workers have written into the rows: the memory of ``slab.completed``.
        ops: uint8, shape (n,): each env's last posted operation, in the bits of `envactors.mailbox.slab`.
        op_of: The same memory, which Python writes and translates faster.
        last_op_of: Each env's previous operation. Its result is the last one until the operation in ``ops`` has one.
        seeds: The seed of each env's last posted operation, if its bits say that it has one.
        buffer_index: uint8, shape (n,): the buffer with each env's last complete observation.
        buffer_of: The same memory.
        incarnations: int64, shape (n,): the current process of each env.
        posted_in: int64, shape (n,): the process that each env was last posted to.
        streams: Whether the last posted step or reset of each env streams; see `STREAM` of
            `envactors.mailbox.control_page`.
        requests: The requests of envs, except plain steps.
        outcomes: The outcomes of `DONE` and `FAILED` envs, except results that are in rows.
        outcome_at: When the outcome of each `DONE` or `FAILED` env came (`time.monotonic`).
        overflow: The parts of results that did not fit into the rows of envs.
        overdue: The envs that missed a deadline. Their results are ignored until their process has ended.
        last_contents: The info and the object leaves of each env's last result, pickled; None if there are none. They
            are kept only where they may have to be returned again; see `RowReader.keeps_contents`.
        steps: The steps that are not in the journals yet.
        saves_due: The envs whose journals are long enough to be replaced by a saved state.
        waiters: The threads that wait for results.
        rollouts: Number of rollouts in flight.
    """

    def __init__(self, lock: ChangeLock, slab: Slab, infos: Infos, episodes: Episodes, deadlines: Deadlines) -> None:
        count = slab.layout.envs
        self.lock = lock
        self.slab = slab
        self.infos = infos
        self.episodes = episodes
        self.autoreset: Autoreset = episodes.autoreset
        self.attach: Attach = Attach(slab.layout, episodes.autoreset == "same_step")
        self.on_failure: OnFailure = episodes.on_failure
        self.replays: bool = episodes.on_failure == "replay"
        self.keeps_journals: bool = self.replays
        self.status: bytearray = bytearray(count)
        self.version: int = 0
        self.call_ids: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.op_of: bytearray = bytearray(count)
        self.ops: npt.NDArray[np.uint8] = np.frombuffer(self.op_of, np.uint8)
        self.last_op_of: bytearray = bytearray(count)
        self.seeds: list[int | None] = [None] * count
        self.buffer_of: bytearray = bytearray(count)
        self.buffer_index: npt.NDArray[np.uint8] = np.frombuffer(self.buffer_of, np.uint8)
        self.incarnations: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.posted_in: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.streams: bytearray = bytearray(count)
        self.requests: dict[int, EnvRequest] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.outcome_at: dict[int, float] = {}
        self.overflow: dict[int, memoryview] = {}
        self.overdue: set[int] = set()
        self.last_contents: list[bytes | None] = [None] * count
        self.steps: StepBuffer[Journal] = StepBuffer(slab, self.ops)
        self.saves_due: set[int] = set()
        self.waiters: ResultWaiters = ResultWaiters(slab, self.streams)
        self.rollouts: int = 0
        self.call_id_of: memoryview[int] = self.call_ids.data
        self.completed_of: memoryview[int] = slab.completed.data
        self._deadlines = deadlines
        # The envs whose requests were not posted yet: their entries in ``call_ids`` belong to earlier requests.
        self._unposted: set[int] = set()
        # Columns in which all envs have the same value: one for each status. The first two also serve as booleans.
        self._uniform_columns = [bytes([value]) * count for value in range(FAILED + 1)]
        self._incarnation_of: memoryview[int] = self.incarnations.data
        self._posted_in_of: memoryview[int] = self.posted_in.data
        self._slab_ops: memoryview[int] = slab.ops.data
        self._slab_posted: memoryview[int] = slab.posted.data

    def add_journals(self, ids: range, max_journal: int, save_every: int | None) -> None:
        """Add the journals of an actor's envs. See `Journal` for the other arguments."""
        for position, index in enumerate(ids):
            on_save_due = functools.partial(self.saves_due.add, index)
            self.steps.journals.append(Journal(position, max_journal, save_every, on_save_due))
        if save_every is not None:
            self.steps.size = 1

    @property
    def journals(self) -> list[Journal]:
        """The journal of each env."""
        return self.steps.move_to_journals()

    # Facts -----------------------------------------------------------------------------------------------

    @property
    def are_all_plain(self) -> bool:
        """Whether all envs run plain steps: no env has a request of another kind, or a flag of `Episodes`."""
        return not self.requests and not self.episodes.has_flags

    def are_plain(self, envs: Selection) -> bool:
        """Return whether these envs run plain steps; see `are_all_plain`."""
        flags, requests = self.episodes.flags, self.requests
        if not requests and not self.episodes.has_flags:
            return True
        return not any(flags[index] or index in requests for index in envs.ids)

    def are_all(self, status: int) -> bool:
        """Return whether all envs have a status."""
        return self.status == self._uniform_columns[status]

    def is_complete(self, index: int) -> bool:
        """Return whether the whole result of a posted env has come, and before the deadline."""
        if self.completed_of[index] != self.call_id_of[index] or index in self.overdue:
            return False
        return self.infos.encodings[index] < OVERFLOW or index in self.overflow

    def has_outcome(self, index: int) -> bool:
        """Return whether an env has an outcome that was not delivered."""
        status = self.status[index]
        return status >= DONE or (status == POSTED and self.is_complete(index))

    def has_failed(self, index: int) -> bool:
        """Return whether an env has a failure as its outcome."""
        status = self.status[index]
        return status == FAILED or (status == POSTED and self.infos.failed(index) and self.is_complete(index))

    def lacks_outcome(self, index: int) -> bool:
        """Return whether the request of an env has no outcome yet."""
        status = self.status[index]
        return status == QUEUED or (status == POSTED and not self.is_complete(index))

    def request_of(self, index: int) -> EnvRequest:
        """Return the request of an env, which is a plain step unless ``requests`` has another."""
        return self.requests.get(index, _PLAIN_STEP)

    def future_of(self, index: int) -> ActorFuture | None:
        """Return the future of an env's request; None if the vector delivers the outcome."""
        return self.requests.get(index, _PLAIN_STEP).future

    def activity_of(self, index: int, *, started: float = 0.0, method: str | None = None) -> Activity:
        """Return the request of an env, for deadlines and errors."""
        if method is None:
            # Until a queued env is posted, its row has the operation of an earlier request.
            is_posted_reset = self.status[index] != QUEUED and self.op_of[index] & RESET
            is_reset = is_posted_reset or self.request_of(index).method == "reset"
            method = "reset" if is_reset else "step"
        call_id = 0 if index in self._unposted else self.call_id_of[index]
        return Activity(method, index, call_id, started, self._deadlines.of(method))

    def starts(self, at: Any) -> Any:
        """Return whether the last observations of envs are the first of their episodes; for ``at`` see `Selection`."""
        were_reset = self.ops[at] & RESET != 0
        have_ended = self.slab.terminated[at] | self.slab.truncated[at]
        return were_reset | have_ended if self.autoreset == "same_step" else were_reset

    def posted_buffers(self) -> bytearray:
        """Return the buffer that the observation of each env's last posted operation is in."""
        return self.op_of.translate(_BUFFER_OF_OP)

    def posted_request(self, index: int) -> PostedRequest:
        """Return an env's last posted operation in the form that its journal records."""
        op = self.op_of[index]
        payload = self.request_of(index).payload if op & PAYLOAD else None
        seed = self.seeds[index] if op & (SEED | PAYLOAD) else None
        autoreset = self.autoreset == "same_step" and not op & NO_AUTORESET
        return PostedRequest(op, seed, payload, autoreset)

    def needs_episode(self, index: int) -> bool:
        """Return whether the request of an env cannot run without the episode that was lost with its process."""
        request = self.request_of(index)
        if request.method == "reset" or request.failure is not None or request.ending is not None:
            return False
        return self.episodes.step_needs_episode(index)

    # Requests and outcomes -------------------------------------------------------------------------------

    def set_requests(self, requests: Mapping[int, EnvRequest]) -> None:
        """Set the requests, except plain steps, of envs that are about to be queued or posted."""
        self.requests.update(requests)
        for index, request in requests.items():
            if request.seed is not None:
                self.episodes.set_root_seed(index, request.seed)

    def queue(self, ids: list[int], *, is_new: bool = False) -> None:
        """Mark envs as queued. Their actor posts them later, for the first time if their requests are new."""
        self.version += 1
        if is_new:
            self._unposted.update(ids)
        for index in ids:
            self.status[index] = QUEUED
            self.streams[index] = True

    def post(self, envs: Selection, call_id: int, streams: bool) -> dict[int, bytes]:
        """Write the requests of envs into their rows. The caller has written the actions.

        Args:
            envs: The envs.
            call_id: The call id of the requests.
            streams: Whether they stream.

        Returns:
            The payloads that do not fit into rows, by env.
        """
        payloads: dict[int, bytes] = {}
        ops = self.buffer_of.translate(_OTHER_BUFFER)
        resets_next_of = self.episodes.resets_next_of
        if 1 in resets_next_of:
            for index in envs.ids:
                ops[index] |= resets_next_of[index] * RESET
        if not self.are_all_plain:
            for index in envs.ids:
                if self.episodes.flags[index] or index in self.requests:
                    ops[index], payload = self._encode(index, ops[index])
                    if payload is not None:
                        payloads[index] = payload
        if self.overflow:
            for index in envs.ids:
                self.overflow.pop(index, None)
        if self._unposted:
            self._unposted.difference_update(envs.ids)
        self.version += 1
        # ``slab.posted`` is written last: a worker that is running other rows may run these as soon as it is.
        if envs.is_all:
            self.last_op_of[:] = self.op_of
            self.op_of[:] = self._slab_ops[:] = ops
            self.posted_in[:] = self.incarnations
            self.call_ids.fill(call_id)
            self.status[:] = self._uniform_columns[POSTED]
            self.streams[:] = self._uniform_columns[streams]
            self.slab.posted[envs.at] = call_id
        else:
            for index in envs.ids:
                self.last_op_of[index] = self.op_of[index]
                self.op_of[index] = self._slab_ops[index] = ops[index]
                self._posted_in_of[index] = self._incarnation_of[index]
                self.call_id_of[index] = call_id
                self.status[index] = POSTED
                self.streams[index] = streams
                self._slab_posted[index] = call_id
        if self.waiters.sleepers:
            self.waiters.ring()  # other threads count complete rows, which are fewer now
        return payloads

    def record_outcome(self, index: int, outcome: Outcome | None, when: float | None = None) -> None:
        """Record the outcome of an env. If its request has a future, resolve the future and make the env idle.

        Args:
            index: The env.
            outcome: The outcome; None for a result that stays in the row.
            when: The time at which it came (`time.monotonic`); None for now.
        """
        future = self.future_of(index)
        self.version += 1
        self.status[index] = FAILED if outcome is not None and outcome.is_failure else DONE
        self.outcome_at[index] = time.monotonic() if when is None else when
        if outcome is not None:
            self.outcomes[index] = outcome
        if future is not None:
            assert outcome is not None, "a future needs a copy of the row"
            future.set_outcome(outcome)
            self.deliver_ids([index])
        self.waiters.ring()

    def deliver(self, envs: Selection, buffers: bytearray | None = None) -> None:
        """Make envs idle. The caller has taken their outcomes, or drops them.

        Args:
            envs: The envs.
            buffers: The buffers that `posted_buffers` has returned, if the results were taken directly from the rows.
        """
        if not envs.is_all:
            if buffers is not None:
                for index in envs.ids:
                    self.buffer_of[index] = buffers[index]
            self.deliver_ids(envs.ids)
            return
        if buffers is not None:
            self.buffer_of[:] = buffers
        self.version += 1
        self.status[:] = self._uniform_columns[IDLE]
        if self.requests or self.outcome_at:
            self.requests.clear()
            self.outcomes.clear()
            self.outcome_at.clear()
        if self.waiters.sleepers:
            self.waiters.ring()  # other threads, or the code below a signal handler, may wait for these envs

    def deliver_ids(self, ids: Sequence[int]) -> None:
        """Make some envs idle; see `deliver`."""
        self.version += 1
        for index in ids:
            self.status[index] = IDLE
        if self.requests or self.outcome_at:
            for index in ids:
                self.requests.pop(index, None)
                self.outcomes.pop(index, None)
                self.outcome_at.pop(index, None)
        if self.waiters.sleepers:
            self.waiters.ring()

    # Other changes ---------------------------------------------------------------------------------------

    def add_overflow(self, parts: dict[int, memoryview]) -> None:
        """Keep the parts of results that did not fit into the rows of envs. This may complete the rows."""
        self.overflow.update(parts)
        self.waiters.ring()

    def swap_buffers(self, index: int) -> None:
        """Make the other observation of an env its last one: a result is complete, or turns out to be unreadable."""
        self.buffer_of[index] ^= BUFFER

    def undo_post(self, index: int) -> None:
        """Record that a posted request has left no observation, and the episode continues from the last one."""
        self.op_of[index] = self.last_op_of[index]

    def repeat_observation(self, index: int) -> None:
        """Record that the last observation is returned once more, as that of a step. Then it begins no episode."""
        self.op_of[index] = self.buffer_of[index]

    def set_last_content(self, index: int, content: bytes | memoryview | None) -> None:
        """Keep the pickled info and object leaves of an env's last result; see ``last_contents``."""
        self.last_contents[index] = None if content is None else bytes(content)

    def take_saves_due(self, ids: range) -> list[int]:
        """Remove the envs of an actor from ``saves_due``; return them in ascending order."""
        due = sorted(self.saves_due.intersection(ids))
        self.saves_due.difference_update(due)
        return due

    def miss_deadline(self, index: int) -> None:
        """Ignore the result of a posted env until its process has ended."""
        self.version += 1
        self.overdue.add(index)

    def begin_process(self, ids: range, incarnation: int) -> None:
        """Record the new process of an actor, whose doorbell waiting threads have to watch."""
        self.incarnations[slice_of(ids)] = incarnation
        self.waiters.on_process_change()

    def end_process(self, ids: range) -> None:
        """Mark the posted envs of an actor, whose process has ended, as queued."""
        for index in ids:
            if self.status[index] == POSTED:
                self.status[index] = QUEUED
            self.overdue.discard(index)
            self.episodes.on_process_lost(index)
        # A worker runs all rows that are posted and not completed. The next one must find none.
        mine = slice_of(ids)
        self.slab.posted[mine] = self.slab.completed[mine] = self.call_ids[mine]
        self.version += 1

    def begin_rollout(self, ids: range, call_id: int) -> None:
        """Record that the current process of an actor begins or continues a rollout, and that it has no rows to run."""
        mine = slice_of(ids)
        self.posted_in[mine] = self.incarnations[mine]
        self.call_ids[mine] = self.slab.posted[mine] = self.slab.completed[mine] = call_id

    def end_rollout(self, ids: list[int], starts: npt.NDArray[np.bool_]) -> None:
        """Record whether the last observations of a rollout are the first of their episodes."""
        self.ops[ids] = self.buffer_index[ids] | starts * np.uint8(RESET)

    def record_rollouts(self, count: int) -> None:
        """Record how many rollouts are in flight, which waiting threads may count."""
        self.rollouts = count
        if self.waiters.sleepers:
            self.waiters.ring()

    def restore(self, index: int, incarnation: int, *, starts: bool) -> None:
        """Record that a process has restored an idle env from a snapshot.

        Args:
            index: The env.
            incarnation: The process.
            starts: Whether the last observation is the first of an episode.
        """
        self.version += 1
        self.posted_in[index] = incarnation
        self.op_of[index] = self.buffer_of[index] | (RESET if starts else 0)

    def clear(self, index: int) -> None:
        """Make an env idle, whatever its state. It needs a reset, which another process will run."""
        self.overdue.discard(index)
        self.deliver_ids([index])
        self.episodes.end_without_result(index)
        self.episodes.on_process_lost(index)
        self.journals[index].forget()

    def _encode(self, index: int, op: int) -> tuple[int, bytes | None]:
        """Encode a request other than a plain step, and set its future running; return the operation and payload."""
        request = self.request_of(index)
        episodes = self.episodes
        if request.resets:
            op |= RESET
        if request.future is not None:
            op |= RING
            request.future.set_running()
        payload = request.payload if request.method == "reset" or not op & RESET else None  # an autoreset has no action
        if not op & RESET:
            seed = episodes.next_seeds[index]  # for a reset within the step
            if self.autoreset == "same_step" and episodes.ends_with_episode(index):
                op |= NO_AUTORESET  # the next process does the reset
        elif request.seed is not None:
            seed = request.seed
        else:
            seed = episodes.seed_of_reset(index, int(self.incarnations[index]))
        self.seeds[index] = seed
        large_seed = seed if seed is not None and seed > _LARGEST_SEED else None
        if seed is not None and large_seed is None:
            self.slab.seeds[index] = seed
            op |= SEED
        if op & RESET and (payload is not None or large_seed is not None):
            options = None if payload is None else Pickled(payload)
            payload = bytes(dumps((large_seed, options)))
        return (op, None) if payload is None else (op | PAYLOAD, payload)
