"""The envs of one actor: queue their requests, collect their results, and follow their process.

An `EnvGroup` is the tenant of its actor: the actor tells it about processes, calls, and exits. It calls

    jobs (`row_jobs`)              to queue requests, and to follow the rows that the worker runs
    `EnvRecovery`                  to have failures decided, requests without results resolved, and envs brought back
    `EnvTable`                     to change the state of the envs

None of these imports this module: jobs reach the group as the tenant of their actor. Every change here happens under
the lock of the vector.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

from envactors.actor import recording
from envactors.actor.actor import Actor
from envactors.actor.actor_process import ActorProcess
from envactors.actor.calls import Call
from envactors.actor.future import ActorFuture, ReadyOutcome
from envactors.actor.job import Activity, ErrorOf, Job, ProcessExit, Renewal
from envactors.actor.tenant import Tenant
from envactors.crashes.inputs import Inputs
from envactors.mailbox import packing
from envactors.mailbox.durations import Histograms
from envactors.mailbox.messages import Attach, Failure, Frame, Kind, Save
from envactors.mailbox.pickling import dumps, load_message
from envactors.vector.env_recovery import EnvRecovery
from envactors.vector.fates import RequestLoss
from envactors.vector.recycling import Recycler
from envactors.vector.requests import EnvRequest, ResetAnswer
from envactors.vector.row_jobs import QueuedRows, RowsJob
from envactors.vector.row_reader import RowReader
from envactors.vector.table import POSTED, QUEUED, EnvTable
from envactors.vector.timing import StepTimes

# How often a request to save a state is retried after a crash, which another request may have caused.
_SAVE_RETRIES = 3


class EnvGroup(Tenant):
    """The envs of one actor, of which it is the tenant.

    Args:
        table: The envs of the vector.
        reader: Reads results out of rows.
        actor: The actor.
        recycler: Decides when to replace its process between two episodes.

    Attributes:
        table, reader, actor, recycler: As above.
        attach: That of the table.
        indices: The indices of the envs of the actor.
        recovery: Handles their requests without results, and brings them back in a new process.
        rows_job: Their rows, as the running job of the actor.
        end_rollout_parts: Ends the rollout parts of the actor that an interrupt has left; does nothing
            before the first call of `set_policy`.
    """

    def __init__(self, table: EnvTable, reader: RowReader, actor: Actor, recycler: Recycler) -> None:
        self.table = table
        self.reader = reader
        self.actor: Actor = actor
        self.recycler = recycler
        self.attach: Attach = table.attach
        self.indices: range = actor.config.indices
        self.recovery: EnvRecovery = EnvRecovery(table, reader, actor)
        self.rows_job: RowsJob = RowsJob(table, actor, self.recovery)
        self.end_rollout_parts: Callable[[ErrorOf], object] = lambda _: None
        self._is_timing = False
        self._times = StepTimes(len(self.indices))

    # Posting ---------------------------------------------------------------------------------------------

    def queue_new(self, ids: list[int]) -> None:
        """Queue envs with new requests, behind a renewal of the process if that is due."""
        self.table.mark_queued(ids, is_new=True)
        self._enqueue_new(ids)

    def _enqueue_new(self, ids: list[int]) -> None:
        if reason := self._renewal_reason(ids):
            self.actor.jobs.enqueue(Renewal(why=reason))
        self.recovery.settle_lost_episodes(ids)
        self.actor.jobs.enqueue(QueuedRows(self.rows_job, ids))

    def must_queue(self, ids: list[int]) -> bool:
        """Return whether envs must not be posted directly: an episode was lost, or a renewal of the process is due."""
        return any(map(self.table.episodes.is_lost, ids)) or bool(self._renewal_reason(ids))

    def _renewal_reason(self, ids: list[int]) -> str:
        """Return why the process must be replaced before these envs run, as at a reset; empty if it stays."""
        if not self.actor.is_usable:
            return ""  # only the user may renew an actor without restarts left
        table, episodes = self.table, self.table.episodes
        reset_ids = [index for index in ids if table.request(index).runs_reset]
        # A process of several envs leaves a draining node at a reset of all of them by the user: that loses no episode.
        reason = self.actor.reason_to_move if reset_ids == [*self.indices] else ""
        return episodes.renewal_reason(ids, reset_ids) or reason

    # Results ---------------------------------------------------------------------------------------------

    def collect_completed(self) -> None:
        """Record the results of complete rows, and recover envs that have raised.

        1. Look at each complete row. A result is accepted. A step that has left its autoreset to the next process
           becomes a request for that reset. The losses of requests that have raised are gathered.
        2. Recover these, and enqueue the resets. Jobs that start meanwhile may call this method again. They find
           nothing to do for these envs, since none of them is `POSTED` any more.
        """
        table, rows = self.table, self.table.rows
        if not self.rows_job.has_posted:
            return
        losses, resets = [], []
        for index in self.indices:
            if table.status[index] == POSTED and rows.is_complete(index):
                if rows.infos.failed(index):
                    self.actor.jobs.record_completed(1)
                    failure = rows.infos.failure(rows.overflow.get(index))
                    losses.append(self.recovery.raised_loss(table.activity(index), failure))
                elif rows.lacks_autoreset(index):
                    self._turn_into_reset(index)
                    resets.append(index)
                else:
                    self._accept(index)
        self.recover(losses)
        if resets:
            self._enqueue_new(resets)
        self.queue_saves()

    def recover(self, losses: Iterable[RequestLoss]) -> None:
        """Record the outcomes of posted or queued requests that have no results; some run again.

        Those are queued ahead of everything except replays.
        """
        again = [loss.activity.index for loss in losses if self.recovery.resolve_or_retry(loss)]
        if again:
            self.table.mark_queued(again)
            self.actor.jobs.enqueue(QueuedRows(self.rows_job, again), first=True)

    def _accept(self, index: int) -> None:
        """Record the result in a complete row."""
        table, reader, request = self.table, self.reader, self.table.request(index)
        self.actor.jobs.record_completed(1)
        table.accept_row(index)
        outcome = None
        if request.future or request.partial_answer:
            row = reader.copy_row(index)
            table.last_rows.take_row(index)
            if request.partial_answer:
                row = request.partial_answer.complete(row)
                table.last_rows.write(index, row, is_first=True)
            outcome = reader.lazy_outcome(self.actor, index, functools.partial(reader.read, row))
        table.record_outcome(index, outcome)

    def _turn_into_reset(self, index: int) -> None:
        """Accept a step that has ended its episode, and make its autoreset the request of the env."""
        table = self.table
        table.accept_row(index)
        answer = ResetAnswer(ended_step=self.reader.copy_row(index))
        table.last_rows.take_row(index)
        table.set_requests({index: EnvRequest("step", table.request(index).future, partial_answer=answer)})
        table.mark_queued([index], is_new=True)

    def queue_saves(self) -> None:
        """Queue requests that save the states of envs, so that replays stay short. Nobody waits for them."""
        saves_due = self.table.journals.saves_due
        due = sorted(saves_due.intersection(self.indices))
        saves_due.difference_update(due)
        for index in due:
            future: ActorFuture[Any] = ActorFuture(self.actor, None)
            save = dumps(tuple(Save(index - self.indices.start)))
            log = functools.partial(self._log_unsaved, index)
            call = Call("snapshot", index, Kind.SAVE, future, retries=_SAVE_RETRIES, payload=save, before_outcome=log)
            self.actor.jobs.enqueue(call)

    def _log_unsaved(self, index: int, frame: Frame) -> None:
        if frame.kind == Kind.FAILED:
            text = load_message(Failure, frame.payload).text
            self.actor.log.write(logging.WARNING, f"the state of env {index} cannot be saved: {text}")

    # The memory ------------------------------------------------------------------

    def check_memory(self, finished: int) -> str:
        """Return an error text if the worker claims to have finished rows that are not complete; else an empty one.

        Args:
            finished: The call id up to which the worker claimed to have finished, before its frames were read.
        """
        table = self.table
        for index in self.indices:
            is_finished = table.status[index] == POSTED and finished >= table.rows.posted_ids[index]
            if is_finished and index not in table.rows.overdue and not table.rows.is_complete(index):
                return "its rows are not complete, and it says that it has finished them"
        return ""

    def on_overflow(self, frame: Frame) -> None:
        """Keep the parts of results that did not fit into their rows."""
        parts = packing.unpack(frame.payload)
        self.table.add_overflow({index: payload for index, payload in parts if index in self.indices})
        if (worker := self.actor.process.worker) is not None and worker.watches_rings:
            self.actor.runtime.loop.call_soon(self.rows_job.on_ring)  # the ring may have come before this frame

    # Times -----------------------------------------------------------------------------------------------

    def begin_timing(self) -> None:
        """Time steps and resets from now on, in this process and in later ones. Call it again if a recording begins."""
        self._is_timing = True
        if (worker := self.actor.process.worker) is not None:
            worker.begin_timing(recording.is_recording())

    def histograms(self) -> Histograms:
        """Return the durations of all steps and resets that were timed."""
        return self._times.total(self.actor.page)

    # The tenant ------------------------------------------------------------------------------------------

    def on_started(self, process: ActorProcess, *, is_renewal: bool) -> list[Job]:
        """Prepare for a new process; return the replays that it runs first."""
        self.recycler.begin_process(self.table.episodes.steps(self.indices.start))
        self.table.begin_process(self.indices, process.incarnation)
        if self._is_timing:
            self.begin_timing()
        return self.recovery.replays(is_renewal=is_renewal)

    def on_call(self, kind: Kind, index: int, payload: bytes | bytearray, frame: Frame) -> None:
        """Record a call in the journal of its env; a saved state begins the journal anew."""
        table, failed = self.table, frame.kind == Kind.FAILED
        if not table.journals.is_recorded:
            return
        if kind != Kind.SAVE:
            table.journals.flushed(index).record_call(kind, bytes(payload), failed=failed)
        elif not failed and table.episodes.has_episode(index) and not table.episodes.is_lost(index):
            load_message(table.journals.flushed(index).begin_with_state, frame.payload)
        self.queue_saves()

    def inputs_of_call(self, index: int, request: tuple[int, bytes]) -> Inputs:
        """Return a call of an env with the requests before it."""
        return self.recovery.message_inputs(index, request)

    def handle_exit(self, process_exit: ProcessExit) -> None:
        """Continue or fail the requests of an ended process, and end its episodes.

        1. Record the process: how long its steps took, and whether it has crashed in a replay. Whether envs can be
           replayed, which 3 and 4 ask, depends on the latter.
        2. End it in the table: posted envs are queued, and their episodes are lost.
        3. Give the requests that it had not completed an outcome, or another try. The queued requests are now those
           that were queued before the exit, and those that run again.
        4. Settle those of them which need an episode that no replay brings back. If no process follows, `JobQueue`
           fails all of them.
        5. Wake the threads that wait for results.
        """
        self._times.add(self.actor.page)
        self.recovery.record_crash_in_replay(process_exit)
        self.table.end_process(self.indices)
        self.recover([self.recovery.exit_loss(activity, process_exit) for activity in process_exit.uncompleted.rows])
        if process_exit.has_successor:
            self.recovery.settle_lost_episodes(self.indices)
        self.table.waiters.ring()

    def withdraw(self, future: ActorFuture, end: Callable[[Activity], object]) -> bool:
        """Take the request of a future out of the queue; see `Tenant.withdraw`."""
        if (index := self._find_env(future, QUEUED)) is None:
            return False
        end(self.table.activity(index))
        self.table.withdraw(index)
        return True

    def blame(self, future: ActorFuture) -> None:
        """Have the env of this future, if its row is posted, count as the one that the worker ran."""
        if (index := self._find_env(future, POSTED)) is not None:
            self.rows_job.blame(index)

    def is_posted_for(self, future: ActorFuture) -> bool:
        """Return whether the row of this future is posted and not complete."""
        index = self._find_env(future, POSTED)
        return index is not None and not self.table.rows.is_complete(index)

    def _find_env(self, future: ActorFuture, status: int) -> int | None:
        table = self.table
        return next((i for i in self.indices if table.status[i] == status and table.request(i).future is future), None)

    def repair(self, error_of: ErrorOf) -> None:
        """Make all envs idle and in need of a reset. Futures get their outcomes or an error; other results are lost."""
        table = self.table
        for index in self.indices:
            if (future := table.request(index).future) is not None:
                future.set_outcome(table.outcomes.get(index) or ReadyOutcome(None, error_of(table.activity(index))))
            table.clear(index)
        self.end_rollout_parts(error_of)
        table.waiters.on_process_change()
