"""Which method of an env a call is for: its name, or a function as in ``actor.call(Counter.add, 1)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def method_name(method: str | Callable[..., Any]) -> str:
    """Return the name of a method that was given by its name, or as the env's class has it.

    Raises:
        AttributeError: The name begins with an underscore.
        TypeError: It is something else, such as a lambda, a function of a module, or a method of an object.
    """
    if isinstance(method, str):
        return public_name(method)
    owner, _, name = getattr(method, "__qualname__", "").rpartition(".")
    is_bound = getattr(method, "__self__", None) is not None
    is_of_class = owner and not owner.endswith("<locals>") and name == getattr(method, "__name__", None)
    if not callable(method) or isinstance(method, type) or is_bound or not is_of_class:
        raise TypeError(
            f"cannot call {method!r} in an actor: expected a method of the env's class, as in "
            "actor.call(Counter.add, 1), or the name of a method, as in actor.call('add', 1)"
        )
    return public_name(name)


def public_name(name: str) -> str:
    """Return the name of a method or an attribute.

    Raises:
        AttributeError: It begins with an underscore, or is not a string.
    """
    if not isinstance(name, str) or name.startswith("_"):
        raise AttributeError(f"{name!r}: expected the name of a public attribute; others are never sent to an env")
    return name
