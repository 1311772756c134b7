"""The recovery of one actor's envs from requests without results, and the errors that users get.

    a request without a result ──▶ recover ──▶ end_attempt ──▶ fates.decide
                                   row         episode, journal, process

`envactors.rollout.part` calls `EnvRecovery.end_attempt`, since the steps of its envs are in no rows. `EnvRecovery` has
no state of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

from envactors.actor.activity import Activity
from envactors.actor.actor import Actor
from envactors.actor.exits import ProcessExit
from envactors.actor.future import LazyOutcome, Outcome, ReadyOutcome
from envactors.actor.incarnation import ExitReport
from envactors.actor.job import ErrorOf
from envactors.actor.states import EndReason, is_crash
from envactors.crashes.inputs import Inputs
from envactors.errors import ActorError, copy_error
from envactors.mailbox.messages import Failure, Fault
from envactors.mailbox.pickling import try_to_read
from envactors.mailbox.recorded import copy_replay, inputs_of
from envactors.replay import PostedRequest
from envactors.vector.fates import Cause, Decision, EnvFate, Facts, RequestLoss, decide
from envactors.vector.results import EnvStep
from envactors.vector.rows import RowReader
from envactors.vector.table import QUEUED, EnvTable

# The actions of all envs: one array per leaf of the action.
Actions: TypeAlias = Sequence[npt.NDArray[Any]]


def exit_loss(
    ended: ProcessExit, cause: Cause, error: ActorError, activity: Activity, *, has_reason: bool = True
) -> RequestLoss:
    """Return the loss of a request that an ended process has not completed.

    Args:
        ended: The exit of the process.
        cause: `Cause.RUNNING` or `Cause.NOT_BEGUN`.
        error: The error of the request.
        activity: The request.
        has_reason: Whether the reason of the exit concerns the request.
    """
    index, outcome, reason = ended.incarnation.index, ReadyOutcome(None, error), ended.reason if has_reason else None
    loss = RequestLoss(cause, outcome, index, activity, ended.plan.has_process, reason=reason)
    return loss._replace(counts_as_crash=is_crash(ended.reason))


class EnvRecovery:
    """Handles the requests of one actor's envs that have no results. Every change happens under the lock of the vector.

    Args:
        table: The envs of the vector.
        reader: Reads results out of rows.
        actor: The actor.
        queue_again: Queues envs whose requests run again.
    """

    def __init__(self, table: EnvTable, reader: RowReader, actor: Actor, queue_again: Callable[..., object]) -> None:
        self._table = table
        self._reader = reader
        self._actor = actor
        self._queue_again = queue_again

    def recover(self, losses: Iterable[RequestLoss]) -> None:
        """Record the outcomes of requests in rows that have no results, and queue those that run again."""
        again = [loss.activity.env for loss in losses if self._recover_row(loss)]
        if again:
            self._queue_again(again)

    def recover_lost_episodes(self, ids: Sequence[int]) -> None:
        """Handle the queued requests of these envs that need a lost episode.

        Each gets its outcome now, or becomes a reset and stays in the queue.
        """
        for index in ids:
            if self._table.status[index] == QUEUED and self._table.cannot_continue(index):
                self._recover_row(self.episode_loss(self._table.activity(index)))

    def _recover_row(self, loss: RequestLoss) -> bool:
        """Record the outcome of a request in a row that has no result; return True if it runs again instead."""
        table, reader, index = self._table, self._reader, loss.activity.env
        decision, error = self.end_attempt(index, loss, table.posted_request(index), table.slab.actions)
        if loss.has_run and decision.fate is EnvFate.REPORT:
            table.last.take(index)  # the env continues from the result that cannot be read
        if decision.fate is EnvFate.REDO:
            return True
        if decision.fate is EnvFate.RESET:
            request = table.request(index)
            # A repeated reset keeps the seed and the options of the user.
            seed = request.seed if decision.repeats_reset else None
            payload = request.payload if request.method == "reset" else None
            reset = dataclasses.replace(request, resets=True, seed=seed, payload=payload, earlier_error=error)
            table.set_requests({index: reset})
            return True
        outcome = error
        if decision.fate is EnvFate.TRUNCATE:
            last = reader.copy_last(index, has_info=False)
            assert last is not None, "only an env with an earlier result is truncated"
            table.last.repeat(index)
            # Starts that have failed since have an incarnation, too.
            incarnation = max(loss.incarnation + 1, self._actor.incarnation.index)
            outcome = self.read_later(index, functools.partial(reader.read_truncated, last, error, incarnation))
        table.record_outcome(index, outcome)
        return False

    def end_attempt(
        self, index: int, loss: RequestLoss, posted: PostedRequest, actions: Actions
    ) -> tuple[Decision, Outcome]:
        """End an attempt at a step or reset: apply its fate to the episode, the journal, the counts, and the process.

        Args:
            index: The env.
            loss: Why there is no result.
            posted: The request as it was posted.
            actions: The actions of all envs.

        Returns:
            The decision, and the error to report.
        """
        table, journal = self._table, self._table.journals[index]
        request, episodes = table.request(index), table.episodes
        loss = loss._replace(in_reset=loss.in_reset or posted.is_reset)
        loss = loss._replace(error=self._complete_error(index, loss, posted, actions))
        facts = Facts(
            ran_only_reset=posted.is_reset and not loss.has_run,  # one that has run is recorded, with its episode
            asked_reset=request.method == "reset",
            continues_episode=table.continues_episode(index),
            has_earlier_error=request.earlier_error is not None,
            can_replay=journal.can_replay,
            can_retry=table.uses_replay and not loss.has_run and journal.can_retry(posted),
        )
        decision = decide(loss, facts, episodes, index)
        runs_again = decision.fate is EnvFate.REDO
        if decision.ends_episode:
            episodes.end_without_result(index, resets_next=decision.resets_next)
        if decision.ends_episode and not runs_again:
            journal.forget()
        elif runs_again and loss.cause is not Cause.NOT_BEGUN and loss.counts_as_crash:
            journal.count_crash()
        elif table.keeps_journals and decision.fate is EnvFate.REPORT and loss.report is not None:
            journal.record_failed(journal.request(table.attach, actions, index, posted))
        if decision.changes_seed:
            episodes.advance(index)
        if loss.cause is Cause.RUNNING and not runs_again:
            self._actor.add_failed()
        if decision.replaces_process:
            pid = self._actor.pid
            self._actor.discard(loss.incarnation, lambda: self._discard_error(loss, pid))
        return decision, loss.error

    # Requests without a result ---------------------------------------------------------------------------

    def raised_loss(self, activity: Activity, report: Failure) -> RequestLoss:
        """Return the loss of a request in which the env raised, without unpickling the exception."""
        errors, incarnation, pid = self._actor.errors, int(self._table.posted_in[activity.env]), self._actor.pid
        error = LazyOutcome(lambda: (None, errors.raised(activity, incarnation, pid, report)), is_failure=True)
        loss = RequestLoss(Cause.RAISED, error, incarnation, activity, self._actor.is_usable, report)
        return loss._replace(in_reset=report.fault in (Fault.RESET, Fault.LAST_RESULT))

    def unreadable_loss(self, index: int, error: BaseException) -> RequestLoss:
        """Return the loss of a result that cannot be unpickled."""
        table, outcome = self._table, ReadyOutcome(None, error)
        process, has_process = int(table.posted_in[index]), self._actor.is_usable
        loss = RequestLoss(Cause.RAISED, outcome, process, table.activity(index), has_process, has_run=True)
        # After an end that the user has not seen, the env needs a reset, as if its autoreset had raised.
        return loss._replace(in_reset=bool(table.slab.terminated[index] or table.slab.truncated[index]))

    def exit_losses(self, requests: list[Activity], running: Activity | None, ended: ProcessExit) -> list[RequestLoss]:
        """Return the losses of the requests that an ended process has not completed.

        Args:
            requests: The requests.
            running: The one of them that the process was running; None if it was running none.
            ended: The exit of the process, with the request that is blamed for it.
        """
        culprit = ended.culprit
        # The worker may have finished a step after its deadline, and begun the next one: then both have begun.
        begun = [activity.env for activity in (culprit, running) if activity is not None]
        is_discard = ended.reason is EndReason.DISCARD
        losses = []
        for activity in requests:
            is_culprit = culprit is not None and activity.env == culprit.env and not is_discard
            error = ended.error if is_culprit else self.crash_error_for(activity)
            cause = Cause.RUNNING if activity.env in begun else Cause.NOT_BEGUN
            losses.append(exit_loss(ended, cause, error, activity, has_reason=is_culprit or is_discard))
        return losses

    def refused_loss(self, index: int, error_of: ErrorOf) -> RequestLoss:
        """Return the loss of a queued request that no process will run."""
        activity = self._table.activity(index)
        # A closing actor reports the error that led to the retry, rather than that it is closed.
        earlier = self._table.request(index).earlier_error if self._actor.is_closing else None
        error = earlier or ReadyOutcome(None, error_of(activity))
        return RequestLoss(Cause.NOT_BEGUN, error, self._actor.incarnation.index, activity, has_process=False)

    def episode_loss(self, activity: Activity) -> RequestLoss:
        """Return the loss of a request that needs an episode which ended with an earlier process."""
        actor, crash = self._actor, self._actor.last_crash
        incarnation = actor.incarnation.index if crash is None or crash.incarnation is None else crash.incarnation
        error = ReadyOutcome(None, self.crash_error_for(activity))
        return RequestLoss(Cause.NOT_BEGUN, error, incarnation, activity, actor.is_usable)

    # Crash bundles ---------------------------------------------------------------------------------------

    def step_inputs(self, index: int, posted: PostedRequest, actions: Actions) -> Inputs:
        """Return a failed step or reset with the requests before it, for a crash bundle; see `end_attempt`."""
        table, journal = self._table, self._table.journals[index]
        inputs = self.message_inputs(index, journal.request(table.attach, actions, index, posted))
        is_poison = table.uses_replay and journal.is_poison(posted)
        return inputs._replace(is_complete=inputs.is_complete or posted.is_seeded_reset, is_poison=is_poison)

    def message_inputs(self, index: int, request: tuple[int, bytes]) -> Inputs:
        """Return a message with the requests before it, for a crash bundle."""
        table, journal, reader = self._table, self._table.journals[index], self._reader
        last = reader.copy_row(index) if table.has_result_in_row(index) else reader.copy_last(index, has_info=False)
        is_complete = journal.can_replay or not table.episodes.has_result(index)
        # In a rollout the rows are behind.
        read = None if last is None or table.rollouts else lambda: reader.read(last).obs
        replay = journal.replay(table.attach)
        return Inputs(replay and copy_replay(replay), request, is_complete, read_observation=read)

    # Errors ----------------------------------------------------------------------------------------------

    def _complete_error(self, index: int, loss: RequestLoss, posted: PostedRequest, actions: Actions) -> Outcome:
        """Return the error of a request, with its crash bundle, or with the inputs if they have ended two processes."""
        table, journal, crashes = self._table, self._table.journals[index], self._actor.config.crashes
        if crashes is not None and loss.report is not None:
            find_inputs = functools.partial(self.step_inputs, index, posted, actions)
            return crashes.name(loss.error, loss.report, find_inputs, loss.activity, loss.incarnation, self._actor.pid)
        has_crashed = loss.cause is Cause.RUNNING and loss.counts_as_crash
        if not (has_crashed and table.uses_replay and journal.is_poison(posted)):
            return loss.error
        request = journal.request(table.attach, actions, index, posted)
        inputs = functools.partial(inputs_of, journal.replay(table.attach), request)
        crash = loss.error.read()[1]
        assert isinstance(crash, ActorError), "a running request fails only with its process"
        return ReadyOutcome(None, self._actor.errors.poison(crash, inputs))

    def _discard_error(self, loss: RequestLoss, pid: int | None) -> ActorError:
        """Return the error of a process that is discarded since an env raised. Runs code of users, without the lock."""
        cause = loss.error.read()[1]
        assert cause is not None, "the env has raised"
        text = type(cause).__name__ if loss.report is None else loss.report.text
        error = self._actor.errors.discarded(loss.activity, loss.incarnation, pid, cause, text)
        error.bundle = getattr(loss.error, "bundle", None)
        return error

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
