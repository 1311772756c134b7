"""Gymnasium's vector API over actors: `ActorVectorEnv` takes the place of ``gymnasium.vector.AsyncVectorEnv``."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Sequence
from typing import Any

try:
    import gymnasium
except ImportError as error:
    raise ImportError(
        "envactors.integrations.gymnasium needs Gymnasium, which is not installed: pip install 'envactors[gymnasium]'"
    ) from error

from gymnasium.envs.registration import EnvSpec, VectorizeMode

from envactors.integrations.gymnasium_vector import ActorVectorEnv

__all__ = ["ActorVectorEnv", "make_vec", "register"]


def make_vec(
    id: str | EnvSpec,  # noqa: A002 # Gymnasium's name
    num_envs: int = 1,
    vectorization_mode: VectorizeMode | str | None = None,
    vector_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] | None = None,
    **kwargs: Any,
) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """Gymnasium's ``make_vec`` with actors for processes.

    Args:
        id: A registered env's id, or a spec.
        num_envs: How many envs.
        vectorization_mode: None and ``"async"`` make an `ActorVectorEnv`; anything else is left to Gymnasium.
        vector_kwargs: Arguments of `ActorVectorEnv`.
        wrappers: Applied to each env, in this order, in the workers.
        **kwargs: Arguments of each env.

    Returns:
        The vector env; its ``spec`` makes it again.
    """
    found = gymnasium.envs.registration._find_spec(id) if isinstance(id, str) else id
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
    # By its id where there is one: then it is the worker that knows what that means.
    what = id if isinstance(id, str) else spec

    # A local function travels by value: a worker has no use for this module.
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


def register(id: str, **vector_kwargs: Any) -> None:  # noqa: A002 # Gymnasium's name
    """Has ``gymnasium.make_vec(id, n)`` make an `ActorVectorEnv`.

    It sets the ``vector_entry_point`` of an env that is registered, in place of any that it has.

    Args:
        id: The env's id.
        **vector_kwargs: Arguments of `ActorVectorEnv`.

    Raises:
        gymnasium.error.Error: There is no such env.
    """

    # A local function travels by value with the registry: a worker has no use for this module.
    def entry_point(num_envs: int = 1, **kwargs: Any) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        from envactors.integrations.gymnasium import make_vec

        return make_vec(id, num_envs, "async", vector_kwargs, **kwargs)

    gymnasium.spec(id).vector_entry_point = entry_point
