"""The env of simulated sessions: it knows who uses it, and finds calls that run in the wrong process."""

from __future__ import annotations

from typing import ClassVar

from simulation.envs import Misbehaving
from simulation.world import Killed, Violation


class SessionEnv(Misbehaving):
    """An env of one session at a time, which misbehaves.

    Attributes:
        crashed: The processes that have crashed, or are about to.
    """

    crashed: ClassVar[set[int]] = set()
    # Whether the process of an env may be used again after a reset.
    may_reset: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._user: object = None
        self._act()

    def note(self, user: object, token: int) -> int:
        """Return the token."""
        if self._user is None:
            self._user = user
        elif self._user != user:
            self._complain(f"runs a call of {user}, and was used by {self._user}")
        self._act()
        return token

    def reset(self) -> None:
        """Forget the user."""
        if not self.may_reset:
            self._complain("is reset, and should have been replaced")
        self._user = None
        self._act()

    def close(self) -> None:
        """Close it, or fail to."""
        self._act()

    def _act(self) -> None:
        process = self._process
        try:
            self._misbehave()
        except Killed:
            self.crashed.add(process.number)
            raise
        if process.fiber.stores_left is not None:
            self.crashed.add(process.number)

    def _complain(self, what: str) -> None:
        self.world.errors.append(Violation(f"the env in process {self._process.number} {what}"))
