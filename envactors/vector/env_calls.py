"""Methods of `VectorEnv` that call methods of envs, and read and write their attributes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from envactors.actor.future import results_of
from envactors.actor.handle import ActorView
from envactors.vector import inputs


class EnvCalls:
    """Base class of `VectorEnv` with calls and attributes of envs."""

    _handles: list[ActorView]

    def __len__(self) -> int:
        return len(self._handles)

    def _select(self, env_ids: Iterable[int] | None) -> list[int]:
        """Check that the vector is open, and return the ids of some envs, or of all for None."""
        raise NotImplementedError

    def __getitem__(self, env_id: int) -> ActorView:
        """Return the handle of an env."""
        return self._handles[operator.index(env_id)]

    def call(self, method: str, /, *args: Any, env_ids: Iterable[int] | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of envs in parallel.

        Args:
            method: Name of the method.
            *args: Arguments of the method.
            env_ids: Ids of the envs, in this order; None for all.
            **kwargs: Keyword arguments of the method.

        Returns:
            One value per env.

        Raises:
            Exception: Raised by the first env that failed, once all envs have replied.
        """
        return results_of([self[env_id].call(method, *args, **kwargs) for env_id in self._select(env_ids)])

    def get_attr(self, name: str, env_ids: Iterable[int] | None = None) -> list[Any]:
        """Return an attribute of envs, one value per env."""
        return results_of([self[env_id].get(name) for env_id in self._select(env_ids)])

    def set_attr(self, name: str, values: Any, env_ids: Iterable[int] | None = None) -> None:
        """Set an attribute of envs.

        Args:
            name: Name of the attribute.
            values: A list or tuple with one value per env, or one value for all.
            env_ids: Ids of the envs, in this order; None for all.

        Raises:
            VectorInputError: ``values`` does not have one value per env.
        """
        ids = self._select(env_ids)
        each = inputs.one_each(values, len(ids), "values", f"set_attr({name!r}): ")
        results_of([self[env_id].set(name, value) for env_id, value in zip(ids, each, strict=True)])

    def render(self) -> list[Any]:
        """Return the frames that the envs' ``render`` methods return."""
        return self.call("render")
