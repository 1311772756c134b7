"""Steps of all envs of a vector, posted at once and taken into account at once, with as few operations as possible.

With an in-process backend, the thread that steps runs them in one loop: a turn of each worker would take several times
as long as a light env. Whatever the loop does not finish, because of an exception, or of a call from within an env, is
left to the workers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from envactors.actor.core import ActorCore
from envactors.actor.process import ActorProcess
from envactors.actor.rows import ActorRows
from envactors.actor.slots import POSTED, Slots
from envactors.actor.states import LIVE
from envactors.actor.supervisor import Supervisor
from envactors.backends.local import InlineLoop, InlineWorker
from envactors.mailbox.control_page import ASLEEP, BEGUN, FINISHED, OVERFLOWS, STEP, ControlPage, encode_wait
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


class WholeSteps:
    """Posts steps of all envs, and takes their results into account.

    Args:
        slots: All envs.
        actors: Their actors.

    Attributes:
        parts: The part of each actor in the last step that was posted here.
    """

    def __init__(self, slots: Slots, actors: Sequence[Supervisor]) -> None:
        self._slots = slots
        self._actors = actors
        self._lock = actors[0].core.lock  # that of all
        self.parts: list[Part] = []
        self._all_posted = bytes([POSTED]) * len(slots.of)
        # The call id of the last step.
        self._number = 0
        self._is_inline = actors[0].config.backend.inline
        self._loop = InlineLoop([], self._lock)
        for actor in actors if self._is_inline else ():
            # Handles of actors outlive the vector, and must not keep its memory.
            run = actor.core.run_inline
            assert run is not None, "the backend is in-process"
            actor.core.run_inline = functools.partial(_run_worker, weakref.ref(self), actor, run)

    def post(self, now: float, wait: int, *, pinned: bool = False) -> bool:
        """Post all envs, if all workers are free for them; return whether that was so.

        The envs are idle, and what they are posted is in `Slots.ops`. Called with signals deferred.

        Args:
            now: The time (`time.monotonic`).
            wait: How the workers wait for the next request.
            pinned: Whether each of them waits on a separate core.
        """
        slots, number = self._slots, 0
        with self._lock:
            parts = self.parts or self._find_parts()
            for core, _, process, _ in parts:
                table = core.table
                is_free = core.phase is LIVE and not core.closing and core.permits is None and not table.queue
                if core.process is not process or not is_free or table.running is not None:
                    self.parts = []
                    self._loop = InlineLoop([], self._lock)
                    return False
                number = max(number, table.last_id)
            if not parts or slots.unusual:
                return False
            try:
                self._post(number + 1, now, wait, pinned=pinned)
            except BaseException:
                _replace_processes([part.core for part in parts])
                raise
        return True

    def _post(self, number: int, now: float, wait: int, *, pinned: bool) -> None:
        slots, self._number = self._slots, number
        # The private numbers first: from now on no row is complete.
        slots.numbers.fill(number)
        for core, rows, _, page in self.parts:
            core.table.last_id = rows.last = page.last_call = number
            rows.posted_at = now
            if "call" not in core.timers.when:
                core.watch(now)
        slots.states[:] = self._all_posted
        slots.slab.posted.fill(number)
        for place, (_, rows, _, page) in enumerate(self.parts):
            if self._is_inline:
                page.is_streaming = False
            else:
                page.post_step(number, encode_wait(place, wait) if pinned else wait, False, rows.indices)

    def _find_parts(self) -> list[Part]:
        """Find the present processes of the actors; return nothing if one has none."""
        parts = []
        for actor in self._actors:
            core, rows, process = actor.core, actor.calls.rows, actor.core.process
            if rows is None or process is None:
                return []
            parts.append(Part(core, rows, process, process.page))
        if self._is_inline:
            workers = [part.process.worker for part in parts]
            self._loop = InlineLoop([worker for worker in workers if isinstance(worker, InlineWorker)], self._lock)
        self.parts = parts
        return parts

    def run(self) -> None:
        """Run what was posted to in-process workers. Called without signals deferred, since env code runs in here."""
        try:
            self._loop.run(self._slots.ops, self._number)
        except BaseException:  # of the library's own lines: what env code raises is the outcome of its step
            _replace_processes(
                [core for core, rows, _, page in self.parts if rows.is_in_flight() and _has_begun(rows, page)]
            )
            raise

    def finish(self) -> bool:
        """Take the results of all envs into account; return False if that is not as simple as it is most often.

        Called with signals deferred.
        """
        slots, parts, states = self._slots, self.parts, self._slots.states
        if slots.unusual or slots.overflow or not parts or slots.numbers_of != slots.slab.completed.data:
            return False
        with self._lock:
            if states != self._all_posted or (not slots.infos.all_plain() and slots.infos.any_failed(0, len(states))):
                return False
            for core, rows, process, page in parts:
                counters = page.counters
                is_as_usual = core.process is process and core.phase is LIVE and not core.table.queue
                if not is_as_usual or counters[OVERFLOWS] != process.overflows or counters[FINISHED] != rows.last:
                    return False
            slots.halves[:] = slots.in_half[slots.ops[0] & HALF]
            for core, rows, _, _ in parts:
                if core.recovery.replays and not core.recovery.record_all(slots):
                    return False
                core.completed += rows.stop - rows.first
                states[rows.first : rows.stop] = rows.all_arrived
        return True

    def leave(self, actor: Supervisor) -> None:
        """Leave to an in-process worker what the loop does not run."""
        with self._lock:
            rows, process = actor.calls.rows, actor.core.process
            if process is not None and rows is not None and rows.has_posted() and self._loop.may_send():
                page, number = process.page, self._slots.numbers_of[rows.first]
                is_left = not _has_begun(rows, page) or not rows.is_in_flight()
                if page.counters[STEP] < number and is_left:
                    page.post_step(number, ASLEEP, False)


def _run_worker(whole: weakref.ref[WholeSteps], actor: Supervisor, run: Callable[[], None]) -> None:
    """Run what an in-process worker was sent, and what the loop leaves to it."""
    steps = whole()
    if steps is not None:
        steps.leave(actor)
    run()


def _replace_processes(cores: Sequence[ActorCore]) -> None:
    """Replace the processes of some actors after an exception in the middle of a step."""
    for core in cores:
        core.is_inconsistent = True  # all first: with little stack left, the next request has to replace the processes
    for core in cores:
        core.kill_inconsistent()


def _has_begun(rows: ActorRows, page: ControlPage) -> bool:
    """Return whether the worker, or the loop, has begun the last rows that were posted."""
    return page.counters[BEGUN] == rows.slots.numbers_of[rows.first]
