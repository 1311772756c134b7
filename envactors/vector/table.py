"""The table of a vector's envs: for each env the status of its request, and the parent's record of its row.

    IDLE ──▶ QUEUED ──▶ POSTED ──▶ DONE or FAILED ──delivered──▶ IDLE
                ▲          │
                └──────────┘

An env whose actor is free skips `QUEUED`. A posted request that must run again, after a crash or an exception of the
env, returns to `QUEUED`.

A posted row is *written* once the worker has put the call id of the request into it. It is *complete* once the parts of
the result that do not fit there have come, too, unless the env has missed a deadline. Neither changes the status: the
vector delivers a complete row directly, or `EnvGroup.collect_completed` makes it `DONE` or `FAILED` first.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envactors.actor.activity import Activity
from envactors.actor.change import ChangeLock
from envactors.actor.future import Outcome
from envactors.mailbox.info_codec import INLINE_INFO, OVERFLOW, PLAIN, Infos
from envactors.mailbox.messages import Attach, Pickled
from envactors.mailbox.pickling import dumps
from envactors.mailbox.slab import BUFFER, NO_AUTORESET, PAYLOAD, RESET, RING, SEED, WHEN, Slab, slice_of
from envactors.mailbox.step_buffer import StepBuffer
from envactors.options import Deadlines
from envactors.replay import Journal, PostedRequest
from envactors.vector.episodes import EPISODE_LOST, Episodes
from envactors.vector.last_rows import LastRows
from envactors.vector.requests import EnvRequest
from envactors.vector.results import EnvSnapshot
from envactors.vector.selection import Selection
from envactors.vector.waiting import ResultWaiters

IDLE: Final = 0
QUEUED: Final = 1  # the request waits in the queue of the actor
POSTED: Final = 2  # the request is in the row, which may be complete
DONE: Final = 3  # the result is in `EnvTable.outcomes`, or else in the row
FAILED: Final = 4  # the error is in `EnvTable.outcomes`

# The largest seed that fits into a row.
_LARGEST_SEED: Final = (1 << 64) - 1


# Tables for `bytes.translate`: a step that writes to the other buffer than an operation, without and with streaming.
_STEPS: Final = [bytes((op & BUFFER) ^ BUFFER | when for op in range(256)) for when in (0, WHEN)]

# The request of each env without an entry in `EnvTable.requests`.
_BARE_STEP: Final = EnvRequest("step")


class EnvTable:
    """The state of all envs: their requests and rows, and in three parts their episodes, journals, and last results.

    Once the vector is built, only methods change it: those of this class, which change the parts, too, and those of the
    parts. `EnvGroup`, `EnvRecovery`, restored snapshots, and rollouts call the latter directly. The memory of the rows
    has other writers, too: the caller writes actions, workers write results, and a rollout writes the last results of
    its envs at its end.

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
        lock, slab, infos, episodes: As above.
        attach: The part of the first message that tells a worker where the rows are.
        uses_replay: Whether lost episodes are brought back by replay.
        keeps_journals: Whether steps and resets are recorded, for replays or for crash bundles.
        status: The status of each env.
        version: Grows as envs are queued, posted, restored, or made idle, as outcomes are recorded, as deadlines are
            missed, and as processes end. A thread that copies results without the lock reads the version under the
            lock, before and after. If it has not changed, the copies are valid.
        call_ids: The call id of each env's last post or rollout. Workers cannot overwrite it.
        completed: The call id of the last result in each row, which is the worker's to write while the row is posted:
            the memory of ``slab.completed``.
        ops: The operation of each env's request as it was posted last, in the bits of `envactors.mailbox.slab`; 0 while
            a new one is queued.
        unposted: The envs with a new request that was queued and not posted yet; some may be idle again.
        last_rows: The last results of envs.
        incarnations: The current process of each env.
        posted_in: The process that each env was last posted to.
        posted_in_array: The same as an array: int64, shape (n,).
        streams: Whether the last step or reset of each env streams, as it does when it was queued; see `STREAM` of
            `envactors.mailbox.control_page`.
        requests: The requests of envs, except bare steps.
        outcomes: The outcomes of `DONE` and `FAILED` envs, except results that are in rows.
        outcome_at: When the outcome of each `DONE` or `FAILED` env came (`time.monotonic`).
        overflow: The parts of results that did not fit into the rows of envs.
        overdue: The envs that missed a deadline. Their results are ignored until their process has ended.
        saves_due: The envs whose journals are long enough to be replaced by a saved state.
        waiters: The threads that wait for results.
        rollouts_in_flight: Number of rollouts in flight.
    """

    def __init__(self, lock: ChangeLock, slab: Slab, infos: Infos, episodes: Episodes, deadlines: Deadlines) -> None:
        count = slab.layout.envs
        self.lock = lock
        self.slab = slab
        self.infos = infos
        self.episodes = episodes
        self.attach: Attach = Attach(slab.layout, episodes.autoreset.resets_within_step)
        self.uses_replay: bool = episodes.on_failure == "replay"
        self.keeps_journals: bool = self.uses_replay
        self.status: bytearray = bytearray(count)
        self.version: int = 0
        self.ops: bytearray = bytearray(count)
        self.unposted: set[int] = set()
        self.streams: bytearray = bytearray(count)
        self.requests: dict[int, EnvRequest] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.outcome_at: dict[int, float] = {}
        self.overflow: dict[int, memoryview] = {}
        self.overdue: set[int] = set()
        self.saves_due: set[int] = set()
        # Arrays are faster for all envs, and their memory as plain integers for one.
        self.posted_in_array: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self._call_id_array, self._incarnation_array = np.zeros((2, count), np.int64)
        self.posted_in: memoryview[int] = self.posted_in_array.data
        self.call_ids: memoryview[int] = self._call_id_array.data
        self.incarnations: memoryview[int] = self._incarnation_array.data
        self.completed: memoryview[int] = slab.completed.data
        self._slab_ops: memoryview[int] = slab.ops.data
        self.last_rows: LastRows = LastRows(slab, self.ops, self.posted_in, self.content, episodes)
        self.waiters: ResultWaiters = ResultWaiters(slab, self.streams)
        self.rollouts_in_flight: int = 0
        self._deadlines = deadlines
        # The seed of each env's last posted operation, if its bits say that it has one.
        self._seeds: list[int | None] = [None] * count
        # The journals, and steps that are not in them yet.
        self._steps: StepBuffer[Journal] = StepBuffer(slab, np.frombuffer(self.ops, np.uint8))
        # Columns in which all envs have the same value, for each status and for both values of ``streams``.
        self._status_columns = [bytes([status]) * count for status in range(FAILED + 1)]
        self._streams_columns = [bytes([streams]) * count for streams in (False, True)]

    def add_journals(self, ids: range, max_journal: int, save_every: int | None) -> None:
        """Add the journals of an actor's envs. See `Journal` for the other arguments."""
        for position, index in enumerate(ids):
            on_save_due = functools.partial(self.saves_due.add, index)
            self._steps.journals.append(Journal(position, max_journal, save_every, on_save_due))
        if save_every is not None:
            self._steps.size = 1

    def journal(self, index: int) -> Journal:
        """Return the journal of an env. This moves the buffered steps of all envs into their journals."""
        return self._steps.flush()[index]

    # Facts -----------------------------------------------------------------------------------------------

    def are_on_fast_path(self, envs: Selection) -> bool:
        """Return whether these envs run bare steps, and have none of the flags of `Episodes`."""
        flags, requests = self.episodes.flags, self.requests
        if not requests and flags == self.episodes.no_flags:
            return True
        return not any(flags[index] or index in requests for index in envs.ids)

    def are_all(self, status: int) -> bool:
        """Return whether all envs have a status."""
        return self.status == self._status_columns[status]

    def count_unwritten(self) -> int:
        """Return how many rows are not written, while all envs are posted."""
        return int(np.count_nonzero(self.slab.completed != self._call_id_array))

    def is_complete(self, index: int) -> bool:
        """Return whether the whole result of a posted env has come, and before the deadline."""
        is_in_time = self.completed[index] == self.call_ids[index] and index not in self.overdue
        return is_in_time and (self.infos.encodings[index] < OVERFLOW or index in self.overflow)

    def has_outcome(self, index: int) -> bool:
        """Return whether an env has an outcome that was not delivered."""
        status = self.status[index]
        return status >= DONE or (status == POSTED and self.is_complete(index))

    def has_failed(self, index: int) -> bool:
        """Return whether an env has an error as its outcome."""
        status = self.status[index]
        return status == FAILED or (status == POSTED and self.infos.failed(index) and self.is_complete(index))

    def has_result_in_row(self, index: int) -> bool:
        """Return whether an env has an undelivered result that is only in its row."""
        return self.status[index] == DONE and index not in self.outcomes

    def is_pending(self, index: int) -> bool:
        """Return whether the request of an env has no outcome yet."""
        status = self.status[index]
        return status == QUEUED or (status == POSTED and not self.is_complete(index))

    def lacks_autoreset(self, index: int) -> bool:
        """Return whether the step in a complete row ended its episode, and left the autoreset to the next process."""
        return bool(self.ops[index] & NO_AUTORESET) and self.slab.ends_episode(index, self.ops[index])

    def request(self, index: int) -> EnvRequest:
        """Return the request of an env, which is a bare step unless ``requests`` has another."""
        return self.requests.get(index, _BARE_STEP)

    def activity(self, index: int, *, started_at: float = 0.0, method: str | None = None) -> Activity:
        """Return the request of an env as an `Activity`, for deadlines and errors."""
        method = method or ("reset" if self.ops[index] & RESET else self.request(index).method)
        call_id = 0 if index in self.unposted else self.call_ids[index]
        return Activity(method, index, call_id, started_at, self._deadlines.of(method))

    def posted_request(self, index: int) -> PostedRequest:
        """Return an env's last posted operation in the form that its journal records."""
        op = self.ops[index]
        payload = self.request(index).payload if op & PAYLOAD else None
        seed = self._seeds[index] if op & (SEED | PAYLOAD) else None
        resets_within_step = self.attach.resets_within_step and not op & NO_AUTORESET
        return PostedRequest(op, seed, payload, resets_within_step, self.slab.actions)

    def notices_loss(self, index: int) -> bool:
        """Return whether the request of an env reports that its episode is lost, if it is.

        An env without a request, as in a rollout, counts as one with a bare step.
        """
        return not self.request(index).resets and self.episodes.step_notices_loss(index)

    def is_lost_for_good(self, index: int) -> bool:
        """Return whether the episode of an env was lost with its process, and no replay can bring it back.

        Like `needs_lost_episode`, this moves buffered steps into the journals.
        """
        return self.episodes.state(index) == EPISODE_LOST and not self.journal(index).can_replay

    def needs_lost_episode(self, index: int) -> bool:
        """Return whether the request of an env continues an episode that no replay can bring back."""
        return self.is_lost_for_good(index) and self.notices_loss(index)

    def content(self, index: int) -> bytes | memoryview | None:
        """Return the info and the object leaves in a complete row, pickled; None if there are none."""
        encoding = self.infos.encodings[index]
        if encoding == PLAIN:
            return None
        return bytes(self.slab.inline_info(index)) if encoding == INLINE_INFO else self.overflow[index]

    # Requests --------------------------------------------------------------------------------------------

    def set_requests(self, requests: Mapping[int, EnvRequest]) -> None:
        """Set the requests, except bare steps, of envs that are about to be queued or posted."""
        self.requests.update(requests)

    def begin_seeds(self, index: int) -> None:
        """Have the user's seed for a reset, if the request of an env has one, begin the seeds of its episodes."""
        if (seed := self.request(index).seed) is not None:
            self.episodes.set_root_seed(index, seed)

    def queue(self, ids: list[int], *, is_new: bool = False) -> None:
        """Mark envs as queued. Their actor posts them later, for the first time if their requests are new."""
        self.version += 1
        for index in ids:
            if is_new:
                self.ops[index] = 0
                self.unposted.add(index)
            self.status[index] = QUEUED
            self.streams[index] = True

    def write_requests(self, envs: Selection, call_id: int, streams: bool) -> dict[int, bytes]:
        """Write the requests of envs into their rows. The caller has written the actions.

        Args:
            envs: The envs.
            call_id: The call id of the requests.
            streams: Whether they stream.

        Returns:
            The payloads that do not fit into rows, by env.
        """
        payloads: dict[int, bytes] = {}
        ops = self.last_rows.ops.translate(_STEPS[streams])
        resets_next = self.episodes.resets_next
        if 1 in resets_next:
            for index in envs.ids:
                ops[index] |= resets_next[index] * RESET
        if not self.are_on_fast_path(envs):
            for index in envs.ids:
                if self.episodes.flags[index] or index in self.requests:
                    ops[index], payload = self._encode(index, ops[index])
                    if payload is not None:
                        payloads[index] = payload
        if self.overflow:
            for index in envs.ids:
                self.overflow.pop(index, None)
        if self.unposted:
            self.unposted.difference_update(envs.ids)
        self.version += 1
        # ``slab.posted`` is written last: a worker that is running other rows may run these as soon as it is.
        if envs.is_all:
            self.ops[:] = self._slab_ops[:] = ops
            self.posted_in[:] = self.incarnations
            self._call_id_array.fill(call_id)
            self.status[:] = self._status_columns[POSTED]
            self.streams[:] = self._streams_columns[streams]
            self.slab.posted.fill(call_id)
        else:
            for index in envs.ids:
                self.ops[index] = self._slab_ops[index] = ops[index]
                self.posted_in[index] = self.incarnations[index]
                self.call_ids[index] = call_id
                self.status[index] = POSTED
                self.streams[index] = streams
                self.slab.posted[index] = call_id
        if self.waiters.sleepers:
            self.waiters.ring()  # other threads count complete rows, which are fewer now
        return payloads

    def _encode(self, index: int, op: int) -> tuple[int, bytes | None]:
        """Encode a request other than a bare step; it cannot be canceled any more. Return the operation and payload."""
        request, episodes = self.request(index), self.episodes
        if request.resets:
            op |= RESET
        if request.future is not None:
            op |= RING
            request.future.set_running()
        payload = request.payload if request.method == "reset" or not op & RESET else None  # an autoreset has no action
        if not op & RESET:
            seed = episodes.next_seeds[index]  # for a reset within the step
            if self.attach.resets_within_step and episodes.is_retiring(index):
                op |= NO_AUTORESET  # the next process does the reset
        elif request.seed is not None:
            seed = request.seed
            self.begin_seeds(index)
        else:
            seed = episodes.seed_of_reset(index, self.incarnations[index])
        self._seeds[index] = seed
        large_seed = seed if seed is not None and seed > _LARGEST_SEED else None
        if seed is not None and large_seed is None:
            self.slab.seeds[index] = seed
            op |= SEED
        if op & RESET and (payload is not None or large_seed is not None):
            options = None if payload is None else Pickled(payload)
            payload = bytes(dumps((large_seed, options)))
        return (op, None) if payload is None else (op | PAYLOAD, payload)

    # Results ---------------------------------------------------------------------------------------------

    def add_overflow(self, parts: dict[int, memoryview]) -> None:
        """Keep the parts of results that did not fit into the rows of envs. This may complete the rows."""
        self.overflow.update(parts)
        self.waiters.ring()

    def accept_row(self, index: int) -> None:
        """Record the result in a complete row in the episode and the journal of its env."""
        slab, op = self.slab, self.ops[index]
        if self.keeps_journals:
            self.journal(index).record_row(slab, index, self.posted_request(index))
        if self.lacks_autoreset(index):
            self.episodes.record_end_without_reset(index)
        else:
            self.episodes.record(index, ends=slab.ends_episode(index, op), is_reset=bool(op & RESET))

    def deliver_rows(self, envs: Selection, terminated: Any, truncated: Any) -> None:
        """Accept the results of envs on the fast path, which the caller has copied, and make the envs idle.

        Args:
            envs: The envs.
            terminated: Whether the episode of each has ended.
            truncated: Whether it was cut off.
        """
        if self.keeps_journals:
            self._steps.record(envs.ids, is_all=envs.is_all)
        self.episodes.record_batch(envs, terminated, truncated)
        self.last_rows.keep_all(envs, terminated, truncated, have_contents=not self.infos.all_plain())
        self.set_idle(envs.ids, is_all=envs.is_all)

    def record_outcome(self, index: int, outcome: Outcome | None, when: float | None = None) -> None:
        """Record the outcome of an env. If its request has a future, resolve the future and make the env idle.

        Args:
            index: The env.
            outcome: The outcome; None for a result that stays in the row.
            when: The time at which it came (`time.monotonic`); None for now.
        """
        future = self.request(index).future
        self.version += 1
        self.status[index] = FAILED if outcome is not None and outcome.is_failure else DONE
        self.outcome_at[index] = time.monotonic() if when is None else when
        if outcome is not None:
            self.outcomes[index] = outcome
        if future is not None:
            assert outcome is not None, "a future needs a copy of the row"
            future.set_outcome(outcome)
            self.set_idle([index])
        self.waiters.ring()

    def set_idle(self, ids: Sequence[int], *, is_all: bool = False) -> None:
        """Make envs idle. The caller has taken their outcomes, or drops them."""
        self.version += 1
        for index in ids if self.outcome_at else ():
            if self.has_result_in_row(index):
                self.last_rows.keep(index)
        # The status first: to a reader without the lock, a complete row without a request is that of a bare step.
        if is_all:
            self.status[:] = self._status_columns[IDLE]
        else:
            for index in ids:
                self.status[index] = IDLE
        if self.requests or self.outcome_at:
            for index in ids:
                self.requests.pop(index, None)
                self.outcomes.pop(index, None)
                self.outcome_at.pop(index, None)
        if self.waiters.sleepers:
            self.waiters.ring()  # other threads, or the code below a signal handler, may wait for these envs

    # Other changes ---------------------------------------------------------------------------------------

    def pop_saves_due(self, ids: range) -> list[int]:
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
        self._incarnation_array[slice_of(ids)] = incarnation
        self.waiters.on_process_change()

    def end_process(self, ids: range) -> None:
        """Record the end of an actor's process: posted envs are queued, episodes are lost, and no row is to be run."""
        for index in ids:
            if self.status[index] == POSTED:
                self.status[index] = QUEUED
            self.overdue.discard(index)
            self.episodes.on_process_lost(index)
        # A worker runs all rows that are posted and not completed. The next one must find none.
        mine = slice_of(ids)
        self.slab.posted[mine] = self.slab.completed[mine] = self._call_id_array[mine]
        self.version += 1

    def begin_rollout(self, ids: range, call_id: int) -> None:
        """Record that the current process of an actor begins or continues a rollout, and that it has no rows to run."""
        mine = slice_of(ids)
        self.posted_in_array[mine] = self._incarnation_array[mine]
        self._call_id_array[mine] = self.slab.posted[mine] = self.slab.completed[mine] = call_id

    def record_rollouts(self, count: int) -> None:
        """Record how many rollouts are in flight, which waiting threads may count."""
        self.rollouts_in_flight = count
        self.waiters.ring()

    def restore(self, index: int, snapshot: EnvSnapshot) -> None:
        """Record that a process has restored an idle env from a snapshot."""
        self.version += 1
        self.episodes.restore(index, snapshot)
        if self.keeps_journals:
            self.journal(index).begin_with_state(snapshot.checksum, snapshot.state)

    def lose_episode(self, index: int) -> None:
        """Record that an env has to be reset, and that no replay leads to where it is."""
        self.episodes.end_without_result(index)
        self.journal(index).forget()

    def clear(self, index: int) -> None:
        """Make an env idle after an interrupted change. It needs a reset, which another process will run."""
        self.overdue.discard(index)
        self.status[index] = IDLE  # its row may have only a part of a result
        self.set_idle([index])
        self.episodes.on_interrupt(index)
        self.journal(index).forget()
