"""Steps of all envs of a vector, posted at once and taken into account at once, with as few operations as possible.

With an in-process backend, the thread that steps runs them in one loop: a turn of each worker would take several times
as long as a light env. Whatever the loop does not finish, because of an exception, or of a call from within an env, is
left to the workers.

Steps of some envs, and steps in which an env needs more than to be posted, are started by `envactors.vector.asking`.
Their results are delivered by `envactors.vector.collector`, as are those that need more than to be copied.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from envactors.actor.core import ActorCore
from envactors.actor.process import ActorProcess
from envactors.actor.rows import ActorRows
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.slots import POSTED
from envactors.actor.states import LIVE
from envactors.actor.supervisor import Supervisor
from envactors.actor.wait_set import WaitSet
from envactors.actor.wait_tuner import SHORT_PAUSE, WaitTuner
from envactors.backends.local import InlineLoop, InlineWorker
from envactors.envs.core import VectorCore
from envactors.envs.results import StepResults
from envactors.mailbox.control_page import (
    ASLEEP,
    BEGUN,
    FINISHED,
    OVERFLOWS,
    SPINNING,
    STEP,
    ControlPage,
    encode_wait,
    spin_until_all,
)
from envactors.mailbox.slab import HALF, RESET, SEED
from envactors.system.cpus import cores
from envactors.vector.asking import Asker


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


class Stepper:
    """Starts steps, and returns the results of those of all envs.

    Args:
        vector: The vector.
        asker: Starts the steps that need more than to be posted.

    Attributes:
        wait_set: Doorbells that the vector's thread sleeps on.
        tuner: Chooses how `step` and the workers wait for each other.
        stream_tuner: The same for `recv`.
    """

    def __init__(self, vector: VectorCore, asker: Asker) -> None:
        self._vector = vector
        self._slots = slots = vector.slots
        self._asker = asker
        config, self._lock = vector.supervisors[0].config, vector.supervisors[0].core.lock  # the lock of all actors
        backend = config.backend
        may_pin = backend.kills and not backend.is_far and 1 < len(vector.actors) <= cores()
        self.tuner: WaitTuner = WaitTuner(config.spin, may_pin)
        self.stream_tuner: WaitTuner = WaitTuner(config.spin, may_pin)
        # Whether replies contain the rings of other machines.
        self._is_far = backend.is_far
        self.wait_set: WaitSet = vector.reactor.make_wait_set()
        # The page of each actor whose doorbell is in the wait set.
        self._heard: dict[Supervisor, ControlPage] = {}
        # Time at which the last step was started (`time.monotonic`).
        self._started = 0.0
        self._all_posted = bytes([POSTED]) * len(slots.of)
        # Whether a step consists of nothing but an action in the row, and its result of nothing but arrays and an info.
        self._is_simple = slots.slab.layout.action is not None
        self._is_simple &= not vector.batcher.learns and not vector.reader.copies_objects
        self._seeds_episodes = slots.of[0].next_seed is not None
        # The call id of the last step that was posted here, until a thread finishes it; else 0.
        self._number = 0
        # The part of each actor in it.
        self._parts: list[Part] = []
        self._is_inline = backend.inline
        self._loop = InlineLoop([], self._lock)
        for actor in vector.actors if self._is_inline else ():
            # Handles of actors outlive the vector, and must not keep its memory.
            run = actor.core.run_inline
            assert run is not None, "the backend is in-process"
            actor.core.run_inline = functools.partial(_run_worker, weakref.ref(self), actor, run)

    # Starting --------------------------------------------------------------------------------------------

    def start(self, env_ids: list[int], actions: Any, *, stream: bool) -> None:
        """Start a step of some envs. Called with signals deferred. For errors see `Asker.start_steps`."""
        asker, slots = self._asker, self._slots
        self._started = now = time.monotonic()
        tuner = self.stream_tuner if stream else self.tuner
        strategy = tuner.strategy
        wait = SPINNING if strategy.workers_spin and now - tuner.recorded < SHORT_PAUSE else ASLEEP
        self._number = 0
        is_whole = env_ids is asker.all_ids and self._is_simple and not stream
        if is_whole and not slots.unusual and slots.states == slots.zeros:
            self._write_rows(actions)
            with asker.corked():
                self._post_if_free(now, wait, pinned=strategy.pinned)
        if not self._number:
            spec = self._vector.action_spec
            asker.start_steps(env_ids, actions, stream=stream, wait=wait, pinned=strategy.pinned, checked=spec)

    def _write_rows(self, actions: Any) -> None:
        """Write the actions of all envs, which are idle and need nothing but to be posted."""
        asker, slots, only = self._asker, self._slots, self._asker.only_action
        is_array = only is not None and type(actions) is np.ndarray and actions.dtype == only.dtype
        if only is not None and is_array and actions.shape == only.shape:
            only[...] = actions  # as `write_actions` does, which would be a call
        else:
            asker.write_actions(asker.all_ids, actions, self._vector.action_spec)
        half = slots.halves[0]
        if slots.halves != slots.in_half[half]:
            slots.align_halves(half)
        bits = slots.in_half[half ^ HALF]  # the only bit of a plain step
        if slots.ended.tobytes() != slots.zeros:
            bits = (slots.ended * np.uint8(RESET) | np.uint8(half ^ HALF)).tobytes()
        if self._seeds_episodes:
            for slot in slots.of:
                assert slot.next_seed is not None, "all episodes are seeded"
                slots.slab.seeds[slot.index] = slot.seed = slot.next_seed
            bits = bytes([op | SEED for op in bits])
        slots.ops[:] = bits
        slots.posted_ops[:] = bits
        slots.streams[:] = slots.zeros
        slots.overflow.clear()

    def _post_if_free(self, now: float, wait: int, *, pinned: bool) -> None:
        """Post all envs if all workers are free for them."""
        slots, number = self._slots, 0
        with self._lock:
            parts = self._parts or self._find_parts()
            for core, _, process, _ in parts:
                table = core.table
                is_free = core.phase is LIVE and not core.closing and core.permits is None and not table.queue
                if core.process is not process or not is_free or table.running is not None:
                    self._parts = []
                    self._loop = InlineLoop([], self._lock)
                    return
                number = max(number, table.last_id)
            if not parts or slots.unusual:
                return
            try:
                self._post(number + 1, now, wait, pinned=pinned)
            except BaseException:
                _replace_processes([part.core for part in parts])
                raise

    def _post(self, number: int, now: float, wait: int, *, pinned: bool) -> None:
        slots, self._number = self._slots, number
        # The private numbers first: from now on no row is complete.
        slots.numbers.fill(number)
        for core, rows, _, page in self._parts:
            core.table.last_id = rows.last = page.last_call = number
            rows.posted_at = now
            if "call" not in core.timers.when:
                core.watch(now)
        slots.states[:] = self._all_posted
        slots.slab.posted.fill(number)
        for place, (_, rows, _, page) in enumerate(self._parts):
            if self._is_inline:
                page.is_streaming = False
            else:
                page.post_step(number, encode_wait(place, wait) if pinned else wait, False, rows.indices)

    def _find_parts(self) -> list[Part]:
        """Find the present processes of the actors; return nothing if one has none."""
        parts = []
        for actor in self._vector.actors:
            core, rows, process = actor.core, actor.calls.rows, actor.core.process
            if rows is None or process is None:
                return []
            parts.append(Part(core, rows, process, process.page))
        if self._is_inline:
            workers = [part.process.worker for part in parts]
            self._loop = InlineLoop([worker for worker in workers if isinstance(worker, InlineWorker)], self._lock)
        self._parts = parts
        return parts

    def run_inline(self) -> None:
        """Run what was started, with an in-process backend."""
        for actor in self._vector.actors:
            if actor.core.run_inline is not None:
                actor.core.run_inline()

    # Waiting ---------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Add the doorbells of new processes to the wait set. Called before each wait."""
        for actor in self._vector.actors:
            process = actor.core.process
            if process is not None and self._heard.get(actor) is not process.page:
                self._heard[actor] = process.page
                self.wait_set.watch_doorbell(process.page.to_parent)

    def spin(self, tuner: WaitTuner) -> bool:
        """Spin for a short time, if that pays off; return whether all workers have finished meanwhile."""
        if not tuner.strategy.both_spin:
            return False
        pairs = []
        for actor in self._vector.actors:
            process, rows = actor.core.process, actor.calls.rows
            if process is not None and rows is not None:
                pairs.append((process.page.counters, rows.last))  # not a comprehension, which costs one more call
        return spin_until_all(pairs, FINISHED)

    def finish_at_once(self) -> StepResults | None:
        """Return `gather` if the workers finish while this spins. Called with signals deferred."""
        number = self._number
        if number and self.spin(self.tuner) and not defer_signals.interrupted:
            return self.gather(number)
        return None

    def finish(self, deadline: float | None) -> StepResults | None:
        """Wait for a step that `start` has posted until the deadline (`time.monotonic`), and return `gather`.

        Only one thread does so: rows of in-process workers must not run twice. Others wait in `Collector`.
        """
        with self._lock:
            number, self._number = self._number, 0
        if not number:
            return None
        pending, reactor = self._vector.pending, self._vector.reactor
        if self._is_inline:
            self._run(number)
        else:
            self.listen()
            is_finished = functools.partial(self._is_finished, number)
            if self._is_far:
                in_time = reactor.wait(is_finished, pending, deadline, self.wait_set)
            else:
                in_time = self.wait_set.wait_rings(is_finished, pending, deadline)
            if not in_time:
                return None
        with defer_signals:
            results = self.gather(number)
        if self._is_inline:
            reactor.wake(pending)  # no ring has told other threads of it
        return results

    def _is_finished(self, number: int) -> bool:
        """Return whether all workers have finished a step, or an env needs more than waiting."""
        is_finished = True
        for _, rows, _, page in self._parts:
            # What has been posted since, by a signal handler or to another process, may be streamed: its end does not
            # ring.
            if rows.last != number:
                return True
            if page.counters[FINISHED] < number:
                is_finished = False
        return is_finished

    def _run(self, number: int) -> None:
        """Run what was posted to in-process workers. Called without signals deferred, since env code runs in here."""
        try:
            self._loop.run(self._slots.ops, number)
        except BaseException:  # of the library's own lines: what env code raises is the outcome of its step
            _replace_processes(
                [core for core, rows, _, page in self._parts if rows.is_in_flight() and _has_begun(rows, page)]
            )
            raise

    def leave(self, actor: Supervisor) -> None:
        """Leave to an in-process worker what the loop does not run."""
        with self._lock:
            rows, process = actor.calls.rows, actor.core.process
            if process is not None and rows is not None and rows.has_posted() and self._loop.may_send():
                page, number = process.page, self._slots.numbers_of[rows.first]
                is_left = not _has_begun(rows, page) or not rows.is_in_flight()
                if page.counters[STEP] < number and is_left:
                    page.post_step(number, ASLEEP, False)

    # Results ---------------------------------------------------------------------------------------------

    def gather(self, number: int) -> StepResults | None:
        """Deliver the results of the step with this call id. Called with signals deferred.

        Returns:
            The results as `VectorEnv.step` returns them; None if an env needs special handling, so that `Collector`
            has to deliver them.
        """
        vector, slots, contents = self._vector, self._slots, None
        if not self.arrive(number):
            return None
        if not slots.infos.all_plain():
            contents = vector.reader.decode_all()
            if contents is None:
                return None
        results = vector.reader.batch(None, contents)
        is_plain = slots.ops == slots.in_half[slots.halves[0]]
        resets = None if is_plain else (np.frombuffer(slots.ops, np.uint8) & RESET).astype(np.bool_)
        vector.episodes.record_all(results[2], results[3], resets)
        vector.reader.keep_all(contents)
        self._number = 0
        # Made idle last: after an interrupt before that, `recv` delivers the results.
        slots.states[:] = slots.zeros
        self.record()
        return results

    def record(self) -> None:
        """Record that the results of a step have been gathered."""
        now = time.monotonic()
        self.tuner.record(now - self._started, now)

    def arrive(self, number: int) -> bool:
        """Take the results of all envs into account; return False if that is not as simple as it is most often.

        Called with signals deferred.
        """
        slots, states = self._slots, self._slots.states
        if slots.unusual or slots.overflow or not self._parts or slots.numbers_of != slots.slab.completed.data:
            return False
        with self._lock:
            if states != self._all_posted or (not slots.infos.all_plain() and slots.infos.any_failed(0, len(states))):
                return False
            for core, rows, process, page in self._parts:
                counters = page.counters
                is_as_usual = core.process is process and core.phase is LIVE and not core.table.queue
                if not is_as_usual or counters[OVERFLOWS] != process.overflows:
                    return False
                if counters[FINISHED] != number or rows.last != number:
                    return False
            slots.halves[:] = slots.in_half[slots.ops[0] & HALF]
            for core, rows, _, _ in self._parts:
                if core.recovery.replays:
                    core.recovery.record_all(slots)
                core.completed += rows.stop - rows.first
                states[rows.first : rows.stop] = rows.all_arrived
        for core in [part.core for part in self._parts] if slots.on_failure == "replay" else ():
            if core.queue:  # states of envs are to be saved
                with core.change, core.lock:
                    core.on_idle()
        return True


def _run_worker(stepper: weakref.ref[Stepper], actor: Supervisor, run: Callable[[], None]) -> None:
    """Run what an in-process worker was sent, and what the loop leaves to it."""
    steps = stepper()
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
