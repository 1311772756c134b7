"""The base class of the adapters that drop-ins wrap around an env in its worker, and factories of adapters.

Adapters import no framework, which keeps workers small. The prefix ``envactors_`` keeps the methods of an adapter from
hiding those of the env. An adapter defines ``envactors_set`` if its framework sets attributes in another way than
Gymnasium's wrappers do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from envactors.mailbox.factory import Factory, as_callable, as_factories
from envactors.mailbox.specs import ArraySpec, Spec
from envactors.options import SnapshotPolicy

# A space for values of any kind, which are pickled.
ANY: Final = ArraySpec((), np.dtype(object))


class EnvAdapter:
    """Forwards every attribute and call to an env; subclasses add what their framework needs.

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
    """Return a snapshot policy whose functions receive the env without the adapter around it."""
    get, put = functools.partial(_call_inner, policy.get), functools.partial(_call_inner, policy.set)
    return SnapshotPolicy(get, put, policy.every)


def _call_inner(function: Callable[..., Any], env: Any, *args: Any) -> Any:
    return function(vars(env)["_env"] if isinstance(env, EnvAdapter) else env, *args)


def adapted(adapter: Callable[..., Any], factory: Factory, *args: Any) -> Callable[[], Any]:
    """Return a factory that wraps an adapter around the env of another factory.

    Raises:
        TypeError: The factory is neither a callable nor a string.
        ValueError: The factory is a string that does not have the form ``"module:callable"``.
    """
    return functools.partial(adapter, as_callable(factory, "an env"), *args)


def adapter_factories(adapter: Callable[..., Any], env_fns: Iterable[Factory], *args: Any) -> list[Any]:
    """Return a factory of adapters, which get ``args`` too, for each env factory.

    Equal env factories give the same object, since standbys can only replace workers with the same factory.

    Raises:
        TypeError: ``env_fns`` is not iterable, or an element is neither a callable nor a string.
        ValueError: An element is a string that does not have the form ``"module:callable"``.
    """
    made: dict[int, Any] = {}
    return [
        made.setdefault(id(factory), adapted(adapter, factory, *args)) for factory in as_factories(env_fns, "env_fns")
    ]


def exact_check(spec: Spec) -> Callable[[Any], bool]:
    """Return a function that returns whether a value would come out of a row of this spec as it is."""
    if isinstance(spec, ArraySpec):
        shape, dtype = spec.shape, spec.dtype
        if not spec.batchable:
            return lambda _: True
        if shape:
            return lambda value: type(value) is np.ndarray and value.dtype == dtype and value.shape == shape
        number = type(dtype.type().item())  # arrays of these have the same dtype
        numbers = (dtype.type, number) if np.asarray(number()).dtype == dtype else (dtype.type,)
        return lambda value: type(value) in numbers
    container: Any = type(spec)
    keys: Any = spec.keys() if isinstance(spec, dict) else range(len(spec))
    parts = [(key, exact_check(spec[key])) for key in keys]

    def fits(value: Any) -> bool:
        if type(value) is not container or (value.keys() != keys if container is dict else len(value) != len(keys)):
            return False
        return False not in [fits_part(value[key]) for key, fits_part in parts]

    return fits
