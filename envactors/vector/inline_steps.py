"""Steps of all envs of an in-process vector: one loop over their rows, in the thread that steps.

Sending each worker its part would take several times as long as a light env. Whatever the loop does not finish, because
of an exception or of a call from within an env, is left to the workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from envactors.actor.core import ActorCore
from envactors.actor.process import ActorProcess
from envactors.actor.rows import ActorRows
from envactors.actor.slots import ARRIVED, POSTED
from envactors.actor.states import LIVE
from envactors.actor.supervisor import Supervisor
from envactors.backends.local import InlineLoop, InlineWorker
from envactors.envs.core import VectorCore
from envactors.mailbox.control_page import ASLEEP, BEGUN, FINISHED, STEP, ControlPage
from envactors.mailbox.slab import HALF


class Part(NamedTuple):
    """The part of one actor in a step.

    Attributes:
        core: The actor's state.
        rows: The rows of its envs.
        process: Its process.
        page: Its control page.
    """

    core: ActorCore
    rows: ActorRows
    process: ActorProcess
    page: ControlPage


class InlineSteps:
    """Posts steps of all envs, runs them, and takes their results into account.

    Args:
        vector: The vector.
    """

    def __init__(self, vector: VectorCore) -> None:
        self._slots = slots = vector.slots
        self._actors = list(vector.actors)
        self._lock = self._actors[0].core.lock  # that of all
        self._parts: list[Part] = []
        self._loop = InlineLoop([], self._lock)
        self._all_posted = bytes([POSTED]) * len(slots.of)
        self._all_arrived = bytes([ARRIVED]) * len(slots.of)
        for actor in self._actors:
            actor.core.run_inline = functools.partial(self._run_worker, actor, actor.core.run_inline)

    def post(self, now: float) -> bool:
        """Post all envs, which are idle and whose operations are in `Slots.ops`; return False if an actor is not free.

        Called with signals deferred.

        Args:
            now: The time (`time.monotonic`).
        """
        slots, parts, number = self._slots, self._parts or self._find_parts(), 0
        with self._lock:
            for core, _, process, _ in parts:
                table = core.table
                if core.phase is not LIVE or core.closing or table.queue or table.running is not None:
                    return False
                if core.process is not process:
                    self._parts = []
                    return False
                number = max(number, table.last_id)
            if not parts:
                return False
            number += 1
            # The private numbers first: from now on no row is complete.
            slots.numbers.fill(number)
            for core, rows, _, page in parts:
                core.table.last_id = rows.last = page.last_call = number
                page.is_streaming = False
                rows.posted_at = now
                if "call" not in core.timers.when:
                    core.watch(now)
            slots.states[:] = self._all_posted
            slots.slab.posted.fill(number)
        return True

    def _find_parts(self) -> list[Part]:
        """Find the present processes of the actors, and make a loop for these; return nothing if one has none."""
        parts = []
        for actor in self._actors:
            core, rows, process = actor.core, actor.calls.rows, actor.core.process
            if rows is None or process is None:
                return []
            parts.append(Part(core, rows, process, process.page))
        workers = [part.process.worker for part in parts]
        self._loop = InlineLoop([worker for worker in workers if isinstance(worker, InlineWorker)], self._lock)
        self._parts = parts
        return parts

    def run(self) -> None:
        """Run what was posted. Called without signals deferred, since env code runs in here."""
        try:
            self._loop.run(self._slots.ops, self._slots.numbers_of[0])
        except BaseException:  # of the library's own lines: what env code raises is the outcome of its step
            for core, rows, _, page in self._parts:
                if rows.is_in_flight() and has_begun(rows, page):
                    core.kill_inconsistent()
            raise

    def finish(self) -> bool:
        """Take the results of the loop into account; return False if that is not as simple as it is most often.

        Called with signals deferred.
        """
        slots = self._slots
        if slots.numbers_of != slots.slab.completed.data or slots.states != self._all_posted:
            return False
        if not slots.infos.all_plain() and slots.infos.any_failed(0, len(slots.of)):
            return False
        with self._lock:
            for core, _, _, _ in self._parts:
                if core.phase is not LIVE or core.table.queue:
                    return False
            for core, rows, _, page in self._parts:
                core.completed += len(rows.indices)
                page.counters[FINISHED] = page.last_call
            slots.states[:] = self._all_arrived
        slots.halves[:] = slots.in_half[slots.ops[0] & HALF]
        return True

    def _run_worker(self, actor: Supervisor, run: Callable[[], None] | None) -> None:
        """Leave to the worker of an actor what the loop does not run, and run what the worker was sent."""
        with self._lock:
            rows, process = actor.calls.rows, actor.core.process
            if process is not None and rows is not None and rows.has_posted() and self._loop.may_send():
                page, number = process.page, self._slots.numbers_of[rows.first]
                is_left = not has_begun(rows, page) or not rows.is_in_flight()
                if page.counters[STEP] < number and is_left:
                    page.post_step(number, ASLEEP, False)
        assert run is not None, "the backend is in-process"
        run()


def has_begun(rows: ActorRows, page: ControlPage) -> bool:
    """Return whether the worker, or the loop, has begun the last rows that were posted."""
    return page.counters[BEGUN] == rows.slots.numbers_of[rows.first]
