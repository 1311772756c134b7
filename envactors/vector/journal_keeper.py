"""The journals of one actor's envs: what is recorded besides steps and resets, and what a new process repeats.

`EnvTable` records steps and resets as it accepts their results. `envactors.replay` has the journals themselves;
`JournalKeeper` has no state of its own.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from envactors.actor.actor import Actor
from envactors.actor.future import ActorFuture
from envactors.actor.job import ProcessExit
from envactors.actor.jobs import Call, Replay
from envactors.actor.states import is_crash
from envactors.mailbox.messages import Failure, Frame, Kind, Save
from envactors.mailbox.pickling import dumps, loads
from envactors.vector.env_recovery import EnvRecovery
from envactors.vector.episodes import EPISODE_RUNS
from envactors.vector.table import EnvTable

# How often a request to save a state is retried after a crash, which another request may have caused.
_SAVE_RETRIES = 3


class JournalKeeper:
    """Keeps the journals of one actor's envs. Every change happens under the lock of the vector.

    Args:
        table: The envs of the vector, with their journals.
        actor: The actor.
        recovery: Handles the requests of envs that a replay has not brought back.
    """

    def __init__(self, table: EnvTable, actor: Actor, recovery: EnvRecovery) -> None:
        self._table = table
        self._actor = actor
        self._recovery = recovery
        self._indices = actor.config.indices

    def record_call(self, kind: Kind, index: int, payload: bytes | bytearray, reply: Frame) -> None:
        """Record a call in the journal of its env; a saved state begins the journal anew. See `Tenant.on_call`."""
        table = self._table
        failed = reply.kind == Kind.FAILED
        if kind != Kind.SAVE:
            table.journal(index).record_call(kind, bytes(payload), failed=failed)
        elif not failed and table.episodes.state(index) == EPISODE_RUNS:
            table.journal(index).begin_with_state(*loads(reply.payload))
        self.queue_saves()

    def queue_saves(self) -> None:
        """Queue requests that save the states of envs, so that replays stay short. Nobody waits for them."""
        for index in self._table.pop_saves_due(self._indices):
            future: ActorFuture[Any] = ActorFuture(self._actor, None)
            message = dumps(tuple(Save(index - self._indices.start)))
            log = functools.partial(self._log_unsaved, index)
            call = Call("snapshot", index, Kind.SAVE, future, retries=_SAVE_RETRIES, payload=message, take_reply=log)
            self._actor.jobs.enqueue(call)

    def _log_unsaved(self, index: int, frame: Frame) -> None:
        if frame.kind == Kind.FAILED:
            text = Failure(*loads(frame.payload)).text
            self._actor.log.write(logging.WARNING, f"the state of env {index} cannot be saved: {text}")

    # Replays ---------------------------------------------------------------------------------------------

    def replays_for_process(self, *, is_renewal: bool) -> list[Replay]:
        """Return the jobs that a new process runs first, to bring the envs to where they were.

        Without replays, the journals begin anew with it.

        Args:
            is_renewal: Whether the user has asked for a fresh process, in which only attributes are set again.
        """
        for index in self._indices:
            if not self._table.uses_replay:
                self._table.journal(index).forget_all()
            elif is_renewal:
                self._table.journal(index).forget()
        return [replay for index in self._indices for replay in self._replays_for_env(index)]

    def _replays_for_env(self, index: int) -> list[Replay]:
        """Return the job that replays the journal of an env, if it has anything to repeat."""
        table = self._table
        message = table.journal(index).replay(table.attach) if table.uses_replay else None
        if message is None:
            return []
        return [Replay(index, dumps(tuple(message)), functools.partial(self._on_replayed, index))]

    def _on_replayed(self, index: int, is_same: bool) -> None:
        """Continue the episode of an env if the replay reached the same point; otherwise the episode stays lost."""
        journal = self._table.journal(index)
        could_replay = journal.can_replay
        journal.record_replay(crashed=False, is_same=is_same)
        if journal.can_replay:
            self._table.episodes.resume(index)
            text = f"the episode of env {index} was replayed in the new process, and continues"
            self._actor.log.write(logging.WARNING, text)
        elif could_replay:
            for attributes in self._replays_for_env(index):  # the replay may have ended before all of them were set
                self._actor.jobs.enqueue(attributes, first=True)
        self._recovery.answer_lost_episodes([index])

    def record_exit(self, ended: ProcessExit) -> None:
        """Record the replay that has ended a process, if it was one."""
        if isinstance(ended.job, Replay) and ended.culprit is not None and is_crash(ended.reason):
            self._table.journal(ended.culprit.env).record_replay(crashed=True)
