"""`ActorParallelEnvironment`: ALF's ``FastParallelEnvironment`` over actors.

    step ──▶ the actions as arrays ──▶ a step of the envs that have a slot ──▶ records ──▶ a `TimeStep` of tensors

The mechanisms are those of `envactors.vector.facade.VectorEnv` and, for spare envs, of
`envactors.vector.rotation.Rotation`; what runs around each env in its worker is in
`envactors.integrations.inside_alf`. ALF (the Agent Learning Framework, https://github.com/HorizonRobotics/alf) need not
be installed: any env with the interface of its ``AlfEnvironment`` will do.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle
from envactors.backends.process import THREAD_CAPS, ProcessBackend
from envactors.errors import ActorError, SerializationError, SpaceMismatchError, VectorStepError
from envactors.integrations.inside_alf import AlfGuest, Described, StepType, TimeStep, packer, record_of
from envactors.options import Deadlines, RestartPolicy
from envactors.vector.facade import VectorEnv, seeds_for
from envactors.vector.rotation import Rotation
from envactors.vector.slot import OnFailure

__all__ = ["ActorEnvironment", "ActorParallelEnvironment", "StepType", "TimeStep"]

try:
    import torch
except ImportError:
    torch = None
try:
    import alf
    from alf.data_structures import TimeStep as _TimeStep
    from alf.environments.alf_environment import AlfEnvironment as _Base
except ImportError:  # or another package of that name
    alf, _TimeStep, _Base = None, TimeStep, object

_log = logging.getLogger("envactors")

# Of what must be the same for all envs.
_AGREED = "is_tensor_based", "action_spec", "reward_spec", "env_info_spec", "batch_size", "batched", "time_step_spec"


class _Specs:
    """What an env and many envs alike say of themselves."""

    _described: Described

    def observation_spec(self) -> Any:
        """One env's observation."""
        return self._described.observation_spec

    def action_spec(self) -> Any:
        """One env's action."""
        return self._described.action_spec

    def reward_spec(self) -> Any:
        """One env's reward."""
        return self._described.reward_spec

    def env_info_spec(self) -> Any:
        """One env's ``env_info``."""
        return self._described.env_info_spec

    def time_step_spec(self) -> Any:
        """One env's time step, without its ``env_info``."""
        return self._described.time_step_spec

    @property
    def num_tasks(self) -> int:
        """How many tasks the envs have."""
        return self._described.num_tasks

    @property
    def task_names(self) -> Any:
        """The tasks' names."""
        return self._described.task_names


class ActorParallelEnvironment(_Specs, _Base):  # type: ignore[misc] # its module is checked nowhere
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
            self._all = _Envs(
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
            raise _interrupted(error) from error
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
        self._batch_size = slots * described.batch_size
        self._action_leaves, self._outer = described.action_leaves(), described.outer
        leaves = described.leaves()
        self._record = record_of(leaves)
        self._names = [str(number) for number in range(len(leaves))]
        self._makers = [packer(nest) for nest in described.fields().values()]
        # It comes before what is last.
        self._env_id_at = sum(not leaf.name.startswith(("untransformed", "env_info")) for leaf in leaves)
        self._env_ids = np.arange(self._batch_size, dtype=np.int32)
        self._seeds: list[Any] | None = None
        self._current_time_step: Any = None
        self.envs = [ActorEnvironment(self._all[slot], described) for slot in range(slots)]
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
        raise _interrupted(failed) from failed.__cause__

    def _step(self, action: Any) -> Any:
        try:
            obs, _, _, failures, infos = self._rotation.step(self._actions(action))
        except VectorStepError as error:
            failed = error
        else:
            return self._time_step(obs, failures, infos)
        raise _interrupted(failed) from failed.__cause__

    def _actions(self, action: Any) -> Any:
        if not self._described.nests_actions:
            return self._action("action", action)
        return tuple(self._action(leaf.name, leaf.of(action)) for leaf in self._action_leaves)

    def _action(self, name: str, value: Any) -> npt.NDArray[Any]:
        to_numpy = getattr(value, "numpy", None)
        array = np.asarray(value if to_numpy is None else to_numpy(force=True))
        if array.shape[:1] != (self._batch_size,):
            raise SpaceMismatchError(f"{name} has shape {array.shape}: expected {self._batch_size} rows, one a slot")
        return array.reshape(-1, *self._outer, *array.shape[1:]) if self._outer else array

    def _time_step(self, obs: Any, ended: npt.NDArray[np.bool_], infos: list[dict[str, Any]]) -> Any:
        """Makes a time step of the records; where the facade, and no env, has ended an episode, it says so."""
        records = obs.view(self._record)[:, 0]
        arrays = [records[name].copy() for name in self._names]
        self.failures = {slot: info["failure"] for slot, info in enumerate(infos) if info} if any(infos) else {}
        if self.failures:
            step_type, reward, discount = arrays[:3]
            step_type[ended], reward[ended], discount[ended] = StepType.LAST, 0, 1
        if self._outer:
            arrays = [array.reshape(self._batch_size, *array.shape[2:]) for array in arrays]
        arrays.insert(self._env_id_at, self._env_ids.copy())
        if torch is not None:
            arrays = [torch.from_numpy(array) for array in arrays]
        result = self._packed(arrays)
        if alf is not None and alf.get_default_device() != "cpu":
            there = self._packed([array.to(alf.get_default_device()) for array in arrays])
            there._cpu = result  # where ALF looks for it
            return there
        return result

    def _packed(self, arrays: list[Any]) -> Any:
        values = iter(arrays)
        return _TimeStep(*[make(values) for make in self._makers])

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
        return self._batch_size

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
        results = _kept([_promise(self._all[i].call("seed", seed)) for i, seed in enumerate(wanted)])
        self._seeds = wanted
        return results

    def sync_progress(self) -> None:
        """Has ALF's schedulers in all workers know the caller's progress, and each env's ``sync_progress`` called.

        It is not waited for: an env that resets learns it afterwards.
        """
        for i in range(self._all.num_envs):
            _sync(self._all[i])

    def close(self) -> None:
        """Closes the envs and ends their processes, within the close deadline; done at exit if nobody has."""
        self._all.close()

    def __enter__(self) -> ActorParallelEnvironment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class ActorEnvironment(_Specs):
    """One env of an `ActorParallelEnvironment`: ALF's ``ProcessEnvironment``. Its attributes are the env's own."""

    def __init__(self, handle: ActorHandle, described: Described) -> None:
        self._handle = handle
        self._described = described

    def call(self, name: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Starts a call of a method of the env.

        Returns:
            A promise: called, it waits for this call and gives its result, as often as it is called. It raises what the
            env raised, or RuntimeError where the process was lost.
        """
        return _promise(self._handle.call(_OWN.get(name, name), *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} begins with an underscore: such names are never sent to an env")
        return _promise(self._handle.get(name))()

    def step(self, action: Any, blocking: bool = True) -> Any:
        """Steps this env alone, of which the others know nothing; its time step, or without ``blocking`` a promise."""
        promise = self.call("step", action)
        return promise() if blocking else promise

    def reset(self, blocking: bool = True) -> Any:
        """Resets this env alone, of which the others know nothing; its time step, or without ``blocking`` a promise."""
        promise = self.call("reset")
        return promise() if blocking else promise

    def render(self, mode: str = "human") -> Any:
        """A frame, as the env's ``render`` gives it."""
        return self.call("render", mode)()

    def sync_progress(self) -> None:
        """See `ActorParallelEnvironment.sync_progress`."""
        _sync(self._handle)


class _Envs(VectorEnv):
    """The envs, that must be alike.

    Attributes:
        described: What they say of themselves.
    """

    def _learn_specs(self) -> None:
        first, *others = self.call("envactors_describe")
        for env_id, other in enumerate(others, 1):
            for name in _AGREED:
                ours, theirs = getattr(first, name), getattr(other, name)
                if theirs != ours:
                    raise SpaceMismatchError(
                        f"All environments must have the same {name}: that of env {env_id} is {theirs}, "
                        f"that of env 0 {ours}"
                    )
        if first.is_tensor_based:
            raise SpaceMismatchError("All environments must be array-based environments: is_tensor_based is True")
        self.described: Described = first
        super()._learn_specs()


# What the drop-in has put methods of its own before, in the worker.
_OWN = {"step": "envactors_step", "reset": "envactors_reset"}


def _promise(future: ActorFuture) -> Callable[[], Any]:
    def promise() -> Any:
        try:
            return future.result()
        except SerializationError:
            raise
        except ActorError as error:
            raise _interrupted(error) from error

    return promise


def _kept(promises: list[Callable[[], Any]]) -> list[Any]:
    return [promise() for promise in promises]


def _sync(handle: ActorHandle) -> None:
    progress = None
    if alf is not None:
        from alf.utils.schedulers import get_all_progresses

        progress = get_all_progresses()
    handle.call("envactors_sync_progress", progress).add_done_callback(_tell)


def _tell(future: Future[Any]) -> None:
    error = future.exception()
    if error is not None:
        _log.warning("an env has not taken in the progress: %r", error)


def _interrupted(error: BaseException) -> RuntimeError:
    """As ALF says it."""
    return RuntimeError(f"ProcessEnvironment is interrupted: {error}")
