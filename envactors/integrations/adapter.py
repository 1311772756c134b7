"""The base class of the adapters that drop-ins wrap around an env in its worker.

Adapters import no framework, which keeps workers small. The prefix ``envactors_`` keeps a method of an adapter from
hiding one of the env. ``envactors_set`` sets an attribute for frameworks that do not do so as Gymnasium's wrappers do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from envactors.mailbox.factory import Factory, as_callable, as_factories
from envactors.options import SnapshotPolicy


class EnvAdapter:
    """Forwards everything to an env; subclasses add what their framework needs.

    Args:
        factory: Makes the env.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._env = factory()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, action: Any) -> Any:
        return self._env.step(action)


def for_inner_env(policy: SnapshotPolicy) -> SnapshotPolicy:
    """Return a snapshot policy whose functions get the env itself where there is an adapter around it."""
    get, put = functools.partial(_call_inner, policy.get), functools.partial(_call_inner, policy.set)
    return SnapshotPolicy(get, put, policy.every)


def _call_inner(function: Callable[..., Any], env: Any, *args: Any) -> Any:
    return function(vars(env)["_env"] if isinstance(env, EnvAdapter) else env, *args)


def adapted(adapter: Callable[..., EnvAdapter], factory: Factory, *args: Any) -> Callable[[], EnvAdapter]:
    """Return a factory of an adapter around what another factory makes.

    Raises:
        TypeError: The factory is neither a callable nor a string.
        ValueError: It is a string of another form than ``"module:callable"``.
    """
    return functools.partial(adapter, as_callable(factory, "an env"), *args)


def adapter_factories(adapter: Callable[..., EnvAdapter], env_fns: Iterable[Factory]) -> list[Any]:
    """Return one factory of adapters per env factory; the same factory gives the same object, which standbys need.

    Raises:
        TypeError: ``env_fns`` or one of its elements is something else.
        ValueError: An element is a string of another form than ``"module:callable"``.
    """
    made: dict[int, Any] = {}
    return [made.setdefault(id(factory), adapted(adapter, factory)) for factory in as_factories(env_fns, "env_fns")]
