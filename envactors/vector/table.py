"""The table of a vector's envs: for each env its request, the status of the request, and the outcome.

    IDLE ──▶ QUEUED ──▶ POSTED ──▶ DONE or FAILED ──delivered──▶ IDLE
                ▲          │
                └──────────┘

An env whose actor is free skips `QUEUED`. A posted request that must run again, after a crash or an exception of the
env, returns to `QUEUED`. That a row is complete changes no status: the vector delivers it directly, or
`EnvGroup.collect_completed` makes its env `DONE` or `FAILED` first.

Each method changes the following. A blank means that it leaves the column as it is.

    method           status                     request  outcome  row                last result  episode, journal
    set_requests                                set
    begin_seeds                                                                                   root seed
    mark_queued      IDLE, QUEUED, POSTED,                        NOT_POSTED (1)
                     DONE (2) to QUEUED
    write_requests   IDLE, QUEUED to POSTED                       posted                          root seed (3)
    add_overflow                                                  overflow
    miss_deadline                                                 overdue
    begin_process                                                 incarnation
    end_process      POSTED to QUEUED                             not to be run,                  lost
                                                                  not overdue
    accept_row                                                                                    advances
    record_outcome   QUEUED, POSTED, DONE (2)            set
                     to DONE, or FAILED (4)
    deliver_rows     POSTED to IDLE                                                  the row      advances
    set_idle         any to IDLE                removed  removed                     the row (5)
    withdraw         QUEUED to IDLE             removed                                           forgets failures
    record_rollouts
    restore                                                                                       continues
    end_episode                                                                                  ends
    clear            any to IDLE                removed  removed  not overdue                     ends

    (1) If the request is new; the retry of a request keeps the operation that was posted.
    (2) If its result, which is only in the row, turns out to be unreadable.
    (3) For resets with a seed of the user, which `begin_seeds` records.
    (4) If the request has a future, that gets the outcome, and the env is IDLE at once.
    (5) If the env is DONE, and its result is only in the row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from envactors.actor.change import ChangeLock
from envactors.actor.future import Outcome
from envactors.actor.job import Activity
from envactors.mailbox.messages import Attach, Pickled
from envactors.mailbox.pickling import dumps
from envactors.mailbox.slab import BUFFER, NO_AUTORESET, NOT_POSTED, PAYLOAD, RESET, RING, SEED, STREAMED, Slab
from envactors.options import Deadlines
from envactors.replay import PostedRequest
from envactors.vector.episodes import Episodes
from envactors.vector.journals import Journals
from envactors.vector.last_rows import LastRows
from envactors.vector.requests import EnvRequest
from envactors.vector.results import EnvSnapshot
from envactors.vector.rows import Rows
from envactors.vector.selection import Selection
from envactors.vector.waiting import ResultWaiters

IDLE: Final = 0
QUEUED: Final = 1  # the request waits in the queue of the actor
POSTED: Final = 2  # the request is in the row, which may be complete
DONE: Final = 3  # the result is in `EnvTable.outcomes`, or else in the row
FAILED: Final = 4  # the error is in `EnvTable.outcomes`

# The largest seed that fits into a row.
_LARGEST_SEED: Final = (1 << 64) - 1

# Tables for `bytes.translate`: from the operation of a last result to a step that writes to the other buffer, without
# and with streaming.
_NEXT_STEP_OP: Final = [bytes(bit | (BUFFER & ~op) for op in range(256)) for bit in (0, STREAMED)]

# The request of each env without an entry in `EnvTable.requests`.
_BARE_STEP: Final = EnvRequest("step")


class EnvTable:
    """The state of all envs: their requests, and in four parts their rows, episodes, journals, and last results.

    Once the vector is built, only methods of this class and of its parts change it. `EnvGroup`, `EnvRecovery`, restored
    snapshots, and rollouts call those of the parts directly; `EnvGroup` also empties ``journals.saves_due``. The memory
    of the rows has other writers, too: the caller writes actions, workers write results, and a rollout writes the last
    results of its envs at its end.

    Callers hold the lock, except to read facts that they check again under the lock. Between changes this holds:

    - A `QUEUED` env is in a `QueuedRows` job in the queue of its actor.
    - The row of a `POSTED` env was posted to the current process of its actor, with the call id in ``rows.posted_ids``.
    - An `IDLE` env has no entry in ``requests``. Only a `DONE` or `FAILED` env has one in ``outcomes``.
    - The future of a request that was removed from ``requests`` is done.

    Args:
        lock: The lock of all actors.
        rows: The last post of each env, and the result that has come back.
        episodes: The episodes of the envs.
        journals: The journals of the envs.
        deadlines: How long requests may run.

    Attributes:
        lock, rows, episodes, journals: As above.
        slab: The memory of the rows.
        last_rows: The last results of envs.
        attach: The part of the first message that tells a worker where the rows are.
        status: The status of each env.
        requests: The requests of envs, except bare steps.
        outcomes: The outcomes of `DONE` and `FAILED` envs, except results that are in rows.
        version: A number that each change of a status, an outcome, or a deadline, and each restored snapshot increases,
            also if the status stays as it was. A thread that copies results without the lock reads the version under
            the lock, before it copies and after. If it has not changed, the copies are valid.
        waiters: The threads that wait for results.
        rollouts_in_flight: The rollouts in flight, oldest first: each an `envactors.rollout.engine.RolloutInFlight`.
    """

    def __init__(
        self, lock: ChangeLock, rows: Rows, episodes: Episodes, journals: Journals, deadlines: Deadlines
    ) -> None:
        self.lock = lock
        self.rows = rows
        self.slab: Slab = rows.slab
        self.episodes = episodes
        self.journals = journals
        self.last_rows: LastRows = LastRows(rows, episodes)
        self.attach: Attach = Attach(rows.slab.layout, episodes.autoreset.resets_within_step)
        self.status: bytearray = bytearray(rows.slab.layout.envs)
        self.requests: dict[int, EnvRequest] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.version: int = 0
        self.waiters: ResultWaiters = ResultWaiters(rows, self.is_pending)
        self.rollouts_in_flight: list[Any] = []
        self._deadlines = deadlines
        # For each status, the value of ``status`` if all envs have it.
        self._all_have = [bytes([status]) * len(self.status) for status in range(FAILED + 1)]

    # Facts -----------------------------------------------------------------------------------------------

    def are_on_fast_path(self, envs: Selection) -> bool:
        """Return whether these envs run bare steps, and have none of the flags of `Episodes`."""
        flags, requests = self.episodes.flags, self.requests
        if not requests and flags == self.episodes.no_flags:
            return True
        return not any(flags[index] or index in requests for index in envs.ids)

    def are_all(self, status: int) -> bool:
        """Return whether all envs have a status."""
        return self.status == self._all_have[status]

    def has_outcome(self, index: int) -> bool:
        """Return whether an env has an outcome that was not delivered."""
        status = self.status[index]
        return status >= DONE or (status == POSTED and self.rows.is_complete(index))

    def has_failed(self, index: int) -> bool:
        """Return whether an env has an error as its outcome."""
        status, rows = self.status[index], self.rows
        return status == FAILED or (status == POSTED and rows.infos.failed(index) and rows.is_complete(index))

    def has_result_in_row(self, index: int) -> bool:
        """Return whether an env has an undelivered result that is only in its row."""
        return self.status[index] == DONE and index not in self.outcomes

    def is_pending(self, index: int) -> bool:
        """Return whether the request of an env has no outcome yet."""
        status = self.status[index]
        return status == QUEUED or (status == POSTED and not self.rows.is_complete(index))

    def was_posted(self, index: int) -> bool:
        """Return whether the request of an env was posted, perhaps to an earlier process."""
        return self.rows.ops[index] != NOT_POSTED

    def request(self, index: int) -> EnvRequest:
        """Return the request of an env, which is a bare step unless ``requests`` has another."""
        return self.requests.get(index, _BARE_STEP)

    def activity(self, index: int, *, started_at: float = 0.0, method: str | None = None) -> Activity:
        """Return the request of an env, running or not, as an `Activity`, for deadlines and errors."""
        method = method or ("reset" if self.rows.ops[index] & RESET else self.request(index).method)
        call_id = self.rows.posted_ids[index] if self.was_posted(index) else 0
        return Activity(method, index, call_id, started_at, self._deadlines.of(method))

    def posted_request(self, index: int) -> PostedRequest:
        """Return an env's last posted operation in the form that its journal records."""
        op = self.rows.ops[index]
        payload = self.request(index).payload if op & PAYLOAD else None
        seed = self.rows.seeds[index] if op & (SEED | PAYLOAD) else None
        resets_within_step = self.attach.resets_within_step and not op & NO_AUTORESET
        return PostedRequest(op, seed, payload, resets_within_step, self.slab.actions)

    def reports_lost_episode(self, index: int) -> bool:
        """Return whether the request of an env would report the loss of its episode; see `envactors.vector.fates`.

        An env without a request, as in a rollout, counts as one with a bare step.
        """
        return not self.request(index).runs_reset and self.episodes.step_reports_lost_episode(index)

    def is_lost_for_good(self, index: int) -> bool:
        """Return whether the episode of an env was lost with its process, and no replay can bring it back."""
        can_replay = self.journals.is_replayed and self.journals.flushed(index).can_replay
        return self.episodes.is_lost(index) and not can_replay

    def needs_lost_episode(self, index: int) -> bool:
        """Return whether the request of an env continues an episode that no replay can bring back."""
        return self.is_lost_for_good(index) and self.reports_lost_episode(index)

    # Requests --------------------------------------------------------------------------------------------

    def set_requests(self, requests: Mapping[int, EnvRequest]) -> None:
        """Set the requests, except bare steps, of envs that are about to be queued or posted."""
        self.requests.update(requests)

    def begin_seeds(self, index: int) -> None:
        """Restart the episode seeds of an env from the seed of the user, if the request has one."""
        if (seed := self.request(index).seed) is not None:
            self.episodes.set_root_seed(index, seed)

    def mark_queued(self, ids: list[int], *, is_new: bool = False) -> None:
        """Mark envs as queued. Their actor posts them later, for the first time if their requests are new."""
        self.version += 1
        for index in ids:
            if is_new:
                self.rows.ops[index] = NOT_POSTED
            self.status[index] = QUEUED

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
        flags, requests, awaits_autoreset = self.episodes.flags, self.requests, self.episodes.awaits_autoreset
        ops = self.last_rows.ops.translate(_NEXT_STEP_OP[streams])
        if 1 in awaits_autoreset:
            for index in envs.ids:
                ops[index] |= awaits_autoreset[index] * RESET
        if requests or flags != self.episodes.no_flags:
            for index in envs.ids:
                if flags[index] or index in requests:
                    self._start(index)
                    ops[index], payload = self._encode(index, ops[index])
                    if payload is not None:
                        payloads[index] = payload
        self.version += 1
        if envs.is_all:
            self.status[:] = self._all_have[POSTED]
        else:
            for index in envs.ids:
                self.status[index] = POSTED
        self.rows.post(envs, ops, call_id)
        if self.waiters.sleepers:
            self.waiters.ring()  # other threads count complete rows, which are fewer now
        return payloads

    # How `_encode` writes a request. Besides these bits, an operation has `BUFFER` if it writes to the second buffer,
    # `STREAMED` if it streams, and `RING` if it has a future.
    #
    #     request                                bits                      seed                        payload
    #     a step                                 SEED (1)                  the next episode's (2)      the action (3)
    #     a step of an env that is retiring (2)  SEED (1), NO_AUTORESET    the next episode's          the action (3)
    #     a step that is a reset by autoreset    RESET, SEED (1)           `Episodes.seed_of_reset`    (1)
    #     a reset for the user                   RESET, SEED (1)           the user's, or as above     the options, (1)
    #
    # (1) If there is a seed. One that is too large for the row has no bit, and is in the payload of a reset.
    # (2) For a reset within the step. Under the other rules of autoreset, the worker does not use the seed.
    # (3) If it has no place in the row. `PAYLOAD` says that there is a payload.

    def _start(self, index: int) -> None:
        """Restart the seeds of an env whose request has a seed, and have the future of the request count as running."""
        self.begin_seeds(index)
        if (future := self.request(index).future) is not None:
            future.set_running()

    def _encode(self, index: int, op: int) -> tuple[int, bytes | None]:
        """Write the seed of a request that is off the fast path into the row; return the operation and the payload.

        The payload is the part of the request that the row has no place for, pickled; None if there is none.
        """
        request = self.request(index)
        if request.runs_reset:
            op |= RESET
        elif not op & RESET and self.attach.resets_within_step and self.episodes.is_retiring(index):
            op |= NO_AUTORESET  # the next process does the reset
        if request.future is not None:
            op |= RING
        large_seed = seed = self.rows.seeds[index] = self._seed_for(index, op)
        if seed is not None and seed <= _LARGEST_SEED:
            self.slab.seeds[index], op, large_seed = seed, op | SEED, None
        payload = request.payload
        if op & RESET:  # an autoreset does not need the action
            options = Pickled(payload) if request.method == "reset" and payload is not None else None
            payload = None if options is None and large_seed is None else bytes(dumps((large_seed, options)))
        return (op, None) if payload is None else (op | PAYLOAD, payload)

    def _seed_for(self, index: int, op: int) -> int | None:
        """Return the seed of an env's reset, or of the reset within its step; None for none."""
        if not op & RESET:
            return self.episodes.next_seeds[index]
        if (seed := self.request(index).seed) is not None:
            return seed
        return self.episodes.seed_of_reset(index, self.rows.incarnations[index])

    # Results ---------------------------------------------------------------------------------------------

    def add_overflow(self, parts: dict[int, memoryview]) -> None:
        """Keep the parts of results that did not fit into the rows of envs. This may complete the rows."""
        self.rows.overflow.update(parts)
        self.waiters.ring()

    def accept_row(self, index: int) -> None:
        """Record the result in a complete row in the episode and the journal of its env."""
        slab, op = self.slab, self.rows.ops[index]
        if self.journals.is_recorded:
            self.journals.flushed(index).record_row(slab, index, self.posted_request(index))
        if self.rows.lacks_autoreset(index):
            self.episodes.record_end_without_reset(index)
        else:
            self.episodes.record(index, ends=slab.ends_episode(index, op), is_reset=bool(op & RESET))

    def deliver_rows(self, envs: Selection, terminated: Any, truncated: Any, *, have_contents: bool) -> None:
        """Accept the results of envs on the fast path, which the caller has copied, and make the envs idle.

        Args:
            envs: The envs.
            terminated: Whether the episode of each has ended.
            truncated: Whether it was cut off.
            have_contents: Whether any row may have an info or object leaves.
        """
        if self.journals.is_recorded:
            self.journals.record(envs.ids, is_all=envs.is_all)
        self.episodes.record_batch(envs, terminated, truncated)
        self.last_rows.take_rows(envs, terminated, truncated, have_contents=have_contents)
        self.set_idle(envs.ids, is_all=envs.is_all)

    def record_outcome(self, index: int, outcome: Outcome | None) -> None:
        """Record the outcome of an env. If its request has a future, resolve the future and make the env idle.

        Args:
            index: The env.
            outcome: The outcome; None for a result that stays in the row.
        """
        future = self.request(index).future
        self.version += 1
        if outcome is not None:
            self.outcomes[index] = outcome
        if self.status[index] != POSTED or not self.rows.ops[index] & STREAMED:
            self.slab.when[index] = time.monotonic()  # of a row that streams, the worker has recorded it
        self.status[index] = FAILED if outcome is not None and outcome.is_failure else DONE
        if future is not None:
            assert outcome is not None, "a future needs a copy of the row"
            future.set_outcome(outcome)
            self.set_idle([index])
        self.waiters.ring()

    def set_idle(self, ids: Sequence[int], *, is_all: bool = False) -> None:
        """Make envs idle. The caller has taken their outcomes, or drops them.

        1. A result that is only in its row becomes the last one. This reads the status.
        2. The envs become `IDLE`.
        3. Their requests are forgotten. So no thread without the lock sees a `POSTED` env whose request is gone: it
           would take that for a bare step, and deliver its row.
        """
        self.version += 1
        if DONE in self.status:
            for index in filter(self.has_result_in_row, ids):
                self.last_rows.take_row(index)
        if is_all:
            self.status[:] = self._all_have[IDLE]
        else:
            for index in ids:
                self.status[index] = IDLE
        if self.requests or self.outcomes:
            for index in ids:
                self.requests.pop(index, None)
                self.outcomes.pop(index, None)
        if self.waiters.sleepers:
            self.waiters.ring()  # other threads, or the code below a signal handler, may wait for these envs

    # Other changes ---------------------------------------------------------------------------------------

    def withdraw(self, index: int) -> None:
        """Make an env idle whose request was canceled in the queue, so that it is not retried."""
        self.set_idle([index])
        self.journals.flushed(index).forget_crash()
        self.episodes.forget_failed_resets(index)

    def miss_deadline(self, index: int) -> None:
        """Ignore the result of a posted env until its process has ended."""
        self.version += 1
        self.rows.overdue.add(index)

    def begin_process(self, ids: range, incarnation: int) -> None:
        """Record the new process of an actor, whose doorbell waiting threads have to watch."""
        self.rows.begin_process(ids, incarnation)
        self.waiters.on_process_change()

    def end_process(self, ids: range) -> None:
        """Record the end of an actor's process: posted envs are queued, episodes are lost, and no row is to be run.

        Once `Rows.end_process` has run, all rows look complete, so no env is `POSTED` by then.
        """
        for index in ids:
            if self.status[index] == POSTED:
                self.status[index] = QUEUED
            self.episodes.on_process_lost(index)
        self.rows.end_process(ids)
        self.version += 1

    def record_rollouts(self, in_flight: list[Any]) -> None:
        """Record which rollouts are in flight. Waiting threads may count them."""
        self.rollouts_in_flight = in_flight
        self.waiters.ring()

    def restore(self, index: int, snapshot: EnvSnapshot) -> None:
        """Record that a process has restored an idle env from a snapshot."""
        self.version += 1
        self.episodes.restore(index, snapshot)
        if self.journals.is_recorded:
            self.journals.flushed(index).begin_with_state(snapshot.checksum, snapshot.state)

    def end_episode(self, index: int) -> None:
        """Record that an env has to be reset, and that no replay leads to where it is."""
        self.episodes.end_without_result(index)
        self.journals.flushed(index).forget()

    def clear(self, index: int) -> None:
        """Make an env idle after an interrupted change. It needs a reset, which another process will run."""
        self.status[index] = IDLE  # its row may have only a part of a result, which must not become the last one
        self.set_idle([index])
        self.rows.overdue.discard(index)
        self.episodes.on_interrupt(index)
        self.journals.flushed(index).forget()
