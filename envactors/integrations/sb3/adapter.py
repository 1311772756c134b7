"""The adapter around an env of stable-baselines3 in its worker. It imports no framework."""

from __future__ import annotations

import sys
from typing import Any

from envactors.integrations.adapter import EnvAdapter


class StableBaselinesEnvAdapter(EnvAdapter):
    """An env with the semantics of stable-baselines3."""

    def envactors_set(self, name: str, value: Any) -> None:
        """Set an attribute on the outermost wrapper, as stable-baselines3 does."""
        setattr(self._env, name, value)

    def envactors_has(self, name: str) -> bool:
        """Return whether the env or a wrapped env has an attribute. Its value does not need to be picklable."""
        if hasattr(self._env, name):
            return True
        try:
            self._env.get_wrapper_attr(name)
        except AttributeError:
            return False
        return True

    def envactors_is_wrapped(self, module: str, qualname: str) -> bool:
        """Return whether one of the Gymnasium wrappers around the env is an instance of a class.

        The caller passes the class by name, since unpickling it would import its module, and perhaps torch, in the
        worker.
        """
        gymnasium = sys.modules.get("gymnasium")
        env = self._env
        while gymnasium is not None and isinstance(env, gymnasium.Wrapper):
            if any((base.__module__, base.__qualname__) == (module, qualname) for base in type(env).__mro__):
                return True
            env = env.env
        return False
