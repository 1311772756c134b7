"""What users hold: `spawn` returns a handle, a handle's methods return futures."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from envactors import backends
from envactors.actor.config import ActorConfig
from envactors.actor.env_records import levels_of_loggers
from envactors.actor.future import ActorFuture
from envactors.actor.inspection import read_stacks, read_stats
from envactors.actor.journal import SavedJournal
from envactors.actor.permits import Permits
from envactors.actor.process import ActorProcess
from envactors.actor.requests import CallRequest
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.states import ActorState, ActorStats
from envactors.actor.supervisor import Supervisor
from envactors.backends.base import Backend, RowMemory
from envactors.errors import SerializationError
from envactors.mailbox import registry
from envactors.mailbox.factory import Factory, as_callable
from envactors.mailbox.messages import Call, Describe, Get, Kind, Restore, Save, Set, Start
from envactors.mailbox.pickling import dumps_by_value, has_code
from envactors.options import Deadlines, RestartPolicy, Snapshot, as_deadlines, check_timeout, is_int

_numbers = itertools.count()


class Lifeline:
    """Keeps an actor alive: every handle and every unfinished future holds it; its end closes the actor."""

    __slots__ = ("__weakref__",)

    def __init__(self, supervisor: Supervisor) -> None:
        # The engine holds the supervisor until it is closed. Held here, a closed one would stay for ever if an error of
        # its own, with the frames in its traceback, led to this object.
        weakref.finalize(self, _abandon, weakref.ref(supervisor)).atexit = False


def _abandon(supervisor: weakref.ref[Supervisor]) -> None:
    target = supervisor()
    if target is not None:
        target.abandon()


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Caller:
    """Calls the methods of an env: ``caller.method(*args, **kwargs)`` returns a future.

    Names that begin with an underscore are never sent.
    """

    _supervisor: Supervisor
    # Keeps the actor alive.
    _lifeline: Lifeline
    # The position of the env within the actor.
    _env: int = 0
    # A deadline in seconds in place of that of `Deadlines`; None for that one.
    _timeout: float | None = None
    # How many deaths and deadlines each call survives.
    _retries: int = 0
    # The methods that must not be called through it.
    _refused: ClassVar[frozenset[str]] = frozenset()

    def __getattr__(self, name: str) -> Callable[..., ActorFuture]:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} begins with an underscore: such names are never sent to an env")
        return functools.partial(self.call, name)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> ActorFuture:
        """Call a method of the env, also one whose name the handle itself uses.

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
        if not isinstance(method, str) or method.startswith("_"):
            _public(method)
        return self._submit(Kind.CALL, Call(self._env, method, args, kwargs), method)

    def get(self, name: str) -> ActorFuture:
        """Read an attribute of the env, also one that Gymnasium's wrappers hide."""
        return self._submit(Kind.GET, Get(self._env, _public(name)), "get")

    def set(self, name: str, value: Any) -> ActorFuture:
        """Write an attribute of the env, through ``set_wrapper_attr`` if it exists."""
        return self._submit(Kind.SET, Set(self._env, _public(name), value), "set")

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: it belongs to the process that made it; send its results instead"
        )

    def _refuse_method(self, method: str) -> NoReturn:
        """Raise: the method is one of ``_refused``."""
        raise AttributeError(f"{method} through {self!r}: it is not called through this handle")

    def _submit(self, kind: Kind, message: tuple[Any, ...], method: str, bound: int | None = None) -> ActorFuture:
        if method in self._refused and kind == Kind.CALL:
            self._refuse_method(method)
        supervisor = self._supervisor
        future = ActorFuture(supervisor, self._lifeline)
        index = supervisor.config.start.first + self._env
        request = CallRequest(
            method, index, self._timeout, future=future, retries=self._retries, bound=bound, kind=kind
        )
        supervisor.submit_call(request, message)
        return future


class ActorView(Caller):
    """A caller that also says how its actor stands."""

    __slots__ = ()
    _caller_type: type[Caller] = Caller

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._supervisor.config.name

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        return self._supervisor.core.pid

    @property
    def node(self) -> str | None:
        """The name of the other machine that its process runs on; None for this one, and while there is none."""
        process = self._supervisor.core.process
        return None if process is None else process.worker.node

    @property
    def state(self) -> ActorState:
        """What the actor is doing."""
        return self._supervisor.state

    @property
    def incarnation(self) -> int:
        """0 for the first process, one more for each further one."""
        return self._supervisor.core.incarnation

    def stats(self) -> ActorStats:
        """Return counts over the actor's life."""
        return read_stats(self._supervisor)

    def stacks(self, timeout: float = 1.0) -> str:
        """Return the stacks of the worker's threads now; the env is not touched, whatever it is at.

        Args:
            timeout: How long to wait for them, in seconds.

        Returns:
            The stacks as ``faulthandler`` writes them; if none come, one line that says why.

        Raises:
            ValueError: ``timeout`` is negative.
        """
        check_timeout(timeout, "stacks(timeout=...)")
        self._supervisor.check_owner()
        return read_stacks(self._supervisor, timeout)

    def options(self, *, timeout: float | None = None, retries: int = 0) -> Caller:
        """Return the same methods with a deadline of their own, and leave to run again on a new incarnation.

        Args:
            timeout: A deadline in seconds, in place of that of `Deadlines`.
            retries: How many deaths and deadlines a call survives; never exceptions.

        Raises:
            ValueError: A negative value.
        """
        check_timeout(timeout, "options(timeout=...)")
        if not is_int(retries, 0):
            raise ValueError(f"options(retries=...) is {retries!r}: expected an int >= 0")
        return self._caller_type(self._supervisor, self._lifeline, self._env, timeout, retries)

    def __repr__(self) -> str:
        return f"<actor {self.name!r}: {self.state.value}, pid {self.pid}, incarnation {self.incarnation}>"


class ActorHandle(ActorView):
    """An actor. Usable from any thread of the process that made it; also a context manager."""

    __slots__ = ("__weakref__",)

    def renew(self) -> ActorFuture:
        """Replace the process after the calls before; never counted as a restart, revives a dead actor.

        Returns:
            A future of the new incarnation's number, settled once its env is made.
        """
        future = ActorFuture(self._supervisor, self._lifeline)
        self._supervisor.renew(future)
        return future

    def kill(self, *, restart: bool = False) -> None:
        """End the process with SIGKILL, now.

        Args:
            restart: False: running and queued calls get ``ActorDiedError(aborted=True)``, later ones raise
                `ActorClosedError`. True: only the running call fails, the others run on a new process.
        """
        self._supervisor.kill(restart)

    def close(self, timeout: float | None = None) -> None:
        """Let the queued calls run and the env close, then end the process; may be called again.

        Args:
            timeout: How long that may take before the process is killed, in seconds; None: the close deadline.
        """
        check_timeout(timeout, "close(timeout=...)")
        close_all([self], timeout)

    def __enter__(self) -> ActorHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def spawn(
    factory: Factory,
    *,
    name: str | None = None,
    backend: str | Backend = "process",
    deadlines: Deadlines | float = Deadlines(),  # noqa: B008 # frozen
    restart: RestartPolicy = RestartPolicy(max_restarts=0),  # noqa: B008 # frozen
    env_vars: Mapping[str, str] | None = None,
) -> ActorHandle:
    """Make an actor; return at once, the env is made in the background.

    Args:
        factory: Makes the env, in the worker; any callable without arguments, lambdas and local classes too, or a
            string ``"module:callable"``, and then only the worker imports the module.
        name: For errors and output; made up when None.
        backend: Where the actor lives: a name or a backend.
        deadlines: How long things may take; a number of seconds stands for ``Deadlines(call=seconds)``.
        restart: When a lost process is replaced.
        env_vars: Environment variables of the worker, set before it imports anything.

    Raises:
        TypeError: ``factory`` is no callable and no string, or ``env_vars`` no mapping of strings.
        SerializationError: ``factory`` cannot be pickled, or has code of another version of Python than the worker's.
        ValueError: No such backend, ``factory`` is a string of another form, ``deadlines`` is a number that is not
            above 0, or ``env_vars`` has names or values that no environment can have.
    """
    name = next_name() if name is None else name
    return launch(
        [factory], name=name, first=0, backend=backend, deadlines=deadlines, restart=restart, env_vars=env_vars
    )


def next_name() -> str:
    """Return a name for an actor that was given none."""
    return f"actor-{next(_numbers)}"


def launch(
    factories: list[Factory],
    *,
    name: str,
    first: int,
    backend: str | Backend,
    deadlines: Deadlines | float,
    restart: RestartPolicy,
    env_vars: Mapping[str, str] | None,
    memory: RowMemory | None = None,
    max_journal: int | None = None,
    seed_episodes: bool = False,
    snapshot: Snapshot | None = None,
    standbys: Sequence[Callable[[float], ActorProcess | None]] = (),
    is_standby: bool = False,
    permits: Permits | None = None,
) -> ActorHandle:
    """Make an actor of several envs, numbered from ``first``; for the rest see `ActorConfig` and `spawn`."""
    deadlines = as_deadlines(deadlines)
    pickled = [_pickle_factory(factory, name) for factory in factories]
    resolved = backends.resolve(backend)
    if env_vars and not resolved.kills:
        raise ValueError(f"env_vars for actor {name!r}, and {resolved!r} has no environment of its own: expected None")
    journal, levels = max_journal is not None, levels_of_loggers()
    functions = None if snapshot is None else _pickle_snapshot(snapshot)
    start = Start(name, first, pickled, registry.collect(), None, journal, levels, seed_episodes, functions)
    variables = _checked_env_vars(env_vars)
    if any(map(has_code, [*pickled, functions or b""])) and not resolved.loads_code(variables):
        raise SerializationError(
            f"the factories or snapshot functions of actor {name!r} are pickled by value, as code of "
            f"{sys.implementation.cache_tag}, which workers of {resolved!r} do not run: put them into a module that "
            "workers can import, and name a factory as 'module:callable'",
            actor=name,
        )
    every = None if snapshot is None else snapshot.every
    config = ActorConfig(
        name, resolved, start, deadlines, restart, variables, memory, max_journal, every, standbys, is_standby, permits
    )
    with defer_signals:
        supervisor = Supervisor(config)
        return ActorHandle(supervisor, Lifeline(supervisor))


def close_all(actors: list[ActorHandle], timeout: float | None) -> None:
    """Close actors side by side; see `ActorHandle.close`."""
    supervisors = [actor._supervisor for actor in actors]
    for supervisor in supervisors:
        supervisor.check_owner()
    for supervisor in supervisors:
        supervisor.begin_close(timeout)
    for supervisor in supervisors:
        supervisor.wait_closed(timeout)


def call_or_get(caller: Caller, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActorFuture:
    """Call a method of the env, or read an attribute that is no method; for drop-ins whose ``call`` does either."""
    return caller._submit(Kind.CALL, Call(caller._env, _public(name), args, kwargs, or_get=True), name)


def call_on_incarnation(caller: Caller, incarnation: int | None, method: str, *args: Any) -> ActorFuture:
    """Call a method in one process or in none: if that process is lost, so is the call."""
    return caller._submit(Kind.CALL, Call(caller._env, method, args, {}), method, incarnation)


def save_state(caller: Caller) -> ActorFuture:
    """Return the future of an env's state: the checksum over its observations, and bytes."""
    return caller._submit(Kind.SAVE, Save(caller._env), "snapshot")


def restore_state(caller: Caller, check: int, state: bytes) -> ActorFuture:
    """Put an env into a state that `save_state` has returned."""
    return caller._submit(Kind.RESTORE, Restore(caller._env, check, state), "restore")


def bring_back(actor: ActorHandle, journals: Sequence[SavedJournal]) -> ActorFuture:
    """Bring the envs of an actor to where saved journals end; return a future that is settled when that was tried."""
    actor._supervisor.bring_back(journals)
    # Queued behind the replays, it runs in whichever process has done them.
    return actor.options(retries=sys.maxsize)._submit(Kind.DESCRIBE, Describe(0), "describe")


def discard_process(handle: ActorHandle, incarnation: int | None, index: int, method: str, error: Exception) -> None:
    """End a process whose env is not fit to be used any more; counts as a restart. See `Lifecycle.discard`."""
    handle._supervisor.lifecycle.discard(incarnation, index, method, error)


def _pickle_factory(factory: Factory, name: str) -> bytes:
    make = as_callable(factory, f"actor {name!r}")
    try:
        return dumps_by_value(make)
    except Exception as error:
        raise SerializationError(
            f"the factory of actor {name!r} cannot be pickled: {error!r}; make what it needs inside of it", actor=name
        ) from error


def _pickle_snapshot(snapshot: Snapshot) -> bytes:
    try:
        return dumps_by_value((snapshot.get, snapshot.set))
    except Exception as error:
        raise SerializationError(f"the functions of {snapshot!r} cannot be pickled: {error!r}") from error


def _checked_env_vars(env_vars: Mapping[str, str] | None) -> dict[str, str]:
    if env_vars is not None and not isinstance(env_vars, Mapping):
        raise TypeError(f"env_vars is {env_vars!r}: expected a mapping of names to values, all strings")
    checked = dict(env_vars or {})
    for name, value in checked.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env_vars has {name!r}: {value!r}: expected strings")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env_vars has {name!r}: expected a name without '=', and no NUL in the name or the value")
        try:
            os.fsencode(name + value)
        except UnicodeEncodeError as error:
            raise ValueError(f"env_vars has {name!r}: expected text that the system can encode: {error}") from error
    return checked


def _public(name: str) -> str:
    if not isinstance(name, str) or name.startswith("_"):
        raise AttributeError(f"{name!r}: expected the name of a public attribute; others are never sent to an env")
    return name
