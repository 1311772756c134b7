"""`ActorParallelEnvironment`: ALF's ``FastParallelEnvironment`` over actors.

    step ──▶ the actions as arrays ──▶ a step of the envs that have a slot ──▶ records ──▶ a `TimeStep` of tensors

The mechanisms are those of `envactors.vector.facade.VectorEnv` and, for spare envs, of
`envactors.vector.rotation.Rotation`; what runs around each env in its worker is in
`envactors.integrations.inside_alf`. ALF (the Agent Learning Framework, https://github.com/HorizonRobotics/alf) need not
be installed: any env with the interface of its ``AlfEnvironment`` will do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.backends.process import THREAD_CAPS, ProcessBackend
from envactors.errors import ActorError, VectorStepError
from envactors.integrations.alf_envs import ActorEnvironment, Envs, Specs, interrupted
from envactors.integrations.alf_values import AlfEnvironment, Records, torch
from envactors.integrations.inside_alf import AlfGuest, StepType, TimeStep
from envactors.options import Deadlines, RestartPolicy
from envactors.vector.facade import seeds_for
from envactors.vector.rotation import Rotation
from envactors.vector.slot import OnFailure

__all__ = ["ActorEnvironment", "ActorParallelEnvironment", "StepType", "TimeStep"]


class ActorParallelEnvironment(Specs, AlfEnvironment):  # type: ignore[misc] # its module is checked nowhere
    """Steps many envs as one batch, each in an actor of its own, under the interface of ALF's ``AlfEnvironment``.

    Where ``alf`` can be imported it is an ``AlfEnvironment`` and gives ALF's ``TimeStep``, otherwise our own. Its
    arrays are torch tensors where torch is installed, otherwise NumPy's; they are never written to again.

    An env that shows ``StepType.LAST`` resets at once; the next step ignores its action and returns the reset. Envs of
    a ``batch_size`` above 1 do so by themselves.

    Args:
        env_constructors: One callable an env, run in the workers with ``env_id=`` its number; the last ones are the
            spare envs.
        start_serially: Whether each env is made before the next one's process starts; replacements too.
        blocking: Without effect, as in ``FastParallelEnvironment``.
        flatten: Without effect, as in ``FastParallelEnvironment``.
        num_spare_envs_for_reload: How many envs wait, reset, for the slot of an env whose episode ends; that one
            resets and waits at the back of the queue. The others have the slots: first env ``i`` slot ``i``.
        torch_num_threads_per_env: How many threads torch and NumPy's libraries have in each worker. None: what the
            caller's environment says, and one each where it says nothing.
        start_method: ``"fork"`` and ``"spawn"``, as there, or ``"loky"`` and ``"forkserver"``. None: ``"loky"``, which
            never forks the caller; ``"fork"`` is for constructors that need the caller's configuration of ALF.
        on_failure: ``"raise"``: an env that fails is a RuntimeError. ``"renew"``: its process is replaced, its episode
            ends with a `StepType.LAST` of reward 0 and discount 1 (the last complete observation) and the exception is
            in `failures`. ``"replay"``: its process is replaced and brought to the same point, where it was seeded
            with `seed`; see `VectorEnv`.
        deadlines: How long things may take; by default nothing but closing is limited (5 s).
        restart: When a lost process is replaced. None: never with ``on_failure="raise"``, as there; otherwise up to 3
            times in 600 s.

    Attributes:
        envs: An `ActorEnvironment` for each env that is not a spare one.
        actors: The processes' handles, those of the spare envs last.
        failures: The exceptions that the last step or reset stands in for, by slot; with ``on_failure="renew"``.

    Raises:
        ValueError: Envs that differ in what must be the same for all, or an argument that makes no sense.
        RuntimeError: An env could not be made, or spare envs of a ``batch_size`` above 1.
    """

    def __init__(
        self,
        env_constructors: Iterable[Callable[..., Any]],
        start_serially: bool = True,
        blocking: bool = False,  # noqa: ARG002 # known there
        flatten: bool = True,  # noqa: ARG002
        num_spare_envs_for_reload: int = 0,
        torch_num_threads_per_env: int | None = 1,
        start_method: str | None = None,
        *,
        on_failure: OnFailure = "raise",
        deadlines: Deadlines = Deadlines(start=None),  # noqa: B008 # frozen
        restart: RestartPolicy | None = None,
    ) -> None:
        super().__init__()
        threads, spares = torch_num_threads_per_env, num_spare_envs_for_reload
        factories = [
            functools.partial(AlfGuest, constructor, env_id, threads)
            for env_id, constructor in enumerate(env_constructors)
        ]
        if isinstance(spares, bool) or not isinstance(spares, int) or not 0 <= spares < max(len(factories), 1):
            raise ValueError(
                f"num_spare_envs_for_reload is {spares!r} with {len(factories)} env_constructors: expected an int >= "
                "0, and less than that"
            )
        try:
            self._all = Envs(
                factories,
                on_failure=on_failure,
                deadlines=deadlines,
                restart=restart or RestartPolicy(max_restarts=0 if on_failure == "raise" else 3),
                env_vars=None if threads is None else dict.fromkeys(THREAD_CAPS, str(threads)),
                backend=ProcessBackend(
                    "loky" if start_method is None else start_method,  # type: ignore[arg-type] # checked there
                    max_starting=1 if start_serially else None,
                ),
                copy=False,  # each array is copied out of the records
            )
        except ActorError as error:
            raise interrupted(error) from error
        try:
            self._described = described = self._all.described
            slots = self._all.num_envs - spares
            if spares and described.resets_itself:
                raise RuntimeError(
                    f"num_spare_envs_for_reload is {spares} and the envs' batch_size "
                    f"{described.batch_size}: expected no spare envs, since such envs reset by themselves"
                )
            self._rotation = Rotation(self._all, slots)
        except BaseException:
            self._all.close(0)
            raise
        self._num_spare_envs_for_reload = spares
        self._records = Records(described, slots)
        self._seeds: list[Any] | None = None
        self._current_time_step: Any = None
        self._each = [ActorEnvironment(self._all[i], described) for i in range(self._all.num_envs)]
        self.envs = self._each[:slots]
        self.actors = self._all.actors
        self.failures: dict[int, BaseException] = {}

    # Stepping --------------------------------------------------------------------------------------------

    def reset(self) -> Any:
        """Resets all envs, the spare ones too, and waits for those that have a slot: again env ``i`` slot ``i``.

        Returns:
            The `TimeStep`, of ``batch_size`` rows.

        Raises:
            RuntimeError: An env failed; the cause is its own exception, or the `ActorError` of its process.
        """
        self._current_time_step = self._reset()
        return self._current_time_step

    def step(self, action: Any) -> Any:
        """Steps all slots; the first step of all is a reset.

        Args:
            action: A nest of tensors or arrays like ``action_spec()``, of ``batch_size`` rows.

        Returns:
            The `TimeStep`, of ``batch_size`` rows; ``env_id`` is the row.

        Raises:
            RuntimeError: An env failed; the cause is its own exception, or the `ActorError` of its process. After the
                loss of a process, where it is replaced, all need a `reset`.
            SpaceMismatchError: Another structure, number, shape or dtype than the action spec has; a ValueError.
        """
        self._current_time_step = self.reset() if self._current_time_step is None else self._step(action)
        return self._current_time_step

    def current_time_step(self) -> Any:
        """The last result; None before the first."""
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
        self.failures = {slot: info["failure"] for slot, info in enumerate(infos) if info} if any(infos) else {}
        return self._records.time_step(obs, ended if self.failures else None)

    # Asking ----------------------------------------------------------------------------------------------

    @property
    def is_tensor_based(self) -> bool:
        """Whether results are torch tensors."""
        return torch is not None

    @property
    def batched(self) -> bool:
        """Whether values have a row a slot: always."""
        return True

    @property
    def batch_size(self) -> int:
        """How many rows there are: the slots, times the ``batch_size`` of each env."""
        return self._records.batch_size

    @property
    def num_spare_envs_for_reload(self) -> int:
        """How many envs have no slot at a time."""
        return self._num_spare_envs_for_reload

    @property
    def metadata(self) -> Any:
        """The metadata of env 0."""
        return self.envs[0].metadata

    def render(self, mode: str = "rgb_array") -> Any:
        """A frame of env 0."""
        return self.envs[0].render(mode)

    def call_envs_with_same_args(self, func_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of all envs but the spare ones, side by side; one value an env.

        Raises:
            Exception: What the first env that failed raised.
            RuntimeError: The process of an env was lost.
        """
        return _kept([env.call(func_name, *args, **kwargs) for env in self.envs])

    def seed(self, seeds: Sequence[int | None]) -> list[Any]:
        """Seeds all envs, then the spare ones, with their own ``seed``; once more right before the next `reset`.

        The second time makes the reset a seeded one, from which ``on_failure="replay"`` goes on, and from whose seed
        those of later processes follow.

        Returns:
            What each env's ``seed`` returned.

        Raises:
            ValueError: Another number of seeds than there are envs.
            Exception: What the first env that failed raised.
        """
        wanted = seeds_for(seeds, list(range(self._all.num_envs)))
        results = _kept([env.call("seed", seed) for env, seed in zip(self._each, wanted, strict=True)])
        self._seeds = wanted
        return results

    def sync_progress(self) -> None:
        """Has ALF's schedulers in all workers know the caller's progress, and each env's ``sync_progress`` called.

        It is not waited for: an env that resets learns it afterwards.
        """
        for env in self._each:
            env.sync_progress()

    def close(self) -> None:
        """Closes the envs and ends their processes, within the close deadline; done at exit if nobody has."""
        self._all.close()

    def __enter__(self) -> ActorParallelEnvironment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _kept(promises: list[Callable[[], Any]]) -> list[Any]:
    return [promise() for promise in promises]
