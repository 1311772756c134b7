"""The envs of one actor: post their requests, collect their results, and recover after an exit.

`RowEngine` decides when to post and waits for results; `envactors.vector.recovery` decides about failed requests. Every
change here happens under the lock of the vector. Waiting threads also read without it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from envactors.actor import recording
from envactors.actor.activity import Activity
from envactors.actor.actor import Actor
from envactors.actor.exits import ProcessExit
from envactors.actor.future import ActorFuture, LazyOutcome, Outcome, ReadyOutcome
from envactors.actor.incarnation import ExitReport, Incarnation
from envactors.actor.job import ErrorOf, Job, Renewal
from envactors.actor.jobs import Call, Replay
from envactors.actor.states import EndReason, blames_request, is_crash
from envactors.actor.tenant import Tenant
from envactors.errors import ActorError, copy_error
from envactors.mailbox import bundle, messages
from envactors.mailbox.control_page import ASLEEP, METHOD_RESET, ControlPage
from envactors.mailbox.durations import Histograms
from envactors.mailbox.messages import Attach, Frame, Kind, Save
from envactors.mailbox.pickling import dumps, loads, try_to_read
from envactors.mailbox.slab import HALF, NO_AUTORESET, RESET, slice_of
from envactors.replay import PostedRequest
from envactors.vector.episodes import LOST, NO_RESULT
from envactors.vector.recovery import Cause, Decision, EnvFate, Facts, FailedRequest, raised, settle
from envactors.vector.recycling import Recycler
from envactors.vector.results import EnvSnapshot, EnvStep
from envactors.vector.rows import RowReader, RowResult
from envactors.vector.table import POSTED, QUEUED, EnvRequest, EnvTable, Selection
from envactors.vector.timing import StepTimes

# How often a request to save a state is retried after a crash, which another request may have caused.
_SAVE_RETRIES = 3


class RolloutRepairer(Protocol):
    """The rollouts of a vector, as `ActorEnvs.repair` sees them."""

    def repair(self, group: ActorEnvs, error_of: ErrorOf) -> None:
        """End the rollout parts of an actor that are no longer among its unfinished jobs."""


def post_rows(table: EnvTable, envs: Selection, call_id: int, wait: int, *, rings_each: bool) -> None:
    """Post requests whose actions are already in the rows, and ring the workers.

    Args:
        table: The envs of the vector.
        envs: The envs to post; their actors are free.
        call_id: The call id of all these requests.
        wait: How the workers wait for the next request; see `envactors.mailbox.control_page`.
        rings_each: Whether workers announce each result.
    """
    payloads = table.post(envs, call_id, rings_each)
    now = time.monotonic()
    pages = [group.post(call_id, ids, payloads, now) for group, ids in envs.groups]
    # Workers that wake up compete with this thread for cores, so everything slow comes before the first ring.
    for page, (_, ids) in zip(pages, envs.groups, strict=True):
        page.post_step(call_id, wait, rings_each, ids)


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

    def __init__(self, group: ActorEnvs, ids: list[int]) -> None:
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
        """Post the envs. From then on, the running job is the `ActorEnvs`."""
        self._group.post_queued(self.ids, self.call_id)
        return self._group if self._group.has_posted else None

    def activity(self) -> None:
        """Return None: this job is never the running one."""

    def fail(self, error_of: ErrorOf) -> None:
        """Fail the envs."""
        self._group.fail_queued(self.ids, error_of)


class ActorEnvs(Job, Tenant):
    """The envs of one actor. It is the tenant of the actor, and its running job while rows are posted.

    Args:
        table: The envs of the vector.
        reader: Reads results out of rows.
        actor: The actor.
        recycler: Decides when to replace its process between two episodes.

    Attributes:
        table, reader, actor, recycler: As above.
        attach: The part of the first message that tells a worker where the rows are.
        range: The indices of the envs of the actor.
        rollouts: The rollouts of the vector; None until it has a policy.
        queued_in: The job in which each env was queued last.
    """

    call_id = -1  # workers complete rows without a reply
    needs_permit = True

    def __init__(self, table: EnvTable, reader: RowReader, actor: Actor, recycler: Recycler) -> None:
        self.table = table
        self.reader = reader
        self.actor: Actor = actor
        self.recycler = recycler
        self.attach: Attach = Attach(table.slab.layout, table.autoreset == "same_step")
        self.range: range = actor.config.indices
        self.rollouts: RolloutRepairer | None = None
        self.queued_in: dict[int, QueuedRows] = {}
        self._first = self.range.start
        self._slice = slice_of(self.range)
        self._aborted: int | None = None  # the env whose request the user has aborted, until the process has ended
        self._posted_at = 0.0
        self._is_timing = False
        self._times = StepTimes(len(self.range))

    def position(self, index: int) -> int:
        """Return the position of an env in its actor."""
        return index - self._first

    @property
    def has_posted(self) -> bool:
        """Whether any env is `POSTED`, with a complete row or not."""
        return POSTED in self.table.status[self._slice]

    def count_running(self) -> int:
        """Return how many envs have a request without an outcome."""
        return sum(map(self.table.is_running, self.range))

    # Posting ---------------------------------------------------------------------------------------------

    def post(self, call_id: int, ids: Sequence[int], payloads: Mapping[int, bytes], now: float) -> ControlPage:
        """Make written rows the running job, and send the payloads that go with them.

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
        actor.running = self
        self._posted_at = now
        # Without this test, which `watch` repeats, each step would pay for a call that schedules nothing.
        if actor.deadline_watch.next_check_at > now + actor.deadline_watch.shortest:
            actor.deadline_watch.watch(now)
        if payloads:
            mine = [(self.position(index), payloads[index]) for index in ids if index in payloads]
            if mine:
                worker.send(Frame(Kind.PAYLOADS, actor.incarnation.index, call_id, bundle.pack(mine)))
        if table.requests and any(table.future_of(index) is not None for index in ids):
            worker.watch_rings(self._on_ring)  # the loop resolves the futures
        if actor.permits is not None:  # other actors may wait until these rows end
            worker.watch_rings(self._on_ring)
            worker.page.ring_at_end(call_id)
        return worker.page

    def post_queued(self, ids: list[int], call_id: int) -> None:
        """Post queued envs, except those whose requests need an episode that was lost."""
        table = self.table
        self.settle_lost(ids)
        queued = [index for index in ids if table.status[index] == QUEUED]
        if queued:
            envs = Selection(queued, queued, groups=[(self, queued)])
            post_rows(table, envs, call_id, ASLEEP, rings_each=True)
            table.waiters.on_process_change()  # waiting threads may watch the doorbell of an earlier process

    def queue(self, ids: list[int]) -> None:
        """Queue envs, behind a renewal of the process if that is due."""
        table = self.table
        table.queue(ids)
        if self._is_renewal_due(ids):
            self.actor.enqueue(Renewal(self._first))
        self.settle_lost(ids)
        self.actor.enqueue(QueuedRows(self, ids))

    def queue_first(self, ids: list[int]) -> None:
        """Queue envs ahead of everything except replays."""
        self.table.queue(ids)
        self.actor.enqueue(QueuedRows(self, ids), first=True)

    def must_queue(self, ids: list[int]) -> bool:
        """Return whether envs must not be posted directly: an episode was lost, or a renewal of the process is due."""
        flags = self.table.episodes.flags
        return any(flags[index] & LOST for index in ids) or self._is_renewal_due(ids)

    def _is_renewal_due(self, ids: list[int]) -> bool:
        """Return whether the process must be replaced before these envs run: only between episodes, at a reset."""
        if not self.actor.is_usable:
            return False  # only the user may renew an actor without restarts left
        resetting = [index for index in ids if self._resets(index)]
        if any(map(self.table.episodes.is_retiring, resetting)):
            return True
        return self.recycler.is_node_draining and len(resetting) == len(self.range)

    def _resets(self, index: int) -> bool:
        """Return whether the next request of an env resets it, by autoreset or because the user asked for a reset."""
        table = self.table
        return bool(table.episodes.resets_next_of[index]) or table.request_of(index).method == "reset"

    def settle_lost(self, ids: Sequence[int]) -> None:
        """Settle the requests of those envs that are queued but need an episode that was lost.

        A request either gets its outcome now, or becomes a reset and stays in the queue.
        """
        for index in ids:
            if self.table.status[index] == QUEUED and self.lacks_episode(index):
                lost = self.lost_failure(self.activity_of(index))
                self._recover(index, lost, has_process=self.actor.is_usable)

    def lacks_episode(self, index: int) -> bool:
        """Return whether the request of an env needs an episode that was lost and that no replay can bring back."""
        table = self.table
        can_replay = table.replays and table.journals[index].can_replay
        return bool(table.episodes.flags[index] & LOST) and not can_replay and table.needs_episode(index)

    def fail_queued(self, ids: list[int], error_of: ErrorOf) -> None:
        """Fail queued envs that no process will run."""
        for index in ids:
            activity = self.activity_of(index)
            # A closing actor reports the failure that led to the retry, rather than that it is closed.
            earlier = self.table.request_of(index).failure if self.actor.is_closing else None
            error = earlier or ReadyOutcome(None, error_of(activity))
            failure = FailedRequest(Cause.WAITING, error, self.actor.incarnation.index, activity)
            self._recover(index, failure, has_process=False)

    # Results ---------------------------------------------------------------------------------------------

    def collect_completed(self) -> None:
        """Record the results of complete rows; queue failed requests that run again."""
        table = self.table
        if not self.has_posted:
            return
        again: list[int] = []
        for index in self.range:
            if table.status[index] == POSTED and table.is_complete(index):
                self.actor.completed += 1
                if not table.infos.failed(index):
                    self._accept(index)
                elif self._recover(index, self._failure_in_row(index), has_process=self.actor.is_usable):
                    again.append(index)
        if again:
            self.queue_first(again)
        self.save_due_states()

    def _accept(self, index: int) -> None:
        """Record the result in a complete row."""
        table, slab, reader = self.table, self.table.slab, self.reader
        request = table.request_of(index)
        op = int(table.ops[index])
        before = None
        if request.failure is not None and request.method == "step" and request.ending is None:
            before = reader.copy_last(index)  # from the buffer that was current until now
        table.buffer_index[index] = op & HALF
        if table.replays:
            table.journals[index].record_row(slab, index, table.posted_request(index))
        ends = bool(slab.terminated[index]) or bool(slab.truncated[index])
        if ends and op & NO_AUTORESET:
            self._reset_in_next_process(index)
            return
        table.episodes.record(index, ends=ends, is_reset=bool(op & RESET))
        outcome = None
        if request.future or request.failure or request.ending:
            row = reader.copy_row(index)
            outcome = self._read_later(index, functools.partial(reader.read_result, row, request, before))
            reader.keep_content(index)
        table.record_outcome(index, outcome, float(slab.when[index]) if table.rings_each[index] else None)

    def _reset_in_next_process(self, index: int) -> None:
        """Replace the process of an env whose episode has ended, and do the autoreset of that step in the next one."""
        table = self.table
        ending = self._read_later(index, functools.partial(self.reader.read, self.reader.copy_row(index)))
        table.requests[index] = EnvRequest("step", True, table.future_of(index), ending=ending)
        table.episodes.record_end(index)
        table.queue([index])
        self.actor.enqueue(Renewal(self._first))
        self.actor.enqueue(QueuedRows(self, [index]))

    def _read_later(self, index: int, read: Callable[[], EnvStep]) -> Outcome:
        """Return the outcome of an env whose result is unpickled when somebody asks for it."""
        unreadable = self.unreadable_of(index)

        def read_or_explain() -> tuple[EnvStep | None, BaseException | None]:
            step, error = try_to_read(read)
            return step, None if error is None else unreadable(error)

        return LazyOutcome(read_or_explain, is_failure=False)

    def _recover(self, index: int, failure: FailedRequest, *, has_process: bool) -> bool:
        """Handle a failed request, and give it an outcome unless it must run again; return whether it must.

        Args:
            index: The env.
            failure: The failure.
            has_process: See `handle_failure`.
        """
        table, reader = self.table, self.reader
        posted = table.posted_request(index)
        decision, error = self.handle_failure(index, failure, posted, table.slab.actions, has_process=has_process)
        if decision.fate is EnvFate.REDO:
            return True
        if decision.fate is EnvFate.RESET:
            request = table.request_of(index)
            # A repeated reset keeps the seed and the options of the user.
            seed = request.seed if decision.repeats_reset else None
            payload = request.payload if request.method == "reset" else None
            again = dataclasses.replace(request, resets=True, seed=seed, payload=payload, failure=error)
            table.requests[index] = again
            return True
        last = reader.copy_last(index, has_info=False) if decision.fate is EnvFate.TRUNCATE else None
        if last is not None:
            table.ops[index] = table.buffer_index[index]  # of no reset: the failed one left no observation
            next_incarnation = failure.incarnation + 1
            read = functools.partial(reader.read_truncated, last, error, next_incarnation)
            table.record_outcome(index, self._read_later(index, read))
        else:
            table.record_outcome(index, error)
        return False

    def handle_failure(
        self,
        index: int,
        failure: FailedRequest,
        posted: PostedRequest,
        actions: Sequence[npt.NDArray[Any]],
        *,
        has_process: bool,
    ) -> tuple[Decision, Outcome]:
        """Decide the fate of a failed step or reset, and discard its process if the env is not fit for use any more.

        Args:
            index: The env.
            failure: The failure.
            posted: The request as it was posted.
            actions: The actions of all envs, one array per leaf of the action.
            has_process: Whether the actor has a process now, or will have another one.

        Returns:
            The decision, and the error to report.
        """
        table, journal = self.table, self.table.journals[index]
        request = table.request_of(index)
        can_retry = table.replays and not failure.has_run and journal.can_retry(posted)
        facts = Facts(
            cause=failure.cause,
            on_failure=table.on_failure,
            autoreset=table.autoreset,
            reason=failure.reason,
            ran_reset=failure.in_reset or posted.is_reset,
            ran_only_reset=posted.is_reset,
            asked_reset=request.method == "reset",
            needs_episode=table.needs_episode(index),
            has_process=has_process,
            has_last=not table.episodes.flags[index] & NO_RESULT,
            has_failed=request.failure is not None,
            can_replay=journal.can_replay,
            can_retry=can_retry,
        )
        error = failure.error
        if table.replays and not can_retry:  # reads the journal, which `settle` may clear
            error = self._error_with_inputs(index, failure, posted, actions)
        decision = settle(facts, table.episodes, index, journal)
        if decision.replaces_process:
            pid = self.actor.pid
            self.actor.discard(failure.incarnation, lambda: self._discard_error(failure, pid))
        return decision, error

    def _error_with_inputs(
        self, index: int, failure: FailedRequest, posted: PostedRequest, actions: Sequence[npt.NDArray[Any]]
    ) -> Outcome:
        """Return the error of a request that is not tried again, with the inputs that end processes, if they do."""
        if failure.cause is not Cause.RUNNING or not is_crash(failure.reason):
            return failure.error
        inputs = self.table.journals[index].inputs(actions, index, posted, self.attach)
        if inputs is None:
            return failure.error
        crash = failure.error.read()[1]
        assert isinstance(crash, ActorError), "a running request fails only with its process"
        return ReadyOutcome(None, self.actor.errors.poison(crash, inputs))

    def _discard_error(self, failure: FailedRequest, pid: int | None) -> ActorError:
        """Return the error of a process that is discarded since an env raised. Runs code of users, without the lock."""
        cause = failure.error.read()[1]
        assert cause is not None, "the env has raised"
        return self.actor.errors.discarded(failure.activity, failure.incarnation, pid, cause, failure.text)

    def give_up(self, index: int, error: BaseException) -> None:
        """Turn a result that cannot be unpickled into a failure."""
        self.table.buffer_index[index] ^= HALF  # back to the observation before it, which may be returned instead
        incarnation = int(self.table.posted_in[index])
        outcome = ReadyOutcome(None, error)
        text = type(error).__name__
        failure = FailedRequest(Cause.RAISED, outcome, incarnation, self.activity_of(index), text, has_run=True)
        if self._recover(index, failure, has_process=self.actor.is_usable):
            self.queue_first([index])

    def _failure_in_row(self, index: int) -> FailedRequest:
        """Return the failure in a complete row, whose env raised."""
        table, actor = self.table, self.actor
        failure = table.infos.failure(table.overflow.get(index))
        return raised(actor.errors, self.activity_of(index), int(table.posted_in[index]), actor.pid, failure)

    def unreadable_of(self, index: int) -> Callable[[BaseException], ActorError]:
        """Return a function that turns the exception of unpickling an env's result into the error for the user.

        The function runs code of users, so callers must not hold the lock.
        """
        incarnation = int(self.table.posted_in[index])
        return functools.partial(self.actor.errors.unreadable, self.activity_of(index), incarnation, self.actor.pid)

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
            worker.page.ring_at_end(max(self.table.call_id_of[index] for index in self.range))
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

    def activity_of(self, index: int, *, started: float = 0.0, method: str | None = None) -> Activity:
        """Return the request of an env, for deadlines and errors."""
        table = self.table
        if method is None:
            # Until a queued env is posted, its row has the operation of an earlier request.
            is_posted_reset = table.status[index] != QUEUED and table.ops[index] & RESET
            is_reset = is_posted_reset or table.request_of(index).method == "reset"
            method = "reset" if is_reset else "step"
        return Activity(method, index, table.call_id_of[index], started, self.actor.config.deadlines.of(method))

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
        ids = [index for index in self.range if table.status[index] == POSTED and not table.is_complete(index)]
        progress = worker.page.progress()
        index = self._first + progress.position
        if index in ids and progress.call_id == table.call_id_of[index] != table.completed_of[index]:
            # An autoreset within a step counts as a reset.
            method = "reset" if progress.method == METHOD_RESET else None
            running = self.activity_of(index, started=progress.since, method=method)
        return list(map(self.activity_of, ids)), running, progress.since

    def check_memory(self, finished: int) -> str:
        """Return an error text if the worker claims to have finished rows that are not complete; else an empty one.

        Args:
            finished: The call id up to which the worker claimed to have finished, before its frames were read.
        """
        table = self.table
        for index in self.range:
            is_finished = table.status[index] == POSTED and finished >= table.call_id_of[index]
            if is_finished and index not in table.overdue and not table.is_complete(index):
                return "its rows are not complete, and it says that it has finished them"
        return ""

    def on_overflow(self, frame: Frame) -> None:
        """Keep the parts of results that did not fit into their rows."""
        parts = bundle.unpack(frame.payload)
        self.table.add_overflow({index: payload for index, payload in parts if index in self.range})
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
        table = self.table
        jobs: list[Job] = []
        self.recycler.begin_process(table.episodes.steps_of[self._first])
        table.incarnations[self._slice] = incarnation.index
        table.waiters.on_process_change()
        if self._is_timing:
            self.begin_timing()
        for index in self.range:
            if is_renewal:
                table.journals[index].forget()  # in a fresh process, only attributes are set again
            jobs += self._replays_of(index)
        if is_renewal:
            self.settle_lost(list(self.range))
        return jobs

    def _replays_of(self, index: int) -> list[Replay]:
        """Return the job that replays the journal of an env, if it has anything to repeat."""
        message = self.table.journals[index].replay(self.attach) if self.table.replays else None
        if message is None:
            return []
        return [Replay(index, dumps(tuple(message)), functools.partial(self._on_replayed, index))]

    def _on_replayed(self, index: int, is_same: bool) -> None:
        """Continue the episode of an env if the replay reached the same point; otherwise the episode stays lost."""
        journal = self.table.journals[index]
        journal.record_replay(crashed=False)
        if is_same and journal.can_replay:
            self.table.episodes.resume(index)
        elif journal.can_replay:
            journal.forget()
            for attributes in self._replays_of(index):  # the replay may have ended before all of them were set
                self.actor.enqueue(attributes, first=True)
        self.settle_lost([index])

    def on_call(self, kind: Kind, index: int, payload: bytes | bytearray, frame: Frame) -> None:
        """Record a call in the journal of its env. A saved state replaces what the journal had."""
        table = self.table
        failed = frame.kind == Kind.FAILED
        if not table.replays:
            return
        if kind != Kind.SAVE:
            table.journals[index].record_call(kind, bytes(payload), failed=failed)
        elif not failed and table.episodes.holds(index):
            table.journals[index].begin_with_state(*loads(frame.payload))
        self.save_due_states()

    def save_due_states(self) -> None:
        """Queue requests that save the states of envs, so that replays stay short. Nobody waits for them."""
        due = self.table.saves_due
        if not due:
            return
        for index in sorted(due.intersection(self.range)):
            due.discard(index)
            future: ActorFuture[Any] = ActorFuture(self.actor, None)
            message = dumps(tuple(Save(self.position(index))))
            log = functools.partial(self._log_unsaved, index)
            call = Call("snapshot", index, Kind.SAVE, future, retries=_SAVE_RETRIES, payload=message, take_reply=log)
            self.actor.enqueue(call)

    def _log_unsaved(self, index: int, frame: Frame) -> None:
        if frame.kind == Kind.FAILED:
            text = messages.Failure(*loads(frame.payload)).text
            self.actor.log(logging.WARNING, f"the state of env {index} cannot be saved: {text}")

    def on_restored(self, index: int, snapshot: EnvSnapshot, last: RowResult | None, frame: Frame) -> None:
        """Continue the episode of a snapshot that the worker has restored. If that failed, the env needs a reset.

        Args:
            index: The env.
            snapshot: The snapshot.
            last: Its last result, as `RowReader.encode` returns it.
            frame: The worker's reply.
        """
        table = self.table
        if frame.kind == Kind.FAILED:
            table.episodes.lose(index)
            table.journals[index].forget()
            return
        table.episodes.restore(index, snapshot.root_seed, snapshot.episode, resets_next=snapshot.resets_next)
        table.restore(index, frame.incarnation, starts=snapshot.starts)
        if last is not None:
            self.reader.put_back(index, last)
        if table.replays:
            table.journals[index].begin_with_state(snapshot.check, snapshot.state)

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
        table, culprit = self.table, ended.culprit
        has_process = ended.plan.has_process
        if self._is_timing:
            self._times.add(self.actor.page)
        if isinstance(self.actor.running, Replay) and culprit is not None and is_crash(ended.reason):
            table.journals[culprit.env].record_replay(crashed=True)
        unfinished, running, _ = self._read_progress()
        # A step that missed its deadline may still have ended, and the next one begun: then both have begun.
        begun = [activity.env for activity in (culprit, running) if activity is not None]
        is_discard = ended.reason is EndReason.DISCARD
        again: list[int] = []
        table.end_process(self.range)
        self._aborted = None
        for activity in unfinished:
            is_culprit = culprit is not None and activity.env == culprit.env and not is_discard
            error = ended.error if is_culprit else self.crash_error_for(activity)
            cause = Cause.RUNNING if activity.env in begun else Cause.WAITING
            reason = ended.reason if is_culprit or is_discard else None
            outcome = ReadyOutcome(None, error)
            failure = FailedRequest(cause, outcome, ended.incarnation.index, activity, reason=reason)
            if self._recover(activity.env, failure, has_process=has_process):
                again.append(activity.env)
        if again:
            self.queue_first(again)
        if has_process:
            self.settle_lost([index for index in self.range if index not in again])
        table.waiters.ring()

    def lost_failure(self, activity: Activity) -> FailedRequest:
        """Return the failure of a request that needs an episode which ended with an earlier process."""
        actor = self.actor
        incarnation = actor.last_crash.incarnation if actor.last_crash is not None else None
        ended = actor.incarnation.index if incarnation is None else incarnation
        return FailedRequest(Cause.WAITING, ReadyOutcome(None, self.crash_error_for(activity)), ended, activity)

    def crash_error_for(self, activity: Activity) -> ActorError:
        """Return the error of a request whose process ended before it could run.

        The actor records an exit as its last crash before it calls `on_exit`.
        """
        actor, crash = self.actor, self.actor.last_crash
        if crash is None:
            return actor.errors.ended(ExitReport(reason=EndReason.ABORT), actor.incarnation.index, activity)
        if (crash.call_id, crash.index) == (activity.call_id, activity.env):
            return copy_error(crash)
        return actor.errors.not_begun(activity, crash)

    def withdraw(self, future: ActorFuture) -> Activity | None:
        """Take the request of a future out of the queue; return its step, or None if it is not queued."""
        index = self._index_of(future, QUEUED)
        if index is None:
            return None
        activity = self.activity_of(index)
        self.table.deliver_ids([index])
        return activity

    def blame(self, future: ActorFuture) -> None:
        """Have the env of this future, if its row is posted, count as the one that the worker ran."""
        self._aborted = self._index_of(future, POSTED)

    def is_running(self, future: ActorFuture) -> bool:
        """Return whether the row of this future is posted and not complete."""
        index = self._index_of(future, POSTED)
        return index is not None and not self.table.is_complete(index)

    def _index_of(self, future: ActorFuture, status: int) -> int | None:
        for index in self.range:
            if self.table.status[index] == status and self.table.future_of(index) is future:
                return index
        return None

    def repair(self, error_of: ErrorOf) -> None:
        """Make all envs idle and in need of a reset. Requests with a future fail; other results are lost."""
        table = self.table
        for index in self.range:
            future = table.future_of(index)
            if future is not None:
                error = error_of(self.activity_of(index))
                future.set_outcome(table.outcomes.get(index) or ReadyOutcome(None, error))
            table.clear(index)
        if self.rollouts is not None:
            self.rollouts.repair(self, error_of)
        table.waiters.on_process_change()
