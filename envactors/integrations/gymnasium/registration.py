"""`make_vec` and `register`: create a vector env from the id of an env, as Gymnasium does."""

from __future__ import annotations

import copy as copying
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, VectorizeMode, find_highest_version, get_env_id, parse_env_id

from envactors.integrations.gymnasium.vector_env import ActorVectorEnv


def make_vec(
    id: str | EnvSpec,  # noqa: A002 # Gymnasium's name
    num_envs: int = 1,
    vectorization_mode: VectorizeMode | str | None = None,
    vector_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] | None = None,
    **kwargs: Any,
) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """Create a vector env like Gymnasium's ``make_vec``, with actors as workers.

    Args:
        id: Id of a registered env, or a spec.
        num_envs: Number of envs.
        vectorization_mode: None and ``"async"`` create an `ActorVectorEnv`; Gymnasium handles any other mode.
        vector_kwargs: Arguments of `ActorVectorEnv`.
        wrappers: Wrappers that the workers apply to each env, in this order.
        **kwargs: Arguments of each env.

    Returns:
        The vector env. Its ``spec`` can create it again.
    """
    found = _find_spec(id) if isinstance(id, str) else id
    own = dict(found.kwargs)
    num_envs = own.pop("num_envs", num_envs)
    vectorization_mode = own.pop("vectorization_mode", vectorization_mode)
    vector_kwargs = own.pop("vector_kwargs", vector_kwargs) or {}
    wrappers = own.pop("wrappers", wrappers) or []
    own.update(kwargs)
    if vectorization_mode is not None and VectorizeMode(vectorization_mode) is not VectorizeMode.ASYNC:
        return gymnasium.make_vec(id, num_envs, vectorization_mode, vector_kwargs, wrappers, **kwargs)
    spec = copying.deepcopy(found)
    spec.kwargs = {}
    # If there is an id, pass the id rather than the spec, so that the worker resolves it.
    what = id if isinstance(id, str) else spec

    # A local function is pickled by value, so the worker does not need to import this module.
    def make() -> gymnasium.Env[Any, Any]:
        env = gymnasium.make(what, **own)
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    envs = ActorVectorEnv([make] * num_envs, **vector_kwargs)
    spec.kwargs = {**own, "vectorization_mode": VectorizeMode.ASYNC.value}
    optional = {"num_envs": num_envs if num_envs != 1 else None, "vector_kwargs": vector_kwargs, "wrappers": wrappers}
    spec.kwargs.update({key: value for key, value in optional.items() if value})
    envs.spec = spec
    return envs


def register(
    id: str | Iterable[str] = (),  # noqa: A002 # Gymnasium's name
    *,
    namespace: str | None = None,
    **vector_kwargs: Any,
) -> None:
    """Make ``gymnasium.make_vec(id, n)`` create an `ActorVectorEnv`.

    This replaces the ``vector_entry_point`` of registered envs. It applies if ``vectorization_mode`` is omitted or
    ``"vector_entry_point"``; ``"sync"`` and ``"async"`` remain Gymnasium's own. An error leaves all envs unchanged.

    Args:
        id: The id of an env, or several ids.
        namespace: The name of a namespace such as ``"ALE"``, to register all of its envs except those that exist only
            as vector envs.
        **vector_kwargs: Arguments of `ActorVectorEnv`.

    Raises:
        gymnasium.error.Error: An id is not registered, or the namespace has no envs.
        ValueError: There is neither an id nor a namespace, or an env exists only as a vector env.
    """
    specs = [gymnasium.spec(one) for one in ([id] if isinstance(id, str) else id)]
    for spec in specs:
        if spec.entry_point is None:
            raise ValueError(f"{spec.id!r} exists only as a vector env: expected an env that gymnasium.make can make")
    if namespace is not None:
        specs += _envs_of(namespace)
    if not specs:
        raise ValueError("register() was called without an env: expected an id, several ids, or namespace='...'")
    for spec in specs:
        spec.vector_entry_point = _entry_point(spec.id, vector_kwargs)


def _envs_of(namespace: str) -> list[EnvSpec]:
    """Return the specs of a namespace's envs.

    Raises:
        gymnasium.error.NamespaceNotFound: The namespace has no envs.
    """
    specs = [spec for spec in gymnasium.registry.values() if spec.namespace == namespace and spec.entry_point]
    if not specs:
        known = sorted({spec.namespace for spec in gymnasium.registry.values() if spec.namespace})
        raise gymnasium.error.NamespaceNotFound(
            f"the namespace {namespace!r} has no registered envs: expected one of {known}. Import the package that "
            "registers its envs first"
        )
    return specs


def _entry_point(env_id: str, vector_kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return a vector entry point for one env. Gymnasium does not pass the id, so each env needs a separate one."""

    # The registry pickles a local function by value, so a worker does not need to import this module.
    def entry_point(num_envs: int = 1, **kwargs: Any) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        from envactors.integrations.gymnasium.registration import make_vec

        return make_vec(env_id, num_envs, "async", vector_kwargs, **kwargs)

    return entry_point


def _find_spec(env_id: str) -> EnvSpec:
    """Return the spec of an env as ``gymnasium.make`` does.

    Import the module of an id ``module:id``. Without a version in the id, choose the latest.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    namespace, bare_name, version = parse_env_id(name)
    if version is None and (latest := find_highest_version(namespace, bare_name)) is not None:
        name = get_env_id(namespace, bare_name, latest)
    return gymnasium.spec(name)
