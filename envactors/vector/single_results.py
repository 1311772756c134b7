"""Single results of batch steps, for `recv`, and for whoever waits for envs of which one has failed.

claim    rows that are complete ──▶ `Pending`; failures ──▶ `Transitions`
take     results that wait to be delivered ──▶ a batch
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.batch_step import StepRequest
from envactors.actor.requests import Answer
from envactors.actor.shm_batch_step import SharedMemoryBatchStep, SharedMemorySteps
from envactors.actor.wait_tuner import WaitTuner
from envactors.arrays.specs import reader
from envactors.system.cpus import spin_until_all
from envactors.vector.env_state import EnvState
from envactors.vector.episodes import Episodes
from envactors.vector.pending import Pending, ReadyResult
from envactors.vector.results import Batch, EnvStep, LastResults, RowReader
from envactors.vector.transitions import Transitions
from envactors.wire.control_page import FINISHED, ControlPage
from envactors.wire.info_codec import InfoReader


class SingleResults:
    """Collects single results out of the rows of shared memory.

    Args:
        row_reader: Reads results out of the rows.
        infos: Reads what comes beside the arrays.
        envs: All envs.
        pending: Where their results are.
        episodes: The bookkeeper.
        transitions: Asks envs in frames, and handles failures.
        last: The last result of each env; None if failures are raised.
        tuner: Chooses how `recv` and the workers wait for each other.

    Attributes:
        running: The batch steps whose results were not all collected.
        tuner: See above.
        posting: How long the posting of streamed steps has taken since the last results, in seconds.
    """

    def __init__(
        self,
        row_reader: RowReader,
        infos: InfoReader,
        envs: Sequence[EnvState],
        pending: Pending,
        episodes: Episodes,
        transitions: Transitions,
        last: LastResults | None,
        tuner: WaitTuner,
    ) -> None:
        self._rows = row_reader.rows
        self._reader = row_reader
        self._infos = infos
        self._envs = envs
        self._pending = pending
        self._episodes = episodes
        self._transitions = transitions
        self._last = last
        self.tuner = tuner
        self.running: list[tuple[SharedMemorySteps, SharedMemoryBatchStep]] = []
        self.posting = 0.0
        # The control pages whose workers ring for streamed results.
        self._rung: dict[int, ControlPage] = {}

    def reissue(self, env_id: int) -> StepRequest:
        """Return the request that stands for a step of an env that has failed, or was lost with its process."""
        self._episodes.changes += 1
        rows = self._rows
        request = self._transitions.request_step(env_id, reader(rows.layout.action, rows.actions, env_id)())
        self._pending.requests[env_id] = request
        return request

    def collect_at_once(self) -> None:
        """Hand on what is complete now, or within the spin window if spinning pays; called with signals deferred."""
        if self.tuner.strategy.both_spin and self.running:
            spin_until_all([(step.page.counters, step.call_id) for _, step in self.running], FINISHED)
        self.collect(0)

    def has_unread(self) -> bool:
        """Return whether there are results with something beside them that is to be unpickled."""
        return not self._infos.all_plain() and any(step.has_results() for _, step in self.running)

    def collect(self, expected: int) -> int:
        """Hand on single results that are complete; called with signals deferred.

        Args:
            expected: How many more the caller sleeps for, if there are none; 0 if it does not sleep.

        Returns:
            How many there were.
        """
        count = self._claim_complete()
        while self._ring_at(expected - count) and (more := self._claim_complete()):
            count += more
        return count

    def _claim_complete(self) -> int:
        """Hand on what is complete now, in the order in which it came; return how much that was."""
        going: list[tuple[SharedMemorySteps, SharedMemoryBatchStep]] = []
        found: list[ReadyResult] = []
        when, now = self._rows.when.data, time.monotonic()
        for pair in self.running:
            steps, step = pair
            if step.has_results():
                envs, contents = steps.claim(step), self._reader.contents
                if self._infos.all_plain():
                    for env_id in envs:
                        contents[env_id] = {}, []
                else:
                    envs = [env_id for env_id in envs if self._read_content(step, env_id)]
                found += [ReadyResult(env_id, when[env_id] if step.stream else now) for env_id in envs]
            # Handling a failure may have ended the process, and so the step, with more results.
            if not step.over or len(step.claimed) + len(step.failed_envs) < len(step.envs):
                going.append(pair)
        found.sort(key=lambda result: result.when)
        for result in found:
            self._pending.complete(result)
        self.running = going  # not before: what an interrupt has kept from being handed on is claimed again
        return len(found)

    def _ring_at(self, expected: int) -> bool:
        """Have workers ring when so many more results are there; return whether there are any to expect.

        Results that came before have to be looked for after this.
        """
        missing = sum(len(step.envs) - len(step.claimed) for _, step in self.running)
        if expected <= 0 or not missing:
            return False
        # A row is complete also while its env is not asked anything.
        count = len(self._envs) - missing + min(expected, missing)
        self._rung = {id(step.page): step.page for _, step in self.running}
        for page in self._rung.values():
            page.ring_at(count)
        return True

    def _read_content(self, step: SharedMemoryBatchStep, env_id: int) -> bool:
        """Read what came beside an env's rows; if the env has failed, hand on the failure and return False."""
        payload = step.overflow.get(env_id)
        failed = self._infos.failed(env_id)
        if not failed:
            try:
                self._reader.contents[env_id] = self._infos.decode(env_id, payload)
            except BaseException:  # noqa: S110 # unpickling runs any code; the error factory says what was wrong
                pass
            else:
                return True
        content: Any = payload
        if failed:
            with contextlib.suppress(Exception):  # no failure has come, although the row says so
                content = tuple(self._infos.failure(env_id, payload))
        if content is None:
            content = self._rows.inline_info(env_id)
        env, request = self._envs[env_id], self.reissue(env_id)
        request.call_id = step.call_id
        self._infos.mark_failed(env_id)  # what could not be unpickled is no result either
        errors, answer = env.supervisor.core.errors, Answer(request, True, content)
        request.settle(None, errors.outcome(answer, step.bound, env.handle.pid)[1], step.bound)
        return False

    def take_batch(self, env_ids: list[int]) -> Batch:
        """Return results that stand in the rows, and take them into account; called with signals deferred."""
        index, rows = np.array(env_ids, np.int64), self._rows
        contents = [self._reader.contents[env_id] for env_id in env_ids]
        batch = Batch(
            index,
            self._reader.observations(env_ids, contents, all_envs=False),
            rows.rewards[index],
            rows.terminated[index],
            rows.truncated[index],
            [content[0] for content in contents],
            np.array([self._envs[env_id].incarnation or 0 for env_id in env_ids], np.int64),
        )
        self._account_for(index)
        return batch

    def record_wait(self, started: float, count: int) -> None:
        """Record when the waiting for so many results began that have been delivered now."""
        now = time.monotonic()
        self.tuner.record((now - started + self.posting) * len(self._envs) / count, now)
        self.posting = 0.0
        if self._rung:
            for page in self._rung.values():
                page.ring_at(0)
            self._rung = {}

    def take(self, env_ids: Sequence[int]) -> list[EnvStep]:
        """Return results that stand in the rows one by one, and take them into account."""
        envs = [self._envs[env_id] for env_id in env_ids]
        steps = [self._reader.step(env.env_id, env.incarnation or 0) for env in envs]
        index = np.array(env_ids, np.int64)
        self._account_for(index)
        return steps

    def _account_for(self, index: npt.NDArray[np.int64]) -> None:
        self._episodes.record_rows(index, self._rows)
        if self._last is not None:
            self._last.keep_rows(index, self._rows.asked[index])
