"""The recovery of one actor's envs from failed requests, and the errors that users get.

    a failure ──▶ EnvRecovery.decide ──▶ fates.settle ──▶ fates.choose_fate ──▶ a fate ──▶ an outcome, or another try
                  facts, error, bundle   episode, journal

`envactors.rollout.part` also calls `EnvRecovery.decide`, for envs whose steps are in no rows. Nothing here is queued:
callers learn whether a request must run again. `EnvRecovery` has no state of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

from envactors.actor.activity import Activity
from envactors.actor.actor import Actor
from envactors.actor.exits import ProcessExit
from envactors.actor.future import LazyOutcome, Outcome, ReadyOutcome
from envactors.actor.incarnation import ExitReport
from envactors.actor.job import ErrorOf
from envactors.actor.states import EndReason
from envactors.crashes.inputs import Inputs
from envactors.errors import ActorError, copy_error
from envactors.mailbox.messages import Failure, Fault
from envactors.mailbox.pickling import try_to_read
from envactors.mailbox.recorded import copy_replay, inputs_of
from envactors.replay import PostedRequest
from envactors.vector.fates import Cause, Decision, EnvFate, Facts, FailedRequest, lost_request, settle
from envactors.vector.results import EnvStep
from envactors.vector.rows import RowReader
from envactors.vector.table import QUEUED, EnvTable

# The actions of all envs: one array per leaf of the action.
Actions: TypeAlias = Sequence[npt.NDArray[Any]]


class EnvRecovery:
    """Handles the failed requests of one actor's envs. Every change happens under the lock of the vector.

    Args:
        table: The envs of the vector.
        reader: Reads results out of rows.
        actor: The actor.
    """

    def __init__(self, table: EnvTable, reader: RowReader, actor: Actor) -> None:
        self._table = table
        self._reader = reader
        self._actor = actor

    # Failed requests -------------------------------------------------------------------------------------

    def recover_raised(self, index: int) -> bool:
        """Handle the failure in a complete row, whose env raised; return whether the request must run again."""
        table = self._table
        failure = self.raised_failure(table.activity(index), table.infos.failure(table.overflow.get(index)))
        return self._recover(index, failure, has_process=self._actor.is_usable)

    def recover_unreadable(self, index: int, error: BaseException) -> bool:
        """Handle a result that cannot be unpickled; return whether the request must run again."""
        table = self._table
        table.swap_buffers(index)  # the previous observation may be returned instead
        activity, incarnation = table.activity(index), int(table.posted_in[index])
        text = type(error).__name__
        failure = FailedRequest(Cause.RAISED, ReadyOutcome(None, error), incarnation, activity, text, has_run=True)
        return self._recover(index, failure, has_process=self._actor.is_usable)

    def recover_unfinished(self, unfinished: list[Activity], running: Activity | None, ended: ProcessExit) -> list[int]:
        """Handle the requests that an ended process has not completed; return the envs whose requests must run again.

        Args:
            unfinished: The requests.
            running: The one of them that the process was running; None if it was running none.
            ended: The exit of the process, with the request that is blamed for it.
        """
        culprit = ended.culprit
        # The worker may have finished a step after its deadline, and begun the next one: then both have begun.
        begun = [activity.env for activity in (culprit, running) if activity is not None]
        is_discard = ended.reason is EndReason.DISCARD
        again: list[int] = []
        for activity in unfinished:
            is_culprit = culprit is not None and activity.env == culprit.env and not is_discard
            error = ended.error if is_culprit else self.crash_error_for(activity)
            cause = Cause.RUNNING if activity.env in begun else Cause.NOT_BEGUN
            reason = ended.reason if is_culprit or is_discard else None
            failure = lost_request(ended, cause, error, activity, reason)
            if self._recover(activity.env, failure, has_process=ended.plan.has_process):
                again.append(activity.env)
        return again

    def fail_queued(self, ids: list[int], error_of: ErrorOf) -> None:
        """Fail queued envs that no process will run."""
        for index in ids:
            activity = self._table.activity(index)
            # A closing actor reports the failure that led to the retry, rather than that it is closed.
            earlier = self._table.request(index).failure if self._actor.is_closing else None
            error = earlier or ReadyOutcome(None, error_of(activity))
            failure = FailedRequest(Cause.NOT_BEGUN, error, self._actor.incarnation.index, activity)
            self._recover(index, failure, has_process=False)

    def recover_lost_episodes(self, ids: Sequence[int]) -> None:
        """Handle the queued requests of these envs that need a lost episode.

        Each gets its outcome now, or becomes a reset and stays in the queue.
        """
        for index in ids:
            if self._table.status[index] == QUEUED and self._table.lacks_episode(index):
                lost = self.lost_episode_failure(self._table.activity(index))
                self._recover(index, lost, has_process=self._actor.is_usable)

    # Decisions and their effects -------------------------------------------------------------------------

    def _recover(self, index: int, failure: FailedRequest, *, has_process: bool) -> bool:
        """Handle a failed request, and give it an outcome unless it must run again; return whether it must run again.

        Args:
            index: The env.
            failure: The failure.
            has_process: See `decide`.
        """
        table, reader = self._table, self._reader
        posted = table.posted_request(index)
        decision, error = self.decide(index, failure, posted, table.slab.actions, has_process=has_process)
        if decision.fate in (EnvFate.REDO, EnvFate.REPORT):
            table.undo_post(index)
        if decision.fate is EnvFate.REDO:
            return True
        if decision.fate is EnvFate.RESET:
            request = table.request(index)
            # A repeated reset keeps the seed and the options of the user.
            seed = request.seed if decision.repeats_reset else None
            payload = request.payload if request.method == "reset" else None
            reset = dataclasses.replace(request, resets=True, seed=seed, payload=payload, failure=error)
            table.set_requests({index: reset})
            return True
        outcome = error
        if decision.fate is EnvFate.TRUNCATE:
            last = reader.copy_last(index, has_info=False)
            assert last is not None, "only an env with an earlier result is truncated"
            table.repeat_observation(index)
            # Starts may have failed since.
            incarnation = max(failure.incarnation + 1, self._actor.incarnation.index)
            outcome = self.read_later(index, functools.partial(reader.read_truncated, last, error, incarnation))
        table.record_outcome(index, outcome)
        return False

    def decide(
        self, index: int, failure: FailedRequest, posted: PostedRequest, actions: Actions, *, has_process: bool
    ) -> tuple[Decision, Outcome]:
        """Decide the fate of a failed step or reset, and discard its process if the env can no longer be used.

        Args:
            index: The env.
            failure: The failure.
            posted: The request as it was posted.
            actions: The actions of all envs.
            has_process: Whether the actor has a process now, or will have another one.

        Returns:
            The decision, and the error to report.
        """
        table, journal = self._table, self._table.journals[index]
        request = table.request(index)
        failure = failure._replace(in_reset=failure.in_reset or posted.is_reset)
        crashes = self._actor.config.crashes
        if crashes is not None and failure.raised is not None:
            find_inputs = functools.partial(self.step_inputs, index, posted, actions)
            place = failure.activity, failure.incarnation, self._actor.pid
            failure = failure._replace(error=crashes.name(failure.error, failure.raised, find_inputs, *place))
        error = self._with_inputs(index, failure, posted, actions)
        facts = Facts(
            ran_only_reset=posted.is_reset and not failure.has_run,  # otherwise its episode is recorded
            asked_reset=request.method == "reset",
            needs_episode=table.needs_episode(index),
            has_process=has_process,
            has_failed=request.failure is not None,
            can_replay=journal.can_replay,
            can_retry=table.uses_replay and not failure.has_run and journal.can_retry(posted),
        )
        # This may clear the journal, which the facts and the error were read from.
        decision = settle(failure, facts, table.episodes, index, journal)
        if table.keeps_journals and decision.fate is EnvFate.REPORT and failure.raised is not None:
            journal.record_failed(journal.request(table.attach, actions, index, posted))
        if failure.cause is Cause.RUNNING and decision.fate is not EnvFate.REDO:
            self._actor.add_failed()
        if decision.replaces_process:
            pid = self._actor.pid
            self._actor.discard(failure.incarnation, lambda: self._discard_error(failure, pid))
        return decision, error

    def step_inputs(self, index: int, posted: PostedRequest, actions: Actions) -> Inputs:
        """Return a failed step or reset with the requests before it, for a crash bundle; see `decide`."""
        table, journal = self._table, self._table.journals[index]
        inputs = self.message_inputs(index, journal.request(table.attach, actions, index, posted))
        is_poison = table.uses_replay and journal.is_poison(posted)
        return inputs._replace(is_complete=inputs.is_complete or posted.is_seeded_reset, is_poison=is_poison)

    def message_inputs(self, index: int, request: tuple[int, bytes]) -> Inputs:
        """Return a message with the requests before it, for a crash bundle."""
        table, journal, reader = self._table, self._table.journals[index], self._reader
        # In a rollout the rows are behind.
        last = None if table.rollouts else reader.copy_last(index, has_info=False)
        is_complete = journal.can_replay or not table.episodes.has_result(index)
        read = None if last is None else lambda: reader.read(last).obs
        replay = journal.replay(table.attach)
        return Inputs(replay and copy_replay(replay), request, is_complete, read_observation=read)

    # Errors ----------------------------------------------------------------------------------------------

    def _with_inputs(self, index: int, failure: FailedRequest, posted: PostedRequest, actions: Actions) -> Outcome:
        """Return the error of a request, with the inputs if they have ended a second process."""
        table, journal = self._table, self._table.journals[index]
        is_crash = failure.cause is Cause.RUNNING and failure.counts_as_crash
        if not (is_crash and table.uses_replay and journal.is_poison(posted)):
            return failure.error
        request = journal.request(table.attach, actions, index, posted)
        inputs = functools.partial(inputs_of, journal.replay(table.attach), request)
        crash = failure.error.read()[1]
        assert isinstance(crash, ActorError), "a running request fails only with its process"
        return ReadyOutcome(None, self._actor.errors.poison(crash, inputs))

    def _discard_error(self, failure: FailedRequest, pid: int | None) -> ActorError:
        """Return the error of a process that is discarded since an env raised. Runs code of users, without the lock."""
        cause = failure.error.read()[1]
        assert cause is not None, "the env has raised"
        error = self._actor.errors.discarded(failure.activity, failure.incarnation, pid, cause, failure.text)
        error.bundle = getattr(failure.error, "bundle", None)
        return error

    def raised_failure(self, activity: Activity, failure: Failure) -> FailedRequest:
        """Return the failure of a request in which the env raised, without unpickling the exception."""
        errors, incarnation, pid = self._actor.errors, int(self._table.posted_in[activity.env]), self._actor.pid
        error = LazyOutcome(lambda: (None, errors.raised(activity, incarnation, pid, failure)), is_failure=True)
        in_reset = failure.fault == Fault.RESET
        return FailedRequest(Cause.RAISED, error, incarnation, activity, failure.text, failure, in_reset=in_reset)

    def lost_episode_failure(self, activity: Activity) -> FailedRequest:
        """Return the failure of a request that needs an episode which ended with an earlier process."""
        actor = self._actor
        ended = actor.incarnation.index
        if actor.last_crash is not None and actor.last_crash.incarnation is not None:
            ended = actor.last_crash.incarnation
        return FailedRequest(Cause.NOT_BEGUN, ReadyOutcome(None, self.crash_error_for(activity)), ended, activity)

    def crash_error_for(self, activity: Activity) -> ActorError:
        """Return the error of a request that its process did not complete: its own crash, or that of another request.

        The actor records an exit as its last crash before it calls `EnvGroup.on_exit`.
        """
        actor, crash = self._actor, self._actor.last_crash
        if crash is None:
            return actor.errors.ended(ExitReport(reason=EndReason.ABORT), actor.incarnation.index, activity)
        if (crash.call_id, crash.index) == (activity.call_id, activity.env):
            return copy_error(crash)
        return actor.errors.not_begun(activity, crash)

    def read_later(self, index: int, read: Callable[[], EnvStep]) -> Outcome:
        """Return an outcome that unpickles the result of an env when somebody asks for it."""
        make_error = self.unreadable_error_maker(index)

        def read_or_explain() -> tuple[EnvStep | None, BaseException | None]:
            step, error = try_to_read(read)
            return step, None if error is None else make_error(error)

        return LazyOutcome(read_or_explain, is_failure=False)

    def unreadable_error_maker(self, index: int) -> Callable[[BaseException], ActorError]:
        """Return a function that turns the exception of unpickling an env's result into the error for the user.

        The function runs code of users, so callers must not hold the lock.
        """
        table, actor = self._table, self._actor
        incarnation = int(table.posted_in[index])
        return functools.partial(actor.errors.unreadable, table.activity(index), incarnation, actor.pid)
