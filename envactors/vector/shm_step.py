"""Steps through shared memory: actions into rows, one ring per actor, results out of rows.

    start    actions, what to do ──▶ rows ──▶ a batch step of each actor's envs
    gather   all of them are over, and nothing is out of the ordinary ──▶ the whole batch, a copy per array

If something is, or not all are waited for, `envactors.vector.single_results` hands results on one by one. An env goes
this way while the process that holds its episode lives; everything else goes in frames.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any

import numpy as np

from envactors.actor.shm_batch_step import SharedMemoryBatchStep
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.wait_tuner import SHORT_PAUSE, WaitTuner
from envactors.arrays.specs import ArraySpec, flatten, split_batch
from envactors.system.cpus import cores, spin_until_all
from envactors.vector.env_state import EnvState
from envactors.vector.episodes import Episodes
from envactors.vector.pending import IN_FLIGHT, Pending
from envactors.vector.prepared import PreparedStep, PreparedSteps
from envactors.vector.results import NO_CONTENT, Content, LastResults, RowReader
from envactors.vector.single_results import SingleResults
from envactors.vector.transitions import Transitions
from envactors.wire.control_page import ASLEEP, FINISHED, SPINNING, encode_wait
from envactors.wire.info_codec import InfoReader


class SharedMemoryStepper:
    """Steps envs through shared memory.

    Args:
        reader: Reads results out of the rows.
        infos: Reads what comes beside the arrays.
        envs: All envs.
        pending: Where their results are.
        episodes: The bookkeeper.
        transitions: Asks envs in frames, and handles failures.
        last: The last result of each env; None if failures are raised.

    Attributes:
        rows: The rows of all envs.
        wait_set: What the vector's thread sleeps in.
        single: Hands on single results of the steps that were started.
    """

    def __init__(
        self,
        reader: RowReader,
        infos: InfoReader,
        envs: list[EnvState],
        pending: Pending,
        episodes: Episodes,
        transitions: Transitions,
        last: LastResults | None,
    ) -> None:
        self._reader = reader
        self.rows = rows = reader.rows
        self._infos = infos
        self._envs = envs
        self._pending = pending
        self._episodes = episodes
        self._transitions = transitions
        self._last = last
        config = envs[0].supervisor.config
        may_pin = (
            config.backend.kills and not config.backend.is_far and 1 < len({env.supervisor for env in envs}) <= cores()
        )
        self._tuner = WaitTuner(config.spin, may_pin)
        tuner = WaitTuner(config.spin, may_pin)
        self.single = SingleResults(reader, infos, envs, pending, episodes, transitions, last, tuner)
        self._prepared = PreparedSteps(rows, infos, envs, episodes, pending, self.single.reissue)
        self._actors = self._prepared.actors
        self.wait_set = self._prepared.wait_set
        self._inline = config.backend.inline
        # Whether what a step waits for may come with replies: rings of far workers, the ends of steps before it.
        self._reads_replies = config.backend.is_far or config.permits is not None
        self._reactor = envs[0].supervisor.reactor
        self._corked = config.backend.corked
        # When the last step was started (`time.monotonic`).
        self._started = 0.0
        layout = rows.layout
        self._action_spec = layout.action
        # The one array of actions, if there is only one.
        self._only_action = rows.actions[0] if isinstance(layout.action, ArraySpec) else None
        self._no_resets = bytes(len(envs))
        # What the operations of all rows are; None if that is not known.
        self._ops: bytes | None = None

    # Starting --------------------------------------------------------------------------------------------

    def start(self, env_ids: list[int], actions: Any, *, stream: bool) -> PreparedStep:
        """Start a step of each of some envs; called with signals deferred.

        Args:
            env_ids: The envs.
            actions: As `VectorEnv.step` takes them.
            stream: Whether each result is of use before the others are there.

        Raises:
            AlreadyPendingError: A result of one of them was not delivered.
            VectorInputError: One of them needs a reset.
            SpaceMismatchError: The actions do not conform.
        """
        pending = self._pending
        if pending.states != pending.all_idle:
            pending.check_idle(env_ids)
        prepared = self._prepared.full_batch
        if (
            prepared is None
            or prepared.env_ids is not env_ids
            or stream
            or prepared.version != self._episodes.changes
            or (self.single.running and not prepared.is_over())
        ):
            prepared = self._prepared.prepare(env_ids, stream)
        if self.single.running:
            self._forget_running(prepared)
        only, index = self._only_action, prepared.index
        if only is not None and type(actions) is np.ndarray and actions.dtype == only.dtype:
            values: Any = actions if actions.shape == (len(env_ids), *only.shape[1:]) else None
        else:
            values = None
        if values is None:
            values = split_batch(self._action_spec, actions, len(env_ids), "actions")
        if only is not None:
            only[index] = values
        else:
            for env_id, value in zip(env_ids, values, strict=True):
                self._write_action(env_id, value)
        for _, step in prepared.pairs:
            if step.failed_envs or step.overflow or step.claimed:
                step.arm()
            else:  # one call less
                step.started = 0.0
                step.over = False
        self.single.running += prepared.pairs  # listed before they are posted
        self._post(prepared, values, stream)
        return prepared

    def _post(self, prepared: PreparedStep, values: Any, stream: bool) -> None:
        pending, ended = self._pending, self._episodes.ended
        flags = ended.tobytes()
        if flags != self._ops:  # else the rows say it already
            self._ops = None  # until all are written
            self.rows.ops[prepared.index] = ended[prepared.index]
            self._ops = flags if prepared.is_all else None
        prepared.resets = ended.copy() if prepared.is_all and flags != self._no_resets else None
        single = self.single
        if prepared.is_all:
            pending.states[:] = pending.all_in_flight
        else:
            pending.mark(prepared.env_ids, IN_FLIGHT)
        if prepared.decoded:
            prepared.decoded = {}
        self._started = now = time.monotonic()
        tuner, wait = single.tuner if stream else self._tuner, ASLEEP
        strategy = tuner.strategy
        if strategy.workers_spin and now - tuner.recorded < SHORT_PAUSE:
            wait = SPINNING
        refused = prepared.unreachable
        refusing: list[SharedMemoryBatchStep] = []
        with self._corked():
            for steps, step, number in prepared.parts:
                if not steps.start(step, now, encode_wait(number, wait) if strategy.pinned else wait):
                    refused = [*refused, *step.envs]
                    refusing.append(step)
        prepared.asked_in_frames = bool(refused)
        if refused:
            self._episodes.changes += 1
            actions = dict(zip(prepared.env_ids, values, strict=True))
            requests = [self._transitions.request_step(env_id, actions[env_id]) for env_id in refused]
            self._transitions.submit(requests, stream=stream)
            single.running = [pair for pair in single.running if pair[1] not in refusing]
            for step in refusing:
                step.over = True
        if stream:
            single.posting += time.monotonic() - now

    def run_inline(self) -> None:
        """Run what was started, if the workers run in the threads that call them."""
        for actor in self._actors:
            if actor.supervisor.core.run_inline is not None:
                actor.supervisor.core.run_inline()

    def _write_action(self, env_id: int, action: Any) -> None:
        for array, leaf in zip(self.rows.actions, flatten(self._action_spec, action), strict=True):
            array[env_id] = leaf

    # Finishing -------------------------------------------------------------------------------------------

    def finish_at_once(self, prepared: PreparedStep) -> tuple[Any, ...] | None:
        """Return what `gather` does if the workers are done within the spin window; called with signals deferred."""
        if self._tuner.strategy.both_spin and not prepared.asked_in_frames:
            pairs = []
            for _, step, _ in prepared.parts:
                pairs.append((step.page.counters, step.call_id))  # a comprehension is one more call
            if spin_until_all(pairs, FINISHED) and not defer_signals.interrupted:
                return self.gather(prepared)
        return None

    def finish(self, prepared: PreparedStep, deadline: float | None) -> tuple[Any, ...] | None:
        """Wait for a step until the deadline (`time.monotonic`), and return what `gather` does."""
        if prepared.asked_in_frames:
            return None
        is_finished = functools.partial(self._is_finished, prepared)
        if self._inline:
            self.run_inline()
        if self._reads_replies:
            finished = self._reactor.wait(is_finished, self._pending, deadline, self.wait_set)
        else:
            finished = self.wait_set.wait_rings(is_finished, self._pending, deadline)
        if finished:
            with defer_signals:
                return self.gather(prepared)
        return None

    def gather(self, prepared: PreparedStep) -> tuple[Any, ...] | None:
        """Return the results of a step, batched as `VectorEnv.step` returns them; called with signals deferred.

        Returns:
            None if something is out of the ordinary, and each env is to be looked at; nothing is delivered then.
        """
        pending, rows, index, is_all = self._pending, self.rows, prepared.index, prepared.is_all
        for steps, step, _ in prepared.parts:
            if not steps.finish(step) or step.failed_envs:
                return None
        if prepared.asked_in_frames or (
            pending.states != pending.all_in_flight if is_all else not self._all_in_flight(prepared.env_ids)
        ):
            return None
        contents = None
        if not self._infos.all_plain():
            contents = self._decode_all(prepared)
            if contents is None:
                return None
        infos = [{} for _ in prepared.env_ids] if contents is None else [content[0] for content in contents]
        obs = self._reader.observations(prepared.env_ids, contents, all_envs=is_all)
        if is_all:
            rewards, terminated, truncated = rows.rewards.copy(), rows.terminated.copy(), rows.truncated.copy()
        else:
            rewards, terminated, truncated = rows.rewards[index], rows.terminated[index], rows.truncated[index]
        # Delivered last: what an interrupt keeps from it is delivered by `recv`.
        if is_all:
            self._episodes.record_all(terminated, truncated, prepared.resets)
        else:
            self._episodes.record_rows(prepared.env_ids, rows)
        if self._last is not None:
            self._keep_last(prepared, contents)
        if is_all:
            pending.states[:] = pending.all_idle
        else:
            pending.mark(prepared.env_ids, 0)
        if len(self.single.running) == len(prepared.parts):
            self.single.running.clear()
        else:
            self._forget_running(prepared)
        now = time.monotonic()
        self._tuner.record(now - self._started, now)
        return obs, rewards, terminated, truncated, infos

    def _is_finished(self, prepared: PreparedStep) -> bool:
        """Return whether no batch step is with its worker any more.

        If some are and one is not, infos that are there are decoded, so that few are left to decode at the end.
        """
        finished = [step.over or step.page.counters[FINISHED] >= step.call_id for _, step, _ in prepared.parts]
        if all(finished):
            return True
        if any(finished) and not self._infos.all_plain():
            for _, step, _ in prepared.parts:
                for env_id in step.envs:
                    if env_id not in prepared.decoded and step.complete(env_id) and not self._infos.failed(env_id):
                        with contextlib.suppress(Exception):  # `_decode_all` comes upon it again
                            prepared.decoded[env_id] = self._infos.decode(env_id, step.overflow.get(env_id))
        return False

    def _all_in_flight(self, env_ids: list[int]) -> bool:
        states = self._pending.states
        return all(states[env_id] == IN_FLIGHT for env_id in env_ids)

    def _forget_running(self, prepared: PreparedStep) -> None:
        over = {id(step) for _, step, _ in prepared.parts}
        self.single.running = [pair for pair in self.single.running if id(pair[1]) not in over]

    def _decode_all(self, prepared: PreparedStep) -> list[Content] | None:
        """Return (info, object leaves) per env; None if one has failed."""
        contents = prepared.decoded
        for _, step, _ in prepared.parts:
            for env_id in step.envs:
                if self._infos.failed(env_id):
                    return None
                try:
                    if env_id not in contents:
                        contents[env_id] = self._infos.decode(env_id, step.overflow.get(env_id))
                except BaseException:  # unpickling runs any code; `collect` makes an error of it
                    return None
        return [contents[env_id] for env_id in prepared.env_ids]

    def _keep_last(self, prepared: PreparedStep, contents: list[Content] | None) -> None:
        assert self._last is not None, "checked before"
        if prepared.is_all:
            self._reader.contents = contents or [NO_CONTENT] * len(self._envs)
        else:
            for position, env_id in enumerate(prepared.env_ids):
                self._reader.contents[env_id] = NO_CONTENT if contents is None else contents[position]
        self._last.keep_rows(prepared.index, self.rows.asked[prepared.index])
