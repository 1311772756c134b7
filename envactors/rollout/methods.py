"""The methods of a vector env that run its policy in the workers."""

from __future__ import annotations

import concurrent.futures
import operator
from collections.abc import Callable
from typing import Any

from envactors.actor.future import ActorFuture
from envactors.errors import VectorInputError, VectorTimeoutError
from envactors.options import check_timeout, is_int
from envactors.rollout.base import Rollouts
from envactors.rollout.evaluation import Evaluator
from envactors.rollout.results import Evaluation, Rollout
from envactors.rollout.rollouts import WorkerRollouts
from envactors.rollout.serial import SerialRollouts
from envactors.vector.base import Engine
from envactors.vector.engine import RowEngine
from envactors.vector.serial import SerialEngine


class RolloutMethods:
    """Base class of `envactors.VectorEnv` with the methods for rollouts."""

    _check_open: Callable[[], None]
    _engine: Engine
    _has_observation_space: bool
    _memory: Any
    _rollouts: Rollouts | None = None
    num_envs: int
    reset: Callable[..., tuple[Any, list[dict[str, Any]]]]
    reward_spec: Any

    def set_policy(self, make_policy: Callable[[], Any], seed: int = 0) -> None:
        """Make a policy in each worker, for `rollout` to call there.

        Each new process makes the policy again.

        Args:
            make_policy: Called without arguments in each worker; returns the policy. The worker calls it as
                ``policy(obs, context)``: ``obs`` contains read-only observations of the worker's envs, batched as
                `step` returns them, and ``context`` is a `PolicyContext`. The policy returns actions, as `step` takes
                them, or ``(actions, extras)``, where ``extras`` is a dict of arrays with the envs along axis 0. If the
                policy has a method ``load``, the worker calls it with the parameters of a rollout.
            seed: Seed of the random numbers that ``context.rng`` draws.

        Raises:
            TypeError: ``make_policy`` is not callable.
            ValueError: ``seed`` is not an int >= 0.
            VectorInputError: The envs have no observation space.
            AlreadyPendingError: Rollouts are in flight.
            Exception: Raised by ``make_policy``.
        """
        self._check_open()
        if not callable(make_policy):
            raise TypeError(f"make_policy is {make_policy!r}: expected a function without arguments")
        if not is_int(seed, 0):
            raise ValueError(f"seed is {seed!r}: expected an int >= 0")
        if not self._has_observation_space:
            raise VectorInputError("rollouts need envs with an observation space: give the envs one")
        if self._rollouts is None:
            engine = self._engine
            if isinstance(engine, SerialEngine):
                self._rollouts = SerialRollouts(engine)
            else:
                assert isinstance(engine, RowEngine), "there are two"
                self._rollouts = WorkerRollouts(engine, self._memory)
        self._rollouts.set_policy(make_policy, operator.index(seed))

    def rollout(self, steps: int, parameters: Any = None, timeout: float | None = None) -> Rollout:
        """Step every env with the policy of `set_policy` in the workers, and wait for the result.

        Args:
            steps: Number of steps of each env.
            parameters: Parameters that the policy loads first: any nest of arrays, which are copied once and reach the
                policy as read-only views of shared memory, or another object that can be pickled. None keeps the
                current parameters.
            timeout: Longest time to wait, in seconds; None waits until the rollout has ended.

        Returns:
            The steps of all envs. With ``copy=False`` its arrays are views of the shared memory, valid until the next
            rollout but one begins.

        Raises:
            VectorInputError: No policy is set, ``steps`` is not an int >= 1, or an env needs a reset first.
            AlreadyPendingError: Two rollouts are in flight, or results are pending.
            VectorTimeoutError: The timeout passed. The rollout continues, and ``.future`` resolves to its result.
            VectorStepError: Some envs failed; ``.batch`` is a `Rollout` of full shape.
            TypeError: ``parameters`` were given to a policy without a method ``load``.
            Exception: Raised by the policy.
        """
        check_timeout(timeout, "rollout(timeout=...)")
        future = self.rollout_async(steps, parameters)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                return future.result()  # it has just ended, or the policy has raised this error
            raise VectorTimeoutError(
                f"rollout waited {timeout} s for {steps} steps, which continue: wait for .future",
                env_ids=[],
                timeout=timeout,
                future=future,
            ) from None

    def rollout_async(self, steps: int, parameters: Any = None) -> ActorFuture[Rollout]:
        """Start a rollout and return its future. Two may be in flight. Arguments and errors are those of `rollout`."""
        return self._start_rollout(steps, parameters, each=False)[0]

    def rollout_each(self, steps: int, parameters: Any = None) -> list[ActorFuture[Rollout]]:
        """Start a rollout and return one future per actor, which resolves to the `Rollout` of the actor's envs.

        No actor waits for another. Arguments and errors are those of `rollout`.
        """
        return self._start_rollout(steps, parameters, each=True)

    def evaluate(self, episodes: int, parameters: Any = None) -> Evaluation:
        """Play whole episodes with the policy of `set_policy`.

        Which episodes count does not depend on their lengths: of ``n`` envs, env ``k % n`` plays episode ``k``, with a
        seed that is derived from the seed of the policy. All envs are reset first, and need a reset afterwards. An
        episode whose env raises or crashes is repeated.

        Args:
            episodes: Number of episodes.
            parameters: Parameters that the policy loads first, as for `rollout`.

        Raises:
            VectorInputError: No policy is set, or ``episodes`` is not an int >= 1.
            AlreadyPendingError: Rollouts are in flight, or results are pending.
            VectorStepError: An episode failed three times.
            TypeError: ``parameters`` were given to a policy without a method ``load``.
            Exception: Raised by the policy.
        """
        rollouts = self._check_policy("evaluate")
        shape = self.num_envs, *getattr(self.reward_spec, "shape", ())
        evaluator = Evaluator(rollouts, self.reset, episodes, shape)
        rollouts.check_idle()
        try:
            return evaluator.run(parameters)
        finally:
            rollouts.end_episodes()

    def _start_rollout(self, steps: int, parameters: Any, *, each: bool) -> list[ActorFuture[Rollout]]:
        rollouts = self._check_policy("rollout")
        if not is_int(steps):
            raise VectorInputError(f"steps is {steps!r}: expected an int >= 1")
        return rollouts.start(operator.index(steps), parameters, each=each)  # a small int of NumPy would overflow

    def _check_policy(self, caller: str) -> Rollouts:
        self._check_open()
        if self._rollouts is None or not self._rollouts.has_policy:
            raise VectorInputError(f"{caller} needs a policy: call set_policy first")
        return self._rollouts
