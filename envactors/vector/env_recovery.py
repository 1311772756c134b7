"""The recovery of one actor's envs from requests without results: it applies what `fates` decides.

    a request without a result ──▶ resolve_or_retry ──▶ end_attempt ──────▶ Episodes.end_attempt ──▶ fates.decide
                                   row                  journal, process    episode, seeds

`envactors.rollout.part` calls `EnvRecovery.end_attempt`, since the steps of its envs are in no rows. `EnvRecovery` has
no state of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

from envactors.actor.actor import Actor
from envactors.actor.future import Outcome, ReadyOutcome
from envactors.crashes.inputs import Inputs
from envactors.errors import ActorError
from envactors.mailbox.recorded import copy_replay, inputs_of
from envactors.replay import PostedRequest
from envactors.vector.fates import Cause, Decision, EnvFate, RequestFacts, RequestLoss, decide
from envactors.vector.losses import discard_error, lost_episode_loss
from envactors.vector.rows import RowReader
from envactors.vector.table import QUEUED, EnvTable

# The actions of all envs: one array per leaf of the action.
Actions: TypeAlias = Sequence[npt.NDArray[Any]]


class EnvRecovery:
    """Handles the requests of one actor's envs that have no results. Every change happens under the lock of the vector.

    Args:
        table: The envs of the vector.
        reader: Reads results out of rows.
        actor: The actor.
    """

    def __init__(self, table: EnvTable, reader: RowReader, actor: Actor) -> None:
        self._table = table
        self._reader = reader
        self._actor = actor

    def resolve_or_retry(self, loss: RequestLoss) -> bool:
        """Record the outcome of a request in a row that has no result, or have it run again; return whether it does.

        The caller queues it again, unless it is still in the queue.
        """
        table, reader, index = self._table, self._reader, loss.activity.env
        decision, outcome = self.end_attempt(index, loss, table.posted_request(index), table.slab.actions)
        if loss.is_recorded and decision.fate is EnvFate.REPORT:
            table.last.keep(index)  # the env continues from the result that cannot be read
        if decision.fate is EnvFate.REDO:
            return True
        if decision.fate is EnvFate.RESET:
            request = table.request(index)
            seed = request.seed if decision.repeats_reset else None
            payload = request.payload if request.method == "reset" else None
            reset = dataclasses.replace(request, resets=True, seed=seed, payload=payload, earlier_error=outcome)
            table.set_requests({index: reset})
            return True
        if index in table.unposted:
            table.begin_seeds(index)  # as if it had run; a reset that is canceled does not
        if decision.fate is EnvFate.TRUNCATE:
            table.last.truncate(index, self.next_incarnation(loss))
            last = reader.copy_last(index, has_info=False)
            assert last is not None, "only an env with an earlier result is truncated"
            outcome = reader.read_later(self._actor, index, functools.partial(reader.read_truncated, last, outcome))
        table.record_outcome(index, outcome)
        return False

    def answer_lost_episodes(self, ids: Sequence[int]) -> None:
        """Handle the queued requests of these envs that would continue an episode which is lost.

        Each gets its outcome now, or becomes a reset and stays in the queue.
        """
        for index in ids:
            if self._table.status[index] == QUEUED and self._table.cannot_continue(index):
                self.resolve_or_retry(lost_episode_loss(self._actor, self._table.activity(index)))

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
        table, actor, journal = self._table, self._actor, self._table.journal(index)
        request = table.request(index)
        error = self._complete_error(index, loss, posted, actions)
        began_reset = posted.resets_within_step and (loss.failed_in_reset or loss.ended_episode)
        facts = RequestFacts(
            may_blame_seed=(posted.is_reset or began_reset) and not (loss.is_recorded or loss.cause is Cause.NOT_BEGUN),
            user_called_reset=request.method == "reset",
            reports_loss=table.reports_loss(index),
            has_earlier_error=request.earlier_error is not None,
            can_replay=table.uses_replay and journal.can_replay,
            can_retry=table.uses_replay and not loss.is_recorded and journal.can_retry(posted),
        )
        decision = decide(loss, facts, table.episodes.facts(index))
        table.episodes.apply(index, decision)
        is_redo = decision.fate is EnvFate.REDO
        if decision.ends_episode and not is_redo:
            journal.forget()
        elif is_redo and loss.cause is not Cause.NOT_BEGUN and loss.may_blame_inputs:
            journal.count_crash()
        elif table.keeps_journals and decision.fate is EnvFate.REPORT and loss.report is not None:
            journal.record_failed(journal.request(table.attach, actions, index, posted))
        if loss.cause is Cause.RUNNING and not is_redo:
            actor.jobs.record_failed()
        if decision.replaces_process:
            actor.discard(loss.incarnation, functools.partial(discard_error, actor, loss, error, actor.pid))
        return decision, error

    def next_incarnation(self, loss: RequestLoss) -> int:
        """Return the incarnation in which an env continues. Starts that have failed since the loss have one, too."""
        return max(loss.incarnation + 1, self._actor.process.incarnation)

    # Crash bundles ---------------------------------------------------------------------------------------

    def step_inputs(self, index: int, posted: PostedRequest, actions: Actions) -> Inputs:
        """Return a failed step or reset with the requests before it, for a crash bundle; see `end_attempt`."""
        table, journal = self._table, self._table.journal(index)
        inputs = self.message_inputs(index, journal.request(table.attach, actions, index, posted))
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

    def _complete_error(self, index: int, loss: RequestLoss, posted: PostedRequest, actions: Actions) -> Outcome:
        """Return the error of a request, with its crash bundle, or with the inputs if they have ended two processes."""
        table, journal, crashes = self._table, self._table.journal(index), self._actor.config.crashes
        if crashes is not None and loss.report is not None:
            find_inputs = functools.partial(self.step_inputs, index, posted, actions)
            return crashes.name(loss.error, loss.report, find_inputs, loss.activity, loss.incarnation, self._actor.pid)
        has_crashed = loss.cause is Cause.RUNNING and loss.may_blame_inputs
        if not (has_crashed and table.uses_replay and journal.is_poison(posted)):
            return loss.error
        request = journal.request(table.attach, actions, index, posted)
        inputs = functools.partial(inputs_of, journal.replay(table.attach), request)
        crash = loss.error.read()[1]
        assert isinstance(crash, ActorError), "a running request fails only with its process"
        return ReadyOutcome(None, self._actor.errors.poison(crash, inputs))
