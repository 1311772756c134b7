"""The jobs of rows: envs wait in `QueuedRows` for their actor, and run in its `RowsJob`.

Jobs order requests and follow the worker. They read statuses in the table, and have it write rows. The tenant of the
actor takes the results, and `EnvRecovery` handles requests without a result.

Every change here happens under the lock of the vector. Waiting threads also read without it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from envactors.actor.actor import Actor
from envactors.actor.actor_process import ActorProcess, blames_request
from envactors.actor.job import Activity, ErrorOf, Job, Uncompleted
from envactors.crashes.inputs import Inputs
from envactors.mailbox import packing
from envactors.mailbox.control_page import METHOD_RESET, NO_SPIN, ControlPage
from envactors.mailbox.messages import Frame, Kind
from envactors.mailbox.slab import slice_of
from envactors.vector.env_recovery import EnvRecovery
from envactors.vector.selection import Selection
from envactors.vector.table import POSTED, QUEUED, EnvTable


class RowsJob(Job):
    """The running job of an actor from the post of its rows until `JobQueue` finds that no env is `POSTED`.

    An actor has one such job, which runs again and again. Nobody tells the queue that results were delivered. It asks
    (`try_finish`) when the worker rings, or when another job is to start.

    Args:
        table: The envs of the vector.
        actor: The actor.
        recovery: Handles requests without results.

    Attributes:
        table, actor, recovery: As above.
        queued_in: The job in which each env was queued last.
    """

    call_id = -1  # that of no frame: workers complete rows without a reply
    needs_permit = True

    def __init__(self, table: EnvTable, actor: Actor, recovery: EnvRecovery) -> None:
        self.actor: Actor = actor
        self.table = table
        self.recovery = recovery
        self.queued_in: dict[int, QueuedRows] = {}
        self._indices = actor.config.indices
        self._posted_at = 0.0
        self._aborted: tuple[int, int] | None = None  # the env and the call id that the user has aborted last

    @property
    def has_posted(self) -> bool:
        """Whether any env is `POSTED`, with a complete row or not."""
        return POSTED in self.table.status[slice_of(self._indices)]

    def begin(self, call_id: int, ids: Sequence[int], payloads: Mapping[int, bytes], now: float) -> ControlPage:
        """Begin to watch rows that are about to run, and send the payloads that go with them.

        Args:
            call_id: The call id of the rows.
            ids: The envs.
            payloads: The payloads that do not fit into rows, by env; some may be of envs of other actors.
            now: The time (`time.monotonic`).

        Returns:
            The control page of the worker. The caller posts the call id there and rings.
        """
        actor, table = self.actor, self.table
        worker = actor.process.worker
        assert worker is not None, "rows are posted to a live process"
        self._posted_at = now
        # `watch` repeats this test. Testing here saves most steps a call that schedules nothing.
        if now + actor.deadline_watch.shortest < actor.deadline_watch.next_check_at:
            actor.deadline_watch.watch(now)
        sent = [(i - self._indices.start, payloads[i]) for i in ids if i in payloads] if payloads else []
        if sent:
            worker.send(Frame(Kind.PAYLOADS, actor.process.incarnation, call_id, packing.pack(sent)))
        if table.requests and any(table.request(index).future is not None for index in ids):
            worker.watch_rings(self.on_ring)  # the loop resolves the futures
        if actor.jobs.permits is not None:  # other actors may wait until these rows end
            worker.watch_rings(self.on_ring)
            worker.page.ring_at_end(call_id)
        return worker.page

    def try_finish(self) -> bool:
        """Record complete rows, then return whether no row is posted."""
        self.actor.tenant.collect_completed()
        return not self.has_posted

    def request_end_ring(self) -> None:
        """Have the worker ring at the end of its rows, since another job waits for that."""
        if (worker := self.actor.process.worker) is not None:
            worker.watch_rings(self.on_ring)
            worker.page.ring_at_end(max(self.table.rows.posted_ids[index] for index in self._indices))
            self.actor.runtime.loop.call_soon(self.on_ring)  # the rows may have ended without a ring

    def on_ring(self) -> None:
        """Handle a ring of the worker, in the loop and without the lock."""
        self.actor.run_as_change(self._end_if_finished)

    def _end_if_finished(self) -> None:
        """End this job if all rows are complete; the actor then starts the next one."""
        if (worker := self.actor.process.worker) is not None and self.try_finish():
            worker.unwatch_rings()
            self.actor.jobs.end(self)

    def activity(self) -> Activity | None:
        """Return the step or reset that the worker runs, or begins next; None if all rows are complete."""
        rows, running = self._find_uncompleted()
        if running is not None or (page := self.actor.page) is None or not rows:
            return running
        # When the next env begins is unknown. Its time counts from the start of the env before it.
        return rows[0]._replace(started_at=max(page.progress().since, self._posted_at))

    def on_late(self, activity: Activity) -> None:
        """Have the result of a row ignored, whenever it comes: it has missed its deadline."""
        self.table.miss_deadline(activity.index)

    def _find_uncompleted(self) -> tuple[list[Activity], Activity | None]:
        """Return the posted rows that are not complete, in the order in which they run, and the one that runs now."""
        table, page, running = self.table, self.actor.page, None
        if page is None:
            return [], None
        ids = [index for index in self._indices if table.status[index] == POSTED and not table.rows.is_complete(index)]
        progress = page.progress()
        index = self._indices.start + progress.position
        call_id = progress.call_id
        # Env code may have overwritten the position. The worker may also have completed that step, but too late: then
        # it is among those that are not complete, and does not run.
        if index in ids and table.rows.posted_ids[index] == call_id and table.rows.written_ids[index] != call_id:
            # An autoreset within a step counts as a reset.
            method = "reset" if progress.method == METHOD_RESET else None
            running = table.activity(index, started_at=progress.since, method=method)
        return list(map(table.activity, ids)), running

    def blame(self, index: int) -> None:
        """Blame the coming end of the process on a posted env, which the user aborts, whichever env runs."""
        self._aborted = index, self.table.rows.posted_ids[index]

    def inputs(self, culprit: Activity) -> Inputs:
        """Return the row that an ended process was running, and the requests before it."""
        return self.recovery.step_inputs(culprit.index, self.table.posted_request(culprit.index))

    def settle_uncompleted(self, process: ActorProcess) -> Uncompleted:
        """Return the rows that an ended process has not completed."""
        rows, running = self._find_uncompleted()
        return Uncompleted(culprit=self._find_culprit(process, rows, running), running=running, rows=rows)

    def _find_culprit(self, process: ActorProcess, rows: list[Activity], running: Activity | None) -> Activity | None:
        """Return the row that the end of a process is blamed on; None if that was none of them.

        It is the row that was late or aborted, or else the one that was running, or else the first one, if it may have
        begun.

        Args:
            process: The process.
            rows: The steps and resets that it has not completed, in the order in which it runs them.
            running: The one that it was running; None for none.
        """
        guilty = [a for a in rows if a.index in self.table.rows.overdue or (a.index, a.call_id) == self._aborted]
        if guilty and (running is None or running.index != guilty[0].index):
            return guilty[0]._replace(started_at=self._posted_at)
        if running is not None or not rows:
            return running
        if process.status.loss is not None:
            # Nobody knows which env a worker on a lost node had begun.
            return rows[0]._replace(started_at=self._posted_at)
        return rows[0] if blames_request(process.end_reason) else None


class QueuedRows(Job):
    """Envs that wait in the queue of their actor to be posted.

    While an env waits, its request may fail or be canceled, and the next one may be queued in another job. This job
    then skips the env, so that requests run in the order in which they were made: only the last job created for an
    env posts it.

    Args:
        rows_job: The job in which they run.
        ids: The envs that wait.
    """

    def __init__(self, rows_job: RowsJob, ids: list[int]) -> None:
        self._rows_job = rows_job
        self._ids = ids
        rows_job.queued_in.update(dict.fromkeys(ids, self))

    @property
    def ids(self) -> list[int]:
        """The envs that still wait in this job."""
        status, queued_in = self._rows_job.table.status, self._rows_job.queued_in
        return [index for index in self._ids if status[index] == QUEUED and queued_in[index] is self]

    @property
    def needs_permit(self) -> bool:  # type: ignore[override] # nobody sets it
        """Whether any env still waits."""
        return bool(self.ids)

    def can_join(self, running: Job) -> bool:
        """Rows may be posted while earlier rows run."""
        return running is self._rows_job

    def start(self) -> Job | None:
        """Post the envs that still wait; return the job of posted rows, or None if no row is posted."""
        rows_job, table = self._rows_job, self._rows_job.table
        if ids := self.ids:
            payloads = table.write_requests(Selection(ids=ids, array_index=ids), self.call_id, streams=True)
            page = rows_job.begin(self.call_id, ids, payloads, time.monotonic())
            page.post_step(self.call_id, NO_SPIN, True, ids)
            table.waiters.on_process_change()  # waiting threads may watch the doorbell of an earlier process
        return rows_job if rows_job.has_posted else None

    def activity(self) -> None:
        """Return None: the worker runs nothing of it. It is the running job only until `start` returns the next one."""

    def fail(self, error_of: ErrorOf) -> None:
        """Fail the envs."""
        for index in self.ids:
            self._rows_job.recovery.resolve_or_retry(self._rows_job.recovery.queued_request_loss(index, error_of))
