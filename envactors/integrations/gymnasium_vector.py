"""`ActorVectorEnv`, Gymnasium's ``AsyncVectorEnv`` over actors.

It translates spaces, infos, errors and the words of Gymnasium to and from those of `envactors.vector.facade.VectorEnv`,
which does the work.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import Space, logger
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from envactors.backends.base import Backend
from envactors.backends.process import ProcessBackend
from envactors.errors import (
    ActorStartError,
    AlreadyPendingError,
    RestartsExhaustedError,
    SpaceMismatchError,
    VectorStepError,
    raised_by_user_code,
)
from envactors.integrations.gymnasium_batches import Actions, Observations
from envactors.integrations.gymnasium_pending import Pending
from envactors.integrations.gymnasium_spaces import agree, check_mode, check_shareable, unequal
from envactors.options import Deadlines, RestartPolicy
from envactors.vector.facade import VectorEnv
from envactors.vector.slot import OnFailure

_Flags: TypeAlias = npt.NDArray[np.bool_]
_Steps: TypeAlias = tuple[Any, npt.NDArray[np.float64], _Flags, _Flags, dict[str, Any]]

_AUTORESETS: dict[AutoresetMode, Literal["next_step", "same_step", "disabled"]] = {
    AutoresetMode.NEXT_STEP: "next_step",
    AutoresetMode.SAME_STEP: "same_step",
    AutoresetMode.DISABLED: "disabled",
}

# What has a method of its own here, and would get round its account of what is under way.
_NOT_CALLED = ("reset", "step", "close")


class ActorVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Gymnasium's ``AsyncVectorEnv`` with each env in an actor; the first nine parameters are those of Gymnasium 1.4.

    An env's own exception is raised in the caller as itself, and the env goes on. No env is ever made in the caller's
    process: the spaces come from the workers.

    Args:
        env_fns: One callable an env; run in the workers.
        shared_memory: Whether observations, actions, rewards and flags travel through shared memory. None: whatever of
            them has a fixed size does. True: the same, and spaces that are not Gymnasium's own are refused, as there.
        copy: Whether observations are copies; False hands out views, valid until the next step.
        context: How processes start: ``"fork"``, ``"spawn"``, ``"forkserver"`` (or ``"loky"``); None: loky's way.
        daemon: Accepted; workers end with the caller and may start processes of their own, whatever it says.
        worker: Refused: Gymnasium's workers speak over pipes, which there are none of here.
        observation_mode: ``"same"``: all observation spaces are equal; ``"different"``: of one shape and dtype; or the
            batched and the single space.
        autoreset_mode: What happens at an episode's end.
        max_concurrency: How many envs may run at once: there are no more processes than that, and envs share them.
        envs_per_actor: How many envs share a process; see `envactors.VectorEnv`, as for all that follow.
        on_failure: ``"raise"``, ``"renew"`` or ``"replay"``.
        deadlines: How long things may take; by default nothing but closing is limited (5 s).
        restart: When a lost process is replaced.
        standbys: How many processes are kept started for those that are lost; ``env_fns`` must be one object n times.
        backend: Where the actors live; not together with ``context``.

    Raises:
        RuntimeError: The envs' spaces differ.
        ValueError: A parameter that makes no sense, or a custom space with ``shared_memory=True``.
        Exception: What the first ``env_fn`` that failed raised.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        shared_memory: bool | None = None,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        envs_per_actor: int = 1,
        on_failure: OnFailure = "raise",
        deadlines: Deadlines = Deadlines(start=None),  # noqa: B008 # frozen
        restart: RestartPolicy = RestartPolicy(max_restarts=3),  # noqa: B008 # frozen
        standbys: int = 0,
        backend: str | Backend | None = None,
    ) -> None:
        if worker is not None:
            raise ValueError(
                "A custom `worker` must accept 8 arguments, among them the pipes and the queue of Gymnasium's own "
                f"processes: there are none here, and {worker!r} cannot be run. Put what it does into a "
                "gymnasium.Wrapper, or use gymnasium.vector.AsyncVectorEnv"
            )
        if context is not None and backend is not None:
            raise ValueError(f"context={context!r} and backend={backend!r}: expected one of them")
        self.env_fns = env_fns
        self.shared_memory = shared_memory is None or shared_memory
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.worker = worker
        self.observation_mode = observation_mode
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.max_concurrency = max_concurrency
        self.num_envs = len(env_fns)
        check_mode(observation_mode)
        failure: BaseException | None = None
        try:
            self._envs = VectorEnv(
                env_fns,
                envs_per_actor=_limited(envs_per_actor, max_concurrency, self.num_envs),
                autoreset=_AUTORESETS[self.autoreset_mode],
                on_failure=on_failure,
                deadlines=deadlines,
                restart=restart,
                standbys=standbys,
                backend=backend or (ProcessBackend(_start_method(context)) if context is not None else "process"),
                shared_memory=self.shared_memory,
                copy=False,
            )
        except SpaceMismatchError as error:
            what: Literal["action", "observation"] = "action" if "action spec" in str(error) else "observation"
            raise RuntimeError(f"{unequal(what, type(self).__name__, observation_mode)} ({error})") from error
        except (ActorStartError, RestartsExhaustedError) as error:
            failure = raised_by_user_code(error)
        if failure is not None:
            raise failure
        try:
            self._envs._let_envs_judge()
            self.metadata = {**self._envs.metadata, "autoreset_mode": self.autoreset_mode}
            self.render_mode = self._envs.render_mode
            self._take_spaces(strictly=shared_memory is True)
        except BaseException:
            self._envs.close(0)
            self.closed = True
            raise

    def _take_spaces(self, strictly: bool) -> None:
        action_spaces, observation_spaces = (
            self._envs.get_attr("action_space"),
            self._envs.get_attr("observation_space"),
        )
        self.single_observation_space, self.observation_space, self.single_action_space, self.action_space = agree(
            type(self).__name__, self.observation_mode, observation_spaces, action_spaces
        )
        if strictly:
            check_shareable(self.single_observation_space)
        self._actions = Actions(self._envs.action_spec, self.num_envs)
        self._observations = Observations(self.single_observation_space, self._envs.observation_spec, self.num_envs)
        self._pending = Pending(self._envs, self._observations)

    # Looking ---------------------------------------------------------------------------------------------

    @property
    def actors(self) -> VectorEnv:
        """The vector env underneath: handles (``actors[i]``), ``stats()``, ``send`` and ``recv``."""
        return self._envs

    @property
    def observations(self) -> Any:
        """The last batch of observations; None before the first."""
        return self._observations.batch

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override] # as in AsyncVectorEnv
        """The seed of each env's random numbers."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc] # as in AsyncVectorEnv
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A copy of each env's generator of random numbers."""
        return self.get_attr("np_random")

    # Resetting -------------------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the envs, or those that ``options["reset_mask"]`` names.

        Args:
            seed: An int gives env ``i`` the seed ``seed + i``; a sequence has one (or None) an env.
            options: Passed to each env; ``"reset_mask"``, a bool array with an entry an env, is for this class.

        Returns:
            The observations of all envs, and their infos.
        """
        self.reset_async(seed, options)
        return self.reset_wait()

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Starts what `reset` does; `reset_wait` gives the result."""
        self._assert_is_running()
        if seed is None:
            seeds: list[int | None] = [None] * self.num_envs
        elif isinstance(seed, (int, np.integer)):
            seeds = [int(seed) + i for i in range(self.num_envs)]
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(
                f"If seeds are passed as a list the length must match num_envs={self.num_envs} but got "
                f"length={len(seeds)}."
            )
        self._pending.check_free("reset_async")
        envs = self._envs
        slots = envs._slots
        if options is not None and "reset_mask" in options:
            mask = _checked_mask(options["reset_mask"], self.num_envs)
            options = {key: value for key, value in options.items() if key != "reset_mask"}
            slots = [slots[i] for i in np.flatnonzero(mask)]
            seeds = [seeds[i] for i in np.flatnonzero(mask)]
        self._pending.start(
            "reset",
            lambda: envs._begin_reset(slots, seeds, [options] * len(slots)),
            lambda timeout, deadline: envs._gather(slots, timeout, deadline, "reset"),
        )

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Waits for what `reset_async` started.

        Args:
            timeout: How long, in seconds; None: for ever.

        Raises:
            multiprocessing.TimeoutError: The time is over. The resets go on, and nobody sees their results.
            NoAsyncCallError: There is no `reset_async`.
        """
        self._assert_is_running()
        batch = self._pending.finish("reset", timeout)
        env_ids = batch.env_ids.tolist()
        if len(env_ids) == self.num_envs:
            self._observations.take(batch.obs)
        else:
            self._observations.put(env_ids, batch.obs)
        infos: dict[str, Any] = {}
        for env_id, info in zip(env_ids, batch.infos, strict=True):
            infos = self._add_info(infos, info, env_id)
        return self._observations.handed_out(self.copy), infos

    # Stepping --------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> _Steps:
        """Steps all envs.

        Args:
            actions: A batch, as ``action_space`` has it.

        Returns:
            Observations, rewards (float64), terminations, truncations (bool) and infos.
        """
        if self.closed or self._pending.what is not None or not self._actions.fits(actions):
            self.step_async(actions)
            return self.step_wait()
        try:
            try:
                result = self._envs.step(actions)
            except AlreadyPendingError:
                self._pending.drop_late(None)
                result = self._envs.step(actions)
        except VectorStepError as error:
            failure = error
        else:
            return self._handed_out(*result)
        raise self._pending.own_error(failure)

    def step_async(self, actions: Any) -> None:
        """Starts a step of all envs; `step_wait` gives the result. Where a step that timed out still runs, it waits."""
        self._assert_is_running()
        envs, pending = self._envs, self._pending
        pending.check_free("step_async")
        if pending.is_owing():
            actions = copying.deepcopy(actions)
        if self._actions.fits(actions):
            pending.start("step", lambda: envs._begin_all(actions), envs._finish_all)
        else:
            # As there, what does not fit is for the envs to judge; only that there is one for each is not.
            each = list(iterate(self.action_space, actions))
            pending.start("step", lambda: envs._begin_as_given(each), envs._finish_all)

    def step_wait(self, timeout: float | None = None) -> _Steps:
        """Waits for what `step_async` started.

        Args:
            timeout: How long, in seconds; None: for ever.

        Raises:
            multiprocessing.TimeoutError: The time is over. The steps go on, and nobody sees their results.
            NoAsyncCallError: There is no `step_async`.
        """
        self._assert_is_running()
        return self._handed_out(*self._pending.finish("step", timeout))

    def _handed_out(self, obs: Any, rewards: Any, ended: Any, cut: Any, own_infos: list[dict[str, Any]]) -> _Steps:
        self._observations.take(obs)
        infos: dict[str, Any] = {}
        if any(own_infos):
            for i, info in enumerate(own_infos):
                infos = self._add_info(infos, info, i)
        return self._observations.handed_out(self.copy), rewards, ended, cut, infos

    # Calling ---------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each env, or reads an attribute that is none; one value an env."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Starts what `call` does; `call_wait` gives the result.

        Raises:
            ValueError: ``reset``, ``step`` or ``close``.
        """
        self._assert_is_running()
        self._pending.check_free("call_async")
        if name in _NOT_CALLED:
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        self._pending.add_calls([slot.handle._call_or_get(name, args, kwargs) for slot in self._envs._slots])

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits for what `call_async` started.

        Args:
            timeout: How long, in seconds; None: for ever.

        Raises:
            multiprocessing.TimeoutError: The time is over. The calls go on, and nobody sees their results.
            NoAsyncCallError: There is no `call_async`.
        """
        self._assert_is_running()
        results: tuple[Any, ...] = self._pending.finish("call", timeout)
        return results

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Reads an attribute of each env (calls it if it is a method, as in AsyncVectorEnv)."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Writes an attribute of each env.

        Args:
            name: The attribute's name.
            values: A list or tuple has one value an env; anything else goes to all.

        Raises:
            ValueError: A list or tuple of another length.
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
        self._envs.set_attr(name, values)

    def render(self) -> tuple[Any, ...]:
        """The frames of all envs."""
        return self.call("render")

    # Closing ---------------------------------------------------------------------------------------------

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the envs and ends their processes; called by `close`.

        Args:
            timeout: How long that may take before what is left is killed, in seconds; None: the close deadline.
            terminate: Whether processes are killed at once.
        """
        if self._pending.what is not None:
            logger.warn(f"Calling `close` while waiting for a pending call to `{self._pending.what}` to complete.")
            self._pending.forget()
        self._envs.close(0 if terminate else timeout)

    def _assert_is_running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")


def _limited(envs_per_actor: int, max_concurrency: int | None, num_envs: int) -> int:
    """How many envs share a process, so that no more than ``max_concurrency`` run at once."""
    if max_concurrency is None:
        return envs_per_actor
    if not isinstance(max_concurrency, (int, np.integer)):
        raise ValueError(f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}.")
    if max_concurrency < 1:
        raise ValueError(f"`max_concurrency` must be a positive or None, got {max_concurrency}.")
    return max(envs_per_actor, -(-num_envs // int(max_concurrency)))


def _start_method(context: str) -> Any:
    if context not in ("fork", "spawn", "forkserver", "loky"):
        raise ValueError(f"cannot find context for {context!r}: expected 'fork', 'spawn', 'forkserver' or 'loky'")
    return context


def _checked_mask(mask: Any, num_envs: int) -> _Flags:
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return mask
