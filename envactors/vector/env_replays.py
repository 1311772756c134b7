"""The replays of one actor's envs: a new process runs them first, to bring the envs to where they were.

`envactors.replay` has the journals that are repeated, `envactors.actor.calls.ReplayJob` is the job.
"""

from __future__ import annotations

import functools
import logging

from envactors.actor.actor import Actor
from envactors.actor.calls import ReplayJob
from envactors.actor.job import Job, ProcessExit
from envactors.actor.states import is_crash
from envactors.mailbox.pickling import dumps
from envactors.vector.env_recovery import EnvRecovery
from envactors.vector.table import EnvTable


class EnvReplays:
    """Replays the envs of one actor. Changes happen under the vector's lock.

    Args:
        table: The envs of the vector.
        actor: The actor.
        recovery: Settles the requests of envs that no replay brings back.
    """

    def __init__(self, table: EnvTable, actor: Actor, recovery: EnvRecovery) -> None:
        self._table = table
        self._actor = actor
        self._recovery = recovery
        self._indices = actor.config.indices

    def jobs_for_process(self, *, is_renewal: bool) -> list[Job]:
        """Return the jobs that a new process runs first.

        1. Forget what will not be replayed: without replay, everything; after a renewal, the requests, but not the
           attributes.
        2. Settle the queued requests which need an episode that is thereby gone.
        3. Make a job for each journal that has something to repeat.

        Args:
            is_renewal: Whether a `Renewal` has replaced the last process: by the user, or between two episodes.
        """
        journals = self._table.journals
        for index in self._indices:
            if not journals.is_replayed:
                journals.flushed(index).forget_all()
            elif is_renewal:
                journals.flushed(index).forget()
        self._recovery.settle_lost_episodes(self._indices)
        return [*filter(None, map(self._replay_of, self._indices))]

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
        self._recovery.settle_lost_episodes([index])

    def record_exit(self, process_exit: ProcessExit) -> None:
        """Record the replay that has ended a process, if it was one."""
        culprit = process_exit.culprit
        if isinstance(process_exit.job, ReplayJob) and culprit is not None and is_crash(process_exit.reason):
            self._table.journals.flushed(culprit.index).record_replay(crashed=True)
