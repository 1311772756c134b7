"""Gymnasium's vector API over actors: `ActorVectorEnv` takes the place of ``gymnasium.vector.AsyncVectorEnv``.

It translates spaces, infos, errors and the words of Gymnasium to and from those of `envactors.vector.facade.VectorEnv`,
which does the work.
"""

from __future__ import annotations

import copy as copying
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

try:
    import gymnasium
except ImportError as error:
    raise ImportError(
        "envactors.integrations.gymnasium needs Gymnasium, which is not installed: pip install 'envactors[gymnasium]'"
    ) from error

from gymnasium import Space, logger, spaces
from gymnasium.envs.registration import EnvSpec, VectorizeMode
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, CustomSpaceError, NoAsyncCallError
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import (
    batch_differing_spaces,
    batch_space,
    concatenate,
    create_empty_array,
    create_shared_memory,
    iterate,
)

from envactors.actor.future import ActorFuture
from envactors.arrays.specs import ArraySpec
from envactors.backends.base import Backend
from envactors.backends.process import ProcessBackend
from envactors.errors import (
    ActorStartError,
    AlreadyPendingError,
    NothingPendingError,
    RemoteTraceback,
    RestartsExhaustedError,
    SpaceMismatchError,
    VectorStepError,
    VectorTimeoutError,
    raised_by_user_code,
)
from envactors.options import Deadlines, RestartPolicy, check_timeout
from envactors.vector.facade import VectorEnv
from envactors.vector.slot import OnFailure, Slot

_Waiting: TypeAlias = Literal["reset", "step", "call"]
_Flags: TypeAlias = npt.NDArray[np.bool_]
_Steps: TypeAlias = tuple[Any, npt.NDArray[np.float64], _Flags, _Flags, dict[str, Any]]

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
        _check_observation_mode(observation_mode)
        self._waiting: _Waiting | None = None
        self._deferred: Callable[[], object] | None = None
        self._asked: list[Slot] = []
        self._calls: list[ActorFuture] = []
        self.observations: Any = None
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
            raise RuntimeError(f"{self._unequal(what)} ({error})") from error
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
        action_spaces = self._envs.get_attr("action_space")
        observation_spaces = self._envs.get_attr("observation_space")
        self.single_observation_space = observation_spaces[0]
        if isinstance(self.observation_mode, tuple):
            self.observation_space, self.single_observation_space = self.observation_mode
        if self.observation_mode == "same":
            same = all(other == self.single_observation_space for other in observation_spaces)
        else:
            same = all(is_space_dtype_shape_equiv(self.single_observation_space, other) for other in observation_spaces)
        if not same:
            raise RuntimeError(self._unequal("observation"))
        self.single_action_space = action_spaces[0]
        if any(other != self.single_action_space for other in action_spaces):
            raise RuntimeError(self._unequal("action"))
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        if self.observation_mode == "same":
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        elif self.observation_mode == "different":
            self.observation_space = batch_differing_spaces(observation_spaces)
        if strictly and (custom := _custom(self.single_observation_space)) is not None:
            reason = CustomSpaceError(f"{custom!r} is not one of Gymnasium's own spaces")
            raise ValueError(
                f"shared_memory=True with the observation space {custom!r}, whose size is not known: leave "
                "shared_memory out, and what can be shared is; or give False"
            ) from reason
        self._translates = not _is_one_array(self.single_observation_space, self._envs.observation_spec)
        spec = self._envs.action_spec
        self._action_dtype, self._action_shape = None, None
        if isinstance(spec, ArraySpec) and spec.batchable:
            self._action_dtype, self._action_shape = spec.dtype, (self.num_envs, *spec.shape)

    def _unequal(self, what: Literal["action", "observation"]) -> str:
        if what == "action":
            return "Some environments have an action space other than the first's: a batch of actions needs equal ones"
        if self.observation_mode == "same":
            return (
                f"{type(self).__name__}(..., observation_mode='same') however some of the sub-environments observation "
                "spaces are not equivalent. If this is intentional, use `observation_mode='different'` instead."
            )
        return (
            f"{type(self).__name__}(..., observation_mode='different' or custom space) however the sub-environments' "
            "observation spaces do not share a common shape and dtype."
        )

    # Looking ---------------------------------------------------------------------------------------------

    @property
    def actors(self) -> VectorEnv:
        """The vector env underneath: handles (``actors[i]``), ``stats()``, ``send`` and ``recv``."""
        return self._envs

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
        self._check_free("reset_async")
        slots = self._envs._slots
        if options is not None and "reset_mask" in options:
            mask = _checked_mask(options["reset_mask"], self.num_envs)
            options = {key: value for key, value in options.items() if key != "reset_mask"}
            slots = [slots[i] for i in np.flatnonzero(mask)]
            seeds = [seeds[i] for i in np.flatnonzero(mask)]
        self._start("reset", slots, lambda: self._envs._begin_reset(slots, seeds, [options] * len(slots)))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Waits for what `reset_async` started.

        Args:
            timeout: How long, in seconds; None: for ever.

        Raises:
            multiprocessing.TimeoutError: The time is over. The resets go on, and nobody sees their results.
            NoAsyncCallError: There is no `reset_async`.
        """
        slots = self._asked
        batch = self._finish("reset", timeout)
        if len(slots) == self.num_envs:
            self.observations = self._translated(batch.obs)
        else:
            self._keep([slot.env_id for slot in slots], batch.obs)
        infos: dict[str, Any] = {}
        for slot, info in zip(slots, batch.infos, strict=True):
            infos = self._add_info(infos, info, slot.env_id)
        return _copied(self.observations) if self.copy else self.observations, infos

    # Stepping --------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> _Steps:
        """Steps all envs.

        Args:
            actions: A batch, as ``action_space`` has it.

        Returns:
            Observations, rewards (float64), terminations, truncations (bool) and infos.
        """
        if self._waiting is not None or self.closed or not self._fits(actions):
            self.step_async(actions)
            return self.step_wait()
        try:
            try:
                result = self._envs.step(actions)
            except AlreadyPendingError:
                self._drop_late(None)
                result = self._envs.step(actions)
        except VectorStepError as error:
            failure = error
        else:
            return self._handed_out(*result)
        raise self._own_error(failure)

    def step_async(self, actions: Any) -> None:
        """Starts a step of all envs; `step_wait` gives the result. Where a step that timed out still runs, it waits."""
        self._assert_is_running()
        self._check_free("step_async")
        if self._owing():
            actions = copying.deepcopy(actions)
        if self._fits(actions):
            self._start("step", self._envs._slots, lambda: self._envs._begin_all(actions))
        else:
            # As there, what does not fit is for the envs to judge; only that there is one for each is not.
            each = list(iterate(self.action_space, actions))
            self._start("step", self._envs._slots, lambda: self._envs._begin_as_given(each))

    def step_wait(self, timeout: float | None = None) -> _Steps:
        """Waits for what `step_async` started.

        Args:
            timeout: How long, in seconds; None: for ever.

        Raises:
            multiprocessing.TimeoutError: The time is over. The steps go on, and nobody sees their results.
            NoAsyncCallError: There is no `step_async`.
        """
        return self._handed_out(*self._finish("step", timeout))

    def _fits(self, actions: Any) -> bool:
        """Whether a batch of actions can be converted to what the action space says without a loss."""
        if type(actions) is np.ndarray and actions.dtype == self._action_dtype and actions.shape == self._action_shape:
            return True
        return _fits(self._envs.action_spec, actions, self.num_envs)

    def _handed_out(self, obs: Any, rewards: Any, ended: Any, cut: Any, own_infos: list[dict[str, Any]]) -> _Steps:
        self.observations = self._translated(obs)
        infos: dict[str, Any] = {}
        if any(own_infos):
            for i, info in enumerate(own_infos):
                infos = self._add_info(infos, info, i)
        return _copied(self.observations) if self.copy else self.observations, rewards, ended, cut, infos

    # Waiting ---------------------------------------------------------------------------------------------

    def _start(self, what: _Waiting, slots: list[Slot], begin: Callable[[], object]) -> None:
        """Starts something whose results are collected, at once or when older results have come and were dropped."""
        if self._owing():
            self._deferred = begin
        else:
            begin()
        self._waiting, self._asked = what, slots

    def _finish(self, what: Literal["reset", "step"], timeout: float | None) -> Any:
        self._check_waiting(what)
        check_timeout(timeout, f"{what}_wait(timeout=...)")
        deadline = None if timeout is None else time.monotonic() + timeout
        begin, self._deferred, self._waiting = self._deferred, None, None
        try:
            if begin is not None:
                self._drop_late(deadline)
                begin()
            if what == "step":
                return self._envs._finish_all(timeout, deadline)
            return self._envs._gather(self._asked, timeout, deadline, what)
        except VectorTimeoutError as error:
            raise _timed_out(what, timeout) from error
        except VectorStepError as error:
            failure = error
        raise self._own_error(failure)

    def _owing(self) -> bool:
        self._envs._check_open()
        return any(slot.owed is not None for slot in self._envs._slots)

    def _drop_late(self, deadline: float | None) -> None:
        """Takes in the results of what timed out, so that they are nobody's.

        Raises:
            VectorTimeoutError: They have not all come in time.
        """
        while True:
            try:
                batch = self._envs.recv(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except NothingPendingError:
                return
            except VectorStepError as error:
                batch = error.batch
                for index, failure in error.failures.items():
                    logger.warn("Worker-%s failed in a call that had timed out: %s", index, repr(failure))
            self._keep(batch.env_ids, batch.obs)
            if deadline is not None and time.monotonic() >= deadline and self._owing():
                raise VectorTimeoutError("an earlier call that timed out still runs")

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
        self._check_free("call_async")
        if name in _NOT_CALLED:
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        self._calls = [slot.handle._call_or_get(name, args, kwargs) for slot in self._envs._slots]
        self._waiting = "call"

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits for what `call_async` started.

        Args:
            timeout: How long, in seconds; None: for ever.

        Raises:
            multiprocessing.TimeoutError: The time is over. The calls go on, and nobody sees their results.
            NoAsyncCallError: There is no `call_async`.
        """
        self._check_waiting("call")
        check_timeout(timeout, "call_wait(timeout=...)")
        calls, self._calls, self._waiting = self._calls, [], None
        if timeout is not None and wait(calls, timeout).not_done:
            raise _timed_out("call", timeout)
        failures = {i: failure for i, call in enumerate(calls) if (failure := call.exception()) is not None}
        if failures:
            raise _logged(failures)
        return tuple(call.result() for call in calls)

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
        self._check_free("set_attr")
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
        if self._waiting is not None:
            logger.warn(f"Calling `close` while waiting for a pending call to `{self._waiting}` to complete.")
            self._waiting = None
        self._envs.close(0 if terminate else timeout)

    # Checking --------------------------------------------------------------------------------------------

    def _assert_is_running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _check_free(self, what: str) -> None:
        if self._waiting is not None:
            raise AlreadyPendingCallError(
                f"Calling `{what}` while waiting for a pending call to `{self._waiting}` to complete", self._waiting
            )

    def _check_waiting(self, what: _Waiting) -> None:
        self._assert_is_running()
        if self._waiting != what:
            raise NoAsyncCallError(f"Calling `{what}_wait` without any prior call to `{what}_async`.", what)

    def _own_error(self, error: VectorStepError) -> BaseException:
        """What an env raised, for the error that says so."""
        self._keep(error.batch.env_ids, error.batch.obs)
        return _logged(error.failures)

    # Translating -----------------------------------------------------------------------------------------

    def _translated(self, obs: Any) -> Any:
        return _as_batch(self.single_observation_space, obs) if self._translates else obs

    def _keep(self, env_ids: Iterable[int], obs: Any) -> None:
        """Puts the observations of some envs in the place of their older ones."""
        ids = list(env_ids)
        if not ids:
            return
        before = self.observations
        if before is None:
            before = create_empty_array(self.single_observation_space, self.num_envs, np.zeros)
        self.observations = _merged(self.single_observation_space, before, self._translated(obs), ids)


_AUTORESETS: dict[AutoresetMode, Literal["next_step", "same_step", "disabled"]] = {
    AutoresetMode.NEXT_STEP: "next_step",
    AutoresetMode.SAME_STEP: "same_step",
    AutoresetMode.DISABLED: "disabled",
}


def make_vec(
    id: str | EnvSpec,  # noqa: A002 # Gymnasium's name
    num_envs: int = 1,
    vectorization_mode: VectorizeMode | str | None = None,
    vector_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] | None = None,
    **kwargs: Any,
) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """Gymnasium's ``make_vec`` with actors for processes.

    Args:
        id: A registered env's id, or a spec.
        num_envs: How many envs.
        vectorization_mode: None and ``"async"`` make an `ActorVectorEnv`; anything else is left to Gymnasium.
        vector_kwargs: Arguments of `ActorVectorEnv`.
        wrappers: Applied to each env, in this order, in the workers.
        **kwargs: Arguments of each env.

    Returns:
        The vector env; its ``spec`` makes it again.
    """
    found = gymnasium.envs.registration._find_spec(id) if isinstance(id, str) else id
    own = dict(found.kwargs)
    num_envs = own.pop("num_envs", num_envs)
    vectorization_mode = own.pop("vectorization_mode", vectorization_mode)
    vector_kwargs = own.pop("vector_kwargs", vector_kwargs) or {}
    wrappers = own.pop("wrappers", wrappers) or []
    own.update(kwargs)
    if vectorization_mode is not None and VectorizeMode(vectorization_mode) is not VectorizeMode.ASYNC:
        return gymnasium.make_vec(id, num_envs, vectorization_mode, vector_kwargs, wrappers, **kwargs)
    spec = copying.deepcopy(found)
    spec.kwargs = {}
    # By its id where there is one: then it is the worker that knows what that means.
    what = id if isinstance(id, str) else spec

    # A local function travels by value: a worker has no use for this module.
    def make() -> gymnasium.Env[Any, Any]:
        env = gymnasium.make(what, **own)
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    envs = ActorVectorEnv([make] * num_envs, **vector_kwargs)
    spec.kwargs = {**own, "vectorization_mode": VectorizeMode.ASYNC.value}
    optional = {"num_envs": num_envs if num_envs != 1 else None, "vector_kwargs": vector_kwargs, "wrappers": wrappers}
    spec.kwargs.update({key: value for key, value in optional.items() if value})
    envs.spec = spec
    return envs


def register(id: str, **vector_kwargs: Any) -> None:  # noqa: A002 # Gymnasium's name
    """Has ``gymnasium.make_vec(id, n)`` make an `ActorVectorEnv`.

    It sets the ``vector_entry_point`` of an env that is registered, in place of any that it has.

    Args:
        id: The env's id.
        **vector_kwargs: Arguments of `ActorVectorEnv`.

    Raises:
        gymnasium.error.Error: There is no such env.
    """

    # A local function travels by value with the registry: a worker has no use for this module.
    def entry_point(num_envs: int = 1, **kwargs: Any) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        from envactors.integrations.gymnasium import make_vec

        return make_vec(id, num_envs, "async", vector_kwargs, **kwargs)

    gymnasium.spec(id).vector_entry_point = entry_point


def _check_observation_mode(mode: Any) -> None:
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
            )
    elif mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {mode}"
        )


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


def _custom(space: Space[Any]) -> Space[Any] | None:
    """The first part of a space that Gymnasium does not know how to share; None where it knows all."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        inner: Iterable[Space[Any]] = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return next((part for part in map(_custom, inner) if part is not None), None)
    unknown = create_shared_memory.dispatch(Space)
    return space if create_shared_memory.dispatch(type(space)) is unknown else None


def _fits(spec: Any, actions: Any, num_envs: int) -> bool:
    if isinstance(spec, dict):
        same = isinstance(actions, Mapping) and actions.keys() == spec.keys()
        return same and all(_fits(inner, actions[key], num_envs) for key, inner in spec.items())
    if isinstance(spec, tuple):
        same = isinstance(actions, tuple) and len(actions) == len(spec)
        return same and all(_fits(inner, part, num_envs) for inner, part in zip(spec, actions, strict=True))
    if not spec.batchable:
        return isinstance(actions, (tuple, list)) and len(actions) == num_envs
    try:
        array = np.asarray(actions)
    except ValueError:
        return False
    return array.shape == (num_envs, *spec.shape) and np.can_cast(array.dtype, spec.dtype, "safe")


def _is_one_array(space: Space[Any], spec: Any) -> bool:
    """Whether a batch of observations is one array here and in Gymnasium."""
    return not isinstance(batch_space(space, 1), (spaces.Dict, spaces.Tuple)) and getattr(spec, "batchable", False)


def _as_batch(space: Space[Any], obs: Any) -> Any:
    """Makes a batch as Gymnasium has it: what is a list in one of `VectorEnv`'s is a tuple there, most of the time."""
    if isinstance(space, spaces.Dict):
        return {key: _as_batch(inner, obs[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_as_batch(inner, part) for inner, part in zip(space.spaces, obs, strict=True))
    if isinstance(batch_space(space, 1), spaces.Tuple):
        return tuple(obs)
    if not isinstance(obs, list):
        return obs
    empty: Any = create_empty_array(space, len(obs))
    return concatenate(space, obs, empty)


def _merged(space: Space[Any], before: Any, fresh: Any, env_ids: list[int]) -> Any:
    """A batch in which some envs' observations are replaced."""
    if isinstance(space, spaces.Dict):
        return {key: _merged(inner, before[key], fresh[key], env_ids) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, before, fresh, strict=True)
        return tuple(_merged(inner, old, new, env_ids) for inner, old, new in parts)
    merged = before.copy() if isinstance(before, np.ndarray) else list(before)
    for i, one in zip(env_ids, fresh, strict=True):
        merged[i] = one
    return merged if isinstance(before, np.ndarray) else tuple(merged)


def _copied(obs: Any) -> Any:
    if type(obs) is np.ndarray:
        return obs.copy()
    if type(obs) is dict:
        return {key: _copied(part) for key, part in obs.items()}
    if type(obs) is tuple:
        return tuple(map(_copied, obs))
    return copying.deepcopy(obs)


def _timed_out(what: _Waiting, timeout: float | None) -> multiprocessing.TimeoutError:
    return multiprocessing.TimeoutError(f"The call to `{what}_wait` has timed out after {timeout} second(s).")


def _logged(failures: Mapping[int, BaseException]) -> BaseException:
    """Logs what envs raised, in the words that Gymnasium has for it, and gives the last, which is raised."""
    for index, failure in failures.items():
        remote = failure.__cause__
        text = remote.text if isinstance(remote, RemoteTraceback) else "".join(traceback.format_exception(failure))
        logger.error("Received the following error from Worker-%s - Shutting it down", index)
        logger.error("%s", text)
    logger.error("Raising the last exception back to the main process.")
    return list(failures.values())[-1]
