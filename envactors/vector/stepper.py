"""Steps of several envs of a vector, posted at once and taken into account at once, with as few operations as possible.

Streamed steps, and steps in which an env needs more than to be posted, are started by `envactors.vector.asking`. Their
results are delivered by `envactors.vector.collector`, as are those that need more than to be copied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from envactors.actor.reactor import Reactor
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.slots import ARRIVED, POSTED, READING
from envactors.actor.states import LIVE
from envactors.actor.supervisor import Supervisor
from envactors.actor.wait_set import WaitSet
from envactors.actor.wait_tuner import SHORT_PAUSE, WaitTuner
from envactors.envs.core import VectorCore
from envactors.envs.results import StepResults
from envactors.envs.selection import Selection
from envactors.mailbox.control_page import (
    ASLEEP,
    FINISHED,
    OVERFLOWS,
    SPINNING,
    SPINNING_LONG,
    ControlPage,
    spin_until_all,
)
from envactors.mailbox.slab import HALF, RESET, SEED
from envactors.system.cpus import usable_cores
from envactors.vector.asking import Asker
from envactors.vector.steps import Part, Step, replace_processes

# For each operation in the bits of `envactors.mailbox.slab`: its half alone, and the other one.
_HALF_OF = bytes([op & HALF for op in range(256)])
_OTHER_HALF = bytes([op & HALF ^ HALF for op in range(256)])


class _Ears(threading.local):
    """What one thread sleeps on: of two threads that slept in one wait set, one might take the other's rings.

    Args:
        reactor: Makes the wait set.

    Attributes:
        wait_set: Doorbells of the vector's actors.
        heard: The page of each actor whose doorbell is in the wait set.
    """

    def __init__(self, reactor: Reactor) -> None:
        self.wait_set: WaitSet = reactor.make_wait_set()
        self.heard: dict[Supervisor, ControlPage] = {}


class Stepper:
    """Starts steps, and returns the results of those that it has posted at once.

    Args:
        vector: The vector.
        asker: Starts the steps that need more than to be posted.

    Attributes:
        tuner: Chooses how `step` and the workers wait for each other.
        stream_tuner: The same for `recv`.
        all: All envs.
        is_simple: Whether a step consists of nothing but an action in the row, and its result of nothing but arrays and
            an info.
        is_inline: Whether the backend is in-process, whose steps of all envs `envactors.vector.inline` runs.
    """

    def __init__(self, vector: VectorCore, asker: Asker) -> None:
        self._vector = vector
        self._slots = slots = vector.slots
        self._asker = asker
        config = vector.supervisors[0].config
        # Those of all actors.
        self._lock, self._ids = vector.supervisors[0].core.lock, config.ids
        backend = config.backend
        self.tuner: WaitTuner = WaitTuner(config.spin)
        self.stream_tuner: WaitTuner = WaitTuner(config.spin)
        # How workers that spin wait for the next request.
        self._spinning = SPINNING_LONG if len(vector.actors) <= usable_cores() else SPINNING
        # Whether replies contain the rings of other machines.
        self._is_far, self._kills = backend.is_far, backend.kills
        self._replays = vector.supervisors[0].core.recovery.replays
        self._ears = _Ears(vector.reactor)
        # Time at which the last step was started (`time.monotonic`).
        self._started = 0.0
        self.all: Selection = Selection(asker.all_ids, is_all=True)
        self._completed = slots.slab.completed.data
        self._all_posted = bytes([POSTED]) * len(slots.of)
        self._all_reading = bytes([READING]) * len(slots.of)
        self.is_simple: bool = slots.slab.layout.action is not None
        self.is_simple &= not vector.batcher.learns and not vector.reader.copies_objects
        self._seeds_episodes = slots.of[0].next_seed is not None
        # The last step of all envs that was posted here, until a thread finishes it.
        self._step: Step | None = None
        # The part of each actor in steps of all envs; empty until the next one if an actor was not free for the last.
        self._parts: list[Part] = []
        self.is_inline: bool = backend.inline

    # Starting --------------------------------------------------------------------------------------------

    def start(self, env_ids: list[int], actions: Any, *, stream: bool) -> Step | None:
        """Start a step of some envs. Called with signals deferred. For errors see `Asker.start_steps`.

        Returns:
            The step, if it was posted at once.
        """
        asker, slots = self._asker, self._slots
        self._started = now = time.monotonic()
        tuner = self.stream_tuner if stream else self.tuner
        strategy = tuner.strategy
        wait = self._spinning if strategy.workers_spin and now - tuner.recorded < SHORT_PAUSE else ASLEEP
        self._step = step = None
        if self.is_simple and not stream and (not slots.unusual or slots.unusual.isdisjoint(env_ids)):
            envs = self.all if env_ids is asker.all_ids else Selection(env_ids)
            are_idle = True
            for each in envs.ranges:
                are_idle = are_idle and slots.states[each] == slots.zeros[each]
            if are_idle:
                resets = self.write_rows(envs, actions)
                with asker.corked(), self._lock:
                    step = self.prepare(envs, resets, now)
                    if step is not None:
                        self._post_and_ring(step, wait)
        if step is None:
            spec = self._vector.action_spec
            asker.start_steps(env_ids, actions, stream=stream, wait=wait, checked=spec)
        return step

    def write_rows(self, envs: Selection, actions: Any) -> Sequence[int]:
        """Write the actions of envs that are idle and need nothing but to be posted; return those that are reset."""
        asker, slots, only = self._asker, self._slots, self._asker.only_action
        is_array = only is not None and type(actions) is np.ndarray and actions.dtype == only.dtype
        if only is not None and is_array and envs is self.all and actions.shape == only.shape:
            only[...] = actions  # as `write_actions` does, which would be a call
        else:
            asker.write_actions(envs.env_ids, actions, self._vector.action_spec)
        if envs is self.all and slots.halves.count(slots.halves[0]) != len(slots.halves):
            slots.align_halves(slots.halves[0])
        ops = slots.halves.translate(_OTHER_HALF)  # the only bit of a plain step
        resets: Sequence[int] = ()
        ended = slots.ended.tobytes()
        if ended != slots.zeros:
            resets = [env_id for env_id in envs.env_ids if ended[env_id]]
            for env_id in resets:
                ops[env_id] |= RESET
        if self._seeds_episodes:
            for env_id in envs.env_ids:
                slot = slots.of[env_id]
                assert slot.next_seed is not None, "all episodes are seeded"
                slots.slab.seeds[env_id] = slot.seed = slot.next_seed
                ops[env_id] |= SEED
        for each in envs.ranges:
            slots.ops[each] = slots.posted_ops[each] = ops[each]
            slots.streams[each] = slots.zeros[each]
        if slots.overflow:
            for env_id in envs.env_ids:
                slots.overflow.pop(env_id, None)
        return resets

    def prepare(self, envs: Selection, resets: Sequence[int], now: float) -> Step | None:
        """Return a step to be posted, if all workers are free and none runs anything for other envs. Under the lock."""
        slots, ids = self._slots, self._ids
        ids.last = number = ids.last + 1
        parts = (self._parts if envs is self.all else None) or self._find_parts(envs)
        for core, rows, process, page, _ in parts:
            # At most states to be saved are queued then, where an interrupt has left them: without rows in flight,
            # only a running call keeps a worker from its queue.
            is_free = core.phase is LIVE and not core.closing and core.permits is None
            if core.process is not process or not is_free or core.table.running is not None:
                self._parts = []
                return None
            # Nothing reads these of an actor without rows in flight, so that they may also be those of no step.
            rows.last = page.last_call = number
            rows.posted_at = now
            if "call" not in core.timers.when:
                core.watch(now)
        if not parts or (slots.unusual and not slots.unusual.isdisjoint(envs.env_ids)):
            return None
        return Step(envs, number, parts, resets)

    def post(self, step: Step) -> None:
        """Post a step, but ring for no worker. Called under the lock.

        The private numbers come first: from then on no row is complete.
        """
        slots, (envs, number, _, _) = self._slots, step
        for each in envs.ranges:
            slots.numbers[each].fill(number)
            slots.slab.posted[each].fill(number)
            slots.states[each] = self._all_posted[each]

    def _post_and_ring(self, step: Step, wait: int) -> None:
        if step.envs is self.all:
            self._step = step
        try:
            self.post(step)
            for _, _, _, page, indices in step.parts:
                page.post_step(step.number, wait, False, indices)
        except BaseException:
            replace_processes(step.parts)
            raise

    def _find_parts(self, envs: Selection) -> list[Part]:
        """Find the present processes of the actors of some envs; return nothing if one has none, or others run."""
        parts = []
        for actor, indices in self._asker.by_actor(envs.env_ids).items():
            core, rows, process = actor.core, actor.calls.rows, actor.core.process
            if rows is None or process is None or rows.has_posted():
                return []
            parts.append(Part(core, rows, process, process.page, indices))
        if envs is self.all:
            self._parts = parts
        return parts

    # Waiting ---------------------------------------------------------------------------------------------

    def listen(self) -> WaitSet:
        """Return what the calling thread sleeps on, with the doorbells of new processes. Called before each wait."""
        ears = self._ears
        for actor in self._vector.actors:
            process = actor.core.process
            if process is not None and ears.heard.get(actor) is not process.page:
                ears.wait_set.watch_doorbell(process.page.to_parent)
                ears.heard[actor] = process.page  # not before: an interrupt in between must not keep it unwatched
        return ears.wait_set

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

    def finish_at_once(self, step: Step) -> StepResults | None:
        """Return `gather` if the workers finish while this spins. Called with signals deferred."""
        if not self.tuner.strategy.both_spin:
            return None
        pairs = []
        for part in step.parts:
            pairs.append((part.page.counters, step.number))  # noqa: PERF401 # a comprehension costs one more call
        if spin_until_all(pairs, FINISHED) and not defer_signals.interrupted:
            return self.gather(step)
        return None

    def finish_last(self, deadline: float | None) -> StepResults | None:
        """Do what `finish` does for the last step of all envs that `start` has posted."""
        step = self._step
        return None if step is None else self.finish(step, deadline)

    def finish(self, step: Step, deadline: float | None) -> StepResults | None:
        """Wait for a step of all envs until the deadline (`time.monotonic`), and return `gather`.

        Only one thread does so. Others wait in `Collector`, and so does who has stepped some of the envs: several
        threads may wait for different ones. In process, the step has run.
        """
        is_whole = step.envs is self.all
        if is_whole:
            with defer_signals, self._lock:
                if step is not self._step:
                    return None
                self._step = None
        if not self.is_inline and not (is_whole and self._wait(step, deadline)):
            return None
        with defer_signals:
            return self.gather(step)

    def _wait(self, step: Step, deadline: float | None) -> bool:
        """Wait until a step is finished, or an env needs more than waiting; return False if `Collector` has to."""
        if not self._kills and any(part.core.runs_here for part in step.parts):
            return False
        reactor, pending = self._vector.reactor, self._vector.pending
        return reactor.wait(step.is_finished, pending, deadline, self.listen(), reads_replies=self._is_far)

    # Results ---------------------------------------------------------------------------------------------

    def gather(self, step: Step) -> StepResults | None:
        """Deliver the results of a step. Called with signals deferred.

        Returns:
            The results as `VectorEnv.step` returns them; None if an env needs special handling, so that `Collector`
            has to deliver them.
        """
        vector, slots, envs, contents = self._vector, self._slots, step.envs, None
        try:
            if not self.arrive(step):
                return None
            if not slots.infos.all_plain():
                contents = vector.reader.decode_all(envs.env_ids)
                if contents is None:
                    self._give_back(envs)
                    return None
            results = vector.reader.batch(envs.index, contents)
            vector.episodes.record_all(envs, results[2], results[3], step.resets)
            vector.reader.keep_all(envs, contents)
            if step is self._step:
                self._step = None
            # Made idle last: after an interrupt before that, `recv` delivers the results.
            for each in envs.ranges:
                slots.states[each] = slots.zeros[each]
        except BaseException:
            self._give_back(envs)
            raise
        if not self.is_inline:  # else nothing waits
            self.record()
        if vector.pending.waiting:
            vector.reactor.wake(vector.pending)
        return results

    def _give_back(self, envs: Selection) -> None:
        """Leave results that were arriving here to other threads."""
        states = self._slots.states
        for each in envs.ranges:
            states[each] = states[each].replace(bytes([READING]), bytes([ARRIVED]))

    def record(self) -> None:
        """Record that the results of a step have been gathered."""
        now = time.monotonic()
        self.tuner.record(now - self._started, now)

    def arrive(self, step: Step) -> bool:
        """Take the results of a step into account, to be read in this thread; return False if that is not so simple.

        Called with signals deferred.
        """
        slots, (envs, number, parts, _) = self._slots, step
        if slots.unusual and not slots.unusual.isdisjoint(envs.env_ids):
            return False
        completed = self._completed
        with self._lock:
            for each in envs.ranges:
                if slots.states[each] != self._all_posted[each] or slots.numbers_of[each] != completed[each]:
                    return False
                if not slots.infos.all_plain() and not slots.infos.are_inline(each):
                    return False
            for core, rows, process, page, _ in parts:
                is_as_usual = core.phase is LIVE and not core.table.queue and rows.last == number
                if not is_as_usual or page.counters[OVERFLOWS] != process.overflows:
                    return False
            for each in envs.ranges:
                slots.halves[each] = slots.ops[each].translate(_HALF_OF)
            for core, _, _, _, indices in parts:
                core.completed += len(indices)
                if self._replays:
                    core.recovery.record_all(slots, indices)
            for each in envs.ranges:
                slots.states[each] = self._all_reading[each]
        for core in [part.core for part in parts] if self._replays else ():
            if core.queue:  # states of envs are to be saved
                with core.change, core.lock:
                    core.on_idle()
        return True
