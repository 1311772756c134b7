"""The fast path of `VectorEnv.step`: start a step of some envs, wait for all, and return it in a few array copies.

If an env needs special handling, `Stepper.gather` returns None, and `envactors.vector.collector` delivers the results.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np

from envactors.actor.signal_deferral import defer_signals
from envactors.actor.slots import ARRIVED, IDLE, POSTED
from envactors.actor.supervisor import Supervisor
from envactors.actor.wait_set import WaitSet
from envactors.actor.wait_tuner import SHORT_PAUSE, WaitTuner
from envactors.envs.core import VectorCore
from envactors.envs.results import StepResults
from envactors.mailbox.control_page import ASLEEP, FINISHED, SPINNING, ControlPage, spin_until_all
from envactors.mailbox.slab import HALF, RESET
from envactors.system.cpus import cores
from envactors.vector.asking import Asker, Selection
from envactors.vector.whole_steps import WholeSteps


class Stepper:
    """Starts steps, and returns their results as whole batches.

    Args:
        vector: The vector.
        asker: Starts steps.

    Attributes:
        wait_set: Doorbells that the vector's thread sleeps on.
        stream_tuner: Chooses how `recv` and the workers wait for each other.
    """

    def __init__(self, vector: VectorCore, asker: Asker) -> None:
        self._vector = vector
        self._slots = slots = vector.slots
        self._asker = asker
        config = vector.supervisors[0].config
        backend = config.backend
        may_pin = backend.kills and not backend.is_far and 1 < len(vector.actors) <= cores()
        self._tuner = WaitTuner(config.spin, may_pin)
        self.stream_tuner: WaitTuner = WaitTuner(config.spin, may_pin)
        self._is_inline = backend.inline
        self._whole = WholeSteps(slots, list(vector.actors))
        # Whether a reply may end a wait: it contains rings of other machines, or starts a step that waits for a permit.
        self._reads_replies = backend.is_far or config.permits is not None
        self.wait_set: WaitSet = vector.reactor.make_wait_set()
        # The page of each actor whose doorbell is in the wait set.
        self._heard: dict[Supervisor, ControlPage] = {}
        # Time at which the last step was started (`time.monotonic`).
        self._started = 0.0
        self._all_posted = bytes([POSTED]) * len(vector.supervisors)
        # Whether a step consists of nothing but an action in the row, and its result of nothing but arrays and an info.
        self._may_be_simple = slots.slab.layout.action is not None and slots.of[0].next_seed is None
        self._may_be_simple &= not vector.batcher.learns and not vector.reader.copies_objects
        # Whether the last step was such a step of all envs, which were posted at once.
        self._is_simple = False

    def listen(self) -> None:
        """Add the doorbells of new processes to the wait set. Called before each wait."""
        for actor in self._vector.actors:
            process = actor.core.process
            if process is not None and self._heard.get(actor) is not process.page:
                self._heard[actor] = process.page
                self.wait_set.watch_doorbell(process.page.to_parent)

    def start(self, env_ids: list[int], actions: Any, *, stream: bool) -> Selection:
        """Start a step of some envs. Called with signals deferred. For errors see `Asker.start_steps`."""
        asker, slots = self._asker, self._slots
        selection = asker.all if env_ids is asker.all.env_ids else asker.select(env_ids)
        self._started = now = time.monotonic()
        tuner = self.stream_tuner if stream else self._tuner
        strategy = tuner.strategy
        wait = SPINNING if strategy.workers_spin and now - tuner.recorded < SHORT_PAUSE else ASLEEP
        self._is_simple = (
            selection is asker.all
            and not stream
            and not slots.unusual
            and slots.states == slots.zeros
            and self._may_be_simple
        )
        if self._is_simple:
            self._start_all(actions, now, wait, pinned=strategy.pinned)
        else:
            spec = self._vector.action_spec
            asker.start_steps(selection, actions, stream=stream, wait=wait, pinned=strategy.pinned, checked=spec)
        return selection

    def _start_all(self, actions: Any, now: float, wait: int, *, pinned: bool) -> None:
        """Start a step of all envs, which are idle and need nothing but to be posted."""
        asker, slots, only = self._asker, self._slots, self._asker.only_action
        is_array = only is not None and type(actions) is np.ndarray and actions.dtype == only.dtype
        if only is not None and is_array and actions.shape == only.shape:
            only[...] = actions  # as `write_actions` does, which would be a call
        else:
            asker.write_actions(asker.all, actions, self._vector.action_spec)
        half = slots.halves[0]
        if slots.halves != slots.in_half[half]:
            slots.align_halves(half)
        bits = slots.in_half[half ^ HALF]  # the only bit of a plain step
        if slots.ended.tobytes() != slots.zeros:
            bits = (slots.ended * np.uint8(RESET) | np.uint8(half ^ HALF)).tobytes()
        slots.ops[:] = bits
        slots.posted_ops[:] = bits
        slots.streams[:] = slots.zeros
        slots.overflow.clear()
        with asker.corked():
            self._is_simple = self._whole.post(now, wait, pinned=pinned)
        if not self._is_simple:
            asker.post(asker.all, wait, stream=False, pinned=pinned)

    def run_inline(self) -> None:
        """Run what was started, with an in-process backend."""
        for actor in self._vector.actors:
            if actor.core.run_inline is not None:
                actor.core.run_inline()

    def finish_at_once(self, selection: Selection) -> StepResults | None:
        """Spin for a short time, and return `gather` if the workers finish meanwhile. Called with signals deferred."""
        if not self._tuner.strategy.both_spin:
            return None
        pairs = []
        for supervisor, _, _ in selection.parts:
            process, rows = supervisor.core.process, supervisor.calls.rows
            if process is None or rows is None:
                return None
            pairs.append((process.page.counters, rows.last))  # not a comprehension, which costs one more call
        if spin_until_all(pairs, FINISHED) and not defer_signals.interrupted:
            return self.gather(selection)
        return None

    def finish(self, selection: Selection, deadline: float | None) -> StepResults | None:
        """Wait for a step until the deadline (`time.monotonic`), and return `gather`."""
        states, pending = self._slots.states, self._vector.pending
        if states != self._all_posted and any(states[env_id] != POSTED for env_id in selection.env_ids):
            return None
        if self._is_inline and self._is_simple:
            self._whole.run()
            with defer_signals:
                if (results := self.gather(selection)) is not None:
                    return results
        if self._is_inline:
            self.run_inline()
        is_finished = functools.partial(self._is_finished, selection)
        if self._is_inline and is_finished():
            finished = True
        elif self._reads_replies:
            self.listen()
            finished = self._vector.reactor.wait(is_finished, pending, deadline, self.wait_set)
        else:
            self.listen()
            finished = self.wait_set.wait_rings(is_finished, pending, deadline)
        if finished:
            with defer_signals:
                return self.gather(selection)
        return None

    def _is_finished(self, selection: Selection) -> bool:
        """Return whether all envs have finished, or an env needs more than waiting."""
        states, numbers = self._slots.states, self._slots.numbers_of
        is_finished = True
        if selection.is_all and states != self._all_posted:
            return True
        # Rows that a new process was posted are streamed, so their end may not ring.
        if any(map(self._slots.streams.__getitem__, selection.env_ids)):
            return True
        for supervisor, envs, _ in selection.parts:
            process, rows = supervisor.core.process, supervisor.calls.rows
            # Stop to listen to a process that has replaced another one, and taken over its rows, since the wait began.
            if process is None or rows is None or self._heard.get(supervisor) is not process.page:
                return True
            if not selection.is_all and any(states[env_id] != POSTED for env_id in envs):
                return True
            # Not the number of the last post: a signal handler may have posted other envs, whose end does not ring.
            if process.page.counters[FINISHED] < max(map(numbers.__getitem__, envs)):
                is_finished = False
        return is_finished

    def gather(self, selection: Selection) -> StepResults | None:
        """Deliver the results of a step, batched as `VectorEnv.step` returns them. Called with signals deferred.

        Returns:
            The results; None if an env needs special handling, so that `Collector` has to deliver them.
        """
        vector, slots, contents = self._vector, self._slots, None
        is_simple = self._is_simple and self._whole.finish()
        self._is_simple = False
        if not is_simple and not self._arrive(selection):
            return None
        if not slots.infos.all_plain():
            contents = vector.reader.decode(selection.env_ids)
            if contents is None:
                return None
        if not is_simple and not vector.reader.accept_all(selection.env_ids, contents):
            return None
        results = vector.reader.batch(selection.index, contents, is_all=selection.is_all)
        # Made idle last: after an interrupt before that, `recv` delivers the results.
        if is_simple:
            is_plain = slots.ops == slots.in_half[slots.halves[0]]
            resets = None if is_plain else (np.frombuffer(slots.ops, np.uint8) & RESET).astype(np.bool_)
            vector.episodes.record_all(results[2], results[3], resets)
            vector.reader.keep_all(contents)
            slots.states[:] = slots.zeros
        else:
            self._deliver(selection.env_ids, results)
        now = time.monotonic()
        self._tuner.record(now - self._started, now)
        return results

    def _arrive(self, selection: Selection) -> bool:
        """Take the results of some envs into account; return False if one needs special handling."""
        slots, states = self._slots, self._slots.states
        for supervisor, envs, _ in selection.parts:
            core = supervisor.core
            with core.change, core.lock:
                if supervisor.calls.rows is not None and any(states[env_id] == POSTED for env_id in envs):
                    supervisor.calls.rows.arrive()
        is_special = self._vector.batcher.learns or any(
            states[env_id] != ARRIVED
            or env_id in slots.outcomes
            or env_id in slots.unusual
            or slots.of[env_id].op is not None
            for env_id in selection.env_ids
        )
        return not is_special

    def _deliver(self, env_ids: list[int], results: StepResults) -> None:
        """Count the steps of some envs, whose results are returned, and make the envs idle."""
        slots, over = self._slots, (results[2] | results[3]).tolist()
        for env_id, is_over in zip(env_ids, over, strict=True):
            self._vector.episodes.record(env_id, over=is_over, reset=bool(slots.ops[env_id] & RESET))
            slots.has_last[env_id] = True
            slots.states[env_id] = IDLE
