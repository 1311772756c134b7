"""Adapters that drop-ins put around an env in its worker. They import no framework, to keep workers small.

The prefix ``envactors_`` keeps a method from hiding one of the env. ``envactors_set`` writes an attribute for
frameworks that do so in another way than Gymnasium's wrappers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from envactors.errors import VectorInputError
from envactors.mailbox.factory import Factory, as_callable, as_factories
from envactors.worker.context import current_actor


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


class StableBaselinesEnvAdapter(EnvAdapter):
    """Env with the semantics of stable-baselines3."""

    def envactors_set(self, name: str, value: Any) -> None:
        """Write an attribute of the outermost wrapper, as stable-baselines3 does."""
        setattr(self._env, name, value)

    def envactors_has(self, name: str) -> bool:
        """Return whether the env or a wrapped env has an attribute, whose value need not be picklable."""
        if hasattr(self._env, name):
            return True
        try:
            self._env.get_wrapper_attr(name)
        except AttributeError:
            return False
        return True

    def envactors_is_wrapped(self, module: str, qualname: str) -> bool:
        """Return whether one of the Gymnasium wrappers around the env is an instance of a class.

        The class is passed by name, since unpickling it would import its module, and perhaps torch, in the worker.
        """
        gymnasium = sys.modules.get("gymnasium")
        env = self._env
        while gymnasium is not None and isinstance(env, gymnasium.Wrapper):
            if any((base.__module__, base.__qualname__) == (module, qualname) for base in type(env).__mro__):
                return True
            env = env.env
        return False


class TianshouEnvAdapter(EnvAdapter):
    """Env with the semantics of tianshou.

    Args:
        factory: Makes the env.
        reports_seeds: True to add the seed of each reset to its info.
    """

    def __init__(self, factory: Callable[[], Any], reports_seeds: bool = False) -> None:
        super().__init__(factory)
        self._reports_seeds = reports_seeds
        context = current_actor()
        self._needs_reset = context is not None and context.incarnation > 0

    def reset(self, **kwargs: Any) -> Any:
        self._needs_reset = False
        result = self._env.reset(**kwargs)
        if self._reports_seeds:
            obs, info = result
            result = obs, {**info, "episode_seed": kwargs["seed"]}
        return result

    def step(self, action: Any) -> Any:
        if self._needs_reset:
            raise VectorInputError(
                "step of an env whose process was replaced, with its episode: it needs a reset first"
            )
        return self._env.step(action)

    def envactors_set(self, name: str, value: Any) -> None:
        """Write an attribute of the innermost env, as tianshou does."""
        setattr(self._env.unwrapped, name, value)

    def render(self, **kwargs: Any) -> Any:
        return self._env.render(**kwargs) if hasattr(self._env, "render") else None

    def envactors_seed(self, seed: int | None) -> Any:
        """Call the env's own ``seed``; if it has none, seed the action space and reset the env with the seed."""
        if hasattr(self._env, "seed"):
            return self._env.seed(seed)
        self._env.action_space.seed(seed=seed)
        self.reset(seed=seed)
        return None


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
