"""`ActorPool`: equal actors that share a queue of calls."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed, wait
from typing import TYPE_CHECKING, Any, Concatenate, Generic, overload

from envactors.actor.exits import Step
from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, close_all, method_name
from envactors.actor.jobs import Call
from envactors.actor.spawn import SpawnOptions, launch, spawn
from envactors.actor.type_variables import Item, P, R, T_co
from envactors.errors import ActorClosedError
from envactors.mailbox import messages
from envactors.mailbox.factory import Factory
from envactors.mailbox.messages import Kind
from envactors.mailbox.pickling import dumps, safe_repr
from envactors.options import check_timeout, is_int
from envactors.runtime import Runtime

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ActorPool(Generic[T_co]):
    """Equal actors that share their work. Also a context manager.

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
        # Guards what follows. Reentrant, since signal handlers and finalizers may use the pool. No lock of an actor is
        # taken while it is held.
        self._lock = threading.RLock()
        self._waiting: deque[tuple[ActorFuture[Any], str, bytes | bytearray]] = deque()
        self._is_closed = False
        self.actors: list[ActorHandle[Any]] = [
            launch([factory], name=f"{name}-{i}", first=i, **options.kwargs) for i in range(n)
        ]
        # The actors without a call; the one that has been idle for longest comes first.
        self._idle: dict[ActorHandle, None] = dict.fromkeys(self.actors)

    @property
    def runtime(self) -> Runtime:
        return self.actors[0]._actor.runtime

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
        future: ActorFuture[Any] = ActorFuture(self, self)
        try:
            payload = dumps(tuple(messages.Call(0, name, args, kwargs)))  # the same for each actor
        except Exception as error:  # the reduction of an argument may raise anything
            actor = self.actors[0]._actor
            step = Step(name, actor.config.first_index)
            future.set_error(actor.errors.unpicklable(step, actor.incarnation.index, error, safe_repr(error)))
            return future
        handle: ActorHandle[Any] | None = None
        try:
            with self._lock:
                if self._is_closed:
                    raise ActorClosedError(f"cannot submit {name!r}: the pool is closed")
                handle = None if self._waiting else self._find_idle()
                if handle is None:
                    self._waiting.append((future, name, payload))
                else:
                    self._idle.pop(handle, None)
            if handle is not None:
                self._send(handle, future, name, payload)
            elif self._idle:
                self.runtime.loop.call_soon(self._assign)
        except BaseException:  # a signal handler has raised, and nobody gets the future
            if handle is not None:
                self._set_idle(handle)
            raise
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
        """Close all actors, and cancel the calls that wait for one.

        Args:
            timeout: How long closing may take before the remaining workers are killed, in seconds; None for the close
                deadline.
        """
        check_timeout(timeout, "close(timeout=...)")
        with self._lock:
            self._is_closed = True
            waiting = [entry[0] for entry in self._waiting]
        for future in waiting:
            future.cancel()
        close_all(self.actors, timeout)

    def __enter__(self) -> ActorPool[T_co]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            with self._lock:
                waiting = [entry[0] for entry in self._waiting]
            wait(waiting)
        self.close()

    def __len__(self) -> int:
        return len(self.actors)

    # What futures use ------------------------------------------------------------------------------------

    def cancel(self, future: ActorFuture[Any]) -> bool:
        """Cancel a call that waits for an actor, or is queued at one."""
        with self._lock:
            found = next((entry for entry in self._waiting if entry[0] is future), None)
            if found is not None:
                future.set_canceled()
                self._waiting.remove(found)
        if found is None and future._owner is not self:
            return future._owner.cancel(future)
        return future.cancelled()

    def abort(self, future: ActorFuture[Any]) -> bool:
        """Cancel a call, or end it by replacing its process."""
        return self.cancel(future) or (future._owner is not self and future._owner.abort(future))

    def read_reply(self, future: ActorFuture[Any], deadline: float | None) -> None:
        """Do nothing: the loop reads the reply."""

    # Assigning calls -------------------------------------------------------------------------------------

    def _find_idle(self) -> ActorHandle[Any] | None:
        """Return an idle actor; once no actor of the pool can run calls any more, a dead one, which fails the call."""
        for handle in self._idle:
            if handle._actor.is_usable:
                return handle
        return None if any(handle._actor.is_usable for handle in self.actors) else next(iter(self._idle), None)

    def _assign(self) -> None:
        """Send calls that wait to idle actors. Runs in the loop, where no signal handler raises."""
        while True:
            with self._lock:
                while self._waiting and self._waiting[0][0].done():  # it was canceled
                    self._waiting.popleft()
                handle = self._find_idle()
                if self._is_closed or not self._waiting or handle is None:
                    return
                self._idle.pop(handle, None)
                entry = self._waiting.popleft()
            self._send(handle, *entry)

    def _send(self, handle: ActorHandle[Any], future: ActorFuture[Any], name: str, payload: bytes | bytearray) -> None:
        """Have an actor run a call."""
        actor = handle._actor
        future._owner = actor
        on_end = functools.partial(self._release, handle)
        call = Call(name, actor.config.first_index, Kind.CALL, future, payload=payload, on_end=on_end)
        try:
            actor.accept(call)
        except ActorClosedError as error:
            future.set_error(error)
        if future.done():  # the actor is closed, or the call has run in this thread
            self._set_idle(handle)

    def _release(self, actor: ActorHandle[Any]) -> None:
        """Run the next call on an actor whose call has ended."""
        self._set_idle(actor)
        self._assign()

    def _set_idle(self, actor: ActorHandle[Any]) -> None:
        with self._lock:
            self._idle[actor] = None
