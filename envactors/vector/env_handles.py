"""Handles of envs that share a process."""

from __future__ import annotations

from typing import NoReturn

from envactors.actor.handle import ActorView
from envactors.errors import VectorInputError


class EnvHandle(ActorView):
    """Handle of one of several envs that share a process: its methods and attributes, but not the process."""

    __slots__ = ()

    def renew(self) -> NoReturn:
        """Raise, since this would end the other envs of the process."""
        self._refuse("renew()")

    def kill(self, *, restart: bool = False) -> NoReturn:
        """Raise, since this would end the other envs of the process."""
        self._refuse(f"kill(restart={restart})")

    def close(self, timeout: float | None = None) -> NoReturn:
        """Raise, since this would end the other envs of the process."""
        self._refuse(f"close({timeout})")

    def _refuse(self, call: str) -> NoReturn:
        raise VectorInputError(
            f"cannot call {call} through the handle of env {self._supervisor.config.first_index + self._env}, which "
            f"shares its process with other envs: use envs.actors[j].{call} for all of {self.name!r}, "
            "or make the vector with envs_per_actor=1"
        )
