"""The interface of the rollouts of a vector, and what the engines for workers and for in-process envs share."""

from __future__ import annotations

import abc
from typing import Any, TypeAlias

import numpy as np

from envactors.actor.future import ActorFuture
from envactors.errors import AlreadyPendingError, VectorInputError
from envactors.mailbox.pickling import pickle_argument
from envactors.rollout.memory import pickle_parameters
from envactors.rollout.results import Rollout
from envactors.rollout.trajectory import TrajectoryLayout
from envactors.vector.base import Engine

RolloutFutures: TypeAlias = "list[ActorFuture[Rollout]]"


class RolloutEngine(abc.ABC):
    """Runs the rollouts of a vector. Call `set_policy` first.

    Until it has succeeded, nothing else is called, except by the repair of an actor after an interrupt.

    Args:
        engine: Steps the envs.
    """

    # Layout of the last rollout that has ended, with the specs that the output of its policy has shown. `set_policy`
    # makes the first one, without any steps.
    _layout: TrajectoryLayout

    def __init__(self, engine: Engine) -> None:
        # The index of the next rollout since the policy was set.
        self._next_index = 0
        # The seed of the policy.
        self._seed = 0
        self._policy_can_load = False
        self._engine = engine

    def set_policy(self, make_policy: Any, seed: int) -> None:
        """Make the policy of each actor; see `VectorEnv.set_policy`."""
        self.check_free()
        if self._engine.observation_spec is None:
            raise VectorInputError("rollouts need envs with an observation space: give them one, or reset them first")
        if isinstance(self._engine.reward_spec, (dict, tuple)):
            raise VectorInputError("rollouts need envs whose reward is one number or array, not a dict or tuple")
        self._policy_can_load = self._make_policies(pickle_argument("make_policy", make_policy), seed)
        self._seed = seed
        self._next_index = 0

    @abc.abstractmethod
    def _make_policies(self, make_policy: bytes, seed: int) -> bool:
        """Have each actor unpickle the function and make its policy; return whether all can load parameters."""

    def _pickle_parameters(self, parameters: Any) -> tuple[bytes, list[memoryview]] | None:
        """Return the pickled parameters without the contents of their arrays, and these contents; None for None."""
        if parameters is None:
            return None
        if not self._policy_can_load:
            raise TypeError("parameters for a policy that has no method load(parameters): add it, or leave them out")
        pickled: tuple[bytes, list[memoryview]] = pickle_argument("the parameters", parameters, pickle_parameters)
        return pickled

    @abc.abstractmethod
    def start(self, steps: int, parameters: Any, *, each: bool = False) -> RolloutFutures:
        """Start a rollout. The futures are done at its end, or now if the envs run in-process.

        Args:
            steps: Number of steps.
            parameters: Parameters that the policy loads first; None keeps the current ones.
            each: True to return one future per actor.

        Raises:
            AlreadyPendingError: Two rollouts are in flight, or results are pending.
            VectorInputError: An env needs a reset first.
            VectorEnvError: There is too little memory.
            ActorClosedError: An actor is closed.
            TypeError: The policy has no method ``load``.
            SerializationError: The parameters cannot be pickled.
        """

    def check_free(self) -> None:
        """Raise `AlreadyPendingError` if a result is pending. Engines of workers also do if a rollout is in flight."""
        if busy := self._engine.busy():
            raise AlreadyPendingError(f"the envs {busy} have results pending: receive them, or reset")

    # Evaluations -----------------------------------------------------------------------------------------

    def seed_of_episode(self, number: int) -> int:
        """Return the seed of an episode of `evaluate`."""
        return int(np.random.SeedSequence(self._seed, spawn_key=(1, number)).generate_state(1)[0])

    def require_resets(self) -> None:
        """Require a reset of every env before its next step."""
        for index in self._engine.all_envs.ids:
            self._engine.episodes.end_without_result(index)
