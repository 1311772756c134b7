"""The recovery of one actor's envs from requests without results.

1. A loss says why a request has no result. Each of the first methods makes one: `exit_loss`, `raised_loss`, and so on.
2. `envactors.vector.fates` decides what follows from it.
3. `apply_fate` applies that to the episode, the journal, the counts, and the process of the env.
4. `resolve_or_retry` does all this for a row: then the request has an outcome, or the caller queues it again. A rollout
   does the rest of it for a trajectory instead (`envactors.rollout.rollout_envs`).

Under ``on_failure="replay"``, `replays` makes the jobs that a new process runs first, to bring the envs to where they
were. `envactors.replay` has the journals that they repeat. `EnvRecovery` keeps no state.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from envactors.actor.actor import Actor
from envactors.actor.actor_process import EndReason, is_crash, most_failures
from envactors.actor.calls import ReplayJob
from envactors.actor.future import LazyOutcome, Outcome, ReadyOutcome
from envactors.actor.job import Activity, ErrorOf, Job, ProcessExit
from envactors.crashes.inputs import Inputs
from envactors.errors import ActorError, copy_error, raised_by_user_code
from envactors.mailbox.messages import Failure, Fault
from envactors.mailbox.pickling import dumps
from envactors.mailbox.recorded import copy_replay, inputs_of
from envactors.replay import PostedRequest
from envactors.vector.fates import Decision, EnvFate, Progress, RequestFacts, RequestLoss, decide
from envactors.vector.requests import EnvRequest, ResetAnswer
from envactors.vector.row_reader import RowReader
from envactors.vector.table import QUEUED, EnvTable


class EnvRecovery:
    """Handles the requests of one actor's envs that have no result. Changes happen under the lock of the vector.

    Args:
        table: The envs of the vector.
        reader: Reads results out of rows.
        actor: The actor.
    """

    def __init__(self, table: EnvTable, reader: RowReader, actor: Actor) -> None:
        self._table = table
        self._reader = reader
        self._actor = actor

    # Losses ----------------------------------------------------------------------------------------------

    def raised_loss(self, activity: Activity, failure: Failure) -> RequestLoss:
        """Return the loss of a request in which the env raised, without unpickling the exception."""
        actor, incarnation, pid = self._actor, self._table.rows.posted_incarnations[activity.index], self._actor.pid
        error = LazyOutcome(lambda: (None, actor.errors.raised(activity, incarnation, pid, failure)), is_failure=True)
        is_over = activity.method == "reset" or failure.fault in (Fault.RESET, Fault.LAST_RESULT)
        loss = RequestLoss(Progress.ENDED, error, incarnation, activity, actor.is_usable, failure)
        return loss._replace(may_blame_inputs=True, episode_is_over=is_over)

    def unreadable_loss(self, index: int, error: BaseException) -> RequestLoss:
        """Return the loss of a result that cannot be unpickled."""
        table, rows, activity = self._table, self._table.rows, self._table.activity(index)
        outcome, incarnation = ReadyOutcome(None, error), rows.posted_incarnations[index]
        is_over = activity.method == "reset" or table.slab.ends_episode(index, rows.ops[index])
        loss = RequestLoss(Progress.ENDED, outcome, incarnation, activity, self._actor.is_usable)
        return loss._replace(may_blame_inputs=True, episode_is_over=is_over, result_is_recorded=True)

    def exit_loss(self, activity: Activity, process_exit: ProcessExit) -> RequestLoss:
        """Return the loss of a request that an ended process has not completed."""
        blamed, running, reason = process_exit.culprit, process_exit.uncompleted.running, process_exit.reason
        is_culprit = blamed is not None and blamed.index == activity.index
        # A worker that has finished a step too late may have begun the next one. Then the late one is the culprit, and
        # the other one was running.
        was_running = is_culprit or (running is not None and running.index == activity.index)
        if is_culprit and blamed is not None:
            activity = blamed  # which knows the method that ran, and its start
        is_blamed = is_culprit and reason is not EndReason.ENV_RAISED
        return RequestLoss(
            progress=Progress.BEGUN if was_running else Progress.NOT_BEGUN,
            error=ReadyOutcome(None, process_exit.error if is_blamed else self.unfinished_error(activity)),
            incarnation=process_exit.process.incarnation,
            activity=activity,
            may_continue=process_exit.has_successor,
            reason=reason if is_blamed or reason is EndReason.ENV_RAISED else None,
            may_blame_inputs=is_culprit and is_crash(reason),
            episode_is_over=activity.method == "reset",
        )

    def queued_request_loss(self, index: int, error_of: ErrorOf) -> RequestLoss:
        """Return the loss of a queued request that no process will run."""
        activity, answer = self._table.activity(index), self._table.request(index).partial_answer
        # A closing actor reports the error that led to the retry, rather than that it is closed.
        earlier = answer.error if answer is not None and self._actor.is_closing else None
        error = earlier or ReadyOutcome(None, error_of(activity))
        return RequestLoss(Progress.NOT_BEGUN, error, self._actor.process.incarnation, activity, may_continue=False)

    def lost_episode_loss(self, activity: Activity) -> RequestLoss:
        """Return the loss of a request that would continue an episode which was lost with an earlier process.

        The error and the incarnation are those of the process that has ended. The env continues in a later one.
        """
        actor, last = self._actor, self._actor.last_exit_error
        incarnation = actor.process.incarnation if last is None or last.incarnation is None else last.incarnation
        error = ReadyOutcome(None, self.unfinished_error(activity))
        return RequestLoss(Progress.NOT_BEGUN, error, incarnation, activity, actor.is_usable)

    def unfinished_error(self, activity: Activity) -> BaseException:
        """Return the error of a request that an ended process has not completed, or that needs its episode.

        If the exit was blamed on this very request, that is the error of the exit.
        """
        actor, crash = self._actor, self._actor.last_exit_error
        if crash is None:
            return actor.errors.not_run(activity, EndReason.ABORT)
        if (crash.call_id, crash.index) == (activity.call_id, activity.index):
            return raised_by_user_code(copy_error(crash))
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
        table, reader, index = self._table, self._reader, loss.activity.index
        decision, outcome = self.apply_fate(index, loss, table.posted_request(index))
        if decision.fate is EnvFate.REDO:
            return True
        if decision.fate is EnvFate.RESET:
            self._request_reset(index, outcome, keeps_seed=not decision.changes_seed)
            return True
        if not table.was_posted(index):
            table.begin_seeds(index)  # as its post would have done; only the seed of a canceled reset is forgotten
        if decision.fate is EnvFate.TRUNCATE:
            table.last_rows.truncate(index, self.next_incarnation(loss))
            last = reader.copy_last(index, with_info=False)
            assert last is not None, "only an env with an earlier result is truncated"
            outcome = reader.lazy_outcome(self._actor, index, functools.partial(reader.read_truncated, last, outcome))
        elif decision.fate is EnvFate.REPORT and loss.result_is_recorded:
            table.last_rows.take_row(index)  # the env continues from the result that cannot be read
        table.record_outcome(index, outcome)
        return False

    def _request_reset(self, index: int, error: Outcome, *, keeps_seed: bool) -> None:
        """Turn the request of an env into a reset, whose result also reports the error."""
        table, request = self._table, self._table.request(index)
        is_step = request.method == "step"
        last = self._reader.copy_last(index) if is_step else None
        answer = request.partial_answer or ResetAnswer(truncates=is_step, before=last)
        seed = request.seed if keeps_seed else None
        options = None if is_step else request.payload
        reset = EnvRequest(request.method, request.future, seed, options, answer._replace(error=error))
        table.set_requests({index: reset})

    def next_incarnation(self, loss: RequestLoss) -> int:
        """Return the incarnation in which an env continues. Starts that have failed since the loss have one, too."""
        return max(loss.incarnation + 1, self._actor.process.incarnation)

    # Rows and rollouts -----------------------------------------------------------------------------------

    def apply_fate(self, index: int, loss: RequestLoss, posted: PostedRequest) -> tuple[Decision, Outcome]:
        """End an attempt at a step or reset: apply its fate to the episode, the journal, the counts, and the process.

        1. Complete the error. It may report the inputs, which are in the journal until 3.
        2. Decide, and apply the decision to the episode and the seeds.
        3. Count the failure, and bring the journal to the point from which the env continues.
        4. Replace the process, if the env has raised and cannot be used again.

        Args:
            index: The env.
            loss: Why there is no result.
            posted: The request as it was posted.

        Returns:
            The decision, and the error to report.
        """
        table, actor = self._table, self._actor
        journal = table.journals.flushed(index)
        error = self._complete_error(index, loss, posted)
        came_to_reset = posted.is_reset or (posted.resets_within_step and loss.episode_is_over)
        facts = RequestFacts(
            user_called_reset=table.request(index).method == "reset",
            has_result=table.episodes.has_result(index),
            ran_reset=came_to_reset and loss.progress is not Progress.NOT_BEGUN,
            failed_resets=table.episodes.failed_resets[index],
            most_failures=most_failures(actor.config.restart),
            reports_lost_episode=table.reports_lost_episode(index),
            can_replay=table.journals.is_replayed and journal.can_replay,
            can_retry=table.journals.is_replayed and not loss.result_is_recorded and journal.can_retry(posted),
        )
        decision = decide(loss, facts, table.episodes.on_failure, table.episodes.autoreset)
        table.episodes.apply(index, decision, seed_is_used=loss.result_is_recorded)
        if decision.fate is EnvFate.REDO:
            # The journal stays: one whose episode ends here has nothing to replay, and only counts the crash.
            if loss.may_blame_inputs:
                journal.count_crash()
        else:
            # What has ended was counted by `record_completed`.
            if loss.progress is Progress.BEGUN or (loss.progress is Progress.NOT_BEGUN and not loss.may_continue):
                actor.jobs.record_failed()
            if decision.ends_episode:
                journal.forget()
            elif table.journals.is_recorded and loss.failure is not None:
                journal.record_failed(journal.request_message(table.attach, index, posted))
        if decision.replaces_process:
            actor.replace_after_raise(loss.incarnation, functools.partial(self._error_of_raise, loss, error, actor.pid))
        return decision, error

    def _complete_error(self, index: int, loss: RequestLoss, posted: PostedRequest) -> Outcome:
        """Return the error of a request, with its crash bundle, or with the inputs if they have ended two processes."""
        table, journal, crashes = self._table, self._table.journals.flushed(index), self._actor.config.crashes
        if crashes is not None and loss.failure is not None:
            get_inputs = functools.partial(self.step_inputs, index, posted)
            return crashes.name(loss.error, loss.failure, get_inputs, loss.activity, loss.incarnation, self._actor.pid)
        has_crashed = loss.progress is Progress.BEGUN and loss.may_blame_inputs
        if not (has_crashed and table.journals.is_replayed and journal.is_poison(posted)):
            return loss.error
        request = journal.request_message(table.attach, index, posted)
        inputs = functools.partial(inputs_of, journal.replay_message(table.attach), request)
        crash = loss.error.read()[1]
        assert isinstance(crash, ActorError), "a running request fails only with its process"
        return ReadyOutcome(None, self._actor.errors.poison_inputs(crash, inputs))

    def _error_of_raise(self, loss: RequestLoss, reported: Outcome, pid: int | None) -> ActorError:
        """Return the error of a process that is replaced since a request failed. Runs code of users, without the lock.

        Args:
            loss: The loss of the request.
            reported: The error of the request, as it is reported.
            pid: The process.
        """
        cause = reported.read()[1]
        assert cause is not None, "the request has failed"
        method, failure = loss.activity.method, loss.failure
        text = f"the result of {method} cannot be unpickled" if failure is None else f"{method} raised {failure.text}"
        error = self._actor.errors.env_raised(loss.activity, loss.incarnation, pid, cause, text)
        error.bundle = getattr(reported, "bundle", None)
        return error

    # Replays ---------------------------------------------------------------------------------------------

    def replays(self, *, is_renewal: bool) -> list[Job]:
        """Return the jobs that a new process runs first, to bring envs to where they were.

        1. Forget what will not be replayed: without replay, everything; after a renewal, the requests, but not the
           attributes.
        2. Settle the queued requests which need an episode that is thereby gone.
        3. Make a job for each journal that has something to repeat.

        Args:
            is_renewal: Whether a `Renewal` has replaced the last process: by the user, or between two episodes.
        """
        journals, indices = self._table.journals, self._actor.config.indices
        for index in indices:
            if not journals.is_replayed:
                journals.flushed(index).forget_all()
            elif is_renewal:
                journals.flushed(index).forget()
        self.settle_lost_episodes(indices)
        return [*filter(None, map(self._replay_of, indices))]

    def _replay_of(self, index: int) -> ReplayJob | None:
        """Return the job that replays the journal of an env; None if it has nothing to repeat."""
        message = self._table.journals.flushed(index).replay_message(self._table.attach)
        return message and ReplayJob(index, dumps(tuple(message)), functools.partial(self._on_replayed, index))

    def _on_replayed(self, index: int, is_same: bool) -> None:
        """Continue the episode of an env if the replay reached the same point; otherwise the episode stays lost."""
        journal, actor = self._table.journals.flushed(index), self._actor
        could_replay = journal.can_replay
        journal.record_replay(crashed=False, is_same=is_same)
        if journal.can_replay:
            self._table.episodes.resume(index)
            text = f"the episode of env {index} was replayed in the new process, and continues"
            actor.log.write(logging.WARNING, text)
        elif could_replay and (attribute_replay := self._replay_of(index)):
            actor.jobs.enqueue(attribute_replay, first=True)  # the failed one may have ended before it set all of them
        self.settle_lost_episodes([index])

    def record_crash_in_replay(self, process_exit: ProcessExit) -> None:
        """Record a replay that has ended its process, if it was one."""
        culprit = process_exit.culprit
        if isinstance(process_exit.job, ReplayJob) and culprit is not None and is_crash(process_exit.reason):
            self._table.journals.flushed(culprit.index).record_replay(crashed=True)

    # Crash bundles ---------------------------------------------------------------------------------------

    def step_inputs(self, index: int, posted: PostedRequest) -> Inputs:
        """Return a failed step or reset with the requests before it, for a crash bundle."""
        table, journal = self._table, self._table.journals.flushed(index)
        inputs = self.message_inputs(index, journal.request_message(table.attach, index, posted))
        is_poison = table.journals.is_replayed and journal.is_poison(posted)
        return inputs._replace(is_complete=inputs.is_complete or posted.is_seeded_reset, is_poison=is_poison)

    def message_inputs(self, index: int, request: tuple[int, bytes]) -> Inputs:
        """Return a message with the requests before it, for a crash bundle."""
        table, journal, reader = self._table, self._table.journals.flushed(index), self._reader
        last = reader.copy_row(index) if table.has_result_in_row(index) else reader.copy_last(index, with_info=False)
        is_complete = journal.can_replay or not table.episodes.has_result(index)
        # In a rollout the rows are behind.
        read = None if last is None or table.rollouts_in_flight else lambda: reader.read(last).obs
        replay = journal.replay_message(table.attach)
        return Inputs(replay and copy_replay(replay), request, is_complete, read_observation=read)
