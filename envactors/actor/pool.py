"""Many equal actors, and calls for whichever of them is idle."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed, wait
from typing import Any

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, close_all, launch, spawn_defaults
from envactors.actor.states import ActorState
from envactors.errors import ActorClosedError
from envactors.options import check_timeout
from envactors.wire.messages import Call, Kind


class PoolFuture(ActorFuture):
    """The future of a call that waits for an idle actor, or runs in one."""

    def __init__(self, pool: ActorPool, call: Call) -> None:
        super().__init__(pool.actors[0]._supervisor, pool)
        self.call = call
        self.actor: ActorHandle | None = None
        self._pool = pool

    def assign(self, actor: ActorHandle) -> None:
        """Gives the call to an actor."""
        self.actor = actor
        self._supervisor = actor._supervisor
        try:
            actor._supervisor.ask(Kind.CALL, self.call, self, self.call.method)
        except ActorClosedError as error:
            self.settle(None, error, actor.incarnation)

    def cancel(self) -> bool:
        if self._pool.withdraw(self):
            self.discard()
            self._supervisor.reactor.wake(self)
            return True
        return super().cancel()

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        first = not self.settled()
        super().settle(value, error, incarnation)
        if first and self.actor is not None:
            self._pool.idle(self.actor)

    def discard(self) -> None:
        super().discard()
        if self.actor is not None:
            self._pool.idle(self.actor)


class ActorPool:
    """Equal actors that share their work; also a context manager.

    Args:
        factory: Makes the env of each, in its worker; `envactors.current_actor` says there which one it is.
        n: How many actors.
        **spawn_options: As for `envactors.spawn`; ``name`` is the prefix of the actors' names.

    Raises:
        ValueError: ``n`` is less than 1.
    """

    def __init__(self, factory: Callable[[], Any], n: int, **spawn_options: Any) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"a pool of {n!r} actors: expected an int >= 1")
        options = spawn_defaults(spawn_options)
        name = options.pop("name") or "pool"
        self._lock = threading.Lock()
        self._waiting: deque[PoolFuture] = deque()
        self._is_closed = False
        self.actors = [launch([factory], name=f"{name}-{i}", first=i, **options) for i in range(n)]
        self._idle = deque(self.actors)

    def submit(self, method: str, /, *args: Any, **kwargs: Any) -> ActorFuture:
        """Calls a method of whichever actor is idle first.

        Raises:
            ActorClosedError: The pool was closed.
        """
        if self._is_closed:
            raise ActorClosedError(f"{method} was asked of a pool that is closed")
        future = PoolFuture(self, Call(0, method, args, kwargs))
        with self._lock:
            actor = self._take()
            if actor is None:
                self._waiting.append(future)
        if actor is not None:
            future.assign(actor)
        return future

    def map(self, method: str, iterable: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
        """Calls a method with each item as its argument; gives the results in the order of the items.

        Args:
            method: The method's name.
            iterable: The arguments; all are sent at once.
            timeout: How long to wait for each result, in seconds.
        """
        check_timeout(timeout, "map(timeout=...)")
        futures = [self.submit(method, item) for item in iterable]
        return (future.result(timeout) for future in futures)

    def map_unordered(self, method: str, iterable: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
        """Like `map`, with the results in the order in which they come; ``timeout`` is for all of them together."""
        check_timeout(timeout, "map_unordered(timeout=...)")
        futures = [self.submit(method, item) for item in iterable]
        return (future.result() for future in as_completed(futures, timeout))

    def close(self, timeout: float | None = None) -> None:
        """Closes all actors; calls that no actor has begun with are cancelled.

        Args:
            timeout: How long that may take before what is left is killed, in seconds; None: the close deadline.
        """
        check_timeout(timeout, "close(timeout=...)")
        self._is_closed = True
        while self._waiting:
            self._waiting.popleft().discard()
        close_all([actor._supervisor for actor in self.actors], timeout)

    def __enter__(self) -> ActorPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            wait(list(self._waiting))
        self.close()

    def __len__(self) -> int:
        return len(self.actors)

    def idle(self, actor: ActorHandle) -> None:
        """Gives an actor that has become idle its next call."""
        with self._lock:
            self._idle.append(actor)
            pair = (self._take(), self._waiting.popleft()) if self._waiting else None
        if pair is not None and pair[0] is not None:
            pair[1].assign(pair[0])

    def withdraw(self, future: PoolFuture) -> bool:
        """Takes back a call that no actor was given yet."""
        with self._lock:
            if future in self._waiting:
                self._waiting.remove(future)
                return True
            return False

    def _take(self) -> ActorHandle | None:
        # One that can run calls, as long as there is any.
        for _ in range(len(self._idle)):
            actor = self._idle.popleft()
            if actor.state not in (ActorState.DEAD, ActorState.CLOSED):
                return actor
            self._idle.append(actor)
        return self._idle.popleft() if self._idle else None
