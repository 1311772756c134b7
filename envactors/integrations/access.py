"""Access to a vector for drop-ins, beyond its public methods.

Drop-ins translate names and types. Whatever else they need of a `VectorEnv` is here, so that none of them uses its
private attributes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, MethodCaller, public_name
from envactors.actor.job import Activity
from envactors.errors import AlreadyPendingError, NothingPendingError, VectorInputError
from envactors.mailbox import messages
from envactors.mailbox.messages import Kind
from envactors.mailbox.pickling import safe_repr
from envactors.mailbox.specs import ArraySpec
from envactors.options import deadline_after
from envactors.vector.inputs import seeds_for
from envactors.vector.options import Autoreset
from envactors.vector.results import Batch, Delivered, StepResults, batch_of
from envactors.vector_env import EnvFuture, VectorEnv

_T = TypeVar("_T")


def call_or_get(caller: MethodCaller, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActorFuture[Any]:
    """Call a method of the env, or read an attribute that is not a method; for drop-ins whose ``call`` does either."""
    message = messages.Call(caller._position, public_name(name), args, kwargs, or_get=True)
    return caller._submit(Kind.CALL, message, name)


def call_on(caller: MethodCaller, method: str, args: tuple[Any, ...], **call_fields: Any) -> ActorFuture[Any]:
    """Call a method of the env; ``call_fields`` are attributes of the `envactors.actor.calls.Call`."""
    return caller._submit(Kind.CALL, messages.Call(caller._position, method, args, {}), method, **call_fields)


def discard_process(handle: ActorHandle, incarnation: int, method: str, error: Exception) -> None:
    """Replace a process whose env is not fit for use any more; this counts as a restart.

    Args:
        handle: The actor.
        incarnation: The process; another one is left alone.
        method: The method in which the env has raised.
        error: The exception.
    """
    actor = handle._actor
    activity = Activity(method, actor.config.first_index)
    reason = actor.errors.env_raised(activity, incarnation, actor.pid, error, f"{method} raised {safe_repr(error)}")
    actor.run_as_change(actor.replace_after_raise, incarnation, lambda: reason)


def warn_of_interrupted(stacklevel: int = 6) -> None:
    """Warn that the results of an interrupted step are discarded; ``stacklevel`` is as for `warnings.warn`."""
    warnings.warn(
        "the last step was interrupted, so its results are discarded. The envs continue from where they are; reset "
        "them for new episodes",
        stacklevel=stacklevel,
    )


class VectorAccess:
    """Starts requests and collects their results separately, with fewer checks than the public methods.

    Args:
        envs: The vector.
    """

    def __init__(self, envs: VectorEnv) -> None:
        self._envs = envs

    @property
    def autoreset(self) -> Autoreset:
        """What happens at the end of an episode."""
        return self._envs._engine.episodes.autoreset.name

    def resets_next(self) -> npt.NDArray[np.bool_]:
        """Return whether the next step of each env resets it, by autoreset; bool, shape (n,)."""
        return np.array(self._envs._engine.episodes.awaits_autoreset, np.bool_)

    def busy(self) -> list[int]:
        """Return the envs whose results were not delivered.

        Raises:
            ActorClosedError: The vector is closed, or belongs to another process.
        """
        self._envs._check_open()
        return self._envs._engine.busy()

    def receivable(self) -> list[int]:
        """Return the envs whose results `gather` can deliver, perhaps after a wait."""
        return self._envs._engine.receivable()

    def disable_reset_checks(self) -> None:
        """Allow steps of envs that were never reset or whose episode is over, and leave it to the envs to refuse them.

        For drop-ins of vector envs that do not check this. An env that has crashed still needs a reset.
        """
        self._envs._engine.episodes.disable_reset_checks()

    def discard(self, env_ids: list[int] | None = None) -> None:
        """Wait for whatever some envs run, or all for None, and drop results that were not delivered.

        The futures of `VectorEnv.submit` still get theirs. After this, the envs can be reset.
        """
        self._envs._engine.make_idle(self._envs._select(env_ids), None, None)

    def start_reset(
        self, env_ids: list[int], seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]
    ) -> None:
        """Start resets, whose results `gather` delivers.

        Raises:
            VectorInputError: A seed is neither an int >= 0 nor None.
        """
        self._envs._engine.start_resets(self._envs._select(env_ids), seeds_for(seeds, env_ids), options)

    def reset_again(self, env_ids: list[int]) -> Batch:
        """Reset envs whose reset by autoreset has failed; wait for them and return their results."""
        none = [None] * len(env_ids)
        self.start_reset(env_ids, none, none)
        return self.gather(env_ids, None, "step")

    def submit_reset(self, env_id: int, seed: int | None, options: dict[str, Any] | None) -> EnvFuture:
        """Start a reset and return the future of its result."""
        seeds = seeds_for([seed], [env_id])
        future = self._envs._make_future(env_id)
        self._envs._engine.start_resets(self._envs._select([env_id]), seeds, [options], [future])
        return future

    def start_as_given(
        self, env_ids: list[int] | None, actions: Sequence[Any], *, streams: bool, futures: Sequence[EnvFuture] = ()
    ) -> None:
        """Start steps with one action per env, which is neither checked nor converted, unless it is an int.

        Args:
            env_ids: Ids of the envs; None for all.
            actions: The actions; those that fit the action spec exactly travel in rows.
            streams: Whether `VectorEnv.recv` or futures return each result as soon as it is there.
            futures: Futures that get the results; without any, `gather` delivers them.
        """
        spec = self._envs.action_spec
        is_array = isinstance(spec, ArraySpec) and spec.batchable
        try:
            batch = np.asarray(actions) if is_array and isinstance(actions[0], (np.ndarray, np.generic, int)) else None
        except ValueError:  # arrays of different shapes
            batch = None
        fits = batch is not None and batch.dtype == spec.dtype and batch.shape[1:] == spec.shape
        given = batch if fits else list(actions)
        envs = self._envs._select(env_ids)
        self._envs._engine.start_steps(envs, given, streams=streams, futures=futures, check_actions=fits)

    def submit_step(self, env_id: int, action: Any) -> EnvFuture:
        """Start a step as `start_as_given` does, and return the future of the result."""
        future = self._envs._make_future(env_id)
        self.start_as_given([env_id], [action], streams=True, futures=[future])
        return future

    def start_steps(self, env_ids: list[int] | None, actions: Any) -> None:
        """Start steps of some envs, or of all for None, whose results `gather` delivers."""
        self._envs._engine.start_steps(self._envs._select(env_ids), actions, streams=False)

    def start_step(self, actions: Any) -> None:
        """Start a step of all envs, whose results `finish_step` delivers, also if the last one was interrupted."""
        self.retry_interrupted(lambda: self.start_steps(None, actions))

    def step(self, actions: Any, env_ids: list[int] | None = None) -> StepResults:
        """Step envs as `VectorEnv.step` does, also if the last step was interrupted."""
        return self.retry_interrupted(lambda: self._envs.step(actions, env_ids), env_ids)

    def step_as_given(self, actions: Sequence[Any], env_ids: list[int] | None = None) -> StepResults:
        """Step envs with actions as `start_as_given` takes them."""
        self.retry_interrupted(lambda: self.start_as_given(env_ids, actions, streams=False), env_ids)
        return self.gather_results(env_ids, None, "step")

    def retry_interrupted(self, step: Callable[[], _T], env_ids: list[int] | None = None) -> _T:
        """Run or start a step of some envs, or of all for None, also if their last one was interrupted."""
        try:
            return step()
        except AlreadyPendingError:
            self.discard_interrupted(env_ids)
        except VectorInputError:
            if not self._find_interrupted():
                raise
            self.discard_interrupted(env_ids)
        return step()

    def discard_interrupted(self, env_ids: list[int] | None = None) -> None:
        """Discard the results of a step that Ctrl-C or another exception has interrupted, with a warning.

        Envs whose episodes have ended, since the exception came in the middle of a change of their state, are reset.
        """
        warn_of_interrupted()
        self.discard(env_ids)
        if lost := self._find_interrupted():
            self._envs.reset(env_ids=lost)

    def _find_interrupted(self) -> list[int]:
        episodes = self._envs._engine.episodes
        return [index for index in range(self._envs.num_envs) if episodes.was_interrupted(index)]

    def finish_step(self, timeout: float | None = None) -> StepResults:
        """Wait for a step of all envs and return its results as `VectorEnv.step` does.

        Args:
            timeout: Longest time to wait, in seconds; None for no limit.

        Raises:
            NothingPendingError: No step was started, or another thread has taken its results.
            VectorTimeoutError: The timeout passed; nothing is lost.
            VectorStepError: Some envs failed.
        """
        self._envs._check_open()
        if not self._envs._engine.receivable():
            raise NothingPendingError("step_wait has nothing to wait for: start a step first")
        return self.gather_results(None, timeout, "step_wait")

    def start_unchecked_steps(self, env_ids: list[int], actions: Sequence[Any]) -> None:
        """Start steps with one unchecked and unconverted action per env. `gather` delivers their results."""
        envs, start = self._envs._select(env_ids), self._envs._engine.start_steps
        self.retry_interrupted(lambda: start(envs, actions, streams=True, check_actions=False), env_ids)

    def start_calls(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ActorFuture[Any]]:
        """Start to call a method of each env, or to read an attribute that is not a method.

        Returns:
            One future per env.
        """
        return [call_or_get(handle, name, args, kwargs) for handle in self._envs._handles]

    def gather(self, env_ids: list[int] | None, timeout: float | None, caller: str) -> Batch:
        """Wait for results, and deliver them as `VectorEnv.recv` does; see `_gather`."""
        return batch_of(self._envs._select(env_ids).ids, self._gather(env_ids, timeout, caller))

    def gather_results(self, env_ids: list[int] | None, timeout: float | None, caller: str) -> StepResults:
        """Wait for results, and deliver them as `VectorEnv.step` does; see `_gather`."""
        return self._gather(env_ids, timeout, caller)[:5]

    def _gather(self, env_ids: list[int] | None, timeout: float | None, caller: str) -> Delivered:
        """Wait for results, and deliver them.

        Args:
            env_ids: Ids of the envs; None for all.
            timeout: Longest time to wait, in seconds; None for no limit.
            caller: Name of the user's method, for errors.

        Raises:
            NothingPendingError: No request of an env is pending.
            VectorTimeoutError: The timeout passed; nothing is lost.
            VectorStepError: Some envs failed.
        """
        envs, engine = self._envs._select(env_ids), self._envs._engine
        deadline = None if timeout is None else deadline_after(timeout, f"{caller}(timeout=...)")
        if not self._envs._statistics.is_timing:
            return engine.wait_for_results(envs, timeout, deadline, caller)
        method = caller.removesuffix("_wait")
        with self._envs._statistics.waiting(method, envs.is_all and method == "step"):
            return engine.wait_for_results(envs, timeout, deadline, caller)
