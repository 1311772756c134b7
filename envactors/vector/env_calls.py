"""Calls and attributes of the envs of a vector: what `VectorEnv` has beside steps and resets."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from envactors.actor.handle import ActorView
from envactors.vector import inputs
from envactors.vector.build import results_of


class EnvCalls:
    """Calls methods of envs side by side, and reads and writes their attributes; the base of `VectorEnv`."""

    _handles: list[ActorView]

    def __len__(self) -> int:
        return len(self._handles)

    def _select(self, env_ids: Iterable[int] | None) -> list[int]:
        """Return the ids of some envs, None for all, once it is known that the vector is open."""
        raise NotImplementedError

    def __getitem__(self, env_id: int) -> ActorView:
        """Return the handle of an env."""
        return self._handles[operator.index(env_id)]

    def call(self, method: str, /, *args: Any, env_ids: Iterable[int] | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of envs side by side.

        Args:
            method: The method's name.
            *args: Its arguments.
            env_ids: Which envs, in this order; None for all.
            **kwargs: Its keyword arguments.

        Returns:
            One value per env.

        Raises:
            Exception: What the first env that failed raised, after all have answered.
        """
        return results_of([self[env_id].call(method, *args, **kwargs) for env_id in self._select(env_ids)])

    def get_attr(self, name: str, env_ids: Iterable[int] | None = None) -> list[Any]:
        """Read an attribute of envs; return one value per env."""
        return results_of([self[env_id].get(name) for env_id in self._select(env_ids)])

    def set_attr(self, name: str, values: Any, env_ids: Iterable[int] | None = None) -> None:
        """Write an attribute of envs.

        Args:
            name: The attribute's name.
            values: A list or tuple has one value per env; anything else goes to all.
            env_ids: Which envs, in this order; None for all.

        Raises:
            VectorInputError: A list or tuple of another length.
        """
        ids = self._select(env_ids)
        each = inputs.one_each(values, len(ids), "values", f"set_attr({name!r}): ")
        results_of([self[env_id].set(name, value) for env_id, value in zip(ids, each, strict=True)])

    def render(self) -> list[Any]:
        """Return the frames of all envs, as their ``render`` returns them."""
        return self.call("render")
