"""Steps that were posted at once, and how those of an in-process vector run in the thread that steps.

In process, a step of all envs runs in one loop: a turn of each worker would take several times as long as a light env.
Whatever the loop does not finish, because of an exception, or of a call from within an env, is left to the workers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from envactors.actor.core import ActorCore
from envactors.actor.process import ActorProcess
from envactors.actor.rows import ActorRows
from envactors.actor.supervisor import Supervisor
from envactors.backends.local import InlineLoop, InlineWorker
from envactors.envs.core import VectorCore
from envactors.envs.selection import Selection
from envactors.mailbox.control_page import ASLEEP, BEGUN, FINISHED, STEP, ControlPage


class Part(NamedTuple):
    """The part of one actor in a step.

    Attributes:
        core: The actor's state.
        rows: The rows of its envs.
        process: Its process.
        page: Its control page.
        indices: Those of its envs that step.
        place: The actor's position among the actors.
    """

    core: ActorCore
    rows: ActorRows
    process: ActorProcess
    page: ControlPage
    indices: Sequence[int]
    place: int


class Step(NamedTuple):
    """A step that was posted at once.

    Attributes:
        envs: The envs that step.
        number: The call id of their rows.
        parts: The part of each of their actors.
        resets: The envs that are reset instead, by autoreset.
    """

    envs: Selection
    number: int
    parts: list[Part]
    resets: Sequence[int]

    def is_finished(self) -> bool:
        """Return whether all workers have finished the step, or an env needs more than waiting."""
        is_finished = True
        for part in self.parts:
            # What has been posted since, by a signal handler or to another process, may be streamed: its end does not
            # ring.
            if part.rows.last != self.number:
                return True
            if part.page.counters[FINISHED] < self.number:
                is_finished = False
        return is_finished


def replace_processes(parts: Sequence[Part]) -> None:
    """Replace the processes of some actors after an exception in the middle of a step."""
    for part in parts:
        part.core.is_inconsistent = True  # all first: with little stack, the next request has to replace the processes
    for part in parts:
        part.core.kill_inconsistent()


class InlineSteps:
    """Runs steps in process.

    Args:
        vector: The vector.
    """

    def __init__(self, vector: VectorCore) -> None:
        self._slots = vector.slots
        self._actors = vector.actors
        self._lock = vector.supervisors[0].core.lock  # the lock of all actors
        self._loop = InlineLoop([], self._lock)
        for actor in vector.actors:
            # Handles of actors outlive the vector, and must not keep its memory.
            run = actor.core.run_inline
            assert run is not None, "the backend is in-process"
            actor.core.run_inline = functools.partial(_run_worker, weakref.ref(self), actor, run)

    def use(self, parts: Sequence[Part]) -> None:
        """Make the loop that runs steps of all envs, given the part of each actor; none for no loop."""
        workers = [part.process.worker for part in parts]
        self._loop = InlineLoop([worker for worker in workers if isinstance(worker, InlineWorker)], self._lock)

    def run_all(self, step: Step) -> None:
        """Run a step of all envs. Called without signals deferred, since env code runs in here."""
        try:
            self._loop.run(self._slots.ops, step.number)
        except BaseException:  # of the library's own lines: what env code raises is the outcome of its step
            in_flight = [part for part in step.parts if part.rows.is_in_flight()]
            replace_processes([part for part in in_flight if part.page.counters[BEGUN] == step.number])
            raise

    def run_posted(self) -> None:
        """Run what the workers were sent. Called without signals deferred, too."""
        for actor in self._actors:
            if actor.core.run_inline is not None:
                actor.core.run_inline()

    def leave(self, actor: Supervisor) -> None:
        """Leave to a worker what the loop does not run."""
        with self._lock:
            rows, process = actor.calls.rows, actor.core.process
            if process is not None and rows is not None and rows.has_posted() and self._loop.may_send():
                page, number = process.page, self._slots.numbers_of[rows.first]
                is_begun = page.counters[BEGUN] == number
                if page.counters[STEP] < number and not (is_begun and rows.is_in_flight()):
                    if not is_begun:
                        self._loop.leave(page)
                    page.post_step(number, ASLEEP, False)


def _run_worker(steps: weakref.ref[InlineSteps], actor: Supervisor, run: Callable[[], None]) -> None:
    """Run what an in-process worker was sent, and what the loop leaves to it."""
    inline = steps()
    if inline is not None:
        inline.leave(actor)
    run()
