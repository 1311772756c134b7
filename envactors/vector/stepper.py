"""The fast path of `VectorEnv.step`: start a step of some envs, wait for all, and return it in a few array copies.

If an env needs special handling, `Stepper.gather` returns None, and `envactors.vector.collector` delivers the results.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.signal_deferral import defer_signals
from envactors.actor.slots import ARRIVED, IDLE, POSTED, Slots
from envactors.actor.supervisor import Supervisor
from envactors.actor.wait_set import WaitSet
from envactors.actor.wait_tuner import SHORT_PAUSE, WaitTuner
from envactors.mailbox.control_page import ASLEEP, FINISHED, SPINNING, ControlPage, encode_wait, spin_until_all
from envactors.mailbox.slab import HALF, RESET
from envactors.mailbox.specs import Spec
from envactors.system.cpus import cores
from envactors.vector.asking import Asker, Selection
from envactors.vector.episodes import Episodes
from envactors.vector.pending import Pending
from envactors.vector.results import RowReader, StepResults


class Stepper:
    """Starts steps, and returns their results as whole batches.

    Args:
        slots: All envs.
        supervisors: The actor of each env.
        asker: Starts steps of single envs.
        reader: Reads results out of rows.
        pending: Results that were not delivered yet.
        episodes: Counts steps and episodes.
        action_spec: Spec of one env's action; None to send actions unchecked.
        learns: Whether the observation spec is learned, so that each observation has to be checked.

    Attributes:
        wait_set: Doorbells that the vector's thread sleeps on.
        stream_tuner: Chooses how `recv` and the workers wait for each other.
    """

    def __init__(
        self,
        slots: Slots,
        supervisors: Sequence[Supervisor],
        asker: Asker,
        reader: RowReader,
        pending: Pending,
        episodes: Episodes,
        action_spec: Spec | None,
        *,
        learns: bool,
    ) -> None:
        self._slots = slots
        self._asker = asker
        self._reader = reader
        self._pending = pending
        self._episodes = episodes
        self._action_spec = action_spec
        self._learns = learns
        self._actors = list(dict.fromkeys(supervisors))
        config = supervisors[0].config
        backend = config.backend
        may_pin = backend.kills and not backend.is_far and 1 < len(self._actors) <= cores()
        self._tuner = WaitTuner(config.spin, may_pin)
        self.stream_tuner: WaitTuner = WaitTuner(config.spin, may_pin)
        self._inline = backend.inline
        # Whether a reply may end a wait: it contains rings of other machines, or starts a step that waits for a permit.
        self._reads_replies = backend.is_far or config.permits is not None
        self._reactor = supervisors[0].reactor
        self.wait_set: WaitSet = self._reactor.make_wait_set()
        # The page of each actor whose doorbell is in the wait set.
        self._heard: dict[Supervisor, ControlPage] = {}
        # Time at which the last step was started (`time.monotonic`).
        self._started = 0.0
        count = len(supervisors)
        self._all_idle = bytes(count)
        self._all_posted = bytes([POSTED]) * count
        # Whether a step consists of nothing but an action in the row.
        self._may_be_simple = slots.slab.layout.action is not None and slots.of[0].next_seed is None
        self._corked = backend.corked if backend.is_far else contextlib.nullcontext
        # Of the last step: whether it was a step of all envs that was posted at once, and which envs it resets.
        self._is_simple = False
        self._resets: npt.NDArray[np.bool_] | None = None

    def listen(self) -> None:
        """Add the doorbells of new processes to the wait set. Called before each wait."""
        for actor in self._actors:
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
            and slots.states == self._all_idle
            and self._may_be_simple
        )
        if self._is_simple:
            if asker.unenforced:
                asker.warn_of_deadline("step")
            only = asker.only_action
            is_array = only is not None and type(actions) is np.ndarray and actions.dtype == only.dtype
            if only is not None and is_array and actions.shape == only.shape:
                only[...] = actions
            else:
                asker.write_actions(selection, actions)
            self._start_all(selection, now, wait, pinned=strategy.pinned)
        else:
            spec = self._action_spec
            asker.start_steps(selection, actions, stream=stream, wait=wait, pinned=strategy.pinned, checked=spec)
        return selection

    def _start_all(self, selection: Selection, now: float, wait: int, *, pinned: bool) -> None:
        """Start a step of all envs, which are idle and only need to be posted."""
        slots = self._slots
        half = slots.halves[0]
        if slots.halves != slots.in_half[half]:
            slots.align_halves(half)
        if slots.ended.tobytes() == self._all_idle:
            self._resets = None
            bits = slots.in_half[half ^ HALF]  # the only bit of a plain step
        else:
            self._resets = slots.ended.copy()
            bits = (slots.ended * np.uint8(RESET) | np.uint8(half ^ HALF)).tobytes()
        slots.ops[:] = bits
        slots.posted_ops[:] = bits
        slots.streams[:] = self._all_idle
        slots.overflow.clear()
        with self._corked():
            for supervisor, envs, number in selection.parts:
                core = supervisor.core
                try:
                    with core.lock:
                        rows = supervisor.calls.rows
                        if rows is not None and rows.post_all(
                            now, encode_wait(number, wait) if pinned else wait, stream=False
                        ):
                            continue
                except BaseException:
                    core.kill_inconsistent()
                    raise
                self._is_simple = False
                self._asker.queue_envs(supervisor, envs, stream=False)

    def run_inline(self) -> None:
        """Run what was started, with an in-process backend."""
        for actor in self._actors:
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
            return self._gather_all(selection) if self._is_simple else self.gather(selection)
        return None

    def finish(self, selection: Selection, deadline: float | None) -> StepResults | None:
        """Wait for a step until the deadline (`time.monotonic`), and return `gather`."""
        states = self._slots.states
        if states != self._all_posted and any(states[env_id] != POSTED for env_id in selection.env_ids):
            return None
        if self._inline:
            self.run_inline()
        is_finished = functools.partial(self._is_finished, selection)
        if self._inline and is_finished():
            finished = True
        elif self._reads_replies:
            self.listen()
            finished = self._reactor.wait(is_finished, self._pending, deadline, self.wait_set)
        else:
            self.listen()
            finished = self.wait_set.wait_rings(is_finished, self._pending, deadline)
        if finished:
            with defer_signals:
                return self._gather_all(selection) if self._is_simple else self.gather(selection)
        return None

    def _is_finished(self, selection: Selection) -> bool:
        """Return whether all envs have finished, or an env needs more than waiting."""
        states, numbers = self._slots.states, self._slots.numbers_of
        is_finished = True
        if selection.is_all and states != self._all_posted:
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
        slots, rows, env_ids, is_all = self._slots, self._slots.slab, selection.env_ids, selection.is_all
        states = slots.states
        for supervisor, envs, _ in selection.parts:
            core = supervisor.core
            with core.change, core.lock:
                if supervisor.calls.rows is not None and any(states[env_id] == POSTED for env_id in envs):
                    supervisor.calls.rows.arrive()
        if any(states[env_id] != ARRIVED or env_id in slots.outcomes for env_id in env_ids):
            return None
        if self._learns or any(slots.of[env_id].op is not None or env_id in slots.unusual for env_id in env_ids):
            return None
        contents = None
        if not slots.infos.all_plain():
            contents = self._reader.decode(env_ids)
            if contents is None:
                return None
        index = selection.index
        try:
            for position, env_id in enumerate(env_ids):
                self._reader.accept(env_id, ({}, []) if contents is None else contents[position])
        except BaseException:  # an object leaf cannot be copied; `Outcomes` reports the error
            return None
        infos = [{} for _ in env_ids] if contents is None else [content[0] for content in contents]
        obs = self._reader.observations(env_ids, contents, all_envs=is_all)
        rewards = self._reader.rewards(index, contents)
        terminated, truncated = rows.terminated[index].copy(), rows.truncated[index].copy()
        for position, env_id in enumerate(env_ids):
            reset = bool(slots.ops[env_id] & RESET)
            self._episodes.record(env_id, over=bool(terminated[position] or truncated[position]), reset=reset)
            slots.has_last[env_id] = True
            # Made idle last: after an interrupt before this line, `recv` delivers the result.
            states[env_id] = IDLE
        now = time.monotonic()
        self._tuner.record(now - self._started, now)
        return obs, rewards, terminated, truncated, infos

    def _gather_all(self, selection: Selection) -> StepResults | None:
        """Return `gather` for a step of all envs that was posted at once."""
        slots, reader, rows = self._slots, self._reader, self._slots.slab
        self._is_simple = False
        if slots.unusual or slots.states != self._all_posted or self._learns or reader.copies_objects:
            return self.gather(selection)
        for actor in self._actors:
            with actor.core.lock:
                if actor.calls.rows is None or not actor.calls.rows.finish_all():
                    return self.gather(selection)
        contents = None
        if not slots.infos.all_plain():
            contents = reader.decode(selection.env_ids)
            if contents is None:
                return self.gather(selection)
        # Not a comprehension, which costs one more call.
        nothing: Iterator[dict[str, Any]] = map(dict, itertools.repeat((), len(selection.env_ids)))
        infos = list(nothing) if contents is None else [content[0] for content in contents]
        obs = reader.observations(selection.env_ids, contents, all_envs=True)
        plain = rows.layout.reward is not None
        rewards = rows.rewards.copy() if plain else reader.rewards(slice(None), contents)
        terminated, truncated = rows.terminated.copy(), rows.truncated.copy()
        # Made idle last: after an interrupt before this line, `recv` delivers the result.
        self._episodes.record_all(terminated, truncated, self._resets)
        reader.keep_all(contents)
        slots.states[:] = self._all_idle
        now = time.monotonic()
        self._tuner.record(now - self._started, now)
        return obs, rewards, terminated, truncated, infos
