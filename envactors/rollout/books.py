"""What rollouts need of the vector whose envs they step."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from envactors.actor.future import ActorFuture
from envactors.mailbox.specs import Spec


class Books(Protocol):
    """The vector's books: what its envs have done, and their last results."""

    def check_steppable(self) -> None:
        """Refuse to step an env that needs a reset.

        Raises:
            VectorInputError: There is one.
        """

    def make_future(self, index: int) -> ActorFuture:
        """Return a future for an env's step that is finished in its row."""

    def record(self, index: int, over: npt.NDArray[np.bool_], resets: npt.NDArray[np.bool_]) -> None:
        """Record consecutive transitions of an env; those that were neither steps nor resets are left out."""

    @property
    def observation_spec(self) -> Spec | None:
        """One env's observation; None if the envs have no space, and were never reset."""

    def keep(self, index: int, obs: Any, reward: Any, *, terminated: bool, truncated: bool) -> None:
        """Keep an env's last result, which is in no row."""

    def last_obs(self, index: int) -> Any:
        """Return the last observation of an env."""

    def starts(self, index: int) -> bool:
        """Return whether that observation is the first one of its episode."""
