"""The handle of one env of several that share a process."""

from __future__ import annotations

from typing import NoReturn

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, Caller
from envactors.errors import VectorInputError


class EnvCaller(Caller):
    """Calls one env of several that share a process; its episodes are the facade's."""

    __slots__ = ()

    def _refuse(self, method: str) -> None:
        if method in ("step", "reset"):
            raise VectorInputError(
                f"{method} through the handle of an env that shares its process: the facade keeps account of its "
                f"episodes; use envs.{method}(..., env_ids=[i])"
            )


class EnvHandle(EnvCaller, ActorHandle):
    """An env of several that share a process: its methods and attributes, and what concerns it alone."""

    __slots__ = ()
    _caller_type = EnvCaller

    def renew(self) -> ActorFuture:
        """Refused: it would take the other envs of the process with it."""
        self._refuse_for_all("renew()")

    def kill(self, *, restart: bool = False) -> None:
        """Refused: it would take the other envs of the process with it."""
        self._refuse_for_all(f"kill(restart={restart})")

    def close(self, timeout: float | None = None) -> None:
        """Refused: it would take the other envs of the process with it."""
        self._refuse_for_all(f"close({timeout})")

    def _refuse_for_all(self, call: str) -> NoReturn:
        start = self._supervisor.plan.start
        raise VectorInputError(
            f"{call} through the handle of env {start.first + self._env}, which shares its process with other envs: "
            f"use envs.actors[j].{call} for all of {self.name!r}, or make the vector with envs_per_actor=1"
        )
