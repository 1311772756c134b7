"""Invariants of a vector's state that hold while none of its threads changes it."""

from __future__ import annotations

import time
from typing import Any

import envactors as ea
from envactors.actor.core import ActorCore
from envactors.actor.requests import CallRequest, Entry, Group
from envactors.actor.rows import ActorRows
from envactors.actor.slots import ARRIVED, ASKED, IDLE, POSTED, READING, READY, ROLLING
from envactors.actor.states import BACKOFF, CLOSED, DEAD, LIVE
from simulation.world import Violation

_NAMES = {
    IDLE: "idle",
    ASKED: "asked",
    POSTED: "posted",
    ARRIVED: "arrived",
    READING: "reading",
    READY: "ready",
    ROLLING: "rolling",
}


class Invariants:
    """Checks the state of one vector.

    Args:
        envs: The vector.
    """

    def __init__(self, envs: ea.VectorEnv) -> None:
        self._slots = envs._core.slots
        self._pending = envs._core.pending
        self._posted, self._completed = self._slots.slab.posted.data, self._slots.slab.completed.data
        self._actors = [actor._supervisor for actor in envs.actors]
        self._permits = self._actors[0].core.permits

    def check(self) -> None:
        """Check everything.

        Raises:
            Violation: Something does not hold.
        """
        for actor in self._actors:
            core, rows = actor.core, actor.calls.rows
            if rows is not None:
                waiting = [index for group in core.table.groups() for index in group.indices] if core.queue else []
                for index in rows.indices:
                    problem = self._find_in_env(core, index, waiting.count(index) if waiting else 0)
                    if problem:
                        raise Violation(f"env {index}, {_NAMES[self._slots.states[index]]}: {problem}")
                problem = self._find_in_actor(core, rows)
                if problem:
                    raise Violation(f"{core.config.name}: {problem}")
        if self._permits is not None:
            self._check_permits(self._permits)

    def check_idle(self) -> None:
        """Check that nothing is left of what was asked.

        Raises:
            Violation: Something is.
        """
        slots = self._slots
        _check(not any(slots.states), "all results were taken, and an env is not idle")
        _check(not slots.outcomes, "all results were taken, and an outcome is kept")
        for actor in self._actors:
            _check(not actor.core.table.queue, "all results were taken, and a request waits")
        if self._permits is not None:
            _check(not self._permits._holders, "nothing runs, and a permit is held")

    def _find_in_env(self, core: ActorCore, index: int, waits: int) -> str:
        """Return what does not hold of an env; empty if all does."""
        slots, state = self._slots, self._slots.states[index]
        slot, number = slots.of[index], slots.numbers_of[index]
        completed, future = self._completed[index], None if slot.op is None else slot.op.future
        if number > core.table.ids.last or self._posted[index] != number:
            return f"its row has {self._posted[index]}, and {number} was posted"
        if state == POSTED and core.process is None:
            return "there is no process"
        if state != POSTED and completed != number:
            return f"its row has {number} and {completed}"
        if waits != (state == ASKED):
            return f"waits {waits} times"
        if (index in self._pending.ready) != (state == READY):
            return "the results that are ready say otherwise"
        if slot.op is not None and state in (IDLE, READY, ROLLING):
            return "keeps what it was asked"
        if index in slots.outcomes and state not in (ARRIVED, READING):
            return "has an outcome"
        if future is not None:
            if future.settled():
                return "its future is settled"
            # What another actor's thread has found is handed out when the ring is heard that is on its way.
            if state == ARRIVED and not future.is_being_read and not core.deferred.waiting:
                return "nobody reads it for its future"
        if index not in slots.unusual:
            is_known = slot.holds >= 0 and slot.counted_in == slot.incarnation and slots.has_last[index]
            if not is_known or slot.needs_reset or slot.retiring:
                return "counts as usual"
        return ""

    def _find_in_actor(self, core: ActorCore, rows: ActorRows) -> str:
        """Return what does not hold of an actor; empty if all does."""
        table, timers, phase = core.table, core.timers.when, core.phase
        has_posted, call = rows.has_posted(), table.running
        if call is not None and has_posted:
            return "a call runs beside rows"
        if phase is BACKOFF and "backoff" not in timers:
            return "it never starts again"
        if phase in (DEAD, CLOSED) and table.queue:
            return "a request waits for no process"
        if core.process is None and call is not None and call.kind is not None:
            return "a call runs in no process"
        if phase is not LIVE:
            return ""
        # Whatever may follow within the worker has the shortest deadline.
        if core.first_look < float("inf") and timers.get("call", float("inf")) > time.monotonic() + core.first_look:
            if has_posted and rows.is_in_flight():
                return "rows without a deadline"
            if call is not None:
                return "a call without a deadline"
        if table.queue and call is None:
            return self._find_in_queue(core, table.queue[0], has_posted=has_posted)
        return ""

    def _find_in_queue(self, core: ActorCore, head: Entry, *, has_posted: bool) -> str:
        """Return what is wrong with what waits while no call runs; empty if nothing is."""
        if not has_posted:
            return "" if core.permits is not None and core in core.permits._waiting else "a request waits for nothing"
        if core.permits is None and isinstance(head, Group):
            return "envs wait that could be posted"
        assert core.process is not None, "a live actor has a process"
        # Nobody waits for a state that is saved.
        is_heard = core.process.on_ring is not None or (isinstance(head, CallRequest) and head.future is None)
        return "" if is_heard else "nobody listens to the end that others wait for"

    def _check_permits(self, permits: Any) -> None:
        _check(len(permits._holders) <= permits._count, "more permits are held than there are")
        _check(not permits._waiting or len(permits._holders) == permits._count, "a permit is left, and an actor waits")
        for actor in self._actors:
            core, rows, call = actor.core, actor.calls.rows, actor.core.table.running
            if rows is None:
                continue
            steps = rows.has_posted()
            steps |= call is not None and call.needs_permit
            _check((core in permits._holders) == steps, f"{core.config.name}: runs {steps}, its permit says otherwise")


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)
