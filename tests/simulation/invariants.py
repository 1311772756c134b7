"""Invariants of the actors of a vector and of its table, which hold while nobody makes a change."""

from __future__ import annotations

from typing import Any

import envactors as ea
from envactors.actor.actor import Actor
from envactors.actor.states import Phase
from envactors.vector.env_group import EnvGroup
from envactors.vector.row_jobs import QueuedRows
from envactors.vector.table import DONE, FAILED, IDLE, POSTED, QUEUED
from simulation.world import Violation

_NAMES = {IDLE: "idle", QUEUED: "queued", POSTED: "posted", DONE: "done", FAILED: "failed"}


class Invariants:
    """Checks the state of one vector.

    Args:
        envs: The vector.
    """

    def __init__(self, envs: ea.VectorEnv) -> None:
        self._engine: Any = envs._engine
        self._table: Any = self._engine.table
        self._lock: Any = self._table.lock

    def check(self) -> None:
        """Check everything, unless a change is being made, or was interrupted.

        Raises:
            Violation: Something does not hold.
        """
        if self._lock._actors or self._lock._is_owned():
            return
        for envs in self._engine.groups:
            problem = self._find_in_actor(envs.actor, envs)
            if problem:
                raise Violation(f"{envs.actor.name}, {envs.actor.phase.name}: {problem}")
            for index in envs.indices:
                problem = self._find_in_env(envs.actor, index)
                if problem:
                    raise Violation(f"env {index}, {_NAMES[self._table.status[index]]}: {problem}")

    def check_idle(self) -> None:
        """Check that nothing is left of what was asked.

        Raises:
            Violation: Something is.
        """
        table = self._table
        if any(table.status) or table.requests or table.outcomes:
            raise Violation("all results were taken, and something of a request is kept")

    def _find_in_env(self, actor: Actor, index: int) -> str:
        """Return what does not hold of an env; empty if all does."""
        table, status = self._table, self._table.status[index]
        waits = sum(index in job.ids for job in actor.jobs.waiting if isinstance(job, QueuedRows))
        if waits != (status == QUEUED):
            return f"{waits} jobs of its actor have it"
        if status == POSTED and table.rows.written_ids[index] != table.rows.posted_ids[index]:
            if actor.process.worker is None:
                return "there is no process"
            if table.rows.posted_incarnations[index] != actor.process.incarnation:
                return f"it was posted to process {table.rows.posted_incarnations[index]}"
        if actor.phase is Phase.LIVE and table.slab.posted_ids[index : index + 1] != table.rows.posted_ids[index]:
            return "its row has another call id"
        if status == IDLE and (index in table.requests or index in table.rows.overdue):
            return "keeps its request"
        if index in table.outcomes and status not in (DONE, FAILED):
            return "has an outcome"
        request = table.requests.get(index)
        if request is not None and request.future is not None and request.future.done():
            return "its future has ended"
        return ""

    def _find_in_actor(self, actor: Actor, envs: EnvGroup) -> str:
        """Return what does not hold of an actor; empty if all does."""
        process, running, timers = actor.process, actor.jobs.running, actor.timers._timers
        others = {running, actor.jobs.renewal} - {None, envs.rows_job}
        known = [*actor.jobs.waiting, *others]
        if set(actor.jobs.unfinished) != set(known):
            return f"{list(actor.jobs.unfinished)} are unfinished, and {known} are known"
        if len(known) != len(set(known)):
            return "a job is queued twice"
        if actor.phase is Phase.BACKOFF and "backoff" not in timers:
            return "it never starts again"
        if actor.phase is Phase.STARTING and not process.is_launching and process.worker is None:
            return "nothing starts"
        if actor.phase in (Phase.BACKOFF, Phase.DEAD, Phase.CLOSED) and process.worker is not None:
            return "it has a process"
        if actor.phase is not Phase.LIVE:
            return ""
        if process.worker is None:
            return "it has no process"
        if envs.rows_job.activity() is not None and running is not envs.rows_job:
            return "rows run, and another job is said to run"
        if actor.runtime.loop._soon:  # type: ignore[attr-defined] # of a `SimulatedLoop`
            return ""  # that may be `Actor._proceed`
        if actor.jobs.waiting and running is None:
            return "a job waits for nothing"
        if actor.jobs.waiting and running is envs.rows_job and not process.worker.watches_rings:
            return "nobody listens to the end of the rows that a job waits for"
        return ""
