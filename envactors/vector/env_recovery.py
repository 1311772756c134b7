"""The recovery of one actor's envs from requests without results, and from the end of their process.

1. A loss says why a request has no result: `exit_loss`, `raised_loss`, and so on.
2. `envactors.vector.fates` decides what follows from it.
3. `end_attempt` applies that to the episode, the journal, the counts, and the process of the env. Then
   `resolve_or_retry` applies it to the row, or `envactors.rollout.part` to the trajectory.

A new process first runs replays, which bring envs to where they were. `EnvRecovery` has no state of its own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from envactors.actor.activity import Activity
from envactors.actor.actor import Actor
from envactors.actor.calls import Replay
from envactors.actor.future import LazyOutcome, Outcome, ReadyOutcome
from envactors.actor.job import ErrorOf, Job, ProcessExit
from envactors.actor.states import EndReason, is_crash
from envactors.crashes.inputs import Inputs
from envactors.errors import ActorError, copy_error
from envactors.mailbox.messages import Failure, Fault
from envactors.mailbox.pickling import dumps
from envactors.mailbox.recorded import copy_replay, inputs_of
from envactors.replay import PostedRequest
from envactors.vector.fates import Cause, Decision, EnvFate, RequestFacts, RequestLoss
from envactors.vector.requests import EnvRequest, ResetAnswer
from envactors.vector.row_reader import RowReader
from envactors.vector.table import QUEUED, EnvTable


class EnvRecovery:
    """Handles lost requests of one actor's envs, and brings the envs back. Changes happen under the vector's lock.

    Args:
        table: The envs of the vector.
        reader: Reads results out of rows.
        actor: The actor.
    """

    def __init__(self, table: EnvTable, reader: RowReader, actor: Actor) -> None:
        self._table = table
        self._reader = reader
        self._actor = actor
        self._indices = actor.config.indices

    # Losses ----------------------------------------------------------------------------------------------

    def raised_loss(self, activity: Activity, report: Failure) -> RequestLoss:
        """Return the loss of a request in which the env raised, without unpickling the exception."""
        actor, incarnation, pid = self._actor, self._table.posted_in[activity.env], self._actor.pid
        error = LazyOutcome(lambda: (None, actor.errors.raised(activity, incarnation, pid, report)), is_failure=True)
        is_over = activity.method == "reset" or report.fault in (Fault.RESET, Fault.LAST_RESULT)
        return RequestLoss(Cause.ERROR, error, incarnation, activity, actor.is_usable, report, episode_is_over=is_over)

    def unreadable_loss(self, index: int, error: BaseException) -> RequestLoss:
        """Return the loss of a result that cannot be unpickled."""
        table, activity, outcome = self._table, self._table.activity(index), ReadyOutcome(None, error)
        is_over = activity.method == "reset" or table.slab.ends_episode(index, table.ops[index])
        loss = RequestLoss(Cause.ERROR, outcome, table.posted_in[index], activity, self._actor.is_usable)
        return loss._replace(episode_is_over=is_over, result_is_recorded=True)

    def exit_loss(self, activity: Activity, ended: ProcessExit) -> RequestLoss:
        """Return the loss of a request that an ended process has not completed."""
        culprit = ended.culprit if ended.culprit is not None and ended.culprit.env == activity.env else None
        # The worker may have finished a step after its deadline, and begun the next one: then both have begun.
        begun = [each.env for each in (ended.culprit, ended.uncompleted.running) if each is not None]
        is_discard = ended.reason is EndReason.DISCARD
        is_blamed = culprit is not None and not is_discard
        return RequestLoss(
            cause=Cause.RUNNING if activity.env in begun else Cause.NOT_BEGUN,
            error=ReadyOutcome(None, ended.error if is_blamed else self.unfinished_error(activity)),
            incarnation=ended.process.incarnation,
            activity=culprit or activity,
            may_continue=ended.plan.starts_another,
            reason=ended.reason if is_blamed or is_discard else None,
            may_blame_inputs=is_crash(ended.reason),
            episode_is_over=(culprit or activity).method == "reset",
        )

    def queued_request_loss(self, index: int, error_of: ErrorOf) -> RequestLoss:
        """Return the loss of a queued request that no process will run."""
        activity, answer = self._table.activity(index), self._table.request(index).answer
        # A closing actor reports the error that led to the retry, rather than that it is closed.
        earlier = answer.error if answer is not None and self._actor.is_closing else None
        error = earlier or ReadyOutcome(None, error_of(activity))
        return RequestLoss(Cause.NOT_BEGUN, error, self._actor.process.incarnation, activity, may_continue=False)

    def lost_episode_loss(self, activity: Activity) -> RequestLoss:
        """Return the loss of a request that continues an episode which ended with an earlier process."""
        actor, last = self._actor, self._actor.last_exit_error
        incarnation = actor.process.incarnation if last is None or last.incarnation is None else last.incarnation
        error = ReadyOutcome(None, self.unfinished_error(activity))
        return RequestLoss(Cause.NOT_BEGUN, error, incarnation, activity, actor.is_usable)

    def unfinished_error(self, activity: Activity) -> ActorError:
        """Return the error of a request that an ended process has not completed, or that needs its episode."""
        actor, crash = self._actor, self._actor.last_exit_error
        if crash is None:
            return actor.errors.not_run(activity, EndReason.ABORT)
        if (crash.call_id, crash.index) == (activity.call_id, activity.env):
            return copy_error(crash)
        return actor.errors.unblamed(activity, crash)

    # Rows ------------------------------------------------------------------------------------------------

    def settle_lost_episodes(self, ids: Sequence[int]) -> None:
        """Handle the queued requests of these envs that would continue an episode which is lost.

        Each gets its outcome now, or becomes a reset and stays in the queue.
        """
        for index in ids:
            if self._table.status[index] == QUEUED and self._table.needs_lost_episode(index):
                self.resolve_or_retry(self.lost_episode_loss(self._table.activity(index)))

    def resolve_or_retry(self, loss: RequestLoss) -> bool:
        """Record the outcome of a row's request that has no result, or have it run again; return whether it runs again.

        If so, the caller queues it, unless it is still in the queue.
        """
        table, reader, index = self._table, self._reader, loss.activity.env
        decision, outcome = self.end_attempt(index, loss, table.posted_request(index))
        if decision.fate is EnvFate.REDO:
            return True
        if decision.fate is EnvFate.RESET:
            self._request_reset(index, outcome, keeps_seed=not decision.changes_seed)
            return True
        if index in table.unposted:
            table.begin_seeds(index)  # as if it had run; only a canceled reset leaves the seeds as they were
        if decision.fate is EnvFate.TRUNCATE:
            table.last_rows.truncate(index, self.next_incarnation(loss))
            last = reader.copy_last(index, has_info=False)
            assert last is not None, "only an env with an earlier result is truncated"
            outcome = reader.read_later(self._actor, index, functools.partial(reader.read_truncated, last, outcome))
        elif decision.fate is EnvFate.REPORT and loss.result_is_recorded:
            table.last_rows.keep(index)  # the env continues from the result that cannot be read
        table.record_outcome(index, outcome)
        return False

    def _request_reset(self, index: int, error: Outcome, *, keeps_seed: bool) -> None:
        """Turn the request of an env into a reset, whose result also reports the error."""
        table, request = self._table, self._table.request(index)
        is_step = request.method == "step"
        answer = request.answer or ResetAnswer(self._reader.copy_last(index) if is_step else None, truncates=is_step)
        seed = request.seed if keeps_seed else None
        options = None if is_step else request.payload
        reset = EnvRequest(request.method, request.future, seed, options, answer._replace(error=error))
        table.set_requests({index: reset})

    def next_incarnation(self, loss: RequestLoss) -> int:
        """Return the incarnation in which an env continues. Starts that have failed since the loss have one, too."""
        return max(loss.incarnation + 1, self._actor.process.incarnation)

    # Rows and rollouts -----------------------------------------------------------------------------------

    def end_attempt(self, index: int, loss: RequestLoss, posted: PostedRequest) -> tuple[Decision, Outcome]:
        """End an attempt at a step or reset: apply its fate to the episode, the journal, the counts, and the process.

        Args:
            index: The env.
            loss: Why there is no result.
            posted: The request as it was posted.

        Returns:
            The decision, and the error to report.
        """
        table, actor, journal = self._table, self._actor, self._table.journal(index)
        request, error = table.request(index), self._complete_error(index, loss, posted)
        ran_reset = posted.is_reset or (posted.resets_within_step and loss.episode_is_over)
        facts = RequestFacts(
            user_called_reset=request.method == "reset",
            is_retry=request.answer is not None,
            ran_reset=ran_reset and loss.cause is not Cause.NOT_BEGUN,
            notices_loss=table.notices_loss(index),
            can_replay=table.uses_replay and journal.can_replay,
            can_retry=table.uses_replay and not loss.result_is_recorded and journal.can_retry(posted),
        )
        decision = table.episodes.decide_loss(index, loss, facts)
        if decision.fate is EnvFate.REDO:
            if loss.cause is not Cause.NOT_BEGUN and loss.may_blame_inputs:
                journal.count_crash()
        else:
            if loss.cause is Cause.RUNNING:
                actor.jobs.failed += 1
            if decision.ends_episode:
                journal.forget()
            elif table.keeps_journals and loss.report is not None:
                journal.record_failed(journal.request(table.attach, index, posted))
        if decision.replaces_process:
            actor.discard(loss.incarnation, functools.partial(self._discard_error, loss, error, actor.pid))
        return decision, error

    def _complete_error(self, index: int, loss: RequestLoss, posted: PostedRequest) -> Outcome:
        """Return the error of a request, with its crash bundle, or with the inputs if they have ended two processes."""
        table, journal, crashes = self._table, self._table.journal(index), self._actor.config.crashes
        if crashes is not None and loss.report is not None:
            find_inputs = functools.partial(self.step_inputs, index, posted)
            return crashes.name(loss.error, loss.report, find_inputs, loss.activity, loss.incarnation, self._actor.pid)
        has_crashed = loss.cause is Cause.RUNNING and loss.may_blame_inputs
        if not (has_crashed and table.uses_replay and journal.is_poison(posted)):
            return loss.error
        request = journal.request(table.attach, index, posted)
        inputs = functools.partial(inputs_of, journal.replay(table.attach), request)
        crash = loss.error.read()[1]
        assert isinstance(crash, ActorError), "a running request fails only with its process"
        return ReadyOutcome(None, self._actor.errors.poison_inputs(crash, inputs))

    def _discard_error(self, loss: RequestLoss, reported: Outcome, pid: int | None) -> ActorError:
        """Return the error of a process that is discarded since an env raised. Runs code of users, without the lock.

        Args:
            loss: The loss of the request.
            reported: The error of the request, as it is reported.
            pid: The process.
        """
        cause = reported.read()[1]
        assert cause is not None, "the env has raised"
        text = type(cause).__name__ if loss.report is None else loss.report.text
        error = self._actor.errors.process_discarded(loss.activity, loss.incarnation, pid, cause, text)
        error.bundle = getattr(reported, "bundle", None)
        return error

    # Replays ---------------------------------------------------------------------------------------------

    def replays_for_process(self, *, is_renewal: bool) -> list[Job]:
        """Return the jobs that a new process runs first, to bring the envs to where they were.

        Without replays, the journals begin anew with it. Requests that need an episode which is gone now are handled.

        Args:
            is_renewal: Whether the user has asked for a fresh process, in which only attributes are set again.
        """
        for index in self._indices:
            if not self._table.uses_replay:
                self._table.journal(index).forget_all()
            elif is_renewal:
                self._table.journal(index).forget()
        self.settle_lost_episodes(self._indices)
        return [*filter(None, map(self._replay_of, self._indices))]

    def _replay_of(self, index: int) -> Replay | None:
        """Return the job that replays the journal of an env; None if it has nothing to repeat."""
        message = self._table.journal(index).replay(self._table.attach)
        return message and Replay(index, dumps(tuple(message)), functools.partial(self._on_replayed, index))

    def _on_replayed(self, index: int, is_same: bool) -> None:
        """Continue the episode of an env if the replay reached the same point; otherwise the episode stays lost."""
        journal, actor = self._table.journal(index), self._actor
        could_replay = journal.can_replay
        journal.record_replay(crashed=False, is_same=is_same)
        if journal.can_replay:
            self._table.episodes.resume(index)
            text = f"the episode of env {index} was replayed in the new process, and continues"
            actor.log.write(logging.WARNING, text)
        elif could_replay and (attribute_replay := self._replay_of(index)):
            actor.jobs.enqueue(attribute_replay, first=True)  # the failed one may have ended before it set all of them
        self.settle_lost_episodes([index])

    def record_exit(self, ended: ProcessExit) -> None:
        """Record the replay that has ended a process, if it was one."""
        if isinstance(ended.job, Replay) and ended.culprit is not None and is_crash(ended.reason):
            self._table.journal(ended.culprit.env).record_replay(crashed=True)

    # Crash bundles ---------------------------------------------------------------------------------------

    def step_inputs(self, index: int, posted: PostedRequest) -> Inputs:
        """Return a failed step or reset with the requests before it, for a crash bundle."""
        table, journal = self._table, self._table.journal(index)
        inputs = self.message_inputs(index, journal.request(table.attach, index, posted))
        is_poison = table.uses_replay and journal.is_poison(posted)
        return inputs._replace(is_complete=inputs.is_complete or posted.is_seeded_reset, is_poison=is_poison)

    def message_inputs(self, index: int, request: tuple[int, bytes]) -> Inputs:
        """Return a message with the requests before it, for a crash bundle."""
        table, journal, reader = self._table, self._table.journal(index), self._reader
        last = reader.copy_row(index) if table.has_result_in_row(index) else reader.copy_last(index, has_info=False)
        is_complete = journal.can_replay or not table.episodes.has_result(index)
        # In a rollout the rows are behind.
        read = None if last is None or table.rollouts_in_flight else lambda: reader.read(last).obs
        replay = journal.replay(table.attach)
        return Inputs(replay and copy_replay(replay), request, is_complete, read_observation=read)
