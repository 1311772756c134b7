"""Checks and conversions of the arguments of a vector, which take place before anything is sent."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from envactors.actor.permits import Permits
from envactors.backends.base import Backend
from envactors.errors import VectorInputError
from envactors.mailbox.factory import Factory
from envactors.options import RecyclePolicy, SnapshotPolicy, as_env_vars, is_int
from envactors.vector.options import Autoreset, OnFailure, VectorEnvVars, VectorSettings


def check_flags(**flags: object) -> None:
    """Check that options are bools.

    Raises:
        VectorInputError: An option is not a bool.
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise VectorInputError(f"{name} is {flag!r}: expected True or False")


def check_counts(least: int, **counts: object) -> None:
    """Check that options are ints of at least ``least``.

    Raises:
        VectorInputError: An option is not.
    """
    for name, count in counts.items():
        if not is_int(count, least):
            raise VectorInputError(f"{name} is {count!r}: expected an int >= {least}")


def check_settings(
    settings: VectorSettings, factories: list[Factory], backend: Backend
) -> tuple[list[list[Factory]], Sequence[Mapping[str, str] | None]]:
    """Check the options of a vector; for the results and other errors see `group_envs`.

    Raises:
        VectorInputError: An option is invalid. `limit_running` checks ``max_running``.
    """
    for name, kind in (("autoreset", Autoreset), ("on_failure", OnFailure)):
        if (value := getattr(settings, name)) not in get_args(kind):
            raise VectorInputError(f"{name} is {value!r}: expected one of {get_args(kind)}")
    check_counts(0, max_journal=settings.max_journal, standbys=settings.standbys)
    for name, one in (("name", str), ("recycle", RecyclePolicy), ("snapshot", SnapshotPolicy)):
        if not isinstance(value := getattr(settings, name), (one, type(None))):
            raise VectorInputError(f"{name} is {value!r}: expected a {one.__name__}, or None")
    check_flags(copy=settings.copy, seed_episodes=settings.seed_episodes)
    factories_by_actor, variables = group_envs(factories, settings.envs_per_actor, settings.env_vars, backend)
    check_recycling(settings.recycle, factories_by_actor, backend)
    check_standbys(settings.standbys, factories, variables, backend)
    return factories_by_actor, variables


def group_envs(
    factories: list[Factory], envs_per_actor: int | Literal["auto"], env_vars: VectorEnvVars, backend: Backend
) -> tuple[list[list[Factory]], Sequence[Mapping[str, str] | None]]:
    """Return the factories of each actor, and the environment variables of each actor (or None).

    Raises:
        TypeError: ``env_vars`` is neither a mapping, a sequence, nor a function, or returns no mapping.
        VectorInputError: There are no factories, ``envs_per_actor`` is invalid, or ``env_vars`` does not have one
            mapping per actor.
        ValueError: ``envs_per_actor`` is ``"auto"``, and the number of cores is not known yet.
    """
    if not factories:
        raise VectorInputError("no factories: expected one callable per env, and at least one")
    if envs_per_actor == "auto":
        actors = min(len(factories), backend.count_cores())
        bounds = [-(-len(factories) * actor // actors) for actor in range(actors + 1)]  # the first is a largest one
    elif is_int(envs_per_actor):
        bounds = [*range(0, len(factories), envs_per_actor), len(factories)]
    else:
        raise VectorInputError(f"envs_per_actor is {envs_per_actor!r}: expected an int >= 1, or 'auto'")
    by_actor = [factories[start:end] for start, end in itertools.pairwise(bounds)]
    if not isinstance(env_vars, Sequence) or isinstance(env_vars, str):
        return by_actor, [as_env_vars(env_vars, index) for index in range(len(by_actor))]
    if len(env_vars) != len(by_actor):
        raise VectorInputError(f"env_vars has {len(env_vars)} mappings for {len(by_actor)} actors: expected one each")
    return by_actor, env_vars


def check_recycling(recycle: RecyclePolicy | None, by_actor: Sequence[Sequence[object]], backend: Backend) -> None:
    """Check that recycling is only used with one env per process.

    Raises:
        VectorInputError: An actor has several envs, or the backend has no processes.
    """
    most = max(map(len, by_actor))
    if recycle is not None and (most > 1 or not backend.traits.can_kill):
        raise VectorInputError(
            f"recycle with {most} envs per actor and {backend!r}: expected envs_per_actor=1, so that no other env's "
            "episode is cut off, and a backend with processes"
        )


def check_standbys(
    standbys: int, factories: list[Factory], env_vars: Sequence[Mapping[str, str] | None], backend: Backend
) -> None:
    """Check that a standby can replace the process of any actor.

    Raises:
        VectorInputError: The actors differ, or have no processes.
    """
    if not standbys:
        return
    if not backend.traits.can_kill:
        raise VectorInputError(
            f"standbys={standbys} with {backend!r}, where no process can be lost: expected 0, or backend='process'"
        )
    make, same = factories[0], env_vars[0]
    odd = [f"the factory of env {i} is {one!r}, not {make!r}" for i, one in enumerate(factories) if one is not make]
    odd += [f"the env_vars of actor {i} are {one!r}, not {same!r}" for i, one in enumerate(env_vars) if one != same]
    if odd:
        raise VectorInputError(
            f"standbys={standbys}, and {odd[0]}: expected one and the same object for all ([make] * n, say) and "
            "equal env_vars, since a standby is started before it is known which process it will replace"
        )


def limit_running(max_running: int | None, actors: int, backend: Backend) -> Permits | None:
    """Return the permits that actors share; None if they need none.

    Raises:
        VectorInputError: ``max_running`` is not an int >= 1.
    """
    if max_running is None:
        return None
    check_counts(1, max_running=max_running)
    return None if max_running >= actors or backend.traits.is_inline else Permits(max_running)


def check_env_ids(env_ids: Any, count: int) -> list[int]:
    """Return env ids as ints.

    Raises:
        VectorInputError: ``env_ids`` is not an iterable of ints, an id is out of range, or an id occurs twice.
    """
    is_single = isinstance(env_ids, (str, bytes)) or (isinstance(env_ids, np.ndarray) and not env_ids.ndim)
    if is_single or not isinstance(env_ids, Iterable):
        raise VectorInputError(f"env_ids is {env_ids!r}: expected an iterable of ints, or None for all")
    ids = env_ids.tolist() if isinstance(env_ids, np.ndarray) and env_ids.dtype.kind in "iu" else list(env_ids)
    for place, one in enumerate(ids):
        if type(one) is not int:
            if isinstance(one, (bool, np.bool_)) or not isinstance(one, (int, np.integer)):
                raise VectorInputError(f"env_ids has {one!r}: expected ints from 0 to {count - 1}")
            ids[place] = int(one)
        if not 0 <= one < count:
            raise VectorInputError(f"env_ids has {one}: expected ids from 0 to {count - 1}")
    if len(set(ids)) != len(ids):
        raise VectorInputError(f"env_ids is {ids}: expected each id once")
    return ids


def seeds_for(seed: int | Sequence[int | None] | None, env_ids: Sequence[int]) -> list[int | None]:
    """Return one seed (or None) per env, given the argument of `VectorEnv.reset`.

    Raises:
        VectorInputError: A seed is invalid, or there is not one seed per env.
    """
    if seed is None or is_int(seed, 0):
        return [None if seed is None else operator.index(seed) + env_id for env_id in env_ids]
    is_single = isinstance(seed, (str, bytes)) or (isinstance(seed, np.ndarray) and not seed.ndim)
    if is_single or not isinstance(seed, (Sequence, np.ndarray)):
        raise VectorInputError(f"seed is {seed!r}: expected an int >= 0, a sequence of them, or None")
    seeds = one_each(list(seed), len(env_ids), "seeds")
    for one in seeds:
        if one is not None and not is_int(one, 0):
            raise VectorInputError(f"seed has {one!r}: expected ints >= 0, or None")
    return [None if one is None else operator.index(one) for one in seeds]


def one_each(values: Any, count: int, name: str, prefix: str = "") -> list[Any]:
    """Return one value per env: those of a list or tuple, or the same value for all.

    Args:
        values: The argument of the user.
        count: How many envs there are.
        name: What the values are, for the error.
        prefix: The beginning of the error.

    Raises:
        VectorInputError: A list or tuple does not have one value per env.
    """
    each = list(values) if isinstance(values, (list, tuple)) else [values] * count
    if len(each) != count:
        raise VectorInputError(f"{prefix}{len(each)} {name} for {count} envs: expected one per env")
    return each


def check_limits(min_envs: int | None, max_envs: int | None) -> list[int | None]:
    """Check the limits of `recv`, and return them as ints of Python, since a narrow one of NumPy would overflow.

    Raises:
        VectorInputError: A limit is invalid, or ``max_envs`` is less than ``min_envs``.
    """
    for name, value in (("min_envs", min_envs), ("max_envs", max_envs)):
        if value is not None and not is_int(value, 0):
            raise VectorInputError(f"recv({name}={value!r}): expected an int >= 0, or None")
    if max_envs is not None and min_envs is not None and max_envs < min_envs:
        raise VectorInputError(f"recv(min_envs={min_envs}, max_envs={max_envs}): expected min_envs <= max_envs")
    return [None if value is None else operator.index(value) for value in (min_envs, max_envs)]
