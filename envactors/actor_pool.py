"""`ActorPool`: equal actors that share a queue of calls."""

from __future__ import annotations

import inspect
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed, wait
from typing import TYPE_CHECKING, Any, Concatenate, Generic, overload

from envactors import backends
from envactors.actor.base import ActorBase
from envactors.actor.bound import BoundToProcess
from envactors.actor.change import ChangeLock
from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, close_all, method_name, pickle_call
from envactors.actor.job import Job
from envactors.actor.jobs import Call
from envactors.actor.spawn import SpawnOptions, launch, spawn
from envactors.actor.states import ActorState, ActorStats
from envactors.actor.type_variables import Item, P, R, T_co
from envactors.errors import ActorClosedError, ActorError, ActorStartError, RestartsExhaustedError, copy_error
from envactors.mailbox import messages
from envactors.mailbox.factory import Factory
from envactors.mailbox.messages import Kind
from envactors.options import RestartPolicy, check_timeout, is_int
from envactors.runtime import Runtime

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PoolCall(Call):
    """A call of any actor of a pool."""

    def start(self) -> Job | None:
        """Send the message, to the actor that has taken it."""
        self.index: int = self.actor.config.first_index
        return super().start()


class PoolQueue:
    """The calls that wait for any actor of a pool; see `envactors.actor.job.SharedQueue`.

    Args:
        actors: The actors.

    Attributes:
        calls: The calls, the next one first.
    """

    def __init__(self, actors: Sequence[ActorBase]) -> None:
        self.calls: deque[Call] = deque()
        self._actors = actors

    def fail_unless_served(self) -> None:
        """Fail all calls if no actor can run any, now or later."""
        if self.calls and not any(actor.is_usable for actor in self._actors):
            stats = [actor.stats() for actor in self._actors]
            for call in self.calls:  # those that have ended before stay as they are
                call.future.set_exception(self._unserved_error(call.method, stats))
            self.calls.clear()

    def _unserved_error(self, method: str, stats: list[ActorStats]) -> ActorError:
        """Return the error of a call that no actor can run. It did not run, so it is not the error of another call."""
        causes = [one.last_failure for one in stats if one.last_failure is not None]
        unmade = next((cause for cause in causes if isinstance(cause, ActorStartError)), None)
        if unmade is not None and all(one.restarts == 0 for one in stats):
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

    def take(self) -> Call | None:
        """Remove and return the next call that was not canceled; None if there is none."""
        while self.calls:
            call = self.calls.popleft()
            if not call.future.done():
                return call
        return None


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
        self._is_closed = False
        is_inline = backends.resolve(options.arguments["backend"]).traits.is_inline
        # In-process actors hold their locks while env code runs. All others share one, which guards the queue, too.
        self._lock = ChangeLock()
        self.actors: list[ActorHandle[Any]] = [
            launch([factory], name=f"{name}-{i}", first=i, **options.kwargs, lock=None if is_inline else self._lock)
            for i in range(n)
        ]
        self._actors: list[Any] = [handle._actor for handle in self.actors]
        self._turns = itertools.count()
        self._shared: PoolQueue | None = None  # in-process calls never wait
        if not is_inline:
            self._shared = PoolQueue(self._actors)
            for actor in self._actors:
                actor.shared = self._shared

    @property
    def _waiting(self) -> list[ActorFuture[Any]]:
        """The futures of the calls that wait for an actor. The lock must be held."""
        calls = () if self._shared is None else self._shared.calls
        return [call.future for call in calls if not call.future.done()]

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
        name, actor = method_name(method), self._actors[0]
        future: ActorFuture[Any] = ActorFuture(self, self)
        call = PoolCall(name, actor.config.first_index, Kind.CALL, future)
        if not pickle_call(actor, call, messages.Call(0, name, args, kwargs)):  # the same for each actor
            return future
        if self._shared is None:
            self._check_open(name)
            self._send(call)
        else:
            with self._lock:
                self._check_open(name)
                self._send(call)
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
            for future in self._waiting:
                future.set_canceled()
        close_all(self.actors, timeout)

    def __enter__(self) -> ActorPool[T_co]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            with self._lock:
                waiting = self._waiting
            wait(waiting)
        self.close()

    def __len__(self) -> int:
        return len(self.actors)

    # What futures use ------------------------------------------------------------------------------------

    def cancel(self, future: ActorFuture[Any]) -> bool:
        """Cancel a call that waits for an actor, or is queued at one."""
        with self._lock:
            if future in self._waiting:
                future.set_canceled()
            owner = future.owner
        return future.cancelled() if owner is self else owner.cancel(future)

    def abort(self, future: ActorFuture[Any]) -> bool:
        """Cancel a call, or end it by replacing its process."""
        return self.cancel(future) or (future.owner is not self and future.owner.abort(future))

    def read_reply(self, future: ActorFuture[Any], deadline: float | None) -> None:
        """Do nothing: the loop reads the reply."""

    # Sending calls ---------------------------------------------------------------------------------------

    def _check_open(self, name: str) -> None:
        if self._is_closed:
            raise ActorClosedError(f"cannot submit {name!r}: the pool is closed")

    def _send(self, call: Call) -> None:
        """Have an actor run a call, or let it wait for one."""
        actor = self._find_actor()
        if actor is None:
            assert self._shared is not None, "in-process calls run at once"
            self._shared.calls.append(call)
            self._shared.fail_unless_served()
            return
        call.index, call.future.owner = actor.config.first_index, actor
        try:
            actor.accept(call)
        except ActorClosedError as error:
            call.future.set_exception(error)

    def _find_actor(self) -> Any:
        """Return an idle actor; None if a call has to wait for one."""
        if self._shared is not None and self._shared.calls:
            return None
        turn = next(self._turns) % len(self._actors)
        in_turn = self._actors[turn:] + self._actors[:turn]
        idle = next((actor for actor in in_turn if actor.is_idle), None)
        if idle is not None or self._shared is not None:
            return idle
        return next((actor for actor in in_turn if actor.is_usable), in_turn[0])  # in-process calls run at once
