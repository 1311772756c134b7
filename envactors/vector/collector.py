"""Waiting for results and delivering them, in the thread that uses the vector."""

from __future__ import annotations

import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from envactors.actor.signal_deferral import defer_signals
from envactors.errors import (
    ActorClosedError,
    ActorError,
    NothingPendingError,
    VectorStepError,
    VectorTimeoutError,
)
from envactors.vector.env_state import EnvState
from envactors.vector.interrupts import Interrupts
from envactors.vector.pending import IDLE, IN_FLIGHT, Pending, ReadyResult
from envactors.vector.results import Batch, Batcher, EnvStep
from envactors.vector.shm_step import SharedMemoryStepper


class Collector:
    """Waits for results and delivers them.

    Args:
        envs: All envs.
        pending: Where their results are.
        batcher: Makes batches of them.
        stepper: Steps through shared memory; None without any.

    Attributes:
        interrupts: Brings the vector in order after an exception in the middle of a request.
    """

    interrupts: Interrupts

    def __init__(
        self,
        envs: Sequence[EnvState],
        pending: Pending,
        batcher: Batcher,
        stepper: SharedMemoryStepper | None,
    ) -> None:
        self._envs = envs
        self._pending = pending
        self._batcher = batcher
        self._single = None if stepper is None else stepper.single
        self._supervisors = list(dict.fromkeys(env.supervisor for env in envs))
        self._reactor = self._supervisors[0].reactor
        self._wait_set = None if stepper is None else stepper.wait_set

    def wait_for(self, done: Callable[[], bool], count: int, deadline: float | None) -> bool:
        """Wait until ``done()`` or the deadline (`time.monotonic`); return whether ``done()``.

        Unless an env fails, or results are taken meanwhile, it needs at least ``count`` results.

        Raises:
            ActorClosedError: The vector was closed meanwhile, and nothing comes any more.
        """
        for supervisor in self._supervisors:
            supervisor.resume_inline()
        pending, single, me = self._pending, self._single, threading.get_ident()
        inbox = pending.inboxes.setdefault(me, deque())
        # Whether nothing could be read that seemed to be there: then the wait goes on in the usual way.
        is_stuck = False

        def is_there() -> bool:
            # What takes long to unpickle is read out of the wait: meanwhile other threads read the replies.
            if inbox or (single is not None and not is_stuck and single.has_unread()):
                return True
            ended = all(supervisor.closed.is_set() for supervisor in self._supervisors)
            if single is not None:
                with defer_signals:
                    single.collect(count - len(pending.ready))
            if done():
                return True
            if ended:
                raise ActorClosedError("this vector env is closed: make another")
            return False

        try:
            while self._reactor.wait(is_there, pending, deadline, self._wait_set):
                if done():
                    return True
                with defer_signals:
                    was_empty = not inbox
                    pending.read_inbox(inbox)
                    is_stuck = (single is None or not single.collect(count - len(pending.ready))) and was_empty
                if done():
                    return True
            return False
        finally:
            pending.inboxes.pop(me, None)
            for settle in inbox:
                self._reactor.callbacks.submit(settle)

    def gather(self, env_ids: list[int], timeout: float | None, deadline: float | None, what: str) -> Batch:
        """Wait for the results of envs and deliver them.

        Args:
            env_ids: The envs.
            timeout: How long the user waits, in seconds, for the error.
            deadline: Until when (`time.monotonic`).
            what: What the user called, for errors.

        Raises:
            VectorTimeoutError: The deadline passed; nothing is lost.
            NothingPendingError: A signal handler or another thread took the results.
            VectorStepError: Some envs failed.
        """
        pending = self._pending
        self.wait_for(lambda: not pending.in_flight(env_ids), len(env_ids), deadline)
        late = pending.in_flight(env_ids)
        if late:
            raise VectorTimeoutError(
                f"{what} waited {timeout} s and the results of the envs {late} have not come; nothing is lost, recv "
                f"hands all of them out. Env {late[0]} is in {self._whereabouts(late[0])}",
                env_ids=late,
                timeout=timeout,
            )
        gone = [env_id for env_id in env_ids if pending.states[env_id] == IDLE]
        if gone:
            raise NothingPendingError(
                f"{what} waited for the results of the envs {gone}, which were handed out to a signal handler or "
                "another thread meanwhile: let one of the two take them"
            )
        return self.deliver(env_ids, what)

    def receive(self, min_envs: int | None, max_envs: int | None, deadline: float | None) -> Batch:
        """Wait for results and deliver them in the order of their completion; see `VectorEnv.recv`."""
        pending, ready = self._pending, self._pending.ready

        def enough() -> bool:
            if min_envs is not None and len(ready) >= min_envs:
                return True
            # Counted anew on every wake-up: a signal handler or another thread may take results meanwhile.
            return IN_FLIGHT not in pending.states or any(result.error for result in tuple(ready.values()))

        started = time.monotonic()
        if self._single is not None:
            with defer_signals:  # once for both: deferring takes a system call per signal, there and back
                self._single.collect_at_once()
                if enough():
                    return self._deliver_ready(max_envs, started)
        wanted = pending.receivable if min_envs is None else min(min_envs, pending.receivable)
        self.wait_for(enough, wanted, deadline)
        return self._deliver_ready(max_envs, started)

    def _deliver_ready(self, max_envs: int | None, started: float) -> Batch:
        """Deliver what is ready, and all failures, for a `receive` that began at ``started`` (`time.monotonic`)."""
        if not self._pending.receivable:
            raise NothingPendingError(
                "recv with nothing under way any more: a signal handler or another thread took it"
            )
        results = sorted(self._pending.ready.values(), key=operator.attrgetter("when"))
        failed = [result.env_id for result in results if result.error is not None]
        fine = [result.env_id for result in results if result.error is None][:max_envs]
        batch = self.deliver([*fine, *failed], "recv")
        if self._single is not None and fine:
            self._single.record_wait(started, len(fine))
        return batch

    def deliver(self, env_ids: list[int], what: str) -> Batch:
        """Deliver results that are ready.

        Raises:
            VectorStepError: Some of them are failures; the others are in its ``.batch``.
        """
        with defer_signals:  # what is delivered is also taken into account
            results = self._pending.look_at(env_ids)
            in_rows = [result for result in results if result.is_in_rows]
            if in_rows and self._single is not None and len(in_rows) == len(results):
                batch = self._single.take_batch(env_ids)
                self._pending.take(env_ids)
                self._reactor.wake(self._pending)  # another thread may wait for the same ones
                return batch
            failures = {result.env_id: result.error for result in results if result.error is not None}
            steps, mismatches = self._batcher.conform_all(self._steps(results))
            failures.update(mismatches)
            batch = self._batcher.batch(steps)
            self._pending.take(env_ids)
        self._reactor.wake(self._pending)  # another thread may wait for the same ones
        if failures:
            first_id, first_error = next(iter(failures.items()))
            # An error of an actor says itself where it happened.
            where = "" if isinstance(first_error, ActorError) else f" ({self._whereabouts(first_id)})"
            raise VectorStepError(
                f"{len(failures)} of {len(results)} envs failed in {what}; env {first_id}{where}: "
                f"{type(first_error).__name__}: {first_error}",
                failures=failures,
                batch=batch,
            ) from first_error
        return batch

    def _steps(self, results: Sequence[ReadyResult]) -> list[EnvStep]:
        """Return the results that are no failures, in order."""
        in_rows = [result.env_id for result in results if result.is_in_rows]
        taken: dict[int, EnvStep] = {}
        if in_rows:
            assert self._single is not None, "only it leaves results in rows"
            taken = {step.env_id: step for step in self._single.take(in_rows)}
        steps = [result.step or taken.get(result.env_id) for result in results]
        return [step for step in steps if step is not None]

    def _whereabouts(self, env_id: int) -> str:
        """Return which actor an env is in, for errors."""
        handle = self._envs[env_id].handle
        return f"actor {handle.name!r}, pid {handle.pid}, incarnation {handle.incarnation}"
