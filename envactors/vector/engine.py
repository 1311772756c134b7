"""The engine of vectors whose envs run in workers: it posts requests into rows, waits, and delivers results.

Steps and resets of all kinds are posted and awaited by the same code. Results that lie completely in their rows are
copied all at once, with one array operation per leaf (`RowEngine._deliver_rows`). Failures, large infos, and whatever
else needs attention are delivered env by env (`RowEngine._deliver_each`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from envactors.actor.future import Outcome
from envactors.actor.job import Activity
from envactors.actor.spinning import SpinPolicy
from envactors.errors import AlreadyPendingError, EnvActorsError, NothingPendingError, VectorTimeoutError
from envactors.mailbox.control_page import FINISHED, spin_until_all
from envactors.mailbox.durations import Histograms
from envactors.mailbox.info_codec import INLINE_INFO
from envactors.mailbox.messages import Description, Frame, Kind
from envactors.mailbox.pickling import dumps, try_to_read
from envactors.mailbox.slab import STREAMED
from envactors.mailbox.specs import ArraySpec, flatten, split_batch
from envactors.vector.base import Engine, Failures, Futures, Options, Seeds
from envactors.vector.env_group import EnvGroup
from envactors.vector.requests import EnvRequest, RowResult
from envactors.vector.results import Batch, Delivered, EnvSnapshot, EnvStep, batch_of
from envactors.vector.row_reader import RowReader
from envactors.vector.selection import Selection
from envactors.vector.table import DONE, FAILED, IDLE, POSTED, QUEUED, EnvTable

# For errors: how users get the results of envs that have not finished.
_RECV_LATER = "nothing is lost, and recv will return the results"


class _Found(NamedTuple):
    """An env's result as `_deliver_each` finds it under the lock, to read it without.

    If this has changed meanwhile, the result was taken. `EnvTable.version` cannot tell: it also counts changes of other
    envs, and while these stream, delivery would never end.
    """

    status: int
    posted_id: int
    outcome: Outcome | None  # None if the result is in the row


class RowEngine(Engine):
    """Steps and resets envs that run in workers.

    Args:
        described: The specs of one env.
        table: The envs.
        reader: Reads results out of rows.
        groups: The envs of each actor.
        may_spin: Whether the backend lets threads spin.

    Attributes:
        table, reader, groups: As above.
        group_by_env: For each env, the group that it belongs to.
    """

    def __init__(
        self, described: Description, table: EnvTable, reader: RowReader, groups: Sequence[EnvGroup], *, may_spin: bool
    ) -> None:
        self.group_by_env: list[EnvGroup] = [group for group in groups for _ in group.indices]
        super().__init__(described, table.episodes, [group.actor for group in self.group_by_env])
        self.table = table
        self.reader = reader
        self.groups = groups
        self.envs_per_process: list[int] = [len(group.indices) for group in groups]
        self._lock = table.lock
        # The type and the shape of the actions of all envs, if these are a single array.
        array = table.slab.actions[0] if isinstance(table.slab.layout.action, ArraySpec) else None
        self._action_format = None if array is None else (array.dtype, array.shape)
        self._spin = SpinPolicy(may_spin)

    def select(self, ids: list[int]) -> Selection:
        by_group: dict[EnvGroup, list[int]] = {}
        for index in sorted(ids):
            by_group.setdefault(self.group_by_env[index], []).append(index)
        actors = [group.actor for group in by_group]
        return Selection(ids=ids, array_index=np.array(ids, np.int64), by_group=list(by_group.items()), actors=actors)

    def busy(self) -> list[int]:
        return [index for index, status in enumerate(self.table.status) if status != IDLE]

    def receivable(self) -> list[int]:
        busy = self.busy()
        return [index for index in busy if self.table.request(index).future is None] if self.table.requests else busy

    def begin_timing(self) -> None:
        with self._lock:
            for group in self.groups:
                group.begin_timing()

    def histograms(self) -> Histograms:
        with self._lock:
            return np.concatenate([group.histograms() for group in self.groups])

    def close(self) -> None:
        """Close the doorbells of the threads that wait for results: they belong to no actor."""
        self.table.waiters.close()

    # Posting ---------------------------------------------------------------------------------------------

    def check_idle(self, envs: Selection) -> None:
        self._lock.repair_if_interrupted()
        self._check_idle(envs)

    def _check_idle(self, envs: Selection) -> None:
        table = self.table
        if table.rollouts_in_flight:
            raise AlreadyPendingError(f"{len(table.rollouts_in_flight)} rollouts are in flight: wait for them first")
        if envs.is_all and table.are_all(IDLE):
            return
        if busy := [index for index in envs.ids if table.status[index] != IDLE]:
            advice = "receive them with recv (or from their futures) before the next request"
            raise AlreadyPendingError(f"the envs {busy} have results pending: {advice}")

    def start_steps(
        self, envs: Selection, actions: Any, *, streams: bool, futures: Futures = (), check_actions: bool = True
    ) -> None:
        self._lock.repair_if_interrupted()
        columns, payloads = self._convert_actions(envs, actions, check_actions=check_actions)
        requests: dict[int, EnvRequest] = {}
        if payloads or futures:
            none = [None] * len(envs.ids)
            for index, future, payload in zip(envs.ids, futures or none, payloads or none, strict=True):
                requests[index] = EnvRequest("step", future=future, payload=payload)
        self._post_or_queue(envs, requests, "step", columns, streams=streams)

    def _convert_options(self, envs: Selection, options: Options) -> list[bytes | None]:
        return self._convert_each(lambda value: None if value is None else bytes(dumps(value)), envs, options, "reset")

    def _start_resets(self, envs: Selection, seeds: Seeds, options: list[bytes | None], futures: Futures) -> None:
        self._lock.repair_if_interrupted()
        none = [None] * len(envs.ids)
        each = zip(envs.ids, futures or none, seeds, options, strict=True)
        requests = {index: EnvRequest("reset", future, seed, payload) for index, future, seed, payload in each}
        self._post_or_queue(envs, requests, "reset", (), streams=True)

    def _convert_actions(self, envs: Selection, actions: Any, *, check_actions: bool) -> tuple[list[Any], list[bytes]]:
        """Check actions, and convert them to the form in which they are sent.

        Returns:
            Two lists, one of which is empty: for each leaf of the action spec, the values of all envs, which fit into
            rows; or else the pickled action of each env.
        """
        spec = self.action_spec if check_actions else None
        is_batch = spec is not None and envs.is_all and type(actions) is np.ndarray
        if is_batch and (actions.dtype, actions.shape) == self._action_format:
            return [actions], []  # most steps end here: `split_batch` would take longer to find the same
        values = split_batch(spec, actions, len(envs.ids), "actions")
        if spec is None or self.table.slab.layout.action is None:
            return [], self._convert_each(lambda value: bytes(dumps(value)), envs, values, "step")
        if isinstance(spec, ArraySpec):
            return [values], []
        return list(zip(*[flatten(spec, value) for value in values], strict=True)), []

    def _post_or_queue(
        self, envs: Selection, requests: dict[int, EnvRequest], method: str, columns: Sequence[Any], *, streams: bool
    ) -> None:
        """Write the actions of envs into their rows and post them, or queue those whose actor is not free.

        1. Refuse the request unless all envs are idle. From here to the end nobody else changes them.
        2. Write the actions. No worker reads the row of an env that is not posted, so the actions of those that are
           queued stay there until their actor posts them.
        3. Find the actors that are free, and post their envs with one call id.
        4. Queue the others.

        Args:
            envs: The envs.
            requests: Their requests that are more than a bare step.
            method: The method that the user called.
            columns: For each leaf of the action spec, the values of these envs; empty if rows get no actions.
            streams: Whether they stream; see `Engine.start_steps`.
        """
        table = self.table
        with self._lock, self._lock.change(*envs.actors):
            are_on_fast_path = not requests and table.are_on_fast_path(envs)
            try:
                self._check_idle(envs)
                self.check_open(envs, method)
                if method == "step" and not are_on_fast_path:
                    self.episodes.check_steppable(envs.ids)
            except EnvActorsError as refusal:
                raise self._lock.end_with(refusal)
            worker_wait = self._spin.record_start(time.monotonic())
            for leaf, column in enumerate(columns):
                table.slab.actions[leaf][envs.array_index] = column
            if requests:
                table.set_requests(requests)
            posted: list[int] = []
            queued: list[tuple[EnvGroup, list[int]]] = []
            for group, ids in envs.by_group:
                may_post = are_on_fast_path or not group.must_queue(ids)
                # `try_run_rows` takes a permit under ``max_running``, or has the actor wait for one.
                if may_post and group.actor.jobs.try_run_rows(group.rows_job):
                    posted += ids
                else:
                    queued.append((group, ids))
            if posted:
                free, call_id = self.select(posted) if queued else envs, self._lock.next_call_id()
                payloads = table.write_requests(free, call_id, streams)
                now = time.monotonic()
                begun = [(group.rows_job.begin(call_id, ids, payloads, now), ids) for group, ids in free.by_group]
                # Workers that wake up compete with this thread for cores, so everything slow comes before the rings.
                for page, ids in begun:
                    page.post_step(call_id, worker_wait, streams, ids)
            for group, ids in queued:
                group.queue_new(ids)

    def check_open(self, envs: Selection, method: str) -> None:
        for actor in envs.actors:
            if actor.is_closing:
                index = next(index for index in envs.ids if index in actor.config.indices)
                raise actor.errors.actor_closed(Activity(method, index))

    # Waiting ---------------------------------------------------------------------------------------------

    def wait_for_results(
        self, envs: Selection, timeout: float | None, deadline: float | None, caller: str
    ) -> Delivered:
        self._spin_for(envs)
        while (results := self._try_to_deliver(envs, caller)) is None:
            if not self.table.waiters.wait(functools.partial(self._count_missing, envs), deadline):
                self._raise_if_late(envs, timeout, caller)
        return results

    def receive(self, min_envs: int | None, max_envs: int | None, deadline: float | None) -> Batch:
        table = self.table
        self._lock.repair_if_interrupted()
        if min_envs is None:
            self._spin_for(self.all_envs)
        batch = None
        while batch is None:
            in_time = table.waiters.wait(lambda: self._count_missing_to_receive(min_envs), deadline, until_failure=True)
            ready = [index for index in self.receivable() if table.has_outcome(index)]
            # If nothing is ready, another thread has handled the failure that woke this one. Either the env runs again,
            # and this one waits on, or nothing is left to receive.
            if ready or not in_time or min_envs == 0:
                batch = self._try_to_receive(ready, max_envs)
            elif not self.receivable():
                raise NothingPendingError(
                    "recv has no results left to wait for: a signal handler or another thread has taken them"
                )
        return batch

    def _try_to_receive(self, ready: list[int], max_envs: int | None) -> Batch | None:
        """Deliver the outcomes of envs: up to ``max_envs`` results, the oldest ones first, and all failures.

        For the results and the errors see `_try_to_deliver`.
        """
        table = self.table
        failed = set(filter(table.has_failed, ready))
        if any(table.status[index] == POSTED for index in failed):
            self._collect(self.select([*failed]))  # some may be retried, or become truncated results
            return None
        succeeded = sorted((index for index in ready if index not in failed), key=self._outcome_at)
        envs = self.select([*succeeded[:max_envs], *sorted(failed)])
        results = self._try_to_deliver(envs, "recv")
        return None if results is None else batch_of(envs.ids, results)

    def make_idle(self, envs: Selection, timeout: float | None, deadline: float | None) -> None:
        table = self.table
        self._lock.repair_if_interrupted()
        advice = "nothing was reset, and nothing is lost: receive the results of the earlier requests, then reset again"
        while table.rollouts_in_flight or not all(table.status[index] == IDLE for index in envs.ids):
            if not table.waiters.wait(lambda: len(table.rollouts_in_flight) + self._count_missing(envs), deadline):
                self._raise_if_late(envs, timeout, "reset", advice)
            self._collect(envs)
            with self._lock, self._lock.change(*envs.actors):
                # While a request runs again, the timeout may pass, and the other results must not be lost.
                if all(table.status[index] in (IDLE, DONE, FAILED) for index in envs.ids):
                    table.set_idle(envs.ids)

    def _raise_if_late(self, envs: Selection, timeout: float | None, caller: str, advice: str = _RECV_LATER) -> None:
        """Raise if envs or rollouts are still running, since the deadline of a wait has passed.

        Args:
            envs: The envs.
            timeout: The user's timeout in seconds.
            caller: Name of the user's method.
            advice: What the error says about the results.

        Raises:
            VectorTimeoutError: They are.
        """
        if late := [index for index in envs.ids if self.table.is_pending(index)]:
            text = f"{caller} waited {timeout} s, and the envs {late} have not finished; {advice}. "
            text += f"Env {late[0]} is in {self._describe_actor(late[0])}"
            raise VectorTimeoutError(text, env_ids=late, timeout=timeout)
        if self.table.rollouts_in_flight:
            text = f"{caller} waited {timeout} s for rollouts in flight, which continue; {advice}"
            raise VectorTimeoutError(text, timeout=timeout)

    def _spin_for(self, envs: Selection) -> None:
        """Spin for a short time until the workers of envs have finished, if the last request was that quick."""
        if self._spin.caller_spins:
            pairs = [(page.counters, page.last_call) for actor in envs.actors if (page := actor.page) is not None]
            spin_until_all(pairs, FINISHED)

    def _can_deliver_rows(self, envs: Selection) -> bool:
        """Return whether `_deliver_rows` can deliver the results of envs.

        It can if the spec of observations is known, and each env has made a bare step in time whose whole result is in
        its row.
        """
        table, rows = self.table, self.table.rows
        if self.batcher.infers_spec or rows.overdue or not table.are_on_fast_path(envs):
            return False
        encodings, status = rows.infos.encodings, table.status
        written_ids, posted_ids = rows.written_ids, rows.posted_ids
        if envs.is_all and table.are_all(POSTED):
            return written_ids == posted_ids and (rows.infos.all_plain() or max(encodings.tobytes()) <= INLINE_INFO)
        return all(
            status[i] == POSTED and written_ids[i] == posted_ids[i] and encodings[i] <= INLINE_INFO for i in envs.ids
        )

    def _count_missing(self, envs: Selection) -> int:
        """Return how many envs have no outcome yet. While rows are written it may be too small: callers look again.

        An idle env does not count: another thread has taken its result, and no other result will come.
        """
        table, rows = self.table, self.table.rows
        if envs.is_all and not rows.overdue and table.are_all(POSTED) and rows.written_ids != rows.posted_ids:
            # Too few if a written row lacks a large part, which comes with another ring.
            return len(envs.ids) - rows.count_written()
        return 0 if self._can_deliver_rows(envs) else sum(map(table.is_pending, envs.ids))

    def _count_missing_to_receive(self, min_envs: int | None) -> int:
        """Return how many more outcomes `receive` waits for. A failure ends its wait at once."""
        receivable = self.receivable()
        ready = [index for index in receivable if self.table.has_outcome(index)]
        if any(map(self.table.has_failed, ready)):
            return 0
        wanted = len(receivable) if min_envs is None else min(min_envs, len(receivable))
        return max(0, wanted - len(ready))

    def _outcome_at(self, index: int) -> float:
        """Return when an env got its outcome; now, if its worker has not recorded that."""
        table = self.table
        is_recorded = table.status[index] != POSTED or table.rows.ops[index] & STREAMED
        return float(table.slab.when[index]) if is_recorded else time.monotonic()

    # Delivering results ----------------------------------------------------------------------------------

    def _try_to_deliver(self, envs: Selection, caller: str) -> Delivered | None:
        """Deliver the results of envs if all of them are there.

        Returns:
            The results; None if the caller has to look again.

        Raises:
            NothingPendingError: A signal handler or another thread has taken the results.
            VectorStepError: Some envs failed; the results of the others are in ``.batch``.
        """
        with self._lock:
            version = self.table.version
        results = self._deliver_rows(envs, version) if self._can_deliver_rows(envs) else None
        if results is None and not self._count_missing(envs):
            results = self._deliver_each(envs, caller)
        if results is not None:
            self._spin.complete(time.monotonic())
        return results

    def _deliver_rows(self, envs: Selection, version: int) -> Delivered | None:
        """Copy the results of envs out of their rows without the lock; then record them, and make the envs idle.

        Args:
            envs: The envs. `_can_deliver_rows` has found that their whole results are in their rows.
            version: The version of the table before that. If the table has changed since, nothing is recorded.

        Returns:
            The results; None if the caller has to look again, since the table has changed, or if an info cannot be
            unpickled.
        """
        table, reader = self.table, self.reader
        contents = None
        if table.last_rows.has_objects or not table.rows.infos.all_plain():
            contents, error = try_to_read(lambda: reader.read_contents(envs.ids), lambda: version == table.version)
            if error is not None:
                return None  # `_deliver_each` finds the env whose info it is
        results = _, _, terminated, truncated, *_ = reader.read_results(envs, contents)
        with self._lock, self._lock.change(*envs.actors):
            if version != table.version:
                return None
            table.deliver_rows(envs, terminated, truncated, have_contents=contents is not None)
            for group, ids in envs.by_group:
                group.actor.jobs.record_completed(len(ids))
            if table.journals.saves_due:
                for group, _ in envs.by_group:
                    group.queue_saves()
        return results

    def _collect(self, envs: Selection) -> None:
        """Record all complete rows of the actors that these envs belong to."""
        with self._lock, self._lock.change(*envs.actors):
            for group, _ in envs.by_group:
                group.collect_completed()

    def _deliver_each(self, envs: Selection, caller: str) -> Delivered | None:
        """Deliver the outcomes of envs one by one. For the results and the errors see `_try_to_deliver`.

        The caller has to look again if an env is queued or posted, since its request runs again, or if another thread
        has taken a result.
        """
        table = self.table
        self._collect(envs)
        found = self._find_results(envs.ids)
        if any(each.status in (QUEUED, POSTED) for each in found.values()):
            return None  # one that runs again may be complete by now
        if gone := [index for index, each in found.items() if each.status == IDLE]:
            raise NothingPendingError(
                f"{caller} waited for the results of the envs {gone}, which a signal handler or another thread has "
                "taken meanwhile: let only one of them wait for these envs"
            )
        steps, errors, unreadable = self._read_results(found)
        with self._lock, self._lock.change(*envs.actors):
            if self._find_results(envs.ids) != found:
                return None  # a signal handler or another thread has taken some
            for group, ids in envs.by_group:
                group.recover(group.recovery.unreadable_loss(i, unreadable[i]) for i in ids if i in unreadable)
            if unreadable and self.episodes.on_failure != "raise":
                return None  # their requests run again, or have other outcomes now
            table.set_idle(envs.ids, is_all=envs.is_all)
        return self._batch(envs, steps, errors | unreadable, caller)[1:]

    def _find_results(self, ids: list[int]) -> dict[int, _Found]:
        table = self.table
        return {i: _Found(table.status[i], table.rows.posted_ids[i], table.outcomes.get(i)) for i in ids}

    def _read_results(self, found: dict[int, _Found]) -> tuple[list[EnvStep], Failures, Failures]:
        """Read the results of envs, without the lock, since this runs code of users.

        Returns:
            The steps; the errors that are outcomes; and those of unpickling rows.
        """
        steps: list[EnvStep] = []
        errors: Failures = {}
        unreadable: Failures = {}
        for index, (_, _, outcome) in found.items():
            step, error = (outcome or self._row_outcome(index)).read()
            if error is None:
                steps.append(step)
            elif outcome is None:
                unreadable[index] = error
            else:
                errors[index] = error
        return steps, errors, unreadable

    def _row_outcome(self, index: int) -> Outcome:
        """Return the result in a complete row as an outcome. Whoever reads it runs code of users."""
        reader, rows, actor = self.reader, self.table.rows, self.group_by_env[index].actor
        posted_id = rows.posted_ids[index]

        def read() -> EnvStep:
            return reader.read(reader.copy_row(index))

        return reader.lazy_outcome(actor, index, read, lambda: rows.posted_ids[index] == posted_id)

    # Last results and snapshots --------------------------------------------------------------------------

    def required_incarnation(self, index: int) -> int | None:
        table = self.table
        with self._lock:
            if table.is_lost_for_good(index):
                raise self.group_by_env[index].recovery.unfinished_error(Activity("snapshot", index))
            # Under replay, the next process would get to the same state; without an episode, the next step resets it.
            counts_in_any = table.journals.is_replayed or not self.episodes.has_episode(index)
            return None if counts_in_any else table.rows.incarnations[index]

    def read_last(self, index: int) -> EnvStep | None:
        last = self.reader.copy_last(index)
        return None if last is None else self.reader.read(last)

    def last_obs_is_first(self, index: int) -> bool:
        return bool(self.table.last_rows.are_first(index))

    def restorer(self, index: int, snapshot: EnvSnapshot) -> Callable[[Frame], object]:
        last = self._conforming_last(snapshot, index)
        row = None if last is None else self.reader.encode(index, last)
        return functools.partial(self._on_restored, index, snapshot, row)

    def _on_restored(self, index: int, snapshot: EnvSnapshot, last: RowResult | None, reply: Frame) -> None:
        """Continue the episode of a snapshot that the worker has restored. If that failed, the env needs a reset."""
        if reply.kind == Kind.FAILED:
            self.table.end_episode(index)
            return
        if last is not None:
            last = last._replace(incarnation=reply.incarnation)
            self.table.last_rows.write(index, last, is_first=snapshot.is_start)
        self.table.restore(index, snapshot)
