"""`ActorPool`: equal actors that share a queue of calls."""

from __future__ import annotations

import inspect
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed
from typing import TYPE_CHECKING, Any, Concatenate, Generic, overload

from envactors import backends
from envactors.actor.change import ChangeLock
from envactors.actor.future import ActorFuture, BoundToProcess
from envactors.actor.handle import ActorHandle, check_closable, method_name
from envactors.actor.spawn import SpawnOptions, make_actor, spawn
from envactors.actor.type_variables import Item, P, R, T_co
from envactors.mailbox import messages
from envactors.mailbox.factory import Factory
from envactors.mailbox.messages import Kind
from envactors.options import RestartPolicy, as_timeout, check_kind, is_int
from envactors.pools.shared_calls import SharedCall, SharedCalls, SharedFuture

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The longest timeout that `concurrent.futures.as_completed` takes, in seconds: it adds the time at which it begins.
_LONGEST = threading.TIMEOUT_MAX / 2


class ActorPool(BoundToProcess, Generic[T_co]):
    """Equal actors that share their work. Also a context manager.

    Args:
        factory: Makes the env of each actor, in its worker, where `envactors.current_actor` returns the actor.
        n: The number of actors.
        **spawn_options: Options of `envactors.spawn`; ``name`` is the prefix of the actors' names. Processes are
            restarted without limit and at once, unless ``restart`` is given.

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
        restart = RestartPolicy(max_restarts=math.inf, backoff=0)
        options = inspect.signature(spawn).bind(factory, **{"restart": restart, **spawn_options})
        options.apply_defaults()
        name = options.arguments.pop("name") or "pool"
        check_kind("name", name, str)
        is_inline = backends.resolve(options.arguments["backend"]).traits.is_inline
        lock = ChangeLock()
        # In-process actors hold their locks while env code runs. All others share one, which guards the calls, too.
        self.actors: list[ActorHandle[Any]] = [
            make_actor([factory], name=f"{name}-{i}", first=i, **options.kwargs, lock=None if is_inline else lock)
            for i in range(n)
        ]
        self._calls = SharedCalls(self.actors, lock)

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
            *args: Its arguments, pickled immediately.
            **kwargs: Its keyword arguments.

        Raises:
            TypeError: ``method`` is neither a name nor a method of a class.
            AttributeError: The name begins with an underscore.
            ActorClosedError: The pool was closed.
        """
        name = method_name(method)
        future: ActorFuture[Any] = SharedFuture(self._calls)
        self._calls.submit(SharedCall(name, 0, Kind.CALL, future), messages.Call(0, name, args, kwargs))
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
        timeout = as_timeout(timeout, "map(timeout=...)")
        futures = deque([self.submit(method, item) for item in iterable])
        return (futures.popleft().result(timeout) for _ in range(len(futures)))

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
        timeout = as_timeout(timeout, "map_unordered(timeout=...)")
        futures = [self.submit(method, item) for item in iterable]
        limit = None if timeout is None else min(timeout, _LONGEST)
        return (future.result() for future in as_completed(futures, limit))

    def close(self, timeout: float | None = None) -> None:
        """Close all actors, and cancel the calls that wait for one.

        Args:
            timeout: How long closing may take before the remaining workers are killed, in seconds; None for the close
                deadline.
        """
        timeout = as_timeout(timeout, "close(timeout=...)")
        check_closable(self._calls.handles)
        self._calls.refuse_calls(cancel=True)
        self._calls.close_actors(timeout)

    def __enter__(self) -> ActorPool[T_co]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                self._calls.wait_ended()
        finally:
            self.close()

    def __len__(self) -> int:
        return len(self.actors)
