"""The policy of one actor, and the context that it receives besides the observations."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# A generator, or a function that returns the generator of a step.
Rng: TypeAlias = "np.random.Generator | Callable[[int], np.random.Generator]"


class PolicyContext:
    """Describes the step that a policy chooses actions for.

    Args:
        env_ids: Ids of the envs whose observations the policy gets; int64, shape (n,).
        starts: Whether each observation is the first of its episode; bool, shape (n,).
        step: Step within the rollout, from 0.
        rng: Generator, or a function that returns the generator of a step.

    Attributes:
        env_ids: As above.
        starts: As above.
        step: As above.
    """

    __slots__ = ("_rng", "env_ids", "starts", "step")

    def __init__(self, env_ids: npt.NDArray[np.int64], starts: npt.NDArray[np.bool_], step: int, rng: Rng) -> None:
        self.env_ids: npt.NDArray[np.int64] = env_ids
        self.starts: npt.NDArray[np.bool_] = starts
        self.step: int = step
        self._rng = rng

    @property
    def rng(self) -> np.random.Generator:
        """Generator that draws the same numbers whenever this step of this rollout is repeated."""
        if not isinstance(self._rng, np.random.Generator):
            self._rng = self._rng(self.step)
        return self._rng

    def __repr__(self) -> str:
        return f"PolicyContext(env_ids={self.env_ids!r}, starts={self.starts!r}, step={self.step})"


class ActorPolicy:
    """The policy of one actor. To make it and to call its methods runs code of users.

    Args:
        make_policy: Function that makes the policy, pickled.
        seed: Seed of its random numbers.
        envs: Indices of the actor's envs.

    Attributes:
        envs: As above.
        can_load: Whether it can load parameters.
        version: Version of the parameters that it loaded last; 0 for none.
        rollout_index: Index of the current rollout, on which the random numbers depend.
    """

    def __init__(self, make_policy: bytes, seed: int, envs: range) -> None:
        self.envs = envs
        self._policy = pickle.loads(make_policy)()
        self.can_load: bool = hasattr(self._policy, "load")
        self.version: int = 0
        self.rollout_index: int = 0
        self._seed = seed
        self._env_ids = np.arange(envs.start, envs.stop, dtype=np.int64)

    def load(self, version: int, pickled: bytes, arrays: Sequence[bytes | memoryview]) -> None:
        """Have the policy load parameters.

        Args:
            version: Their version.
            pickled: The parameters without the contents of their arrays.
            arrays: These contents, which the policy views, read-only.
        """
        self._policy.load(pickle.loads(pickled, buffers=arrays))
        self.version = version

    def choose(self, step: int, obs: Any, starts: npt.NDArray[np.bool_]) -> Any:
        """Return the output of the policy for one step."""
        return self._policy(obs, PolicyContext(self._env_ids, starts, step, self._generator_of))

    def _generator_of(self, step: int) -> np.random.Generator:
        """Return the generator of one step.

        It takes about 7 us to make, which only steps of policies that use ``context.rng`` pay.
        """
        counter = [0, step, self.rollout_index, self.envs.start]
        return np.random.Generator(np.random.Philox(key=self._seed, counter=counter))
