"""Handles of actors, whose methods return futures. `envactors.actor.spawn` makes them."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, Generic, TypeVar, overload

from envactors.actor.base import ActorBase
from envactors.actor.calls import Call
from envactors.actor.future import ActorFuture, BoundToProcess
from envactors.actor.job import Activity
from envactors.actor.states import ActorState, ActorStats
from envactors.actor.type_variables import P, R, T_co
from envactors.errors import VectorInputError
from envactors.mailbox import messages
from envactors.mailbox.messages import Kind
from envactors.mailbox.pickling import PicklerClass, Sealed, ValuePickler, dumps, try_to_pickle
from envactors.options import as_seconds, as_timeout, is_int
from envactors.runtime import close_members


class Lifeline:
    """Keeps an actor alive. Each handle and each unfinished future holds it; the actor is closed when none is left."""

    __slots__ = ("__weakref__",)

    def __init__(self, actor: ActorBase) -> None:
        # A weak reference, so that a closed actor is freed even if one of its errors leads back to this object.
        weakref.finalize(self, _abandon, weakref.ref(actor)).atexit = False


def _abandon(get_actor: Callable[[], ActorBase | None]) -> None:
    if (actor := get_actor()) is not None:
        actor.abandon()


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class MethodCaller(BoundToProcess, Generic[T_co]):
    """Calls the methods of an env: ``caller.method(*args, **kwargs)`` returns a future.

    Names that begin with an underscore are never sent.
    """

    _actor: ActorBase
    _lifeline: Lifeline
    # The position of the env within the actor.
    _position: int = 0
    # A deadline in seconds that replaces that of `Deadlines`.
    _deadline: float | None = None
    # How many crashes and missed deadlines each call survives.
    _retries: int = 0
    # Whether the env belongs to a vector whose envs share processes, so that only the vector may step and reset it.
    _is_shared: bool = False

    def __getattr__(self, name: str) -> Callable[..., ActorFuture[Any]]:
        return functools.partial(self.call, public_name(name))

    @overload
    def call(
        self, method: Callable[Concatenate[T_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> ActorFuture[R]: ...

    @overload
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> ActorFuture[Any]: ...

    def call(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> ActorFuture[Any]:
        """Call a method of the env, even if the handle has a method of that name.

        Args:
            method: Name of the method, or the method of the class, such as ``Counter.add``. Type checkers then check
                the arguments and know the type of the result.
            *args: Arguments of the method, pickled immediately.
            **kwargs: Keyword arguments of the method.

        Returns:
            The future of its result.

        Raises:
            AttributeError: The name begins with an underscore.
            TypeError: ``method`` is neither a name nor a method of a class.
            RuntimeError: Env code of an in-process actor calls an env of that actor.
            VectorInputError: It is ``step`` or ``reset``, and envs of the vector share processes.
            ActorClosedError: The actor was closed.
        """
        name = method if type(method) is str and not method.startswith("_") else method_name(method)
        return self._submit(Kind.CALL, (self._position, name, args, kwargs), name)

    def get(self, name: str) -> ActorFuture[Any]:
        """Read an attribute of the env, even if a Gymnasium wrapper hides it."""
        return self._submit(Kind.GET, messages.Get(self._position, public_name(name)), f"get({name!r})")

    def set(self, name: str, value: Any) -> ActorFuture[Any]:
        """Write an attribute of the env, through ``set_wrapper_attr`` if it exists."""
        return self._submit(Kind.SET, messages.Set(self._position, public_name(name), Sealed(value)), f"set({name!r})")

    def _submit(self, kind: Kind, message: tuple[Any, ...], method: str, **call_fields: Any) -> ActorFuture[Any]:
        """Have the actor run a request; for the arguments see `send_request`."""
        if self._is_shared and method in ("step", "reset") and kind == Kind.CALL:
            raise VectorInputError(
                f"cannot call {method} through a handle of a vector whose envs share processes: the vector keeps track "
                f"of their episodes; use envs.{method}(..., env_ids=[i])"
            )
        actor = self._actor
        future: ActorFuture[Any] = ActorFuture(actor, self._lifeline)
        index = actor.config.first_index + self._position
        send_call(actor, Call(method, index, kind, future, self._deadline, self._retries, **call_fields), message)
        return future


class ActorView(MethodCaller[T_co]):
    """A caller that also reports the state of its actor."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._actor.config.name

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        return self._actor.pid

    @property
    def node(self) -> str | None:
        """The node that runs the process; None on this machine."""
        return self._actor.node

    @property
    def state(self) -> ActorState:
        """The state of the actor."""
        return self._actor.state

    @property
    def incarnation(self) -> int:
        """The index of the process, which is 0 for the first and one more for each replacement."""
        return self._actor.process.incarnation

    def stats(self) -> ActorStats:
        """Return counts over the actor's lifetime."""
        return self._actor.stats()

    def stacks(self, timeout: float = 1.0) -> str:
        """Return the stacks of the worker's threads, without waiting for the env.

        A signal asks for them, which may end a system call of native code early.

        Args:
            timeout: How long to wait for them, in seconds.

        Returns:
            The stacks as ``faulthandler`` writes them, or one line that says why there are none.

        Raises:
            ValueError: ``timeout`` is negative, or None.
        """
        seconds = as_seconds(timeout, "stacks(timeout=...)")
        self._actor.check_not_forked()
        return self._actor.stacks(seconds)

    def options(self: View, *, deadline: float | None = None, retries: int | None = None) -> View:
        """Return a handle of the same actor whose calls have their own deadline and retries.

        Args:
            deadline: Seconds after which the worker is killed; None for that of this handle, at first of `Deadlines`.
            retries: How many crashes and missed deadlines a call survives; an exception is never retried. None for
                those of this handle, at first 0.

        Raises:
            ValueError: A value is negative, or not a number.
        """
        deadline = as_timeout(self._deadline if deadline is None else deadline, "options(deadline=...)")
        retries = self._retries if retries is None else retries
        if not is_int(retries, 0):
            raise ValueError(f"options(retries=...) is {retries!r}: expected an int >= 0")
        self._actor.warn_of_deadlines(deadline)
        return type(self)(self._actor, self._lifeline, self._position, deadline, retries, self._is_shared)

    def __repr__(self) -> str:
        return f"<actor {self.name!r}: {self.state.value}, pid {self.pid}, incarnation {self.incarnation}>"


View = TypeVar("View", bound=ActorView[Any])


class ActorHandle(ActorView[T_co]):
    """An actor. Usable from any thread of the process that made it, and as a context manager."""

    __slots__ = ("__weakref__",)

    def renew(self) -> ActorFuture[int]:
        """Replace the process once queued calls have finished. It never counts as a restart, and revives a dead actor.

        Returns:
            A future that resolves to the new incarnation once its env is made.
        """
        future: ActorFuture[int] = ActorFuture(self._actor, self._lifeline)
        self._actor.renew(future)
        return future

    def kill(self, *, restart: bool = False) -> None:
        """Kill the process immediately, without closing the env. In a thread or in this process, drop the env.

        Args:
            restart: False: running and queued calls get ``ActorDiedError(aborted=True)``, and later ones raise
                `ActorClosedError`. True: only the running call fails; a new process runs the queued ones, also if the
                actor was dead.

        Raises:
            ActorError: A call is running, and the backend cannot kill.
        """
        self._actor.kill(restart)

    def close(self, timeout: float | None = None) -> None:
        """Let the queued calls run and the env close, then end the process. It may be called again.

        If the process crashes or is killed meanwhile, the calls that are left fail.

        Args:
            timeout: How long closing may take before the process is killed, in seconds; None for the close deadline.
                In-process actors ignore it: nothing can end their env code.

        Raises:
            RuntimeError: Env code of an in-process actor closes that actor.
        """
        close_all([self], as_timeout(timeout, "close(timeout=...)"))

    def __enter__(self) -> ActorHandle[T_co]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_closable(actors: list[ActorHandle]) -> None:
    """Raise what `close_all` would raise, before any of the actors is closed."""
    for actor in actors:
        actor._actor.check_closable()


def close_all(actors: list[ActorHandle], timeout: float | None) -> None:
    """Close actors side by side; see `ActorHandle.close`."""
    check_closable(actors)
    close_members([actor._actor for actor in actors], timeout)


def send_request(
    actor: ActorBase, kind: Kind, message: tuple[Any, ...], method: str, **call_fields: Any
) -> ActorFuture[Any]:
    """Have an actor run a request that keeps no handle alive; return the future of the reply.

    Args:
        actor: The actor.
        kind: The kind of the message.
        message: The fields of the message, one of `envactors.mailbox.messages`.
        method: The method, for deadlines and errors.
        **call_fields: Further attributes of the `Call`.

    Raises:
        ActorClosedError: The actor was closed, or belongs to another process.
    """
    future: ActorFuture[Any] = ActorFuture(actor, None)
    send_call(actor, Call(method, actor.config.first_index, kind, future, **call_fields), message)
    return future


def send_call(actor: ActorBase, call: Call, message: tuple[Any, ...]) -> None:
    """Pickle the message of a call, and have an actor run it; see `send_request`."""
    if pickle_call(actor, call, message):
        actor.accept(call)


def pickle_call(actor: ActorBase, call: Call, message: tuple[Any, ...], pickler: PicklerClass = ValuePickler) -> bool:
    """Pickle the message of a call; if that fails, end the call with the error. Return whether it may be sent.

    Args:
        actor: An actor that may run the call.
        call: The call.
        message: The fields of the message.
        pickler: Pickles what pickle cannot.

    Raises:
        ActorClosedError: The actor belongs to another process.
    """
    actor.check_not_forked()
    call.payload, error = try_to_pickle(lambda: dumps(tuple(message), pickler))
    if error is not None:
        call.future.set_exception(actor.errors.unpicklable_arguments(Activity(call.method, call.index), error))
    return error is None


def method_name(method: str | Callable[..., Any]) -> str:
    """Return the name of a method, given by its name or as the env's class has it.

    Raises:
        AttributeError: The name begins with an underscore.
        TypeError: It is something else, such as a lambda, a function of a module, or a method of an object.
    """
    if isinstance(method, str):
        return public_name(method)
    owner, _, name = getattr(method, "__qualname__", "").rpartition(".")
    is_bound = getattr(method, "__self__", None) is not None
    is_of_class = owner and not owner.endswith("<locals>") and name == getattr(method, "__name__", None)
    is_lambda = not name.isidentifier()
    if not callable(method) or isinstance(method, type) or is_bound or is_lambda or not is_of_class:
        raise TypeError(
            f"cannot call {method!r} in an actor: expected a method of the env's class, as in "
            "actor.call(Counter.add, 1), or the name of a method, as in actor.call('add', 1)"
        )
    return public_name(name)


def public_name(name: str) -> str:
    """Return the name of a method or an attribute.

    Raises:
        AttributeError: It begins with an underscore, or is not a string.
    """
    if not isinstance(name, str) or name.startswith("_"):
        raise AttributeError(
            f"{name!r}: expected the name of a public attribute; names with an underscore are never sent to an env"
        )
    return name
