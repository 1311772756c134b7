"""Many equal actors that share a queue of calls."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed, wait
from typing import TYPE_CHECKING, Any, Concatenate, Generic, overload

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, close_all, method_name
from envactors.actor.launch import SpawnOptions, launch, spawn
from envactors.actor.requests import CallRequest
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.type_variables import Item, P, R, T_co
from envactors.errors import ActorClosedError
from envactors.mailbox.factory import Factory
from envactors.mailbox.messages import Call, Kind
from envactors.options import check_timeout, is_int

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PoolFuture(ActorFuture[Any]):
    """The future of a call that waits for an idle actor, or was assigned to one.

    Attributes:
        call: The call.
    """

    def __init__(self, pool: ActorPool, call: Call) -> None:
        super().__init__(pool.actors[0]._supervisor, pool)
        self.call = call
        self._pool = pool
        # Whether `assign` runs: that thread then also assigns the calls after this one.
        self._is_being_assigned = False

    def assign(self, actor: ActorHandle) -> None:
        """Send the call to an actor."""
        self._owner = supervisor = actor._supervisor
        self._is_being_assigned = True
        try:
            request = CallRequest(self.call.method, supervisor.config.first_index, future=self, kind=Kind.CALL)
            supervisor.calls.submit(request, self.call)
        except BaseException as error:  # also what pickling the arguments raises
            self.settle(None, error, actor.incarnation)
            if not isinstance(error, ActorClosedError):
                raise
        finally:
            self._is_being_assigned = False

    def cancel(self) -> bool:
        return self._end_by(super().cancel)

    def abort(self) -> bool:
        return self._end_by(super().abort)

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        super().settle(value, error, incarnation)
        self._leave_actor()

    def _end_by(self, end: Callable[[], bool]) -> bool:
        with defer_signals:
            if self._pool.withdraw(self):  # it has waited for an idle actor
                self.mark_cancelled()
                return True
        try:
            return end()
        finally:
            if self.settled():
                self._leave_actor()  # not when it is marked as cancelled, which is done under the actor's lock

    def _leave_actor(self) -> None:
        """Have the actor run the next call; may be called again."""
        self._pool.release(self)
        if not self._is_being_assigned:
            self._pool.assign_waiting()


class ActorPool(Generic[T_co]):
    """Equal actors that share their work; also a context manager.

    Args:
        factory: Makes the env of each actor, in its worker, where `envactors.current_actor` returns the actor.
        n: The number of actors.
        **spawn_options: Options of `envactors.spawn`; ``name`` is the prefix of the actors' names.

    Raises:
        ValueError: ``n`` is less than 1.
    """

    @overload
    def __init__(self, factory: Callable[[], T_co], n: int, **spawn_options: Unpack[SpawnOptions]) -> None: ...

    @overload
    def __init__(self: ActorPool[Any], factory: str, n: int, **spawn_options: Unpack[SpawnOptions]) -> None: ...

    def __init__(self, factory: Factory, n: int, **spawn_options: Unpack[SpawnOptions]) -> None:
        if not is_int(n):
            raise ValueError(f"a pool of {n!r} actors: expected an int >= 1")
        options = inspect.signature(spawn).bind(factory, **spawn_options)
        options.apply_defaults()
        name = options.arguments.pop("name") or "pool"
        # Guards what follows; reentrant, since signal handlers and finalizers use pools, too.
        self._lock = threading.RLock()
        # Calls that no actor was assigned yet, oldest first.
        self._waiting: deque[PoolFuture] = deque()
        self._is_closed = False
        self.actors: list[ActorHandle[Any]] = [
            launch([factory], name=f"{name}-{i}", first=i, **options.kwargs) for i in range(n)
        ]
        # The actors without a call, the one that has been so for longest first; and those of the calls that run.
        self._idle: dict[ActorHandle, None] = dict.fromkeys(self.actors)
        self._running: dict[PoolFuture, ActorHandle] = {}
        # In-process, env code runs when a call is assigned, and Ctrl-C must reach it.
        is_inline = self.actors[0]._supervisor.config.backend.inline
        self._deferral = contextlib.nullcontext() if is_inline else defer_signals

    @overload
    def submit(
        self, method: Callable[Concatenate[T_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> ActorFuture[R]: ...

    @overload
    def submit(self, method: str, /, *args: Any, **kwargs: Any) -> ActorFuture[Any]: ...

    def submit(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> ActorFuture[Any]:
        """Call a method of the first actor that becomes idle.

        Args:
            method: The method's name, or the method as its class has it; see `ActorHandle.call`.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Raises:
            TypeError: ``method`` is neither a name nor a method of a class.
            AttributeError: The name begins with an underscore.
            ActorClosedError: The pool was closed.
        """
        name = method_name(method)
        future = PoolFuture(self, Call(0, name, args, kwargs))
        with defer_signals, self._lock:
            if self._is_closed:
                raise ActorClosedError(f"cannot submit {name!r}: the pool is closed")
            self._waiting.append(future)
        self.assign_waiting()
        return future

    @overload
    def map(
        self, method: Callable[[T_co, Item], R], iterable: Iterable[Item], timeout: float | None = None
    ) -> Iterator[R]: ...

    @overload
    def map(self, method: str, iterable: Iterable[Any], timeout: float | None = None) -> Iterator[Any]: ...

    def map(
        self, method: str | Callable[..., Any], iterable: Iterable[Any], timeout: float | None = None
    ) -> Iterator[Any]:
        """Call a method with each item as its argument; return the results in the order of the items.

        Args:
            method: The method's name, or the method as its class has it; see `ActorHandle.call`.
            iterable: The arguments; all are sent at once.
            timeout: How long to wait for each result, in seconds.
        """
        check_timeout(timeout, "map(timeout=...)")
        futures = [self.submit(method, item) for item in iterable]
        return (future.result(timeout) for future in futures)

    @overload
    def map_unordered(
        self, method: Callable[[T_co, Item], R], iterable: Iterable[Item], timeout: float | None = None
    ) -> Iterator[R]: ...

    @overload
    def map_unordered(self, method: str, iterable: Iterable[Any], timeout: float | None = None) -> Iterator[Any]: ...

    def map_unordered(
        self, method: str | Callable[..., Any], iterable: Iterable[Any], timeout: float | None = None
    ) -> Iterator[Any]:
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
        with defer_signals, self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()
        close_all(self.actors, timeout)

    def __enter__(self) -> ActorPool[T_co]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            with defer_signals, self._lock:
                waiting = list(self._waiting)
            wait(waiting)
        self.close()

    def __len__(self) -> int:
        return len(self.actors)

    def release(self, future: PoolFuture) -> None:
        """Note that the actor of a call is idle again; may be called again for the same call."""
        with defer_signals, self._lock:
            actor = self._running.get(future)
            if actor is not None:
                self._idle[actor] = None
                del self._running[future]

    def withdraw(self, future: PoolFuture) -> bool:
        """Remove a call from the queue; return False if it was assigned to an actor already."""
        with defer_signals, self._lock:
            if future not in self._waiting:
                return False
            self._waiting.remove(future)
            return True

    def assign_waiting(self) -> None:
        """Send calls that wait to idle actors; called without the lock of any actor."""
        with self._deferral:
            while (pair := self._match()) is not None:
                future, actor = pair
                future.assign(actor)

    def _match(self) -> tuple[PoolFuture, ActorHandle] | None:
        """Take the next call out of the queue, and return it with the actor that is to run it."""
        with defer_signals, self._lock:
            if self._is_closed or not self._waiting or not self._idle:
                return None
            # If no idle actor can run calls any more, the call gets the error of a dead one.
            usable = (actor for actor in self._idle if actor._supervisor.is_usable)
            actor = next(usable, next(iter(self._idle)))
            future = self._waiting.popleft()
            self._running[future] = actor
            del self._idle[actor]
            return future, actor
