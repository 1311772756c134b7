"""`ActorVectorEnv`: Gymnasium's ``AsyncVectorEnv`` on actors.

It translates spaces, infos, errors, and names between Gymnasium and `envactors.vector_env.VectorEnv`, which does the
work.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import Space, logger
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from envactors.actor.future import ActorFuture, BoundToProcess
from envactors.actor.handle import ActorHandle
from envactors.backends.process import ProcessBackend
from envactors.errors import (
    ActorStartError,
    AlreadyPendingError,
    RestartsExhaustedError,
    SpaceMismatchError,
    VectorInputError,
    VectorStepError,
    raised_by_user_code,
)
from envactors.integrations.access import VectorAccess
from envactors.integrations.gymnasium.arguments import check_worker, checked_limit, checked_mask
from envactors.integrations.gymnasium.batches import Actions, Observations
from envactors.integrations.gymnasium.pending import Finish, Pending, results_of
from envactors.integrations.gymnasium.spaces import agree, check_mode, check_shareable, unequal
from envactors.integrations.options import as_start_method, check_one_backend, make_vector
from envactors.mailbox.factory import Factory, as_factories
from envactors.options import Deadlines
from envactors.vector.inputs import seeds_for
from envactors.vector.options import CommonOptions
from envactors.vector.results import Batch
from envactors.vector_env import VectorEnv

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Flags: TypeAlias = npt.NDArray[np.bool_]
_Steps: TypeAlias = tuple[Any, npt.NDArray[np.float64], _Flags, _Flags, dict[str, Any]]

_AUTORESETS: dict[AutoresetMode, Literal["next_step", "same_step", "disabled"]] = {
    AutoresetMode.NEXT_STEP: "next_step",
    AutoresetMode.SAME_STEP: "same_step",
    AutoresetMode.DISABLED: "disabled",
}

_REFUSED = {"autoreset": "Gymnasium's name for it is autoreset_mode"}

# Methods that `call` rejects, since they would bypass the record of the pending call.
_NOT_CALLED = ("reset", "step", "close")


class ActorVectorEnv(BoundToProcess, gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Gymnasium's ``AsyncVectorEnv`` with each env in an actor; the first nine parameters are those of Gymnasium 1.4.

    The caller receives the exception from an env unchanged, and the env remains usable. Envs are created only in the
    workers, which also report the spaces.

    Args:
        env_fns: One callable per env; called only in the workers.
        shared_memory: True to reject custom spaces, as Gymnasium does. None and False accept them. Values of fixed size
            are transferred through shared memory in any case.
        copy: True to return copies of observations; False to return views, valid until the next step.
        context: Start method: ``"loky"``, or None for the default of `ProcessBackend`, which Gymnasium's names
            (``"fork"``, ``"spawn"``, ``"forkserver"``) stand for, too.
        daemon: Has no effect: workers always end with the caller, and may start child processes.
        worker: Must be None, since Gymnasium's workers need pipes that do not exist here.
        observation_mode: ``"same"`` if all observation spaces are equal, ``"different"`` if they only share shape and
            dtype, or a tuple of the batched and the single space.
        autoreset_mode: When envs reset after the end of an episode.
        max_concurrency: How many envs may step or reset at once; the others wait in the caller. This is
            ``max_running`` of `envactors.VectorEnv`.
        **options: See `envactors.VectorOptions`; ``backend`` excludes ``context``. By default only closing has a
            deadline (5 s).

    Attributes:
        vector: The vector behind this class, with handles of the envs (``vector[i]``), ``stats()``, ``send``, ``recv``.
        actors: The handle of each process.

    Raises:
        RuntimeError: The envs' spaces differ.
        ValueError: An argument is invalid, or a space is custom with ``shared_memory=True``.
        Exception: The exception of the first ``env_fn`` that failed.
    """

    def __init__(
        self,
        env_fns: Sequence[Factory],
        shared_memory: bool | None = None,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        # Until the envs exist: Gymnasium 1.1 closes every object that is open when it is garbage-collected.
        self.closed: bool = True
        check_worker(worker)
        check_one_backend("context", context, options)
        if context is not None:
            options["backend"] = ProcessBackend(as_start_method(context))
        self.env_fns: list[Factory] = as_factories(env_fns, "env_fns")
        self.shared_memory: bool = shared_memory is None or shared_memory
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.worker = worker
        self.observation_mode = observation_mode
        self.autoreset_mode: AutoresetMode = AutoresetMode(autoreset_mode)
        self.max_concurrency = max_concurrency
        self.num_envs: int = len(self.env_fns)
        check_mode(observation_mode)
        self.vector: VectorEnv = self._make_vector(options)
        try:
            self.actors: list[ActorHandle[Any]] = self.vector.actors
            self._access = VectorAccess(self.vector)
            self._access.disable_reset_checks()
            self.metadata: dict[str, Any] = {**self.vector.metadata, "autoreset_mode": self.autoreset_mode}
            self.render_mode: str | None = self.vector.render_mode
            self._take_spaces(strictly=shared_memory is True)
        except BaseException:
            self.vector.close(0)
            raise
        self.closed = False

    def _make_vector(self, options: CommonOptions) -> VectorEnv:
        """Create the vector, and raise errors as Gymnasium does."""
        try:
            return make_vector(
                VectorEnv,
                type(self).__name__,
                self.env_fns,
                options,
                _REFUSED,
                autoreset=_AUTORESETS[self.autoreset_mode],
                deadlines=Deadlines(start=None),
                copy=False,
                max_running=checked_limit(self.max_concurrency, options),
            )
        except SpaceMismatchError as error:
            what: Literal["action", "observation"] = "action" if "action spec" in str(error) else "observation"
            raise RuntimeError(f"{unequal(what, type(self).__name__, self.observation_mode)} ({error})") from error
        except (ActorStartError, RestartsExhaustedError) as error:
            failure = raised_by_user_code(error)
        raise failure

    def _take_spaces(self, strictly: bool) -> None:
        action_spaces = self.vector.get_attr("action_space")
        observation_spaces = self.vector.get_attr("observation_space")
        spaces = agree(type(self).__name__, self.observation_mode, observation_spaces, action_spaces)
        self.single_observation_space: Any = spaces[0]
        self.observation_space: Any = spaces[1]
        self.single_action_space: Any = spaces[2]
        self.action_space: Any = spaces[3]
        if strictly:
            check_shareable(self.single_observation_space)
        self._actions = Actions(self.vector.action_spec, self.num_envs)
        self._observations = Observations(self.single_observation_space, self.vector.observation_spec, self.num_envs)
        self._pending = Pending(self.vector, self._observations)

    # State -----------------------------------------------------------------------------------------------

    @property
    def observations(self) -> Any:
        """The last batch of observations; None before the first reset."""
        return self._observations.batch

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override] # as in AsyncVectorEnv
        """The seed of each env's random generator."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc] # as in AsyncVectorEnv
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A copy of each env's random generator."""
        return self.get_attr("np_random")

    # Resetting -------------------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those selected by ``options["reset_mask"]``.

        Args:
            seed: An int gives env ``i`` the seed ``seed + i``; a sequence contains a seed or None per env.
            options: Passed to each env, except ``"reset_mask"``: a bool array with one entry per env.

        Returns:
            The observations of all envs and their infos.
        """
        return self._take_reset(self._pending.run("reset", *self._prepare_reset(seed, options)))

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Start a `reset`; `reset_wait` returns the result."""
        self._pending.start("reset", *self._prepare_reset(seed, options))

    def _prepare_reset(
        self, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> tuple[Callable[[], object], Finish]:
        """Check the arguments of a reset; return the functions that start it, perhaps later, and wait for it."""
        self._assert_is_running()
        if isinstance(seed, np.ndarray):
            seed = seed.tolist()
        if isinstance(seed, Sequence) and not isinstance(seed, str) and len(seed) != self.num_envs:
            raise ValueError(
                f"If seeds are passed as a list the length must match num_envs={self.num_envs} but got "
                f"length={len(seed)}."
            )
        seeds = seeds_for(seed, range(self.num_envs))
        self._pending.check_free("reset_async")
        access, env_ids = self._access, list(range(self.num_envs))
        if options is not None and "reset_mask" in options:
            mask = checked_mask(options["reset_mask"], self.num_envs)
            options = {key: value for key, value in options.items() if key != "reset_mask"}
            env_ids = np.flatnonzero(mask).tolist()
            seeds = [seeds[env_id] for env_id in env_ids]

        def begin() -> None:
            access.discard(env_ids)
            access.start_reset(env_ids, seeds, [options] * len(env_ids))

        return begin, lambda timeout: access.gather(env_ids, timeout, "reset")

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the result of `reset_async`.

        Args:
            timeout: How long to wait, in seconds; None for no limit.

        Raises:
            multiprocessing.TimeoutError: The resets did not finish in time. They continue; their results are discarded.
            NoAsyncCallError: `reset_async` was not called.
        """
        self._assert_is_running()
        return self._take_reset(self._pending.finish("reset", timeout))

    def _take_reset(self, batch: Batch) -> tuple[Any, dict[str, Any]]:
        env_ids = batch.env_ids.tolist()
        if len(env_ids) == self.num_envs:
            self._observations.replace_all(batch.obs)
        else:
            self._observations.replace_some(env_ids, batch.obs)
        infos: dict[str, Any] = {}
        for env_id, info in zip(env_ids, batch.infos, strict=True):
            infos = self._add_info(infos, info, env_id)
        return self._observations.current(self.copy), infos

    # Stepping --------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> _Steps:
        """Step all envs.

        Args:
            actions: Batch of actions in ``action_space``.

        Returns:
            Observations, rewards (float64), terminations and truncations (bool), and infos.
        """
        if self.closed or self._pending.what is not None or not self._actions.fits(actions):
            return self._as_gymnasium(*self._pending.run("step", *self._prepare_step(actions)))
        try:
            try:
                result = self.vector.step(actions)
            except (AlreadyPendingError, VectorInputError):
                self._pending.discard_late_results(None, "step")
                result = self._access.step(actions)
        except VectorStepError as error:
            failure = error
        else:
            return self._as_gymnasium(*result)
        raise self._pending.own_error(failure)

    def step_async(self, actions: Any) -> None:
        """Start a step of all envs; `step_wait` returns the result. The step is queued behind a step that timed out."""
        self._pending.start("step", *self._prepare_step(actions))

    def _prepare_step(self, actions: Any) -> tuple[Callable[[], object], Finish]:
        """Check that a step may start; return the functions that start it, perhaps later, and wait for it."""
        self._assert_is_running()
        access, pending = self._access, self._pending
        pending.check_free("step_async")
        if pending.has_late_results():
            actions = copying.deepcopy(actions)
        if self._actions.fits(actions):
            return lambda: access.start_step(actions), access.finish_step
        # As in Gymnasium, the envs decide about actions that do not fit the space. Only their number is checked.
        each = list(iterate(self.action_space, actions))
        env_ids = list(range(self.num_envs))
        return (
            lambda: access.start_unchecked_steps(env_ids, each),
            lambda timeout: access.gather_results(env_ids, timeout, "step"),
        )

    def step_wait(self, timeout: float | None = None) -> _Steps:
        """Return the result of `step_async`.

        Args:
            timeout: How long to wait, in seconds; None for no limit.

        Raises:
            multiprocessing.TimeoutError: The steps did not finish in time. They continue; their results are discarded.
            NoAsyncCallError: `step_async` was not called.
        """
        self._assert_is_running()
        return self._as_gymnasium(*self._pending.finish("step", timeout))

    def _as_gymnasium(self, obs: Any, rewards: Any, ended: Any, cut: Any, own_infos: list[dict[str, Any]]) -> _Steps:
        self._observations.replace_all(obs)
        infos: dict[str, Any] = {}
        if any(own_infos):
            for i, info in enumerate(own_infos):
                infos = self._add_info(infos, info, i)
        return self._observations.current(self.copy), rewards, ended, cut, infos

    # Calling ---------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or read an attribute that is not a method; return one value per env."""
        calls = self._start_calls(name, args, kwargs)
        results: tuple[Any, ...] = self._pending.run("call", None, lambda timeout: results_of(calls, timeout))
        return results

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Start a `call`; `call_wait` returns the result.

        Raises:
            ValueError: The name is ``reset``, ``step``, or ``close``.
        """
        self._pending.add_calls(self._start_calls(name, args, kwargs))

    def _start_calls(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ActorFuture]:
        self._assert_is_running()
        self._pending.check_free("call_async")
        if name in _NOT_CALLED:
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        return self._access.start_calls(name, args, kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Return the result of `call_async`.

        Args:
            timeout: How long to wait, in seconds; None for no limit.

        Raises:
            multiprocessing.TimeoutError: The calls did not finish in time. They continue; their results are discarded.
            NoAsyncCallError: `call_async` was not called.
        """
        self._assert_is_running()
        results: tuple[Any, ...] = self._pending.finish("call", timeout)
        return results

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each env; methods are called, as in ``AsyncVectorEnv``."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each env.

        Args:
            name: Name of the attribute.
            values: A list or tuple contains one value per env; any other value is set in all envs.

        Raises:
            ValueError: The list or tuple does not have one value per env.
        """
        self._assert_is_running()
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._pending.check_free("set_attr")
        self.vector.set_attr(name, values)

    def render(self) -> tuple[Any, ...]:
        """Return the frames of all envs."""
        return self.call("render")

    # Closing ---------------------------------------------------------------------------------------------

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs and end their processes; `close` calls this method.

        Args:
            timeout: How long to wait before killing processes, in seconds; None for the close deadline.
            terminate: True to kill processes immediately.
        """
        if self._pending.what is not None:
            logger.warn(f"Calling `close` while waiting for a pending call to `{self._pending.what}` to complete.")
            self._pending.forget()
        self.vector.close(0 if terminate else timeout)

    def _assert_is_running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")
