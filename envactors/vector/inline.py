"""Steps of an in-process vector, which run in the thread that steps.

A step of all envs runs in one loop: a turn of each worker would take several times as long as a light env. Whatever the
loop does not finish, because of an exception, or of a call from within an env, is left to the workers.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

from envactors.actor.signal_deferral import defer_signals
from envactors.actor.supervisor import Supervisor
from envactors.backends.local import InlineLoop, InlineWorker
from envactors.envs.core import VectorCore
from envactors.envs.results import StepResults
from envactors.mailbox.control_page import ASLEEP, BEGUN, STEP
from envactors.vector.stepper import Stepper
from envactors.vector.steps import Part, replace_processes


class InlineSteps:
    """Runs steps in process.

    Args:
        vector: The vector.
        stepper: Posts steps of all envs and returns their results.
    """

    def __init__(self, vector: VectorCore, stepper: Stepper) -> None:
        self._vector = vector
        self._slots = vector.slots
        self._stepper = stepper
        self._lock = vector.supervisors[0].core.lock  # the lock of all actors
        self._parts: list[Part] = []
        self._loop = InlineLoop([])
        for actor in vector.actors:
            # Handles of actors outlive the vector, and must not keep its memory.
            run = actor.core.run_inline
            assert run is not None, "the backend is in-process"
            actor.core.run_inline = functools.partial(_run_worker, weakref.ref(self), actor, run)

    def step(self, actions: Any) -> StepResults | None:
        """Step all envs in one loop. Called without signals deferred, since env code runs in here.

        Returns:
            The results; None if `Collector` has to deliver them.
        """
        slots, stepper, loop, step, is_posted = self._slots, self._stepper, self._loop, None, False
        try:
            with defer_signals:
                if stepper.is_simple and not slots.unusual and slots.states == slots.zeros:
                    resets = stepper.write_rows(stepper.all, actions)
                    with self._lock:
                        step = stepper.prepare(stepper.all, resets, time.monotonic())
                        if step is not None:
                            loop = self._loop_of(step.parts)
                            loop.prepare(slots.ops, step.number)
                            stepper.post(step)
                            is_posted = True
                if step is None:
                    stepper.start(stepper.all.env_ids, actions, stream=False)
            if step is not None:
                loop.run()
        except BaseException:  # of the library's own lines: what env code raises is the outcome of its step
            if step is not None and not is_posted:
                replace_processes(step.parts)
            raise
        finally:
            if step is not None:
                loop.thread = None
        if step is None:
            self.run_posted()
            return None
        with defer_signals:
            return stepper.gather(step)

    def _loop_of(self, parts: list[Part]) -> InlineLoop:
        """Return the loop that runs steps of all envs, given the part of each actor."""
        if parts is not self._parts:
            workers = [part.process.worker for part in parts]
            self._loop = InlineLoop([worker for worker in workers if isinstance(worker, InlineWorker)])
            self._parts = parts
        return self._loop

    def run_posted(self) -> None:
        """Run what the workers were sent. Called without signals deferred, too."""
        for actor in self._vector.actors:
            if actor.core.run_inline is not None:
                actor.core.run_inline()

    def leave(self, actor: Supervisor) -> None:
        """Leave to a worker what the loop does not run; replace one at whose row the loop was interrupted."""
        with defer_signals, self._lock:
            rows, process = actor.calls.rows, actor.core.process
            if process is not None and rows is not None and rows.has_posted() and self._loop.may_send():
                page, number = process.page, self._slots.numbers_of[rows.first]
                is_begun = page.counters[BEGUN] == number or self._loop.has_taken(page)
                if page.counters[STEP] >= number:
                    return
                if not is_begun or not rows.is_in_flight():
                    if not is_begun:
                        self._loop.leave(page)
                    page.post_step(number, ASLEEP, False)
                elif self._loop.thread is None:
                    actor.core.kill_inconsistent()


def _run_worker(steps: weakref.ref[InlineSteps], actor: Supervisor, run: Callable[[], None]) -> None:
    """Run what an in-process worker was sent, and what the loop leaves to it."""
    inline = steps()
    if inline is not None:
        inline.leave(actor)
    run()
