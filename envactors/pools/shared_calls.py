"""The calls that several equal actors share: which actor runs which call, which calls wait, and how calls have ended.

`ActorPool`, `Executor`, and `SessionPool` are the interfaces for users.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from envactors.actor.calls import Call
from envactors.actor.change import ChangeLock
from envactors.actor.future import ActorFuture, BoundToProcess, Outcome, Owner, ReadyOutcome
from envactors.actor.handle import ActorHandle, close_all, pickle_call
from envactors.actor.job import Job, ProcessExit, Renewal
from envactors.actor.latch import Latch
from envactors.actor.states import ActorState, ActorStats
from envactors.actor.type_variables import R
from envactors.errors import ActorClosedError, ActorError, ActorStartError, RestartsExhaustedError, copy_error
from envactors.mailbox.messages import Frame
from envactors.mailbox.pickling import PicklerClass, ValuePickler
from envactors.options import RecyclePolicy
from envactors.pools.failure_kinds import FailureKind, kind_of
from envactors.runtime import Runtime

AnyCall = TypeVar("AnyCall", bound=Call)


@dataclasses.dataclass(eq=False)
class SharedCall(Call):
    """A call that any actor of the pool may run.

    Attributes:
        pool: The calls of the pool; None before it is submitted.
    """

    pool: SharedCalls | None = None

    def start(self) -> Job | None:
        """Send the message, to the actor that has taken it."""
        self.index: int = self.actor.config.first_index
        return super().start()

    def on_reply(self, frame: Frame) -> bool:
        """Pass the reply to the future."""
        assert self.pool is not None, "it was submitted"
        self.pool.queue.record_use(self.actor)
        has_ended = super().on_reply(frame)
        if self.pool.recycler is not None:
            self.pool.recycler.on_call(self.actor)
        return has_ended

    def handle_exit(self, process_exit: ProcessExit) -> bool:
        """If the call may run again, let any actor of the pool do so. For this one it has ended."""
        assert self.pool is not None, "it was submitted"
        if not super().handle_exit(process_exit):
            self.call_id = 0
            self.future.owner = self.pool
            self.pool.queue.put_back(self)
        return True


class CallRecycler:
    """Replaces the processes that have reached a limit, or must leave their node, between two calls.

    Args:
        policy: The limits.
    """

    def __init__(self, policy: RecyclePolicy) -> None:
        self._policy = policy
        # How many calls the current process of each actor has run: (incarnation, count).
        self._counts: dict[str, tuple[int, int]] = {}

    def on_call(self, actor: Any) -> None:
        """Count a call, and replace the process if there is a reason. The lock must be held, within a change."""
        incarnation, worker = actor.process.incarnation, actor.process.worker
        counted, count = self._counts.get(actor.name, (incarnation, 0))
        count = count + 1 if counted == incarnation else 1
        self._counts[actor.name] = incarnation, count
        memory = 0 if worker is None or self._policy.max_memory is None else worker.resident_memory()
        if reason := self._policy.limit_reached(calls=count, memory=memory) or actor.reason_to_move:
            actor.jobs.enqueue(Renewal(why=reason), first=True)


class Counts:
    """How many calls were submitted, and how they have ended.

    Attributes:
        submitted, completed: The number of calls that were submitted, and that have returned a result.
        failed: The number of calls that have failed, by kind.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # calls that cannot be pickled end without the lock of the pool
        self.submitted: int = 0
        self.completed: int = 0
        self.failed: dict[FailureKind, int] = {}

    def on_end(self, failure: FailureKind | None) -> None:
        """Count a call that has ended, with a result if there is no failure."""
        with self._lock:
            if failure is None:
                self.completed += 1
            else:
                self.failed[failure] = self.failed.get(failure, 0) + 1


class SharedFuture(ActorFuture[R]):
    """The future of a shared call.

    Args:
        calls: The calls of the pool.
    """

    def __init__(self, calls: SharedCalls) -> None:
        super().__init__(calls, calls)
        self._pool: SharedCalls | None = calls

    def set_outcome(self, outcome: Outcome) -> None:
        """End the call, and count how it has ended."""
        error = outcome.read()[1] if isinstance(outcome, ReadyOutcome) else None
        failure: FailureKind | None = "exception" if outcome.is_failure else None
        self._leave(failure if error is None else kind_of(error))
        super().set_outcome(outcome)

    def set_canceled(self) -> None:
        """End the call as canceled, and count it."""
        self._leave("cancelled")
        super().set_canceled()

    def _leave(self, failure: FailureKind | None) -> None:
        """Count the end, and do not keep the actors of the pool alive any more."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.counts.on_end(failure)
            self._is_urgent = not pool.queue.has_jobs
            if self.owner is pool:
                self.owner: Owner = pool.first_actor


class CallQueue(Generic[AnyCall]):
    """The calls that wait for any actor of a pool, and the actors that wait for a call.

    It implements `envactors.actor.job_queue.SharedQueue`, for the actors whose `shared_jobs` it is. Use it under
    the lock of the actors.

    Args:
        actors: The actors.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors
        self._calls: OrderedDict[ActorFuture[Any], AnyCall] = OrderedDict()  # the next one first
        self._last_use: dict[Any, int] = dict.fromkeys(actors, 0)  # the higher, the later
        self._uses = itertools.count(1)
        self._room: list[Latch] = []

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def has_jobs(self) -> bool:
        """Whether calls are waiting."""
        return bool(self._calls)

    def put(self, call: AnyCall) -> None:
        """Have an idle actor run a call, or let it wait for one; wake an actor if there are too few."""
        others_wait = self.has_jobs  # then no actor is idle, and one can run calls: see `serve` and `on_unusable`
        idle = [] if others_wait else [actor for actor in self._actors if actor.is_idle]
        if idle:
            actor = max(idle, key=self._last_use.__getitem__)
            call.future.owner = actor
            actor.accept(call)
            return
        self._calls[call.future] = call
        self.wake()
        if not others_wait:
            self.fail_unless_served()

    def wake(self) -> None:
        """Start the process of another actor if fewer are starting than calls are waiting."""
        asleep = [actor for actor in self._actors if actor.is_asleep and actor.jobs.shared_jobs is self]
        if asleep and len(self._calls) > sum(actor.is_starting for actor in self._actors):
            asleep[0].wake()

    def take(self) -> AnyCall | None:
        """Remove and return the next call that was not canceled; None if there is none."""
        while self._calls:
            _, call = self._calls.popitem(last=False)
            self.wake_submitters()
            if not call.future.done():
                return call
            call.future.set_canceled()  # wakes those that wait, in case an interrupt has kept `cancel` from it
        return None

    def put_back(self, call: AnyCall) -> None:
        """Let a call that an actor has not completed wait before all others."""
        self._calls[call.future] = call
        self._calls.move_to_end(call.future, last=False)
        call.actor.runtime.loop.call_soon(self.serve)

    def serve(self) -> None:
        """Have idle actors take the calls that wait; wake an actor if there are too few. It takes the lock."""
        with self._actors[0].lock:
            for actor in self._actors:
                call = self.take() if actor.is_idle and actor.jobs.shared_jobs is self else None
                if call is not None:
                    call.future.owner = actor
                    actor.accept(call)
            self.wake()
            self.fail_unless_served()

    def remove(self, future: ActorFuture[Any]) -> None:
        """Remove a call that has ended."""
        self.wake_submitters()
        self._calls.pop(future, None)

    def __contains__(self, future: object) -> bool:
        return future in self._calls

    def futures(self) -> list[ActorFuture[Any]]:
        """Return the futures of the calls."""
        return list(self._calls)

    def on_unusable(self, actor: Any) -> None:
        """Fail the calls that no actor can run, after an actor has become unusable."""
        del actor
        self.fail_unless_served()

    def fail_unless_served(self) -> None:
        """Fail all calls if no actor can run any, now or later."""
        if self._calls and not any(actor.is_usable or actor.jobs.shared_jobs is not self for actor in self._actors):
            is_on_demand = self._actors[0].config.is_on_demand
            stats = [actor.stats() for actor in self._actors]
            for call in list(self._calls.values()):
                call.future.set_exception(_unserved_error(call.method, stats, is_on_demand=is_on_demand))
            self._calls.clear()
            self.wake_submitters()

    def latch_for_room(self) -> Latch:
        """Return a latch that is set once a call is removed."""
        latch = Latch()
        self._room.append(latch)
        return latch

    def wake_submitters(self) -> None:
        """Have the threads that wait for room look again, once the lock is free."""
        for latch in self._room:
            latch.set()
        self._room.clear()

    def record_use(self, actor: Any) -> None:
        """Record that an actor has run a call: the idle actor that was used last is used next."""
        self._last_use[actor] = next(self._uses)


def _unserved_error(method: str, stats: list[ActorStats], *, is_on_demand: bool) -> ActorError:
    """Return the error of a call that no actor can run. It did not run, so it is not the error of another call."""
    causes = [one.last_failure for one in stats if one.last_failure is not None]
    unmade = next((cause for cause in causes if isinstance(cause, ActorStartError)), None)
    if unmade is not None and (is_on_demand or all(one.restarts == 0 for one in stats)):
        return copy_error(unmade)
    if all(one.state is ActorState.CLOSED for one in stats):
        return ActorClosedError(f"cannot run {method}: all actors of the pool are closed", method=method)
    advice = "raise max_restarts of RestartPolicy, or set it to math.inf for no limit"
    if unmade is not None:
        advice = f"correct the factory, or set max_restarts and backoff of RestartPolicy. The last time: {unmade}"
    return RestartsExhaustedError(
        f"cannot run {method}: none of the {len(stats)} actors of the pool has a process, and its restart= allows "
        f"no more of them: {advice}",
        method=method,
        causes=causes,
    )


class SharedCalls(BoundToProcess):
    """The calls of a pool. It keeps the actors alive, and so does each unfinished future.

    Args:
        handles: The actors, which share a lock unless they run in the caller's process.
        lock: That lock.
        max_waiting: How many calls may wait for an actor; None for no limit.
        recycle: When to replace processes; None for never.

    Attributes:
        counts: How the calls have ended.
        is_closed: Whether no more calls are taken.
    """

    def __init__(
        self,
        handles: Sequence[ActorHandle[Any]],
        lock: ChangeLock,
        max_waiting: int | None = None,
        recycle: RecyclePolicy | None = None,
    ) -> None:
        self.counts: Counts = Counts()
        self.is_closed: bool = False
        self.handles: list[ActorHandle[Any]] = list(handles)
        self.recycler: CallRecycler | None = None if recycle is None else CallRecycler(recycle)
        self._actors: list[Any] = [handle._actor for handle in handles]
        self._lock = lock
        self._max_waiting = max_waiting
        # In-process calls run in the thread that makes them, and never wait. Their actors have their own locks, which
        # they hold while code of users runs.
        self._is_inline: bool = self._actors[0].config.backend.traits.is_inline
        self.queue: CallQueue[SharedCall] = CallQueue(self._actors)
        if not self._is_inline:
            for actor in self._actors:
                actor.jobs.shared_jobs = self.queue

    @property
    def first_actor(self) -> Any:
        """One of the actors, which all have the same settings."""
        return self._actors[0]

    @property
    def runtime(self) -> Runtime:
        runtime: Runtime = self._actors[0].runtime
        return runtime

    def submit(self, call: SharedCall, message: tuple[Any, ...], pickler: PicklerClass = ValuePickler) -> None:
        """Pickle a call, and have an actor run it or let it wait; wait first while too many calls wait.

        Args:
            call: The call.
            message: The fields of its message.
            pickler: Pickles what pickle cannot.

        Raises:
            ActorClosedError: The pool was closed, or belongs to another process.
        """
        call.pool = self
        if not pickle_call(self._actors[0], call, message, pickler):  # the same for each actor
            with self._lock:
                self.counts.submitted += 1
            return
        while True:
            with self._lock:
                self._check_open(call.method)
                room = None
                if self._max_waiting is None or len(self.queue) < self._max_waiting:
                    self.counts.submitted += 1
                    if not self._is_inline:
                        self.queue.put(call)
                else:
                    room = self.queue.latch_for_room()
            if room is None:
                break
            self._lock.repair_if_interrupted()
            room.wait(None)
        if self._is_inline:
            self._run_inline(call)

    def check_not_forked(self) -> None:
        """Raise in a forked process, which must not use the actors of its parent.

        Raises:
            ActorClosedError: This is not the process that made the pool.
        """
        self._actors[0].check_not_forked()

    def refuse_calls(self, *, cancel: bool) -> None:
        """Take no more calls.

        Args:
            cancel: Whether to cancel those that wait for an actor.
        """
        with self._lock:
            self.is_closed = True
            self.queue.wake_submitters()
            for future in self.queue.futures() if cancel else ():
                future.set_canceled()
                self.queue.remove(future)

    def close_once_ended(self) -> None:
        """Wait until all calls have ended, then close the actors."""
        self.wait_ended()
        self.close_actors()

    def wait_ended(self) -> None:
        """Wait until all calls have ended.

        Raises:
            RuntimeError: One of them has called this, and would wait for itself.
        """
        if not self._is_inline:
            if any(actor.is_run_by_this_thread for actor in self._actors):
                raise self.first_actor.errors.called_by_own_env()
            self.queue.serve()  # an interrupt may have come between the last call and the start of a process for it
        while futures := self._unfinished():
            for future in futures:
                future.wait_ended()

    def _unfinished(self) -> list[ActorFuture[Any]]:
        with self._lock:
            jobs = [] if self._is_inline else [job for actor in self._actors for job in actor.jobs.unfinished]
            return [*self.queue.futures(), *(job.future for job in jobs if job.future is not None)]

    def close_actors(self, timeout: float | None = None) -> None:
        """Close the actors; see `ActorHandle.close`."""
        close_all(self.handles, timeout)

    # What futures use ------------------------------------------------------------------------------------

    def cancel(self, future: ActorFuture[Any]) -> bool:
        """Cancel a call that waits for an actor, or is queued at one."""
        with self._lock:
            if future in self.queue:
                future.set_canceled()
                self.queue.remove(future)
            owner = future.owner
        return future.cancelled() if owner is self else owner.cancel(future)

    def abort(self, future: ActorFuture[Any]) -> bool:
        """Cancel a call, or end it by replacing its process."""
        return self.cancel(future) or (future.owner is not self and future.owner.abort(future))

    def read_reply(self, future: ActorFuture[Any], until: float | None) -> None:
        """Leave the reply to the loop; raise where waiting would block it."""
        del future, until
        self._lock.repair_if_interrupted()

    # Sending ---------------------------------------------------------------------------------------------

    def _check_open(self, method: str) -> None:
        if self.is_closed:
            raise ActorClosedError(f"cannot submit {method!r}: the pool is closed")

    def _run_inline(self, call: SharedCall) -> None:
        """Run a call in the calling thread, in an idle actor if there is one."""
        usable = [actor for actor in self._actors if actor.is_usable] or self._actors
        actor = next((actor for actor in usable if actor.is_idle), usable[0])
        call.index, call.future.owner = actor.config.first_index, actor
        try:
            actor.accept(call)
        except (ActorClosedError, RuntimeError) as error:  # the latter if the only idle actor has made the call
            call.future.set_exception(error)
