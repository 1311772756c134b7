"""The handles of envs that share a process."""

from __future__ import annotations

from typing import NoReturn

from envactors.actor.handle import ActorView, Caller
from envactors.errors import VectorInputError


class EnvCaller(Caller):
    """Calls one env of several that share a process; its episodes are the facade's."""

    __slots__ = ()

    _refused = frozenset(("step", "reset"))

    def _refuse_method(self, method: str) -> NoReturn:
        raise VectorInputError(
            f"{method} through the handle of an env that shares its process: the facade keeps account of its "
            f"episodes; use envs.{method}(..., env_ids=[i])"
        )


class EnvHandle(EnvCaller, ActorView):
    """An env of several that share a process: its methods and attributes, and what concerns it alone."""

    __slots__ = ()
    _caller_type = EnvCaller

    def renew(self) -> NoReturn:
        """Raise: it would take the other envs of the process with it."""
        self._refuse("renew()")

    def kill(self, *, restart: bool = False) -> NoReturn:
        """Raise: it would take the other envs of the process with it."""
        self._refuse(f"kill(restart={restart})")

    def close(self, timeout: float | None = None) -> NoReturn:
        """Raise: it would take the other envs of the process with it."""
        self._refuse(f"close({timeout})")

    def _refuse(self, call: str) -> NoReturn:
        raise VectorInputError(
            f"{call} through the handle of env {self._supervisor.config.first_index + self._env}, which shares its "
            f"process with other envs: use envs.actors[j].{call} for all of {self.name!r}, or make the vector with "
            "envs_per_actor=1"
        )
