"""Factories, which make envs: callables, or strings that name a callable which only the worker imports.

Factories are checked here; they are pickled by `envactors.mailbox.pickling`.
"""

from __future__ import annotations

import importlib
import operator
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

# A callable without arguments, or "module:callable", which only the worker imports.
Factory: TypeAlias = Callable[[], Any] | str


class NamedFactory:
    """The callable that a string names; unpickling one imports that callable and returns it."""

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


def make_gymnasium(env_id: str) -> Any:
    """Make an env of Gymnasium."""
    import gymnasium

    return gymnasium.make(env_id)


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
    text = f"the factory of {whose} is {reprlib.repr(factory)}: expected a callable without arguments, or "
    if not isinstance(factory, str):
        raise TypeError(f"{text}a string 'module:callable'")
    if not names_callable(factory):
        raise ValueError(f"{text}a string 'module:callable'. For an id of Gymnasium write {_maker_of(factory)}")
    return NamedFactory(factory)


def as_factories(factories: Iterable[Factory], what: str = "factories") -> list[Factory]:
    """Return factories, one per env, as a list.

    Args:
        factories: The factories.
        what: The name of the argument, for the error.

    Raises:
        TypeError: It is a single factory, or cannot be iterated over.
    """
    if isinstance(factories, Iterable) and not isinstance(factories, (str, bytes)):
        return list(factories)
    example = "[make] * 8"
    if isinstance(factories, str):
        example = f"[{factories!r}] * 8" if names_callable(factories) else f"[{_maker_of(factories)}] * 8"
        if what == "factories":  # of `VectorEnv` itself
            example += f", or call envactors.make_vec({factories!r}, 8)"
    raise TypeError(
        f"{what} is {reprlib.repr(factories)}: expected a list with one callable (or string 'module:callable') per "
        f"env. For 8 envs write {example}"
    )


def names_callable(text: str) -> bool:
    """Return whether a string has the form ``"module:callable"``."""
    module, _, name = text.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


def _maker_of(env_id: str) -> str:
    return f"lambda: gymnasium.make({env_id!r})"
