"""What makes an env: a callable, or a string that says where the worker finds one."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

# A callable without arguments, or "module:callable", which only the worker imports.
Factory: TypeAlias = Callable[[], Any] | str


class NamedFactory:
    """The callable that a string stands for; unpickling one imports it, and returns the callable itself."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return import_factory, tuple(self._name.split(":"))

    def __call__(self, *args: Any) -> Any:
        return import_factory(*self._name.split(":"))(*args)


def import_factory(module: str, name: str) -> Callable[..., Any]:
    """Import a callable.

    Raises:
        ImportError: The module cannot be imported.
        AttributeError: The module has no such attribute.
        TypeError: It cannot be called.
    """
    found: Any = operator.attrgetter(name)(importlib.import_module(module))
    if not callable(found):
        raise TypeError(f"'{module}:{name}' is {found!r}: expected a callable")
    return found  # type: ignore[no-any-return] # just checked


def as_callable(factory: Callable[..., Any] | str, whose: str) -> Callable[..., Any]:
    """Check a factory, and return one that pickles.

    Args:
        factory: The factory.
        whose: For the error, such as ``"actor 'env-0'"``.

    Raises:
        TypeError: It is neither a callable nor a string.
        ValueError: It is a string of another form than ``"module:callable"``.
    """
    if callable(factory):
        return factory
    text = f"the factory of {whose} is {factory!r}: expected a callable without arguments, or 'module:callable'"
    if not isinstance(factory, str):
        raise TypeError(text)
    module, _, name = factory.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(text)
    return NamedFactory(factory)
