"""What users hold: `spawn` gives a handle, a handle's methods give futures."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from envactors import backends
from envactors.actor.future import ActorFuture
from envactors.actor.incarnation import Incarnation
from envactors.actor.interrupts import SHIELD
from envactors.actor.states import ActorState, ActorStats, Plan
from envactors.actor.supervisor import Supervisor
from envactors.backends.base import Backend
from envactors.errors import SerializationError
from envactors.options import Deadlines, RestartPolicy, check_timeout
from envactors.system import SharedFile
from envactors.wire import registry
from envactors.wire.messages import Call, Get, Kind, Set, Start
from envactors.wire.pickling import dumps_by_value

_numbers = itertools.count()


class Lifeline:
    """What keeps an actor alive: every handle and every unfinished future holds it."""

    __slots__ = ("__weakref__",)

    def __init__(self, supervisor: Supervisor) -> None:
        weakref.finalize(self, supervisor.abandon).atexit = False


class Caller:
    """Calls the methods of an env: ``caller.method(*args, **kwargs)`` gives a future.

    Names that begin with an underscore are never sent.
    """

    __slots__ = ("_env", "_lifeline", "_retries", "_supervisor", "_timeout")

    def __init__(
        self,
        supervisor: Supervisor,
        lifeline: Lifeline,
        env: int = 0,
        timeout: float | None = None,
        retries: int = 0,
    ) -> None:
        self._supervisor = supervisor
        self._lifeline = lifeline
        self._env = env
        self._timeout = timeout
        self._retries = retries

    def __getattr__(self, name: str) -> Callable[..., ActorFuture]:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} begins with an underscore: such names are never sent to an env")
        return _Method(self, name)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> ActorFuture:
        """Calls a method of the env, also one whose name the handle itself uses.

        Args:
            method: The method's name.
            *args: Its arguments, pickled now.
            **kwargs: Its keyword arguments.

        Returns:
            The future of its result.

        Raises:
            AttributeError: The name begins with an underscore.
            ActorClosedError: The actor was closed.
        """
        return self._ask(Kind.CALL, Call(self._env, _public(method), args, kwargs), method)

    def _call_or_get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActorFuture:
        """Calls a method of the env, or reads an attribute that is none, whichever it is there."""
        return self._ask(Kind.CALL, Call(self._env, _public(name), args, kwargs, or_get=True), name)

    def _refuse(self, method: str) -> None:
        """Raises where a method is not to be called through this handle."""

    def get(self, name: str) -> ActorFuture:
        """Reads an attribute of the env, also one that Gymnasium's wrappers hide."""
        return self._ask(Kind.GET, Get(self._env, _public(name)), "get")

    def set(self, name: str, value: Any) -> ActorFuture:
        """Writes an attribute of the env, through ``set_wrapper_attr`` where it exists."""
        return self._ask(Kind.SET, Set(self._env, _public(name), value), "set")

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: an actor belongs to the process that made it; "
            "send its results, or make another actor where it is needed"
        )

    def _call_in(self, incarnation: int | None, method: str, *args: Any) -> ActorFuture:
        """Calls a method in one process or in none: where that is lost, so is the call."""
        return self._ask(Kind.CALL, Call(self._env, method, args, {}), method, incarnation)

    def _ask(self, kind: Kind, message: tuple[Any, ...], method: str, bound: int | None = None) -> ActorFuture:
        if kind == Kind.CALL:
            self._refuse(method)
        future = ActorFuture(self._supervisor, self._lifeline)
        self._supervisor.ask(kind, message, future, method, self._env, self._timeout, self._retries, bound)
        return future


class ActorHandle(Caller):
    """An actor. Usable from any thread of the process that made it; also a context manager."""

    __slots__ = ("__weakref__",)
    _caller_type: type[Caller] = Caller

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._supervisor.plan.name

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        return self._supervisor.pid

    @property
    def state(self) -> ActorState:
        """What the actor is doing."""
        return self._supervisor.state

    @property
    def incarnation(self) -> int:
        """0 for the first process, one more for each further one."""
        return self._supervisor.incarnation

    def stats(self) -> ActorStats:
        """Counts over the actor's life."""
        return self._supervisor.stats()

    def options(self, *, timeout: float | None = None, retries: int = 0) -> Caller:
        """The same methods with a deadline of their own, and leave to run again on a new incarnation.

        Args:
            timeout: A deadline in seconds, in place of that of `Deadlines`.
            retries: How many deaths and deadlines a call survives; never exceptions.

        Raises:
            ValueError: A negative value.
        """
        check_timeout(timeout, "options(timeout=...)")
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(f"options(retries=...) is {retries!r}: expected an int >= 0")
        return self._caller_type(self._supervisor, self._lifeline, self._env, timeout, retries)

    def renew(self) -> ActorFuture:
        """Replaces the process when the calls before are done; never counted, revives a dead actor.

        Returns:
            A future of the new incarnation's number, there once its env is made.
        """
        future = ActorFuture(self._supervisor, self._lifeline)
        self._supervisor.renew(future)
        return future

    def kill(self, *, restart: bool = False) -> None:
        """Ends the process with SIGKILL, now.

        Args:
            restart: False: running and queued calls get ``ActorDiedError(aborted=True)``, later ones raise
                `ActorClosedError`. True: only the running call fails, the others run on a new process.
        """
        self._supervisor.kill(restart)

    def close(self, timeout: float | None = None) -> None:
        """Lets the queued calls run and the env close, ends the process; may be called again.

        Args:
            timeout: How long that may take before the process is killed, in seconds; None: the close deadline.
        """
        check_timeout(timeout, "close(timeout=...)")
        close_all([self._supervisor], timeout)

    def __enter__(self) -> ActorHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<actor {self.name!r}: {self.state.value}, pid {self.pid}, incarnation {self.incarnation}>"


class _Method:
    """A method of an env, ready to be called."""

    __slots__ = ("_caller", "_name")

    def __init__(self, caller: Caller, name: str) -> None:
        self._caller = caller
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> ActorFuture:
        caller = self._caller
        return caller._ask(Kind.CALL, Call(caller._env, self._name, args, kwargs), self._name)


def spawn(
    factory: Callable[[], Any],
    *,
    name: str | None = None,
    backend: str | Backend = "process",
    deadlines: Deadlines = Deadlines(),  # noqa: B008 # frozen
    restart: RestartPolicy = RestartPolicy(max_restarts=0),  # noqa: B008 # frozen
    env_vars: Mapping[str, str] | None = None,
) -> ActorHandle:
    """Makes an actor; returns at once, the env is made in the background.

    Args:
        factory: Makes the env, in the worker; any callable without arguments, lambdas and local classes too.
        name: For errors and output; made up when None.
        backend: Where the actor lives: a name or a backend.
        deadlines: How long things may take.
        restart: When a lost process is replaced.
        env_vars: Environment variables of the worker, set before it imports anything.

    Raises:
        TypeError: ``factory`` is no callable, or ``env_vars`` no mapping of strings.
        SerializationError: ``factory`` cannot be pickled.
        ValueError: No such backend.
    """
    name = f"actor-{next(_numbers)}" if name is None else name
    return launch(
        [factory], name=name, first=0, backend=backend, deadlines=deadlines, restart=restart, env_vars=env_vars
    )


def spawn_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Completes options of `spawn` with its defaults.

    Raises:
        TypeError: An option that `spawn` does not have.
    """
    bound = inspect.signature(spawn).bind(None, **options)
    bound.apply_defaults()
    return dict(bound.kwargs)


def launch(
    factories: list[Callable[[], Any]],
    *,
    name: str,
    first: int,
    backend: str | Backend,
    deadlines: Deadlines,
    restart: RestartPolicy,
    env_vars: Mapping[str, str] | None,
    shared: SharedFile | None = None,
    max_journal: int | None = None,
    take_standby: Callable[[float], Incarnation | None] | None = None,
    make: Callable[[Plan], Supervisor] = Supervisor,
) -> ActorHandle:
    """Makes an actor of several envs, numbered from ``first``; for the rest see `Plan` and `spawn`."""
    pickled = [_pickle_factory(factory, name) for factory in factories]
    resolved = backends.resolve(backend)
    if env_vars and not resolved.kills:
        raise ValueError(f"env_vars for actor {name!r}, and {resolved!r} has no environment of its own: expected None")
    plan = Plan(
        name,
        resolved,
        Start(name, first, pickled, registry.collect(), journal=max_journal is not None),
        deadlines,
        restart,
        _checked_env_vars(env_vars),
        shared,
        max_journal,
        take_standby,
    )
    with SHIELD:
        supervisor = make(plan)
        return ActorHandle(supervisor, Lifeline(supervisor))


def close_all(supervisors: list[Supervisor], timeout: float | None) -> None:
    """Closes actors side by side; see `ActorHandle.close`."""
    for supervisor in supervisors:
        supervisor.check_owner()
    for supervisor in supervisors:
        supervisor.begin_close(timeout)
    for supervisor in supervisors:
        supervisor.wait_closed(timeout)


def _pickle_factory(factory: Callable[[], Any], name: str) -> bytes:
    if not callable(factory):
        raise TypeError(f"the factory of actor {name!r} is {factory!r}: expected a callable without arguments")
    try:
        return dumps_by_value(factory)
    except Exception as error:
        raise SerializationError(
            f"the factory of actor {name!r} cannot be pickled: {error!r}; make what it needs inside of it", actor=name
        ) from error


def _checked_env_vars(env_vars: Mapping[str, str] | None) -> dict[str, str]:
    checked = dict(env_vars or {})
    for key, value in checked.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"env_vars has {key!r}: {value!r}: expected strings")
    return checked


def _public(name: str) -> str:
    if not isinstance(name, str) or name.startswith("_"):
        raise AttributeError(f"{name!r}: expected the name of a public attribute; others are never sent to an env")
    return name
