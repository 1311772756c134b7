"""`ActorParallelEnvironment`: ALF's ``FastParallelEnvironment`` on actors.

    step ──▶ the actions as arrays ──▶ a step of the envs that have a slot ──▶ records ──▶ a ``TimeStep`` of tensors

`envactors.vector_env.VectorEnv` runs the envs, `envactors.integrations.alf.rotation.Rotation` lets spare envs take
turns, and `envactors.integrations.alf.adapter` contains the adapter around each env in its worker. ALF (the Agent
Learning Framework, https://github.com/HorizonRobotics/alf) does not need to be installed: any env with the interface of
its ``AlfEnvironment`` works.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from envactors.actor.future import BoundToProcess
from envactors.actor.handle import ActorHandle
from envactors.backends.process import ProcessBackend
from envactors.errors import ActorError, VectorStepError
from envactors.integrations.alf.adapter import AlfEnvAdapter
from envactors.integrations.alf.envs import ActorEnvironment, Envs, Specs, interrupted
from envactors.integrations.alf.rotation import Rotation
from envactors.integrations.alf.values import AlfEnvironment, Records, torch
from envactors.integrations.options import as_start_method, check_one_backend, make_vector
from envactors.mailbox.factory import as_callable, as_factories
from envactors.options import Deadlines, RestartPolicy, is_int
from envactors.process.starting import THREAD_CAPS
from envactors.vector.inputs import seeds_for
from envactors.vector.options import VectorEnvVars, VectorOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


_REFUSED = {
    "autoreset": "in ALF the step after StepType.LAST resets the env, which is autoreset='next_step'",
    "copy": "results are always copies of the envs' records",
    "standbys": "an env is created with its env_id, and a standby does not know which env it replaces",
}


class ActorParallelEnvironment(BoundToProcess, Specs, AlfEnvironment):  # type: ignore[misc] # mypy skips its module
    """Steps many envs as one batch, one per actor, with the interface of ALF's ``AlfEnvironment``.

    If ``alf`` can be imported, this class is an ``AlfEnvironment`` and returns ALF's ``TimeStep``, otherwise a class
    with the same fields. Arrays are torch tensors if torch is installed, otherwise NumPy arrays, and always copies.

    After ``StepType.LAST`` the next step ignores its action and returns the reset. Envs with a ``batch_size`` above 1
    reset themselves.

    Args:
        env_constructors: One callable per env, called in the workers with ``env_id=`` its index; the last ones create
            the spare envs.
        start_serially: True to create the envs, and their replacements, one after the other.
        blocking: Has no effect, as in ``FastParallelEnvironment``.
        flatten: Has no effect, as in ``FastParallelEnvironment``.
        num_spare_envs_for_reload: Number of envs that wait, already reset, in a queue. When an episode ends, the first
            env in the queue takes over the slot, and the previous env resets and joins the end of the queue. In the
            beginning, env ``i`` has slot ``i``.
        torch_num_threads_per_env: Number of threads of torch and NumPy's libraries in each worker. With None, the
            caller's environment variables decide; the default is then one thread.
        start_method: ``"loky"``, or None for the default of `ProcessBackend`, which ALF's names (``"fork"``,
            ``"spawn"``) stand for, too. Workers are not forks of the caller, so constructors that need its
            configuration of ALF must load it.
        **options: See `envactors.VectorOptions`; ``backend`` excludes ``start_method`` and ignores ``start_serially``.
            With ``on_failure="raise"`` a failed env raises RuntimeError, and by default no process is restarted, as in
            ALF. With ``"renew"`` the episode of a failed env ends with ``StepType.LAST``, reward 0, discount 1, and the
            last complete observation, and ``failures`` contains the exception. ``"replay"`` needs `seed`.
            ``seed_episodes`` excludes envs that reset themselves. By default only closing has a deadline (5 s).

    Attributes:
        envs: One `ActorEnvironment` per env, without the spare envs.
        actors: The handle of each process, with spare envs last.
        vector: The vector behind this class, including spare envs, with handles of the envs and ``stats()``.
        failures: Exceptions from envs whose episode ended in the last step or reset because they failed, by slot; only
            with ``on_failure="renew"``.
        episode_seeds: The seed of the current episode, by slot; only with ``seed_episodes``.

    Raises:
        ValueError: The specs of the envs differ, or an argument is invalid.
        RuntimeError: An env could not be created, or spare envs or ``seed_episodes`` are used with a ``batch_size``
            above 1.
    """

    def __init__(
        self,
        env_constructors: Iterable[Callable[..., Any] | str],
        start_serially: bool = True,
        blocking: bool = False,  # noqa: ARG002 # part of ALF's signature
        flatten: bool = True,  # noqa: ARG002
        num_spare_envs_for_reload: int = 0,
        torch_num_threads_per_env: int | None = 1,
        start_method: str | None = None,
        **options: Unpack[VectorOptions],
    ) -> None:
        check_one_backend("start_method", start_method, options)
        super().__init__()
        threads, spares = torch_num_threads_per_env, num_spare_envs_for_reload
        factories = [
            functools.partial(AlfEnvAdapter, as_callable(constructor, f"env {env_id}"), env_id)
            for env_id, constructor in enumerate(as_factories(env_constructors, "env_constructors"))
        ]
        options["env_vars"] = _with_caps(options.get("env_vars"), threads)
        if not is_int(spares, 0) or spares >= max(len(factories), 1):
            raise ValueError(
                f"num_spare_envs_for_reload is {spares!r} with {len(factories)} env_constructors: expected an int >= 0 "
                "that is less than the number of env_constructors"
            )
        self.vector: Envs = _make_vector(factories, options, start_method, serially=start_serially)
        try:
            self._described = described = self.vector.described
            slots = self.vector.num_envs - spares
            if described.resets_itself:
                _check_own_resets(described.batch_size, spares, seed_episodes=options.get("seed_episodes", False))
            self._rotation = Rotation(self.vector, slots)
        except BaseException:
            self.vector.close(0)
            raise
        self._num_spare_envs_for_reload = spares
        self._records = Records(described, slots)
        self._seeds: list[Any] | None = None
        self._current_time_step: Any = None
        self._each = [ActorEnvironment(self.vector[i], described) for i in range(self.vector.num_envs)]
        self.envs: list[ActorEnvironment] = self._each[:slots]
        self.actors: list[ActorHandle[Any]] = self.vector.actors
        self.failures: dict[int, BaseException] = {}
        self.episode_seeds: dict[int, int] = {}

    # Stepping --------------------------------------------------------------------------------------------

    def reset(self) -> Any:
        """Reset all envs, including spare envs, and wait for those with a slot. Env ``i`` gets slot ``i`` again.

        Returns:
            The ``TimeStep``, with ``batch_size`` rows.

        Raises:
            RuntimeError: An env failed; the cause is its own exception, or the `ActorError` of its process.
        """
        self._current_time_step = self._reset()
        return self._current_time_step

    def step(self, action: Any) -> Any:
        """Step all slots; the first call resets instead.

        Args:
            action: Nest of tensors or arrays with the structure of ``action_spec()`` and ``batch_size`` rows.

        Returns:
            The ``TimeStep``, with ``batch_size`` rows; ``env_id`` is the row.

        Raises:
            RuntimeError: An env failed; the cause is its own exception, or the `ActorError` of its process. After a
                process was restarted, `reset` must be called.
            SpaceMismatchError: The structure, number, shape, or dtype of the actions does not match the action spec.
        """
        self._current_time_step = self.reset() if self._current_time_step is None else self._step(action)
        return self._current_time_step

    def current_time_step(self) -> Any:
        """Return the last time step; None before the first reset."""
        return self._current_time_step

    def _reset(self) -> Any:
        try:
            obs, infos = self._rotation.reset(self._seeds)
        except VectorStepError as error:
            failed = error
        else:
            self._seeds = None
            return self._time_step(obs, np.zeros(len(infos), np.bool_), infos)
        raise interrupted(failed) from failed.__cause__

    def _step(self, action: Any) -> Any:
        try:
            obs, _, _, failures, infos = self._rotation.step(self._records.actions(action))
        except VectorStepError as error:
            failed = error
        else:
            return self._time_step(obs, failures, infos)
        raise interrupted(failed) from failed.__cause__

    def _time_step(self, obs: Any, ended: npt.NDArray[np.bool_], infos: list[dict[str, Any]]) -> Any:
        self.failures = {}
        if any(infos):
            self.failures = {slot: info["failure"] for slot, info in enumerate(infos) if "failure" in info}
            self.episode_seeds |= {
                slot: info["episode_seed"] for slot, info in enumerate(infos) if "episode_seed" in info
            }
        return self._records.time_step(obs, ended if self.failures else None)

    # Attributes and methods
    # ----------------------------------------------------------------------------------------------

    @property
    def is_tensor_based(self) -> bool:
        """True if results are torch tensors."""
        return torch is not None

    @property
    def batched(self) -> bool:
        """Always True, since values have one row per slot."""
        return True

    @property
    def batch_size(self) -> int:
        """The number of rows, which is the number of slots times the ``batch_size`` of each env."""
        return self._records.batch_size

    @property
    def num_spare_envs_for_reload(self) -> int:
        """The number of envs that have no slot."""
        return self._num_spare_envs_for_reload

    @property
    def metadata(self) -> Any:
        """The metadata of env 0."""
        return self.envs[0].metadata

    def render(self, mode: str = "rgb_array") -> Any:
        """Return a frame of env 0."""
        return self.envs[0].render(mode)

    def call_envs_with_same_args(self, func_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of all envs except spare envs in parallel; return one value per env.

        Raises:
            Exception: The exception from the first env that failed.
            RuntimeError: The process of an env crashed.
        """
        return _fulfilled([env.call(func_name, *args, **kwargs) for env in self.envs])

    def seed(self, seeds: Sequence[int | None]) -> list[Any]:
        """Seed all envs, with spare envs last: call their ``seed`` now, and again just before the next `reset`.

        The second call makes that reset a seeded one. ``on_failure="replay"`` replays from it, and restarted processes
        get seeds that derive from it.

        Returns:
            The results of the envs' ``seed``.

        Raises:
            ValueError: There is not one seed per env.
            Exception: The exception from the first env that failed.
        """
        wanted = seeds_for(seeds, list(range(self.vector.num_envs)))
        results = _fulfilled([env.call("seed", seed) for env, seed in zip(self._each, wanted, strict=True)])
        self._seeds = wanted
        return results

    def sync_progress(self) -> None:
        """Send the caller's progress to ALF's schedulers in all workers, and call each env's ``sync_progress``.

        This method does not wait. An env that is resetting receives the progress afterwards.
        """
        for env in self._each:
            env.sync_progress()

    def close(self) -> None:
        """Close the envs and end their processes, within the close deadline. This also happens when Python exits."""
        self.vector.close()

    def __enter__(self) -> ActorParallelEnvironment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _make_vector(factories: list[Any], options: VectorOptions, start_method: str | None, *, serially: bool) -> Envs:
    raises = options.get("on_failure", "raise") == "raise"
    try:
        return make_vector(
            Envs,
            "ActorParallelEnvironment",
            factories,
            options,
            _REFUSED,
            deadlines=Deadlines(start=None),
            restart=RestartPolicy(max_restarts=0 if raises else 10, backoff_max=5.0),
            backend=ProcessBackend(as_start_method(start_method), max_starting=1 if serially else None),
            copy=False,  # `Records` copies each array
        )
    except ActorError as error:
        raise interrupted(error) from error


def _check_own_resets(batch_size: int, spares: int, *, seed_episodes: bool) -> None:
    """Raise if options are used that do not work for envs that reset themselves.

    Raises:
        RuntimeError: There are spare envs, or ``seed_episodes`` is True.
    """
    for name, value in (("num_spare_envs_for_reload", spares), ("seed_episodes", seed_episodes)):
        if value:
            raise RuntimeError(
                f"{name} is {value} and the batch_size of each env is {batch_size}: omit {name}, since envs with a "
                "batch_size above 1 reset themselves"
            )


def _with_caps(given: VectorEnvVars, threads: int | None) -> VectorEnvVars:
    """Return the environment variables of the workers, including those that limit the threads of NumPy's libraries."""
    caps = {} if threads is None else dict.fromkeys(THREAD_CAPS, str(threads))
    if given is None or isinstance(given, Mapping):
        return {**caps, **(given or {})} or None
    if callable(given):
        return lambda index: {**caps, **(given(index) or {})}
    return given if isinstance(given, str) else [{**caps, **(one or {})} for one in given]


def _fulfilled(promises: list[Callable[[], Any]]) -> list[Any]:
    return [promise() for promise in promises]
