"""The envs of one actor: begin their rows, collect their results, and tell how far the worker has come.

`RowEngine` decides when to post and waits for results. The state of the envs is in `EnvTable`; an `EnvGroup` only keeps
which job each env was queued in last, and what it needs to tell which request a process was running. Its helpers
`EnvRecovery` and `JournalKeeper` have no state. Every change here happens under the lock of the vector. Waiting threads
also read without it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence

from envactors.actor import recording
from envactors.actor.activity import Activity
from envactors.actor.actor import Actor
from envactors.actor.exits import ProcessExit
from envactors.actor.future import ActorFuture, ReadyOutcome
from envactors.actor.incarnation import Incarnation
from envactors.actor.job import ErrorOf, Job, Renewal
from envactors.actor.states import blames_request
from envactors.actor.tenant import Tenant
from envactors.crashes.inputs import Inputs
from envactors.mailbox import bundle
from envactors.mailbox.control_page import METHOD_RESET, NO_SPIN, ControlPage
from envactors.mailbox.durations import Histograms
from envactors.mailbox.messages import Attach, Frame, Kind
from envactors.mailbox.slab import slice_of
from envactors.vector.env_recovery import EnvRecovery
from envactors.vector.journal_keeper import JournalKeeper
from envactors.vector.recycling import Recycler
from envactors.vector.rows import RowReader
from envactors.vector.table import POSTED, QUEUED, EnvRequest, EnvTable, Selection
from envactors.vector.timing import StepTimes


def post_rows(table: EnvTable, envs: Selection, call_id: int, wait: int, *, streams: bool) -> None:
    """Post requests whose actions are already in the rows, and ring the workers.

    Args:
        table: The envs of the vector.
        envs: The envs to post; their actors are free.
        call_id: The call id of all these requests.
        wait: How the workers wait for the next request; see `envactors.mailbox.control_page`.
        streams: Whether they stream.
    """
    payloads = table.write_requests(envs, call_id, streams)
    now = time.monotonic()
    pages = [group.begin_rows(call_id, ids, payloads, now) for group, ids in envs.by_group]
    # Workers that wake up compete with this thread for cores, so everything slow comes before the first ring.
    for page, (_, ids) in zip(pages, envs.by_group, strict=True):
        page.post_step(call_id, wait, streams, ids)


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
        return running is self._group

    def start(self) -> Job | None:
        """Post the envs, except those whose requests need an episode that was lost. Then their group is running."""
        group = self._group
        group.recovery.recover_lost_episodes(self.ids)
        ids = self.ids
        if ids:
            envs = Selection(ids, ids, by_group=[(group, ids)])
            post_rows(group.table, envs, self.call_id, NO_SPIN, streams=True)
            group.table.waiters.on_process_change()  # waiting threads may watch the doorbell of an earlier process
        return group if group.has_posted else None

    def activity(self) -> None:
        """Return None: this job is never the running one."""

    def fail(self, error_of: ErrorOf) -> None:
        """Fail the envs."""
        self._group.recovery.fail_queued(self.ids, error_of)


class EnvGroup(Job, Tenant):
    """The envs of one actor. It is the tenant of the actor, and its running job while rows are posted.

    Args:
        table: The envs of the vector.
        reader: Reads results out of rows.
        actor: The actor.
        recycler: Decides when to replace its process between two episodes.

    Attributes:
        table, reader, actor, recycler: As above.
        attach: That of the table.
        indices: The indices of the envs of the actor.
        recovery: Handles their failed requests.
        journal_keeper: Keeps their journals.
        end_rollout_parts: Ends the rollout parts of the actor that an interrupt has left; None until there is a policy.
        queued_in: The job in which each env was queued last.
    """

    call_id = -1  # workers complete rows without a reply
    needs_permit = True

    def __init__(self, table: EnvTable, reader: RowReader, actor: Actor, recycler: Recycler) -> None:
        self.table = table
        self.reader = reader
        self.actor: Actor = actor
        self.recycler = recycler
        self.attach: Attach = table.attach
        self.indices: range = actor.config.indices
        self.recovery: EnvRecovery = EnvRecovery(table, reader, actor)
        self.journal_keeper: JournalKeeper = JournalKeeper(table, actor, self.recovery)
        self.end_rollout_parts: Callable[[ErrorOf], object] | None = None
        self.queued_in: dict[int, QueuedRows] = {}
        self._first = self.indices.start
        self._slice = slice_of(self.indices)
        self._aborted: int | None = None  # the env whose request the user has aborted, until the process has ended
        self._posted_at = 0.0
        self._is_timing = False
        self._times = StepTimes(len(self.indices))

    @property
    def has_posted(self) -> bool:
        """Whether any env is `POSTED`, with a complete row or not."""
        return POSTED in self.table.status[self._slice]

    def count_missing(self) -> int:
        """Return how many outcomes of its envs are missing."""
        return sum(map(self.table.lacks_outcome, self.indices))

    # Posting ---------------------------------------------------------------------------------------------

    def begin_rows(self, call_id: int, ids: Sequence[int], payloads: Mapping[int, bytes], now: float) -> ControlPage:
        """Begin to watch rows that are about to run, and send the payloads that go with them.

        Args:
            call_id: The call id of the rows.
            ids: The envs.
            payloads: The payloads of any envs of the vector that do not fit into rows, by env.
            now: The time (`time.monotonic`).

        Returns:
            The control page of the worker. The caller posts the call id there and rings.
        """
        actor, table = self.actor, self.table
        worker = actor.incarnation.worker
        assert worker is not None, "rows are posted to a live process"
        self._posted_at = now
        # Without this test, which `watch` repeats, each step would pay for a call that schedules nothing.
        if actor.deadline_watch.next_check_at > now + actor.deadline_watch.shortest:
            actor.deadline_watch.watch(now)
        if payloads:
            mine = [(index - self._first, payloads[index]) for index in ids if index in payloads]
            if mine:
                worker.send(Frame(Kind.PAYLOADS, actor.incarnation.index, call_id, bundle.pack(mine)))
        if table.requests and any(table.request(index).future is not None for index in ids):
            worker.watch_rings(self._on_ring)  # the loop resolves the futures
        if actor.permits is not None:  # other actors may wait until these rows end
            worker.watch_rings(self._on_ring)
            worker.page.ring_at_end(call_id)
        return worker.page

    def queue_new(self, ids: list[int]) -> None:
        """Queue envs with new requests, behind a renewal of the process if that is due."""
        self.table.queue(ids, is_new=True)
        if self._is_renewal_due(ids):
            self.actor.enqueue(Renewal(self._first, reason=self.recycler.reason))
        self.recovery.recover_lost_episodes(ids)
        self.actor.enqueue(QueuedRows(self, ids))

    def queue_again(self, ids: list[int]) -> None:
        """Queue envs whose requests have failed and run again, ahead of everything except replays."""
        if ids:
            self.table.queue(ids)
            self.actor.enqueue(QueuedRows(self, ids), first=True)

    def must_queue(self, ids: list[int]) -> bool:
        """Return whether envs must not be posted directly: an episode was lost, or a renewal of the process is due."""
        return any(map(self.table.episodes.is_loss_unreported, ids)) or self._is_renewal_due(ids)

    def _is_renewal_due(self, ids: list[int]) -> bool:
        """Return whether the process must be replaced before these envs run: only between episodes, at a reset."""
        if not self.actor.is_usable:
            return False  # only the user may renew an actor without restarts left
        table = self.table
        resets = [table.request(index).method == "reset" for index in ids]
        resetting = [
            index for index, reset in zip(ids, resets, strict=True) if reset or table.episodes.resets_next[index]
        ]
        if any(map(table.episodes.is_retiring, resetting)):
            return True
        # Several envs move only at a reset that the user requests for all of them, which loses no episode.
        return self.recycler.is_node_draining and resets == [True] * len(self.indices)

    # Results ---------------------------------------------------------------------------------------------

    def collect_completed(self) -> None:
        """Record the results of complete rows; queue failed requests that run again."""
        table = self.table
        if not self.has_posted:
            return
        again: list[int] = []
        for index in self.indices:
            if table.status[index] == POSTED and table.is_complete(index):
                self.actor.add_completed(1)
                if not table.infos.failed(index):
                    self._accept(index)
                elif self.recovery.recover_raised(index):
                    again.append(index)
        self.queue_again(again)
        self.journal_keeper.queue_saves()

    def recover_unreadable(self, index: int, error: BaseException) -> None:
        """Recover from a result that cannot be unpickled."""
        if self.recovery.recover_unreadable(index, error):
            self.queue_again([index])

    def _accept(self, index: int) -> None:
        """Record the result in a complete row."""
        table, reader = self.table, self.reader
        request = table.request(index)
        before = None
        if request.failure is not None and request.method == "step" and request.ending is None:
            before = reader.copy_last(index)  # from the buffer that was current until now
        if table.accept_row(index):
            self._reset_in_next_process(index)
            return
        outcome = None
        if request.future or request.failure or request.ending:
            row = reader.copy_row(index)
            outcome = self.recovery.read_later(index, functools.partial(reader.read_result, row, request, before))
            table.keep_content(index)
            reader.keep_answer(index, request)
        table.record_outcome(index, outcome, float(table.slab.when[index]) if table.streams[index] else None)

    def _reset_in_next_process(self, index: int) -> None:
        """Replace the process of an env whose episode has ended, and do the autoreset of that step in the next one."""
        table = self.table
        ending = self.reader.copy_row(index)
        table.set_requests({index: EnvRequest("step", True, table.request(index).future, ending=ending)})
        table.queue([index])
        self.actor.enqueue(Renewal(self._first, reason=self.recycler.reason))
        self.actor.enqueue(QueuedRows(self, [index]))

    # The running job -------------------------------------------------------------------------------------

    def is_finished(self) -> bool:
        """Record complete rows, then return whether no row is posted."""
        self.collect_completed()
        return not self.has_posted

    def call_when_finished(self) -> None:
        """Have the worker ring at the end of its rows, since another job waits for that."""
        worker = self.actor.incarnation.worker
        if worker is not None:
            worker.watch_rings(self._on_ring)
            worker.page.ring_at_end(max(self.table.call_ids[index] for index in self.indices))
            self.actor.runtime.loop.call_soon(self._on_ring)  # the rows may have ended without a ring

    def _on_ring(self) -> None:
        """Handle a ring of the worker, in the loop and without the lock."""
        self.recycler.measure_memory()
        self.actor.make_change(self._end_if_finished)

    def _end_if_finished(self) -> None:
        """Start the next job of the actor if all rows are complete."""
        worker = self.actor.incarnation.worker
        if worker is not None and self.is_finished():
            worker.unwatch_rings()
            self.actor.end_job(self)

    def activity(self) -> Activity | None:
        """Return the step that the worker runs, or begins next; None if all rows are complete."""
        unfinished, running, since = self._read_progress()
        if running is not None or not unfinished:
            return running
        # When the next env begins is unknown. Its time counts from the start of the env before it.
        return unfinished[0]._replace(started=max(since, self._posted_at))

    def on_late(self, activity: Activity) -> None:
        """Ignore the result of a row that has missed its deadline."""
        self.table.miss_deadline(activity.env)

    def _read_progress(self) -> tuple[list[Activity], Activity | None, float]:
        """Read how far the worker has come.

        Returns:
            The steps whose rows are not complete, the one of them that runs (None if none does), and the time at which
            the worker last began one.
        """
        table = self.table
        worker = self.actor.incarnation.worker
        running = None
        if worker is None:
            return [], None, 0.0
        ids = [index for index in self.indices if table.status[index] == POSTED and not table.is_complete(index)]
        progress = worker.page.progress()
        index = self._first + progress.position
        if index in ids and progress.call_id == table.call_ids[index] != table.completed[index]:
            # An autoreset within a step counts as a reset.
            method = "reset" if progress.method == METHOD_RESET else None
            running = table.activity(index, started=progress.since, method=method)
        return list(map(table.activity, ids)), running, progress.since

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
        worker = self.actor.incarnation.worker
        if worker is not None and worker.watches_rings:
            self.actor.runtime.loop.call_soon(self._on_ring)  # the ring may have come before this frame

    # Times -----------------------------------------------------------------------------------------------

    def begin_timing(self) -> None:
        """Time steps and resets from now on, in this process and in later ones. Call it again if a recording begins."""
        self._is_timing = True
        worker = self.actor.incarnation.worker
        if worker is not None:
            worker.begin_timing(recording.is_recording())

    def histograms(self) -> Histograms:
        """Return the durations of all steps and resets that were timed."""
        return self._times.total(self.actor.page)

    # The tenant ------------------------------------------------------------------------------------------

    def on_started(self, incarnation: Incarnation, *, is_renewal: bool) -> list[Job]:
        """Prepare for a new process; return the replays that it runs first."""
        self.recycler.begin_process(self.table.episodes.steps[self._first])
        self.table.begin_process(self.indices, incarnation.index)
        if self._is_timing:
            self.begin_timing()
        replays = self.journal_keeper.replays_for_process(is_renewal=is_renewal)
        if is_renewal:
            self.recovery.recover_lost_episodes(self.indices)
        return [*replays]

    def on_call(self, kind: Kind, index: int, payload: bytes | bytearray, frame: Frame) -> None:
        """Record a call in the journal of its env."""
        if self.table.keeps_journals:
            self.journal_keeper.record_call(kind, index, payload, frame)

    def inputs(self, culprit: Activity) -> Inputs:
        """Return the row that an ended process was running, and the requests before it."""
        posted = self.table.posted_request(culprit.env)
        return self.recovery.step_inputs(culprit.env, posted, self.table.slab.actions)

    def inputs_of_call(self, index: int, request: tuple[int, bytes]) -> Inputs:
        """Return a call of an env with the requests before it."""
        return self.recovery.message_inputs(index, request)

    def culprit(self, incarnation: Incarnation) -> Activity | None:
        """Return the step that an ended process was running, or that missed its deadline; None if it ran none.

        Nobody knows which env a worker on a lost node had begun, so its first unfinished one counts as begun.
        """
        unfinished, running, _ = self._read_progress()
        overdue = self.table.overdue
        late = [activity for activity in unfinished if activity.env in overdue or activity.env == self._aborted]
        is_node_lost = incarnation.report is not None and incarnation.report.status.loss is not None
        if running is not None and (not late or running.env == late[0].env):
            return running
        begun = late or (unfinished if is_node_lost else [])
        if begun:
            return begun[0]._replace(started=self._posted_at)
        is_blamed = blames_request(incarnation.end_reason)
        return unfinished[0] if unfinished and is_blamed else None

    def on_exit(self, ended: ProcessExit) -> None:
        """Continue or fail the requests of an ended process, and end its episodes."""
        if self._is_timing:
            self._times.add(self.actor.page)
        self.journal_keeper.record_exit(ended)
        unfinished, running, _ = self._read_progress()
        self.table.end_process(self.indices)
        self._aborted = None
        again = self.recovery.recover_unfinished(unfinished, running, ended)
        self.queue_again(again)
        if ended.plan.has_process:
            self.recovery.recover_lost_episodes([index for index in self.indices if index not in again])
        self.table.waiters.ring()

    def withdraw(self, future: ActorFuture, end: Callable[[Activity], object]) -> bool:
        """Take the request of a future out of the queue; see `Tenant.withdraw`."""
        index = self._find_env(future, QUEUED)
        if index is None:
            return False
        end(self.table.activity(index))
        self.table.set_idle([index])
        return True

    def blame(self, future: ActorFuture) -> None:
        """Have the env of this future, if its row is posted, count as the one that the worker ran."""
        self._aborted = self._find_env(future, POSTED)

    def is_posted_for(self, future: ActorFuture) -> bool:
        """Return whether the row of this future is posted and not complete."""
        index = self._find_env(future, POSTED)
        return index is not None and not self.table.is_complete(index)

    def _find_env(self, future: ActorFuture, status: int) -> int | None:
        for index in self.indices:
            if self.table.status[index] == status and self.table.request(index).future is future:
                return index
        return None

    def repair(self, error_of: ErrorOf) -> None:
        """Make all envs idle and in need of a reset. Requests with a future fail; other results are lost."""
        table = self.table
        for index in self.indices:
            future = table.request(index).future
            if future is not None:
                error = error_of(table.activity(index))
                future.set_outcome(table.outcomes.get(index) or ReadyOutcome(None, error))
            table.clear(index)
        if self.end_rollout_parts is not None:
            self.end_rollout_parts(error_of)
        table.waiters.on_process_change()
