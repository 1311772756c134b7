"""Wait for results and deliver them, in the thread that uses the vector."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from envactors.actor.signal_deferral import defer_signals
from envactors.actor.slots import ASKED, POSTED, READY
from envactors.envs.core import VectorCore
from envactors.envs.pending import ReadyResult
from envactors.envs.results import Batch
from envactors.errors import (
    ActorClosedError,
    ActorError,
    NothingPendingError,
    VectorStepError,
    VectorTimeoutError,
)
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
        self._lock = vector.supervisors[0].core.lock  # the lock of all actors
        self._outcomes = outcomes
        self._stepper = stepper
        self._asker = asker

    def wait_for(self, done: Callable[[], bool], env_ids: Sequence[int], count: int, deadline: float | None) -> None:
        """Wait until ``done()`` or the deadline.

        Results are read between two waits, since that may take long and other threads can read replies meanwhile.

        Args:
            done: Returns whether enough results are ready.
            env_ids: The envs whose results count.
            count: Least number of results that make it true, unless one of them is a failure.
            deadline: End of the wait (`time.monotonic`); None for no limit.

        Raises:
            ActorClosedError: The vector was closed meanwhile.
            RuntimeError: The wait has no limit, and the missing results can only come after it.
        """
        if done():
            return
        for supervisor in self._vector.actors:
            supervisor.calls.resume()
        waiter, reactor = object(), self._vector.reactor
        can_hang = deadline is None and not self._vector.supervisors[0].config.backend.kills
        is_there = functools.partial(self._is_there, done, env_ids if can_hang else (), count, waiter)
        in_time = True
        try:
            self._pending.waiting[waiter] = 0
            while in_time:
                in_time = reactor.wait(is_there, self._pending, deadline, self._stepper.listen())
                self.read()
                in_time = in_time and not done()
        finally:
            self._pending.waiting.pop(waiter, None)
            self._ask_for_rings()
            reactor.wake(self._pending)  # others look again: they may have asked for rings at the same time

    def _is_there(self, done: Callable[[], bool], env_ids: Sequence[int], count: int, waiter: object) -> bool:
        """Return whether ``done()``, or results are to be read: enough of them, a failure, or all that will come.

        Raises if the results of ``env_ids`` that do not wait for this thread are fewer.
        """
        states = self._slots.states
        self._stepper.listen()
        ended = all(supervisor.closed.is_set() for supervisor in self._vector.actors)
        arrived = self._arrive()
        if done() or self._suffice(arrived, count):
            return True
        if ended and not arrived:
            raise ActorClosedError("this vector env is closed: make another")
        late = [index for index in env_ids if states[index] in (ASKED, POSTED)]
        cores = [core for core in (self._vector.supervisors[index].core for index in late) if core.runs_here]
        if cores and len(env_ids) - len(cores) < count:
            raise cores[0].errors.endless()
        missing = states.count(POSTED)
        if not missing:
            return bool(arrived)
        expected = count - states.count(READY) - len(arrived)
        # Workers count complete rows, which include those of envs without a request.
        self._pending.waiting[waiter] = len(states) - missing + min(max(1, expected), missing)
        self._ask_for_rings()
        return self._suffice(self._arrive(), count)  # they may have been complete before

    def _suffice(self, arrived: list[int], count: int) -> bool:
        """Return whether there are ``count`` results with those that have arrived, or one of these may be a failure."""
        slots = self._slots
        if arrived and slots.states.count(READY) + len(arrived) >= count:
            return True
        return any(index in slots.outcomes or slots.infos.failed(index) for index in arrived)

    def _ask_for_rings(self) -> None:
        """Tell workers at how many complete rows to ring for the first thread that waits; 0 if none does any more."""
        count = min(filter(None, tuple(self._pending.waiting.values())), default=0)
        for supervisor in self._vector.actors:
            process = supervisor.core.process
            if process is not None:
                process.page.ring_at(count)

    def read(self) -> None:
        """Read the outcomes that have arrived."""
        with defer_signals:
            self._outcomes.read(self._arrive())

    def _arrive(self) -> list[int]:
        """Take complete rows into account; return the envs whose outcomes are to be read."""
        for supervisor in self._vector.actors:
            core = supervisor.core
            rows = supervisor.calls.rows
            if rows is not None and rows.has_posted():
                with core.change, core.lock:
                    rows.arrive()
        return self._slots.unread()

    def discard(self, env_ids: Sequence[int], deadline: float | None) -> None:
        """Wait for the results of an interrupted request of envs that are about to be reset, and discard them."""
        pending = self._pending
        if pending.was_disturbed:
            self.wait_for(lambda: not pending.in_flight(env_ids), env_ids, len(env_ids), deadline)
            with defer_signals:
                pending.take(set(env_ids).intersection(pending.ready_ids()))

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
        if self._stepper.spin(self._stepper.tuner):
            self.read()
        self.wait_for(lambda: not pending.in_flight(env_ids), env_ids, len(env_ids), deadline)
        late = pending.in_flight(env_ids)
        if late:
            raise VectorTimeoutError(
                f"{what} waited {timeout} s, and the envs {late} have not finished; nothing is lost, and recv will "
                f"return the results. Env {late[0]} is in {self._whereabouts(late[0])}",
                env_ids=late,
                timeout=timeout,
            )
        return self.deliver(lambda: self._check_ready(env_ids, what), what)

    def receive(self, min_envs: int | None, max_envs: int | None, deadline: float | None) -> Batch:
        """Wait for results and deliver them in the order of their completion; see `VectorEnv.recv`."""
        pending = self._pending

        def enough() -> bool:
            ready = pending.ready_ids()
            if min_envs is not None and len(ready) >= min_envs:
                return True
            # Computed on every wake-up, since a signal handler or another thread may take results meanwhile.
            errors = (result.error for env_id in ready if (result := pending.ready.get(env_id)) is not None)
            return len(pending.receivable) == len(ready) or any(errors)

        started = time.monotonic()
        with defer_signals:  # once for all of it: deferring takes a system call per signal, there and back
            self._stepper.spin(self._stepper.stream_tuner)
            self.read()
            if enough():
                return self._deliver_ready(max_envs, started)
        receivable = pending.receivable
        count = len(receivable) if min_envs is None else min(min_envs, len(receivable))
        self.wait_for(enough, receivable, count, deadline)
        return self._deliver_ready(max_envs, started)

    def _deliver_ready(self, max_envs: int | None, started: float) -> Batch:
        """Deliver ready results and all failures, for a `receive` that began at ``started`` (`time.monotonic`)."""
        batch = self.deliver(lambda: self._choose(max_envs), "recv")
        if len(batch.env_ids):
            now = time.monotonic()
            seconds = now - started + self._asker.posting
            self._stepper.stream_tuner.record(seconds * len(self._vector.supervisors) / len(batch.env_ids), now)
            self._asker.posting = 0.0
        return batch

    def _choose(self, max_envs: int | None) -> list[int]:
        """Return the envs whose results `receive` delivers."""
        pending = self._pending
        if not pending.receivable:
            raise NothingPendingError(
                "recv has no results left to wait for: a signal handler or another thread has taken them"
            )
        ready = pending.ready_ids()
        failed = [env_id for env_id in ready if pending.ready[env_id].error is not None]
        return [*[env_id for env_id in ready if env_id not in failed][:max_envs], *failed]

    def _check_ready(self, env_ids: list[int], what: str) -> list[int]:
        """Return the envs if all have results that are ready."""
        ready, states = self._pending.ready, self._slots.states
        gone = [env_id for env_id in env_ids if env_id not in ready or states[env_id] != READY]
        if gone:
            raise NothingPendingError(
                f"{what} waited for the results of the envs {gone}, which a signal handler or another thread has taken "
                "meanwhile: let only one of them wait for these envs"
            )
        return env_ids

    def deliver(self, choose: Callable[[], list[int]], what: str) -> Batch:
        """Deliver results that are ready.

        Args:
            choose: Returns the envs; called under the lock.
            what: Name of the user's call, for errors.

        Raises:
            NothingPendingError: A signal handler or another thread has taken them.
            VectorStepError: Some results are failures; the others are in ``.batch``.
        """
        reader, batcher, ready = self._vector.reader, self._vector.batcher, self._pending.ready
        results: dict[int, ReadyResult] = {}
        with defer_signals:  # delivering and counting must not be separated
            try:
                with self._lock:
                    results = {env_id: ready[env_id] for env_id in choose()}
                    for env_id in results:
                        del ready[env_id]  # from here on, no other thread delivers it
                failures = {env_id: result.error for env_id, result in results.items() if result.error is not None}
                fine = [env_id for env_id in results if env_id not in failures]
                if batcher.learns or any(result.step is not None for result in results.values()):
                    steps, mismatches = batcher.conform_all(
                        [results[env_id].step or reader.step(env_id) for env_id in fine]
                    )
                    failures.update(mismatches)
                    batch = batcher.batch(steps)
                else:
                    batch = reader.batch_of(fine)
                self._pending.take(results)
            except BaseException:
                ready.update(results)
                raise
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

    def _whereabouts(self, env_id: int) -> str:
        """Describe the actor of an env, for errors."""
        supervisor = self._vector.supervisors[env_id]
        core = supervisor.core
        return f"actor {supervisor.config.name!r}, pid {core.pid}, incarnation {core.incarnation}"
