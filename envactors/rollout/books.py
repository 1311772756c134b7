"""The interface through which rollouts read and update the state of their vector."""

from __future__ import annotations

from typing import Any, Protocol

from envactors.actor.future import ActorFuture
from envactors.mailbox.specs import Spec


class Books(Protocol):
    """Counts of steps and episodes, and the last result of each env, as the vector keeps them."""

    def check_steppable(self) -> None:
        """Check that every env can step.

        Raises:
            VectorInputError: An env needs a reset first.
        """

    def make_future(self, index: int) -> ActorFuture:
        """Return a future for a step that an env finishes in its row."""

    def record(self, index: int, over: bytes, resets: bytes) -> None:
        """Record consecutive steps and resets of an env.

        Args:
            index: Index of the env.
            over: Whether each transition ended an episode, 0 or 1.
            resets: Whether each transition was a reset, 0 or 1.
        """

    @property
    def observation_spec(self) -> Spec | None:
        """Spec of one env's observation; None if the envs have no observation space and were never reset."""

    def keep(self, index: int, obs: Any, reward: Any, *, terminated: bool, truncated: bool) -> None:
        """Store the last result of an env, which is not in its row."""

    def last_obs(self, index: int) -> Any:
        """Return the last observation of an env."""

    def starts(self, index: int) -> bool:
        """Return whether the last observation of an env is the first of its episode."""
