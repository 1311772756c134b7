"""The methods of a vector env that run its policy in the workers."""

from __future__ import annotations

import abc
import concurrent.futures
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from envactors.actor.awaiting import AwaitableFuture
from envactors.errors import VectorInputError, VectorTimeoutError
from envactors.options import check_timeout
from envactors.rollout.evaluation import Evaluator
from envactors.rollout.results import Evaluation, Rollout
from envactors.rollout.rollouts import Rollouts


class RolloutMethods(abc.ABC):
    """What `envactors.VectorEnv` inherits."""

    _rollouts: Rollouts | None = None

    @abc.abstractmethod
    def _make_rollouts(self) -> Rollouts:
        """Make the object that runs rollouts; called once."""

    @abc.abstractmethod
    def _check_open(self) -> None:
        """Raise if the vector is closed.

        Raises:
            ActorClosedError: It is.
        """

    @abc.abstractmethod
    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        env_ids: Iterable[int] | None = None,
        timeout: float | None = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset envs; see `envactors.VectorEnv.reset`."""

    def set_policy(self, make_policy: Callable[[], Any], seed: int = 0) -> None:
        """Have each worker make a policy, which `rollout` calls there; a new process makes it again.

        Args:
            make_policy: Called without arguments in each worker; returns the policy. That is called as
                ``policy(obs, context)``: ``obs`` are the observations of the worker's envs as `step` returns them,
                read-only, and ``context`` is a `PolicyContext`. It returns the actions, as `step` takes them, or
                ``(actions, extras)`` with a dict of arrays that have the envs along axis 0. If it has a method
                ``load``, that is called with the parameters of a rollout.
            seed: What the random numbers of ``context.rng`` follow from.

        Raises:
            TypeError: ``make_policy`` cannot be called.
            ValueError: The seed is not an int >= 0.
            AlreadyPendingError: Rollouts are in flight.
            Exception: What ``make_policy`` has raised.
        """
        self._check_open()
        if self._rollouts is None:
            self._rollouts = self._make_rollouts()
        self._rollouts.set_policy(make_policy, seed)

    def rollout(self, steps: int, parameters: Any = None, timeout: float | None = None) -> Rollout:
        """Run this many steps of every env with the policy of `set_policy`, in the workers, and wait.

        Args:
            steps: How many steps.
            parameters: What the policy is to load first: any nest of arrays, which are copied once and reach it as
                read-only views of shared memory, or another object that can be pickled. None for what it has.
            timeout: How long to wait, in seconds.

        Returns:
            What all envs did. Its arrays are the shared memory that the workers have written to. That memory is used
            again once nobody refers to the arrays; beyond two results that are kept, results are copies.

        Raises:
            VectorInputError: No policy was set, ``steps`` is not an int >= 1, or an env needs a reset first.
            AlreadyPendingError: Two rollouts are in flight, or results are pending.
            VectorTimeoutError: The timeout passed. The rollout continues; ``.future`` will hold it.
            VectorStepError: Some envs failed; ``.batch`` is a `Rollout` of full shape.
            TypeError: Parameters were given, and the policy has no ``load``.
            Exception: What the policy has raised.
        """
        check_timeout(timeout, "rollout(timeout=...)")
        future = self.rollout_async(steps, parameters)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                return future.result()  # it has ended meanwhile, or the error is its own
            raise VectorTimeoutError(
                f"rollout waited {timeout} s for {steps} steps, which continue: wait for .future",
                env_ids=[],
                timeout=timeout,
                future=future,
            ) from None

    def rollout_async(self, steps: int, parameters: Any = None) -> AwaitableFuture[Rollout]:
        """Start a rollout, and return its future; two may be in flight. Arguments and errors as for `rollout`."""
        return self._start_rollout(steps, parameters, each=False)[0]

    def rollout_each(self, steps: int, parameters: Any = None) -> list[AwaitableFuture[Rollout]]:
        """Start a rollout, and return a future per actor, of the `Rollout` of its envs; no actor waits for another."""
        return self._start_rollout(steps, parameters, each=True)

    def evaluate(self, episodes: int, parameters: Any = None) -> Evaluation:
        """Play this many whole episodes with the policy of `set_policy`.

        Which episodes count does not depend on their lengths: of ``n`` envs, env ``k % n`` plays episode ``k``.
        Its seed follows from that of the policy. All envs are reset first, and need a reset afterwards.

        Args:
            episodes: How many episodes.
            parameters: What the policy is to load first; as for `rollout`.

        Raises:
            VectorInputError: No policy was set, or ``episodes`` is not an int >= 1.
            AlreadyPendingError: Rollouts are in flight, or results are pending.
            VectorStepError: An episode failed three times: one whose env is lost or raises is repeated.
            TypeError: Parameters were given, and the policy has no ``load``.
            Exception: What the policy has raised.
        """
        rollouts = self._check_policy("evaluate")
        evaluator = Evaluator(rollouts, self.reset, episodes)
        rollouts.check_idle()
        try:
            return evaluator.run(parameters)
        finally:
            rollouts.end_episodes()

    def _start_rollout(self, steps: int, parameters: Any, *, each: bool) -> list[AwaitableFuture[Rollout]]:
        return self._check_policy("rollout").start(steps, parameters, each=each)

    def _check_policy(self, what: str) -> Rollouts:
        self._check_open()
        if self._rollouts is None or not self._rollouts.has_policy:
            raise VectorInputError(f"{what} needs a policy: call set_policy first")
        return self._rollouts
