"""Check the options of drop-ins, and start vectors and actors with them.

Each drop-in lists the options of `VectorOptions` that do not apply to its library, with the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from envactors.actor.change import ChangeLock
from envactors.actor.handle import ActorHandle
from envactors.actor.spawn import make_actor
from envactors.backends import resolve
from envactors.backends.process import ProcessBackend
from envactors.errors import VectorInputError
from envactors.integrations.adapter import for_inner_env
from envactors.mailbox.factory import Factory
from envactors.options import SnapshotPolicy, is_int
from envactors.process.starting import DEFAULT, StartMethod
from envactors.vector.inputs import check_flags, group_envs, limit_running
from envactors.vector.options import CommonOptions, VectorOptions, VectorSettings, check_names
from envactors.vector_env import VectorEnv

if TYPE_CHECKING:
    from typing_extensions import Unpack

V = TypeVar("V", bound=VectorEnv)


def check_options(whose: str, given: CommonOptions, refused: Mapping[str, str]) -> None:
    """Raise unless every option exists and applies to the library.

    Args:
        whose: Class that takes the options, for the error.
        given: The options.
        refused: The options that do not apply to the library, with the reason for each.

    Raises:
        TypeError: An option does not exist.
        VectorInputError: An option does not apply to the library.
    """
    check_names(whose, given)
    for name, value in given.items():
        if name in refused:
            raise VectorInputError(f"{whose} does not take {name}={value!r}: {refused[name]}")


def check_one_backend(name: str, start_method: str | None, given: CommonOptions) -> None:
    """Raise if both a start method and a backend are given, since a backend has its own start method.

    Args:
        name: The library's name for the start method.
        start_method: The start method, or None.
        given: The options.

    Raises:
        ValueError: Both are given.
    """
    if start_method is not None and "backend" in given:
        raise ValueError(f"got both {name}={start_method!r} and backend={given['backend']!r}: expected only one")


def as_start_method(context: str | None) -> StartMethod:
    """Return the start method for the name of a start method in another library.

    All of their names stand for the default; ``"loky"`` is only ours.

    Raises:
        ValueError: No start method has this name.
    """
    if context in (None, "fork", "spawn", "forkserver"):
        return DEFAULT
    if context == "loky":
        return "loky"
    raise ValueError(f"cannot find context for {context!r}: expected 'fork', 'spawn', 'forkserver', or 'loky'")


def preloading(*modules: str, start_method: StartMethod = DEFAULT) -> ProcessBackend:
    """Return a backend whose helper, if it forks workers, imports these modules once for all workers."""
    return ProcessBackend(start_method, preload=modules if start_method == "forkserver" else ())


def make_vector(
    kind: type[V],
    whose: str,
    factories: Sequence[Factory],
    given: CommonOptions,
    refused: Mapping[str, str],
    **defaults: Unpack[VectorOptions],
) -> V:
    """Create the vector behind a drop-in.

    Args:
        kind: Class of the vector.
        whose: Class of the drop-in, for errors.
        factories: One per env.
        given: The user's options.
        refused: The options that do not apply to the library, with the reason for each.
        **defaults: The options that the drop-in itself sets.

    Raises:
        TypeError, VectorInputError: As for `check_options`.
        Exception: As for `VectorEnv`.
    """
    check_options(whose, given, refused)
    merged = cast("VectorOptions", {**defaults, **given})
    if isinstance(policy := merged.get("snapshot"), SnapshotPolicy):
        merged["snapshot"] = for_inner_env(policy)
    return kind(factories, **merged)


def launch_each(
    whose: str, factories: Sequence[Any], names: Sequence[str], given: CommonOptions, refused: Mapping[str, str]
) -> list[ActorHandle]:
    """Start one actor per env, for a library that calls each env separately.

    Args:
        whose: Class of the drop-in, for errors.
        factories: One per env.
        names: Name of each actor.
        given: The user's options.
        refused: The options that do not apply to the library, with the reason for each.

    Raises:
        TypeError, VectorInputError: As for `check_options`.
    """
    check_options(whose, given, refused)
    settings = VectorSettings(**given)
    check_flags(seed_episodes=settings.seed_episodes)
    backend = resolve(settings.backend)
    groups, variables = group_envs(list(factories), 1, settings.env_vars, backend)
    lock, permits = ChangeLock(), limit_running(settings.max_running, len(groups), backend)
    return [
        make_actor(
            group,
            name=settings.actor_name(name),
            first=index,
            backend=backend,
            deadlines=settings.deadlines,
            restart=settings.restart,
            env_vars=env_vars,
            crash_dir=settings.crash_dir,
            lock=lock,
            permits=permits,
        )
        for index, (group, name, env_vars) in enumerate(zip(groups, names, variables, strict=True))
    ]


def check_seed(seed: Any) -> int | None:
    """Return a single seed as an int of Python, since adding to a narrow one of NumPy would overflow.

    Raises:
        VectorInputError: The seed is neither an int >= 0 nor None.
    """
    if seed is not None and not is_int(seed, 0):
        raise VectorInputError(f"seed is {seed!r}: expected an int >= 0, or None")
    return None if seed is None else operator.index(seed)
