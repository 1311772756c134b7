"""What drop-ins run in the worker, around its env; imports no framework, so that workers stay as small as their envs.

Names begin with ``envactors_`` where the env's own methods must not be hidden. ``envactors_set`` is what writes an
attribute where a framework does not write it as Gymnasium's wrappers do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from envactors.errors import VectorInputError
from envactors.worker.context import current_actor


class Guest:
    """An env, seen through; subclasses add what their framework asks of it.

    Args:
        factory: Makes the env.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._env = factory()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, action: Any) -> Any:
        return self._env.step(action)


class StableBaselinesGuest(Guest):
    """An env as stable-baselines3 treats it."""

    def envactors_set(self, name: str, value: Any) -> None:
        """Writes to the outermost wrapper, as there."""
        setattr(self._env, name, value)

    def envactors_has(self, name: str) -> bool:
        """Whether the env, or one that it wraps, has an attribute; its value need not pickle."""
        if hasattr(self._env, name):
            return True
        try:
            self._env.get_wrapper_attr(name)
        except AttributeError:
            return False
        return True

    def envactors_is_wrapped(self, module: str, qualname: str) -> bool:
        """Whether one of Gymnasium's wrappers around the env is of a class, or derived from it.

        The class comes by its name: to send it would have the worker import its module, and with it perhaps torch.
        """
        gymnasium = sys.modules.get("gymnasium")
        env = self._env
        while gymnasium is not None and isinstance(env, gymnasium.Wrapper):
            if any((base.__module__, base.__qualname__) == (module, qualname) for base in type(env).__mro__):
                return True
            env = env.env
        return False


class TianshouGuest(Guest):
    """An env as tianshou treats it."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        super().__init__(factory)
        context = current_actor()
        self._needs_reset = context is not None and context.incarnation > 0

    def reset(self, **kwargs: Any) -> Any:
        self._needs_reset = False
        return self._env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        if self._needs_reset:
            raise VectorInputError(
                "step of an env whose process was replaced, with its episode: it needs a reset first"
            )
        return self._env.step(action)

    def envactors_set(self, name: str, value: Any) -> None:
        """Writes to the innermost env, as there."""
        setattr(self._env.unwrapped, name, value)

    def render(self, **kwargs: Any) -> Any:
        return self._env.render(**kwargs) if hasattr(self._env, "render") else None

    def envactors_seed(self, seed: int | None) -> Any:
        """Seeds by the env's own ``seed``, or where it has none its actions and, by a reset, the env."""
        if hasattr(self._env, "seed"):
            return self._env.seed(seed)
        self._env.action_space.seed(seed=seed)
        self.reset(seed=seed)
        return None


def guests(guest: Callable[[Callable[[], Any]], Guest], factories: Iterable[Callable[[], Any]]) -> list[Any]:
    """Makes factories of guests; one and the same factory stays one, as standbys need it."""
    made: dict[int, Any] = {}
    return [made.setdefault(id(factory), functools.partial(guest, factory)) for factory in list(factories)]
