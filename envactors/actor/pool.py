"""Many equal actors that share a queue of calls."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed, wait
from typing import Any

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, close_all, launch, spawn
from envactors.actor.requests import CallRequest
from envactors.actor.signal_deferral import defer_signals
from envactors.errors import ActorClosedError
from envactors.mailbox.factory import Factory
from envactors.mailbox.messages import Call, Kind
from envactors.options import check_timeout, is_int


class PoolFuture(ActorFuture):
    """The future of a call that waits for an idle actor, or was assigned to one.

    Attributes:
        call: The call.
        actor: The actor that it was assigned to; None while it waits.
        is_waiting: Whether it is in the pool's queue; after an interrupt it may no longer be.
        claim: The claim of the thread that sends or cancels the call; empty once it does so no more.
    """

    def __init__(self, pool: ActorPool, call: Call) -> None:
        super().__init__(pool.actors[0]._supervisor, pool)
        self.call = call
        self.actor: ActorHandle | None = None
        self.is_waiting = True
        self.claim: Sequence[PoolFuture] = ()
        self._pool = pool
        # Whether a thread has begun to hand the call to its actor; it may have been interrupted at any point of that.
        self._was_sent = False

    def assign(self) -> None:
        """Send the call to its actor unless the actor has it; called by the thread that has claimed the call."""
        if self._is_taken():
            if self.settled():
                self._pool.release(self)
        elif self.actor is None or self.settled() or self._pool.is_closed:
            self._end_cancelled()
        else:
            self._send(self.actor)

    def cancel(self) -> bool:
        return self._pool.withdraw(self) or super().cancel()

    def abort(self) -> bool:
        return self._pool.withdraw(self) or super().abort()

    def cancel_waiting(self) -> None:
        """Cancel the call unless an actor has it; called by the thread that has claimed the call."""
        if not self._is_taken():
            self._end_cancelled()

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        super().settle(value, error, incarnation)
        self._owner.reactor.wake(self)
        self._leave_actor()

    def mark_cancelled(self) -> None:
        # The actor's lock is held. What it defers runs after that, also if an exception falls into the rest of this.
        assert self.actor is not None, "an actor had it in its queue"
        self.actor._supervisor.core.deferred.waiting.append(self._end_cancelled)
        super().mark_cancelled()

    def _wait(self, deadline: float | None) -> None:
        if self.is_waiting:
            self._pool.assign_waiting()  # a thread that was interrupted may have left this call to others
        super()._wait(deadline)

    def _is_taken(self) -> bool:
        """Return whether the call has ended or its actor has it, and it must not be sent again."""
        if self.actor is None or not self._was_sent:
            return self._state != "PENDING" and self._has_ended()
        core = self.actor._supervisor.core
        with core.lock:
            return self._has_ended() or core.table.holds(self)

    def _has_ended(self) -> bool:
        return self.settled() and self._state != "CANCELLED"  # else an exception has fallen into its cancellation

    def _send(self, actor: ActorHandle) -> None:
        self._owner = supervisor = actor._supervisor
        self._was_sent = True
        try:
            request = CallRequest(self.call.method, supervisor.config.first_index, future=self, kind=Kind.CALL)
            supervisor.submit_call(request, self.call)
        except ActorClosedError as error:
            self.settle(None, error, actor.incarnation)
        except BaseException as error:
            # In threads of users it may be an interrupt: then this runs once more, in another one.
            if not supervisor.reactor.owns_current_thread() or self._is_taken():
                raise
            self.settle(None, error, actor.incarnation)

    def _end_cancelled(self) -> None:
        """Mark the call as cancelled and have its actor run another one; may be called again."""
        if not self._has_ended():
            super().mark_cancelled()
        self._owner.reactor.wake(self)
        self._leave_actor()

    def _leave_actor(self) -> None:
        """Have the actor run the next call; may be called again."""
        self._pool.release(self)
        if not self.claim:  # else the thread that has claimed it assigns the calls after this one
            self._pool.assign_waiting()


class ActorPool:
    """Equal actors that share their work; also a context manager.

    Args:
        factory: Makes the env of each actor, in its worker, where `envactors.current_actor` returns the actor.
        n: The number of actors.
        **spawn_options: Options of `envactors.spawn`; ``name`` is the prefix of the actors' names.

    Raises:
        ValueError: ``n`` is less than 1.
    """

    def __init__(self, factory: Factory, n: int, **spawn_options: Any) -> None:
        if not is_int(n):
            raise ValueError(f"a pool of {n!r} actors: expected an int >= 1")
        options = inspect.signature(spawn).bind(factory, **spawn_options)
        options.apply_defaults()
        name = options.arguments.pop("name") or "pool"
        # Guards what follows; reentrant, since signal handlers and finalizers use pools, too.
        self._lock = threading.RLock()
        # Calls that were not sent to an actor yet, oldest first. A call is taken out once it was sent: one whose thread
        # is interrupted before that is still here for the next thread.
        self._waiting: deque[PoolFuture] = deque()
        self.is_closed = False
        self.actors = [launch([factory], name=f"{name}-{i}", first=i, **options.kwargs) for i in range(n)]
        # The actors without a call, the one that has been so for longest first; and what the others run. After an
        # interrupt an actor may be in both, and is idle.
        self._idle: dict[ActorHandle, None] = dict.fromkeys(self.actors)
        self._running: dict[ActorHandle, PoolFuture] = {}
        # In line env code runs when a call is assigned, and Ctrl-C shall reach it.
        is_inline = self.actors[0]._supervisor.config.backend.inline
        self._deferral = contextlib.nullcontext() if is_inline else defer_signals

    def submit(self, method: str, /, *args: Any, **kwargs: Any) -> ActorFuture:
        """Call a method of the first actor that becomes idle.

        Raises:
            ActorClosedError: The pool was closed.
        """
        future = PoolFuture(self, Call(0, method, args, kwargs))
        with self._lock:
            if self.is_closed:
                raise ActorClosedError(f"{method} was asked of a pool that is closed")
            self._waiting.append(future)
        self.assign_waiting()
        return future

    def map(self, method: str, iterable: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
        """Call a method with each item as its argument; return the results in the order of the items.

        Args:
            method: The method's name.
            iterable: The arguments; all are sent at once.
            timeout: How long to wait for each result, in seconds.
        """
        check_timeout(timeout, "map(timeout=...)")
        futures = [self.submit(method, item) for item in iterable]
        return (future.result(timeout) for future in futures)

    def map_unordered(self, method: str, iterable: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
        """Like `map`, but return the results in the order in which they come; ``timeout`` is for all of them."""
        check_timeout(timeout, "map_unordered(timeout=...)")
        futures = [self.submit(method, item) for item in iterable]
        return (future.result() for future in as_completed(futures, timeout))

    def close(self, timeout: float | None = None) -> None:
        """Close all actors, and cancel the calls that were not assigned yet.

        Args:
            timeout: How long closing may take before the remaining workers are killed, in seconds; None for the close
                deadline.
        """
        check_timeout(timeout, "close(timeout=...)")
        with self._lock:
            self.is_closed = True
        self.assign_waiting()  # which cancels them
        close_all(self.actors, timeout)

    def __enter__(self) -> ActorPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.assign_waiting()
            with self._lock:
                waiting = list(self._waiting)
            wait(waiting)
        self.close()

    def __len__(self) -> int:
        return len(self.actors)

    def release(self, future: PoolFuture) -> None:
        """Note that the actor of a call is idle again; may be called again for the same call."""
        actor = future.actor
        with self._lock:
            if actor is not None and self._running.get(actor) is future:
                self._idle[actor] = None
                del self._running[actor]

    def withdraw(self, future: PoolFuture) -> bool:
        """Cancel a call that no actor has; return False if one has it, or a thread is sending it to one."""

        def claim_it(claim: list[PoolFuture]) -> PoolFuture | None:
            with self._lock:
                if future.claim or not future.is_waiting:
                    return None
                claim.append(future)
                future.claim = claim
            return future

        with defer_signals:
            if not self._handle(claim_it, PoolFuture.cancel_waiting):
                return False
            self.assign_waiting()  # other threads have passed over the call
            return future.cancelled()

    def assign_waiting(self) -> None:
        """Send calls that wait to idle actors, or cancel them if the pool is closed.

        Called without the lock of any actor, by every thread that uses the pool: it also finishes what other threads
        have left because of an exception.
        """
        if not self._waiting:
            return  # who adds a call comes here afterwards
        with self._deferral:
            while self._waiting and self._handle(self._match, PoolFuture.assign):
                pass

    def _handle(
        self, claim_one: Callable[[list[PoolFuture]], PoolFuture | None], act: Callable[[PoolFuture], None]
    ) -> bool:
        """Claim a call that waits, and do something with it that takes it out of the queue.

        Args:
            claim_one: Chooses the call, and adds it to the claim that it is given; returns None if there is none.
            act: Called with it, without the lock, since code of users may run in there.

        Returns:
            Whether there was a call.
        """
        claim: list[PoolFuture] = []
        try:
            try:
                future = claim_one(claim)
                if future is None:
                    return False
                act(future)
                with self._lock:
                    if future in self._waiting:
                        self._waiting.remove(future)
                    future.is_waiting = False
                claim.clear()
                return True
            finally:
                claim.clear()  # again, since an exception may fall in here, too
        except BaseException:  # an interrupt; the call may be the last one, after which nobody uses the pool
            reactor = self.actors[0]._supervisor.reactor
            if not reactor.owns_current_thread():
                reactor.callbacks.submit(self.assign_waiting)
            raise

    def _match(self, claim: list[PoolFuture]) -> PoolFuture | None:
        """Claim the next call that waits and choose its actor; return None if either is missing."""
        with self._lock:
            future = self._next_unclaimed()
            if future is None:
                return None
            actor = future.actor
            # A thread that was interrupted may have chosen its actor already.
            is_placed = self.is_closed or future.settled() or (actor is not None and self._running.get(actor) is future)
            if not is_placed and not self._idle:
                return None
            claim.append(future)
            future.claim = claim
            if not is_placed:
                # If no idle actor can run calls any more, the call gets the error of a dead one.
                usable = (actor for actor in self._idle if actor._supervisor.is_usable)
                future.actor = actor = next(usable, next(iter(self._idle)))
                self._running[actor] = future
            if actor is not None and self._running.get(actor) is future:
                self._idle.pop(actor, None)
            return future

    def _next_unclaimed(self) -> PoolFuture | None:
        """Return the oldest call that waits and that no thread has claimed; under the lock."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        if not first.claim:
            return first
        # Not more are being sent than there are actors, and a thread that cancels one looks for others afterwards.
        oldest = tuple(itertools.islice(self._waiting, len(self.actors) + 1))
        return next((future for future in oldest if not future.claim), None)
