"""Wait for results and deliver them, in the thread that uses the vector."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence

import numpy as np

from envactors.actor.signal_deferral import defer_signals
from envactors.actor.slots import IDLE, POSTED
from envactors.envs.core import VectorCore
from envactors.envs.results import Batch
from envactors.errors import (
    ActorClosedError,
    ActorError,
    NothingPendingError,
    VectorStepError,
    VectorTimeoutError,
)
from envactors.mailbox.control_page import ControlPage
from envactors.vector.asking import Asker
from envactors.vector.outcomes import Outcomes
from envactors.vector.stepper import Stepper


class Collector:
    """Waits for results and delivers them.

    Args:
        vector: The vector.
        outcomes: Reads outcomes that have arrived.
        stepper: Listens to the doorbells.
        asker: Measures how long posting takes.
    """

    def __init__(self, vector: VectorCore, outcomes: Outcomes, stepper: Stepper, asker: Asker) -> None:
        self._vector = vector
        self._slots = vector.slots
        self._pending = vector.pending
        self._outcomes = outcomes
        self._stepper = stepper
        self._asker = asker
        # Control pages whose workers were told to ring for streamed results.
        self._rung: dict[int, ControlPage] = {}

    def wait_for(self, done: Callable[[], bool], count: int, deadline: float | None) -> bool:
        """Wait until ``done()`` or the deadline, and return ``done()``.

        Results are read between two waits, since that may take long and other threads can read replies meanwhile.

        Args:
            done: Returns whether enough results are ready.
            count: Least number of results that make it true, unless one of them is a failure.
            deadline: End of the wait (`time.monotonic`); None for no limit.

        Raises:
            ActorClosedError: The vector was closed meanwhile.
        """
        for supervisor in self._vector.actors:
            supervisor.calls.resume()
        ready = self._pending.ready

        def is_there() -> bool:
            self._stepper.listen()
            ended = all(supervisor.closed.is_set() for supervisor in self._vector.actors)
            self._arrive()
            arrived = len(self._slots.unread())
            if done() or (arrived and len(ready) + arrived >= count) or self._has_failed():
                return True
            if ended and not arrived:
                raise ActorClosedError("this vector env is closed: make another")
            if not self._ring_at(count - len(ready) - arrived):
                return bool(arrived)
            self._arrive()
            arrived = len(self._slots.unread())
            return bool(arrived) and (len(ready) + arrived >= count or self._has_failed())

        while not done():
            if not self._vector.reactor.wait(is_there, self._pending, deadline, self._stepper.wait_set):
                self.read()
                return done()
            self.read()
        return True

    def read(self) -> None:
        """Read the outcomes that have arrived."""
        with defer_signals:
            self._arrive()
            self._outcomes.read_arrived()

    def _arrive(self) -> None:
        for supervisor in self._vector.actors:
            core = supervisor.core
            rows = supervisor.calls.rows
            if rows is not None and rows.has_posted():
                with core.change, core.lock:
                    rows.arrive()

    def _has_failed(self) -> bool:
        """Return whether an outcome that has arrived may be a failure, which ends the wait."""
        slots = self._slots
        return any(index in slots.outcomes or slots.infos.failed(index) for index in slots.unread())

    def _ring_at(self, expected: int) -> bool:
        """Tell workers to ring when ``expected`` more results are complete; return whether any are outstanding.

        The caller has to look again afterwards for results that were complete before.
        """
        states = self._slots.states
        missing = states.count(POSTED)
        if not missing:
            return False
        # Workers count complete rows, which include those of envs without a request.
        count = len(states) - missing + min(max(1, expected), missing)
        for supervisor in self._vector.actors:
            process = supervisor.core.process
            if process is not None:
                self._rung[id(process.page)] = process.page
        for page in self._rung.values():
            page.ring_at(count)
        return True

    def collect_at_once(self) -> None:
        """Read the results that are complete, after a short spin if that pays off. Called with signals deferred."""
        self._stepper.spin(self._stepper.stream_tuner)
        self.read()

    def _record_wait(self, started: float, count: int) -> None:
        """Record the duration of a wait for ``count`` delivered results, which began at ``started``."""
        now = time.monotonic()
        seconds = now - started + self._asker.posting
        self._stepper.stream_tuner.record(seconds * len(self._vector.supervisors) / count, now)
        self._asker.posting = 0.0
        for page in self._rung.values():
            page.ring_at(0)
        self._rung = {}

    def discard(self, env_ids: Sequence[int], deadline: float | None) -> None:
        """Wait for the results of an interrupted request of envs that are about to be reset, and discard them."""
        pending = self._pending
        if pending.was_disturbed:
            self.wait_for(lambda: not pending.in_flight(env_ids), len(env_ids), deadline)
            with defer_signals:
                pending.take([env_id for env_id in env_ids if env_id in pending.ready])

    def gather(self, env_ids: list[int], timeout: float | None, deadline: float | None, what: str) -> Batch:
        """Wait for the results of envs and deliver them.

        Args:
            env_ids: Ids of the envs.
            timeout: The user's timeout in seconds, for the error.
            deadline: End of the wait (`time.monotonic`); None for no limit.
            what: Name of the user's call, for errors.

        Raises:
            VectorTimeoutError: The deadline passed; nothing is lost.
            NothingPendingError: A signal handler or another thread has taken the results.
            VectorStepError: Some envs failed.
        """
        pending = self._pending
        self.wait_for(lambda: not pending.in_flight(env_ids), len(env_ids), deadline)
        late = pending.in_flight(env_ids)
        if late:
            raise VectorTimeoutError(
                f"{what} waited {timeout} s, and the envs {late} have not finished; nothing is lost, and recv will "
                f"return the results. Env {late[0]} is in {self._whereabouts(late[0])}",
                env_ids=late,
                timeout=timeout,
            )
        gone = [env_id for env_id in env_ids if self._slots.states[env_id] == IDLE]
        if gone:
            raise NothingPendingError(
                f"{what} waited for the results of the envs {gone}, which a signal handler or another thread has taken "
                "meanwhile: let only one of them wait for these envs"
            )
        return self.deliver(env_ids, what)

    def receive(self, min_envs: int | None, max_envs: int | None, deadline: float | None) -> Batch:
        """Wait for results and deliver them in the order of their completion; see `VectorEnv.recv`."""
        ready = self._pending.ready

        def enough() -> bool:
            if min_envs is not None and len(ready) >= min_envs:
                return True
            # Computed on every wake-up, since a signal handler or another thread may take results meanwhile.
            return self._pending.receivable == len(ready) or any(result.error for result in tuple(ready.values()))

        started = time.monotonic()
        with defer_signals:  # once for both: deferring takes a system call per signal, there and back
            self.collect_at_once()
            if enough():
                return self._deliver_ready(max_envs, started)
        receivable = self._pending.receivable
        self.wait_for(enough, receivable if min_envs is None else min(min_envs, receivable), deadline)
        return self._deliver_ready(max_envs, started)

    def _deliver_ready(self, max_envs: int | None, started: float) -> Batch:
        """Deliver ready results and all failures, for a `receive` that began at ``started`` (`time.monotonic`)."""
        if not self._pending.receivable:
            raise NothingPendingError(
                "recv has no results left to wait for: a signal handler or another thread has taken them"
            )
        results = sorted(self._pending.ready.values(), key=operator.attrgetter("when"))
        failed = [result.env_id for result in results if result.error is not None]
        fine = [result.env_id for result in results if result.error is None][:max_envs]
        batch = self.deliver([*fine, *failed], "recv")
        if fine:
            self._record_wait(started, len(fine))
        return batch

    def deliver(self, env_ids: list[int], what: str) -> Batch:
        """Deliver results that are ready.

        Raises:
            VectorStepError: Some results are failures; the others are in ``.batch``.
        """
        with defer_signals:  # delivering and counting must not be separated
            results = self._pending.look_at(env_ids)
            failures = {result.env_id: result.error for result in results if result.error is not None}
            if not failures and not self._vector.batcher.learns and all(result.step is None for result in results):
                batch = self._take_batch(env_ids)
            else:
                reader, of = self._vector.reader, self._slots.of
                complete = [
                    result.step or reader.step(result.env_id, of[result.env_id].incarnation)
                    for result in results
                    if result.error is None
                ]
                steps, mismatches = self._vector.batcher.conform_all(complete)
                failures.update(mismatches)
                batch = self._vector.batcher.batch(steps)
            self._pending.take(env_ids)
        self._vector.reactor.wake(self._pending)  # another thread may wait for the same ones
        if failures:
            first_id, first_error = next(iter(failures.items()))
            # An `ActorError` already names the actor.
            where = "" if isinstance(first_error, ActorError) else f" ({self._whereabouts(first_id)})"
            raise VectorStepError(
                f"{len(failures)} of {len(results)} envs failed in {what}; env {first_id}{where}: "
                f"{type(first_error).__name__}: {first_error}",
                failures=failures,
                batch=batch,
            ) from first_error
        return batch

    def _take_batch(self, env_ids: list[int]) -> Batch:
        """Return a batch of results that are in the rows."""
        index, reader = np.array(env_ids, np.int64), self._vector.reader
        results = reader.batch(index, [reader.contents[env_id] for env_id in env_ids])
        incarnations = np.array([self._slots.of[env_id].incarnation for env_id in env_ids], np.int64)
        return Batch(index, *results, incarnations)

    def _whereabouts(self, env_id: int) -> str:
        """Describe the actor of an env, for errors."""
        supervisor = self._vector.supervisors[env_id]
        core = supervisor.core
        return f"actor {supervisor.config.name!r}, pid {core.pid}, incarnation {core.incarnation}"
