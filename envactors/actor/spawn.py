"""Making actors: `spawn` for users, and `make_actor` for pools, vectors, and drop-ins."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, overload

from envactors import backends
from envactors.actor.actor import Actor
from envactors.actor.base import ActorBase
from envactors.actor.change import ChangeLock
from envactors.actor.config import ActorConfig
from envactors.actor.handle import ActorHandle, Lifeline
from envactors.actor.inline import InlineActor
from envactors.actor.type_variables import T
from envactors.backends.base import Backend
from envactors.backends.log_records import levels_of_loggers
from envactors.crashes.writer import CrashDir, CrashReporter
from envactors.errors import SerializationError
from envactors.mailbox import registry
from envactors.mailbox.factory import Factory, as_callable
from envactors.mailbox.messages import Start
from envactors.mailbox.pickling import has_code, pickle_argument
from envactors.options import Deadlines, EnvVars, RestartPolicy, SnapshotPolicy, as_deadlines, as_env_vars, check_kind

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from envactors.actor.type_variables import Ts

_numbers = itertools.count()


class SpawnOptions(TypedDict, total=False):
    """The keyword arguments of `spawn`, which describes them."""

    name: str | None
    backend: str | Backend
    deadlines: Deadlines | float
    restart: RestartPolicy
    env_vars: EnvVars
    crash_dir: CrashDir


@overload
def spawn(factory: Callable[[Unpack[Ts]], T], *args: Unpack[Ts], **options: Unpack[SpawnOptions]) -> ActorHandle[T]: ...


@overload
def spawn(factory: str, *args: Any, **options: Unpack[SpawnOptions]) -> ActorHandle[Any]: ...


def spawn(  # type: ignore[misc] # mypy does not accept Any for the types of several arguments
    factory: Factory,
    *args: Any,
    name: str | None = None,
    backend: str | Backend = "process",
    deadlines: Deadlines | float = Deadlines(),  # noqa: B008 # frozen
    restart: RestartPolicy = RestartPolicy(max_restarts=0),  # noqa: B008 # frozen
    env_vars: EnvVars = None,
    crash_dir: CrashDir = None,
) -> ActorHandle[Any]:
    """Start an actor and return at once; the worker makes the env in the background.

    Args:
        factory: Called in the worker to make the env: any callable, such as a lambda or a local class, or a string
            ``"module:callable"``, whose module only the worker imports.
        *args: Arguments of the factory, pickled immediately.
        name: Name of the actor in errors and output; None for a generated name.
        backend: Where the actor runs: the name of a backend, or a backend.
        deadlines: Time limits in seconds; a number means ``Deadlines(call=number)``.
        restart: How often a process that crashed or missed a deadline is replaced.
        env_vars: Environment variables of the worker, set before it imports anything; or a function of the actor's
            index that returns them, as for the actors of an `ActorPool`.
        crash_dir: Directory for crash bundles, which ``envactors replay`` runs again; None for none.

    Raises:
        TypeError: ``factory`` is neither a callable nor a string, ``env_vars`` is not a mapping of strings, or another
            option is of another class.
        SerializationError: ``factory`` or an argument cannot be pickled, or contains code of a version of
            Python that is not the worker's.
        ValueError: There is no such backend, ``factory`` is a string of another form, ``deadlines`` is a number that is
            not above 0, or ``env_vars`` has names or values that no environment can have.
    """
    name = next_name() if name is None else name
    if args:
        factory = functools.partial(as_callable(factory, f"actor {name!r}"), *args)
    return make_actor(
        [factory],
        name=name,
        first=0,
        backend=backend,
        deadlines=deadlines,
        restart=restart,
        env_vars=env_vars,
        crash_dir=crash_dir,
    )


def next_name() -> str:
    """Return a name for an actor that was given none."""
    return f"actor-{next(_numbers)}"


def make_actor(
    factories: list[Factory],
    *,
    name: str,
    first: int,
    backend: str | Backend,
    deadlines: Deadlines | float,
    restart: RestartPolicy,
    env_vars: EnvVars,
    crash_dir: CrashDir = None,
    has_journal: bool = False,
    seed_episodes: bool = False,
    snapshot: SnapshotPolicy | None = None,
    lock: ChangeLock | None = None,
    **settings: Any,
) -> ActorHandle:
    """Make an actor of several envs.

    Args:
        factories: One factory per env.
        name: Name of the actor.
        first: The index of the first env.
        backend: As for `spawn`.
        deadlines: As for `spawn`.
        restart: As for `spawn`.
        env_vars: As for `spawn`.
        crash_dir: As for `spawn`.
        has_journal: Whether workers compute checksums over observations.
        seed_episodes: Whether the infos of resets contain their seeds.
        snapshot: How to save and restore the states of the envs; None if that is not used.
        lock: A lock that it shares with other actors; None for its own.
        **settings: Further settings of the `ActorConfig`.
    """
    check_kind("name", name, str)
    check_kind("restart", restart, RestartPolicy)
    who = f"actor {name!r}"
    pickled = [pickle_argument(f"the factory of {who}", as_callable(one, who), actor=name) for one in factories]
    functions = None if snapshot is None else pickle_argument(repr(snapshot), (snapshot.get, snapshot.set), actor=name)
    resolved = backends.resolve(backend)
    is_inline = resolved.traits.is_inline
    variables = as_env_vars(env_vars, first)
    if variables and not resolved.traits.can_kill:
        raise ValueError(f"env_vars for {name!r}: {resolved!r} shares the caller's environment. Leave env_vars out.")
    registrations: tuple[list[bytes], list[bytes]] = ([], []) if is_inline else registry.collect()
    start = Start(name, first, pickled, registrations, None, has_journal, levels_of_loggers(), seed_episodes, functions)
    if any(map(has_code, [*pickled, functions or b""])) and not resolved.loads_code(variables):
        raise SerializationError(
            f"the factories or snapshot functions of {who} are pickled by value, as code of "
            f"{sys.implementation.cache_tag}, which workers of {resolved!r} do not run: put them into a module that "
            "workers can import, and name a factory as 'module:callable'",
            actor=name,
        )
    wanted = as_deadlines(deadlines)
    enforced = wanted if resolved.traits.can_kill else Deadlines(start=None, close=wanted.close, slow=wanted.slow)
    crashes = None if crash_dir is None else CrashReporter(crash_dir, start, variables, enforced, is_inline=is_inline)
    config = ActorConfig(
        name=name,
        backend=resolved,
        start=start,
        deadlines=enforced,
        restart=restart,
        env_vars=variables,
        crashes=crashes,
        lock=lock or ChangeLock(),
        **settings,
    )
    actor: ActorBase = InlineActor(config) if is_inline else Actor(config)
    if first == 0:  # the other actors of a vector have the same settings
        actor.warn_of_deadlines(wanted.call, wanted.step, wanted.reset, wanted.policy)
    handle: ActorHandle = ActorHandle(actor, Lifeline(actor))
    try:
        actor.join_and_start()
    except BaseException:
        actor.abandon()  # as long as the user keeps the exception, its traceback keeps the handle
        raise
    return handle
