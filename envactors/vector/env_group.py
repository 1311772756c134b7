"""The envs of one actor: queue their requests, collect their results, and follow their process.

`RowEngine` decides when to post and waits for results. `PostedRows` is the running job of the actor while rows are
posted. The state of the envs is in `EnvTable`; an `EnvGroup` only keeps of it in which job each env was queued last.
Its helpers `EnvRecovery` and `JournalKeeper` have no state. Every change here happens under the lock of the vector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from envactors.actor import recording
from envactors.actor.activity import Activity
from envactors.actor.actor import Actor
from envactors.actor.actor_process import ActorProcess
from envactors.actor.future import ActorFuture, ReadyOutcome
from envactors.actor.job import ErrorOf, Job, ProcessExit, Renewal
from envactors.actor.tenant import Tenant
from envactors.crashes.inputs import Inputs
from envactors.mailbox import bundle
from envactors.mailbox.control_page import NO_SPIN
from envactors.mailbox.durations import Histograms
from envactors.mailbox.messages import Attach, Frame, Kind
from envactors.vector.env_recovery import EnvRecovery
from envactors.vector.episodes import EPISODE_LOST
from envactors.vector.fates import RequestLoss
from envactors.vector.journal_keeper import JournalKeeper
from envactors.vector.losses import exit_loss, queued_request_loss, raised_loss
from envactors.vector.posted_rows import PostedRows, post_rows
from envactors.vector.recycling import Recycler
from envactors.vector.requests import EnvRequest, Selection
from envactors.vector.rows import RowReader
from envactors.vector.table import POSTED, QUEUED, EnvTable
from envactors.vector.timing import StepTimes


class QueuedRows(Job):
    """Envs that wait in the queue of their actor to be posted.

    While an env waits, its request may fail or be canceled, and the next one may be queued in another job. This job
    then skips the env, so that requests run in the order in which they were made: only the last job created for an
    env posts it.

    Args:
        group: The envs of the actor.
        ids: Those that wait.
    """

    needs_permit = True

    def __init__(self, group: EnvGroup, ids: list[int]) -> None:
        self._group = group
        self._ids = ids
        group.queued_in.update(dict.fromkeys(ids, self))

    @property
    def ids(self) -> list[int]:
        """The envs that still wait in this job."""
        status, queued_in = self._group.table.status, self._group.queued_in
        return [index for index in self._ids if status[index] == QUEUED and queued_in[index] is self]

    def can_join(self, running: Job) -> bool:
        """Rows may be posted while earlier rows run."""
        return running is self._group.rows

    def start(self) -> Job | None:
        """Handle lost episodes, then post the envs that still wait; return the posted rows, None if there are none."""
        group = self._group
        group.recovery.answer_lost_episodes(self.ids)
        if ids := self.ids:
            post_rows(group.table, Selection(ids, ids, False, [(group, ids)]), self.call_id, NO_SPIN, streams=True)
            group.table.waiters.on_process_change()  # waiting threads may watch the doorbell of an earlier process
        return group.rows if group.rows.has_posted else None

    def activity(self) -> None:
        """Return None: this job is never the running one."""

    def fail(self, error_of: ErrorOf) -> None:
        """Fail the envs."""
        group = self._group
        group.recover([queued_request_loss(group.table, group.actor, index, error_of) for index in self.ids])


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
        recovery: Handles their requests without results.
        rows: Their rows, as the running job of the actor.
        journal_keeper: Keeps their journals.
        end_rollout_parts: Ends the rollout parts of the actor that an interrupt has left; nothing without a policy.
        queued_in: The job in which each env was queued last.
    """

    def __init__(self, table: EnvTable, reader: RowReader, actor: Actor, recycler: Recycler) -> None:
        self.table = table
        self.reader = reader
        self.actor: Actor = actor
        self.recycler = recycler
        self.attach: Attach = table.attach
        self.indices: range = actor.config.indices
        self.recovery: EnvRecovery = EnvRecovery(table, reader, actor)
        self.rows: PostedRows = PostedRows(table, actor, recycler, self.recovery)
        self.journal_keeper: JournalKeeper = JournalKeeper(table, actor, self.recovery)
        self.end_rollout_parts: Callable[[ErrorOf], object] = lambda _: None
        self.queued_in: dict[int, QueuedRows] = {}
        self._is_timing = False
        self._times = StepTimes(len(self.indices))

    def count_missing(self) -> int:
        """Return how many outcomes of its envs are missing."""
        return sum(map(self.table.is_pending, self.indices))

    # Posting ---------------------------------------------------------------------------------------------

    def queue_new(self, ids: list[int]) -> None:
        """Queue envs with new requests, behind a renewal of the process if that is due."""
        self.table.queue(ids, is_new=True)
        if self._is_renewal_due(ids):
            self.actor.jobs.enqueue(Renewal(reason=self.recycler.reason))
        self.recovery.answer_lost_episodes(ids)
        self.actor.jobs.enqueue(QueuedRows(self, ids))

    def must_queue(self, ids: list[int]) -> bool:
        """Return whether envs must not be posted directly: an episode was lost, or a renewal of the process is due."""
        return EPISODE_LOST in map(self.table.episodes.state, ids) or self._is_renewal_due(ids)

    def _is_renewal_due(self, ids: list[int]) -> bool:
        """Return whether the process must be replaced before these envs run: only between episodes, at a reset."""
        if not self.actor.is_usable:
            return False  # only the user may renew an actor without restarts left
        table, episodes = self.table, self.table.episodes
        reset_ids = [index for index in ids if table.request(index).method == "reset"]
        is_retiring = any(episodes.is_retiring(i) for i in ids if i in reset_ids or episodes.resets_next[i])
        # A process of several envs leaves a draining node at a reset of all of them by the user: that loses no episode.
        return is_retiring or (self.recycler.is_node_draining and reset_ids == [*self.indices])

    # Results ---------------------------------------------------------------------------------------------

    def collect_completed(self) -> None:
        """Record the results of complete rows, and recover envs that have raised."""
        table = self.table
        if not self.rows.has_posted:
            return
        losses = []
        for index in self.indices:
            if table.status[index] == POSTED and table.is_complete(index):
                # A step with an ``ended_step`` was counted at the end of its episode; the reset after it adds nothing.
                self.actor.jobs.record_completed(1 if table.request(index).ended_step is None else 0)
                if table.infos.failed(index):
                    report = table.infos.failure(table.overflow.get(index))
                    losses.append(raised_loss(table, self.actor, table.activity(index), report))
                else:
                    self._accept(index)
        self.recover(losses)
        self.journal_keeper.queue_saves()

    def recover(self, losses: Iterable[RequestLoss]) -> None:
        """Record the outcomes of posted or queued requests that have no results; some run again.

        Those are queued ahead of everything except replays.
        """
        again = []
        for loss in losses:
            if self.recovery.resolve_or_retry(loss):
                again += [loss.activity.env]
        if again:
            self.table.queue(again)
            self.actor.jobs.enqueue(QueuedRows(self, again), first=True)

    def _accept(self, index: int) -> None:
        """Record the result in a complete row."""
        table, reader = self.table, self.reader
        request = table.request(index)
        before = reader.copy_last(index) if request.truncates_episode else None
        table.accept_row(index)
        if table.lacks_autoreset(index):
            self._reset_in_next_process(index)
            return
        outcome = None
        if request.future or request.earlier_error or request.ended_step:
            row = reader.copy_answer(index, request)
            outcome = reader.read_later(self.actor, index, functools.partial(reader.read_result, row, request, before))
            table.last.keep(index)
            if request.earlier_error or request.ended_step:
                table.last.overwrite(index, row, is_first=True)
        table.record_outcome(index, outcome, float(table.slab.when[index]) if table.streams[index] else None)

    def _reset_in_next_process(self, index: int) -> None:
        """Replace the process of an env whose episode has ended, and do the autoreset of that step in the next one."""
        table = self.table
        ended_step = self.reader.copy_row(index)
        table.last.keep(index)
        table.set_requests({index: EnvRequest("step", True, table.request(index).future, ended_step=ended_step)})
        table.queue([index])
        self.actor.jobs.enqueue(Renewal(reason=self.recycler.reason))
        self.actor.jobs.enqueue(QueuedRows(self, [index]))

    # The running job -------------------------------------------------------------------------------------

    def check_memory(self, finished: int) -> str:
        """Return an error text if the worker claims to have finished rows that are not complete; else an empty one.

        Args:
            finished: The call id up to which the worker claimed to have finished, before its frames were read.
        """
        table = self.table
        for index in self.indices:
            is_finished = table.status[index] == POSTED and finished >= table.call_ids[index]
            if is_finished and index not in table.overdue and not table.is_complete(index):
                return "its rows are not complete, and it says that it has finished them"
        return ""

    def on_overflow(self, frame: Frame) -> None:
        """Keep the parts of results that did not fit into their rows."""
        parts = bundle.unpack(frame.payload)
        self.table.add_overflow({index: payload for index, payload in parts if index in self.indices})
        worker = self.actor.process.worker
        if worker is not None and worker.watches_rings:
            self.actor.runtime.loop.call_soon(self.rows.on_ring)  # the ring may have come before this frame

    # Times -----------------------------------------------------------------------------------------------

    def begin_timing(self) -> None:
        """Time steps and resets from now on, in this process and in later ones. Call it again if a recording begins."""
        self._is_timing = True
        worker = self.actor.process.worker
        if worker is not None:
            worker.begin_timing(recording.is_recording())

    def histograms(self) -> Histograms:
        """Return the durations of all steps and resets that were timed."""
        return self._times.total(self.actor.page)

    # The tenant ------------------------------------------------------------------------------------------

    def on_started(self, process: ActorProcess, *, is_renewal: bool) -> list[Job]:
        """Prepare for a new process; return the replays that it runs first."""
        self.recycler.begin_process(self.table.episodes.steps[self.indices.start])
        self.table.begin_process(self.indices, process.incarnation)
        if self._is_timing:
            self.begin_timing()
        replays = self.journal_keeper.replays_for_process(is_renewal=is_renewal)
        if is_renewal:
            self.recovery.answer_lost_episodes(self.indices)
        return [*replays]

    def on_call(self, kind: Kind, index: int, payload: bytes | bytearray, frame: Frame) -> None:
        """Record a call in the journal of its env."""
        if self.table.keeps_journals:
            self.journal_keeper.record_call(kind, index, payload, frame)

    def inputs_of_call(self, index: int, request: tuple[int, bytes]) -> Inputs:
        """Return a call of an env with the requests before it."""
        return self.recovery.message_inputs(index, request)

    def on_exit(self, ended: ProcessExit) -> None:
        """Continue or fail the requests of an ended process, and end its episodes."""
        self._times.add(self.actor.page)
        self.journal_keeper.record_exit(ended)
        self.table.end_process(self.indices)
        self.recover([exit_loss(self.actor, activity, ended) for activity in ended.remainder.rows])
        if ended.plan.has_process:
            self.recovery.answer_lost_episodes(self.indices)
        self.table.waiters.ring()

    def withdraw(self, future: ActorFuture, end: Callable[[Activity], object]) -> bool:
        """Take the request of a future out of the queue; see `Tenant.withdraw`."""
        index = self._find_env(future, QUEUED)
        if index is None:
            return False
        end(self.table.activity(index))
        if self.table.request(index).ended_step is not None:  # the reset after it waits for the next process
            self.table.episodes.end_without_result(index, resets_next=self.table.episodes.on_failure != "raise")
        self.table.set_idle([index])
        return True

    def blame(self, future: ActorFuture) -> None:
        """Have the env of this future, if its row is posted, count as the one that the worker ran."""
        index = self._find_env(future, POSTED)
        if index is not None:
            self.rows.blame(index)

    def is_posted_for(self, future: ActorFuture) -> bool:
        """Return whether the row of this future is posted and not complete."""
        index = self._find_env(future, POSTED)
        return index is not None and not self.table.is_complete(index)

    def _find_env(self, future: ActorFuture, status: int) -> int | None:
        table = self.table
        return next((i for i in self.indices if table.status[i] == status and table.request(i).future is future), None)

    def repair(self, error_of: ErrorOf) -> None:
        """Make all envs idle and in need of a reset. Futures get their outcomes or an error; other results are lost."""
        table = self.table
        for index in self.indices:
            future = table.request(index).future
            if future is not None:
                future.set_outcome(table.outcomes.get(index) or ReadyOutcome(None, error_of(table.activity(index))))
            table.clear(index)
        self.end_rollout_parts(error_of)
        table.waiters.on_process_change()
