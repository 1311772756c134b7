"""DI-engine's env managers over actors: `AsyncActorEnvManager`, `SyncActorEnvManager`, `ActorEnvManagerV2`.

    step    the facade's step of all envs, or send and recv for some of them ──▶ timesteps, by env id
    reset   a future an env, taken in by whatever is called next ──▶ RUN, or the next try

The managers work with any object that has ``reset``, ``step``, ``seed`` and ``close``. Where DI-engine is installed,
they are of its `BaseEnvManager`, give its `BaseEnvTimestep`, and are registered as ``async_actor``, ``actor`` and
``actor_v2``.
The mechanisms are those of `envactors.vector.facade.VectorEnv` with ``autoreset="disabled"``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import numbers
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for
from typing import Any, NoReturn

import numpy as np

from envactors.actor.handle import ActorHandle, spawn
from envactors.actor.states import ActorState
from envactors.arrays.specs import ArraySpec, split_batch
from envactors.backends.base import Backend
from envactors.backends.process import ProcessBackend
from envactors.errors import ActorError, RemoteTraceback, SerializationError, VectorStepError
from envactors.integrations.ding_values import (
    CONTEXT,
    PRELOAD,
    BaseEnvManager,
    BaseEnvTimestep,
    EnvState,
    as_timestep,
    config_dict,
    first_rows,
    read_rewards,
    register,
    rows_of,
    stack_trees,
    timestep_tree,
)
from envactors.integrations.inside_ding import Begun, DingGuest, Given, is_abnormal
from envactors.options import Deadlines, RestartPolicy
from envactors.vector.batch import Batch
from envactors.vector.facade import VectorEnv
from envactors.vector.slot import EnvFuture

_log = logging.getLogger("envactors")


@dataclasses.dataclass
class _Resetting:
    """A reset that is under way.

    Attributes:
        seed: Its seed, or None.
        failed: How many tries have failed.
        future: The try that runs; None between two of them.
        due: When the next one begins, where none runs (`time.monotonic`).
    """

    seed: int | None
    failed: int = 0
    future: EnvFuture | None = None
    due: float = 0.0


class _Reference:
    """An env in its worker, as an object here: attributes are read there, methods called there."""

    def __init__(self, handle: Callable[[], ActorHandle]) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_method, value = self._handle().call("envactors_look", name).result()
        return functools.partial(self._invoke, name) if is_method else value

    def _invoke(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._handle().call("envactors_invoke", name, *args, **kwargs).result()


@register("async_actor")
class AsyncActorEnvManager(BaseEnvManager):
    """Steps some envs at a time, each in an actor of its own, under the interface of ``AsyncSubprocessEnvManager``.

    Args:
        env_fn: One callable an env; run in the workers alone.
        cfg: A mapping of what shall be other than in `default_config`; entries that are not known are left out.
        **options: The same by name; here each must be known.

    The entries, in seconds where they are times: ``episode_num`` (of each env), ``max_retry`` (tries of a reset in
    all), ``retry_type`` (``"reset"`` tries again in the same process, ``"renew"`` in a new one),
    ``retry_waiting_time``, ``auto_reset``, ``reset_inplace`` (the step that ends an episode resets), ``step_timeout``
    and ``reset_timeout`` (deadlines, enforced by ending the process), ``connect_timeout`` (for each try of a
    reset, and for the start of a process if it is more than 60), ``wait_num`` and ``step_wait_timeout`` (when a step
    returns), ``shared_memory`` (whether values that are as the spaces say go through it), ``copy_on_get`` (False:
    observations are views, valid until the env's next step), ``context`` (``"loky"``, ``"spawn"``, ``"forkserver"`` or
    ``"fork"``).

    Two are of envactors' own: ``on_failure`` (``"raise"``: what fails in a step is raised and closes the manager;
    ``"renew"``: it is an abnormal timestep, with the exception as ``info["failure"]``, and the env's next reset runs in
    a new process) and ``restart`` (how often a lost process is replaced under ``"renew"``).

    Raises:
        AssertionError: Entries that make no sense, as everywhere where a call is refused.
        TypeError: An option that is not known.
    """

    config: dict[str, Any] = {  # noqa: RUF012 # as there
        "episode_num": float("inf"),
        "max_retry": 1,
        "retry_type": "reset",
        "retry_waiting_time": 0.1,
        "auto_reset": True,
        "step_timeout": None,
        "reset_timeout": None,
        "shared_memory": True,
        "copy_on_get": True,
        "context": CONTEXT,
        "wait_num": 2,
        "step_wait_timeout": 0.01,
        "connect_timeout": 60,
        "reset_inplace": False,
        "on_failure": "raise",
        "restart": RestartPolicy(max_restarts=3),
    }
    _waits_for_all = False

    @classmethod
    def default_config(cls) -> Any:
        """A copy of the default configuration: an ``EasyDict`` where that is installed, else a dict much like one."""
        return config_dict({**cls.config, "cfg_type": f"{cls.__name__}Dict"})

    def __init__(
        self, env_fn: Sequence[Callable[[], Any]], cfg: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._closed = True
        for name in options:
            if name not in self.config:
                raise TypeError(f"{type(self).__name__} has no option {name!r}: expected some of {sorted(self.config)}")
        self._cfg = config_dict({**self.config, **(cfg or {}), **options})
        self._env_fn = list(env_fn)
        self._env_num = len(self._env_fn)
        _require(self._env_num > 0, "no env_fn: expected one callable an env, and at least one")
        self._episode_num = self._cfg["episode_num"]
        self._max_retry = max(self._cfg["max_retry"], 1)
        self._retry_type = self._cfg["retry_type"]
        _require(self._retry_type in ("reset", "renew"), f"retry_type is {self._retry_type!r}: 'reset' or 'renew'")
        self._on_failure = self._cfg["on_failure"]
        _require(self._on_failure in ("raise", "renew"), f"on_failure is {self._on_failure!r}: 'raise' or 'renew'")
        self._retry_waiting_time = self._cfg["retry_waiting_time"]
        self._auto_reset = self._cfg["auto_reset"]
        self._reset_inplace = self._cfg["reset_inplace"]
        _require(
            self._auto_reset or not self._reset_inplace,
            "reset_inplace with auto_reset=False: expected both, or neither",
        )
        self._step_timeout = self._cfg["step_timeout"]
        self._reset_timeout = self._cfg["reset_timeout"]
        self._connect_timeout = self._cfg["connect_timeout"]
        self._wait_num = self._cfg["wait_num"]
        self._step_wait_timeout = self._cfg["step_wait_timeout"]
        self._env_replay_path: Sequence[str | None] = [None] * self._env_num
        self._env_seed: dict[int, int | None] = dict.fromkeys(range(self._env_num))
        self._env_dynamic_seed: bool | None = None
        self._action_seed: int | None = None
        self._env_episode_count: dict[int, int] = {}
        self._reset_param: dict[int, dict[str, Any] | None] = {}
        self._ready_obs: dict[int, Any] = {}
        self._states: dict[int, Any] = dict.fromkeys(range(self._env_num), EnvState.VOID)
        self._waiting: set[int] = set()
        self._resets: dict[int, _Resetting] = {}
        self._spaces: tuple[Any, ...] | None = None
        self._scout: ActorHandle | None = None
        self._actors: VectorEnv

    # Looking ---------------------------------------------------------------------------------------------

    @property
    def env_num(self) -> int:
        """How many envs there are."""
        return self._env_num

    @property
    def actors(self) -> list[ActorHandle]:
        """The envs' processes."""
        self._check_closed()
        return self._actors.actors

    @property
    def closed(self) -> bool:
        """Whether it is closed, or was not launched yet."""
        return self._closed

    @property
    def done(self) -> bool:
        """Whether all envs have had their episodes."""
        return all(state == EnvState.DONE for state in self._env_states.values())

    @property
    def active_env(self) -> list[int]:
        """The envs in RUN."""
        return [env_id for env_id, state in self._env_states.items() if state is EnvState.RUN]

    @property
    def ready_env(self) -> list[int]:
        """The envs in RUN with nothing under way."""
        active = self.active_env
        return [env_id for env_id in active if env_id not in self._waiting] if self._waiting else active

    @property
    def ready_obs_id(self) -> list[int]:
        """The envs that `ready_obs` has."""
        return self.ready_env

    @property
    def ready_obs(self) -> Any:
        """The observations of the envs in RUN with nothing under way, by env id; waits until an env is in RUN.

        Raises:
            RuntimeError: A reset has failed as often as it may; its last cause is ``__cause__``.
        """
        return self._ready_now()

    def _ready_now(self) -> dict[int, Any]:
        self._check_closed()
        if self._resets:
            self._await(lambda: not self._resets or EnvState.RUN in self._states.values())
        return {env_id: self._ready_obs[env_id] for env_id in self.ready_env}

    @property
    def ready_imgs(self) -> dict[int, Any]:
        """The frames of the envs that are ready, by env id."""
        ids = self.ready_env
        self._check_closed()
        return dict(zip(ids, self._ask(ids, "envactors_render", "rgb_array"), strict=True))

    def env_state_done(self, env_id: int) -> bool:
        """Whether an env has had its episodes."""
        return bool(self._env_states[env_id] == EnvState.DONE)

    @property
    def _env_states(self) -> dict[int, Any]:
        self._settle()
        return self._states

    @property
    def observation_space(self) -> Any:
        """An env's observation space, from its worker; None where it has none."""
        return self._known_spaces()[0]

    @property
    def action_space(self) -> Any:
        """An env's action space, from its worker; None where it has none."""
        return self._known_spaces()[1]

    @property
    def reward_space(self) -> Any:
        """An env's reward space, from its worker; None where it has none."""
        return self._known_spaces()[2]

    def _known_spaces(self) -> tuple[Any, ...]:
        if self._spaces is None:
            self._spaces = self._first_env().call("envactors_spaces").result()
            self._seed_actions()
        return self._spaces

    def _seed_actions(self) -> None:
        if self._spaces is not None and self._action_seed is not None and hasattr(self._spaces[1], "seed"):
            self._spaces[1].seed(self._action_seed)

    @property
    def env_ref(self) -> Any:
        """An env whose attributes are read, and whose methods called, in its worker: env 0 once it is launched."""
        return _Reference(self._first_env)

    @property
    def _env_ref(self) -> Any:
        return self.env_ref

    def _first_env(self) -> ActorHandle:
        if not self._closed:
            return self._actors[0]
        if self._scout is None:
            guest = functools.partial(DingGuest, self._env_fn[0], False, False)
            self._scout = spawn(guest, deadlines=Deadlines(start=self._start_deadline()), backend=self._backend())
        return self._scout

    def random_action(self) -> dict[int, Any]:
        """A sample of the action space for each env that is ready."""
        return {env_id: self.action_space.sample() for env_id in self.ready_obs_id}

    @property
    def method_name_list(self) -> list[str]:
        """The envs' methods that can be called through the manager."""
        return [
            "reset",
            "step",
            "seed",
            "close",
            "enable_save_replay",
            "render",
            "reward_shaping",
            "enable_save_figure",
        ]

    def __getattr__(self, key: str) -> Any:
        """Reads an attribute of all envs; of a method in `method_name_list` what calls it in all.

        Raises:
            AttributeError: An env does not have it.
            RuntimeError: It is another method.
            AssertionError: The manager is closed.
        """
        if key.startswith("__") or key in ("_closed", "_actors"):
            raise AttributeError(key)
        self._check_closed()
        looks = self._ask(range(self._env_num), "envactors_look", key)
        if not looks[0][0]:
            return [value for _, value in looks]
        if key not in self.method_name_list:
            raise RuntimeError(f"{key} is a method of the envs, and not in method_name_list: add it there to call it")
        return functools.partial(self._ask, range(self._env_num), "envactors_invoke", key)

    def reward_shaping(self, env_id: int, transitions: list[dict[str, Any]]) -> Any:
        """What an env's ``reward_shaping`` makes of transitions."""
        return self._ask([env_id], "envactors_invoke", "reward_shaping", transitions)[0]

    def enable_save_figure(self, env_id: int, figure_path: str) -> None:
        """Has an env save figures."""
        self._ask([env_id], "envactors_invoke", "enable_save_figure", figure_path)

    def _ask(self, env_ids: Iterable[int], method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._actors.call(method, *args, env_ids=env_ids, **kwargs)

    # Launching and closing -------------------------------------------------------------------------------

    def launch(self, reset_param: Mapping[int, dict[str, Any] | None] | None = None) -> None:
        """Starts the envs side by side and resets them.

        Args:
            reset_param: The arguments of each env's ``reset``, by env id.

        Raises:
            AssertionError: It is not closed, or there is not one entry an env.
            RuntimeError: An env could not be made, or its reset has failed as often as it may.
            SpaceMismatchError: The envs' spaces differ, and ``shared_memory`` is not False.
        """
        _require(self._closed, "the env manager is launched already: close it first")
        _require(
            reset_param is None or len(reset_param) == self._env_num,
            f"launch with {len(reset_param or ())} entries for {self._env_num} envs: expected one an env",
        )
        shared, paths = bool(self._cfg["shared_memory"]), self._env_replay_path
        renews = self._on_failure == "renew"
        limits = [limit for limit in (self._reset_timeout, self._connect_timeout) if limit is not None]
        self._leave_scout()
        start = self._start_deadline()
        try:
            self._actors = VectorEnv(
                [
                    functools.partial(DingGuest, env_fn, shared, self._reset_inplace, path)
                    for env_fn, path in zip(self._env_fn, paths, strict=True)
                ],
                autoreset="disabled",
                deadlines=Deadlines(start=start, step=self._step_timeout, reset=min(limits, default=None)),
                # What is lost otherwise closes the manager, or is the affair of `_start`.
                restart=self._cfg["restart"] if renews else RestartPolicy(self._max_retry - 1),
                backend=self._backend(),
                shared_memory=shared,
                copy=self._cfg["copy_on_get"],
            )
        except ActorError as error:
            raise RuntimeError(f"an env could not be made: {error}") from error
        self._actors._let_envs_judge()
        self._reward_spec = self._actors.call("envactors_reward_spec", env_ids=[0])[0]
        self._env_episode_count = dict.fromkeys(range(self._env_num), 0)
        self._ready_obs = dict.fromkeys(range(self._env_num))
        self._reset_param = {env_id: {} for env_id in range(self._env_num)}
        self._states = dict.fromkeys(range(self._env_num), EnvState.INIT)
        self._closed = False
        self.reset(reset_param)

    def _start_deadline(self) -> float | None:
        """How long a worker may take to start: to import torch alone can take longer than an answer may."""
        return None if self._connect_timeout is None else max(self._connect_timeout, 60.0)

    def _backend(self) -> str | Backend:
        context = self._cfg["context"]
        if context == "loky":
            return "process"
        return ProcessBackend(start_method=context, preload=PRELOAD if context == "forkserver" else ())

    def close(self) -> None:
        """Closes the envs and ends their processes; may be called again, and `launch` after it."""
        self._leave_scout()
        if self._closed:
            return
        self._closed = True
        self._actors.close()
        self._waiting.clear()
        self._resets.clear()
        self._ready_obs.clear()
        self._states = dict.fromkeys(self._states, EnvState.VOID)

    def _leave_scout(self) -> None:
        if self._scout is not None:
            self._scout.close()
            self._scout = None

    def _check_closed(self) -> None:
        _require(not self._closed, "the env manager is closed: launch it first")

    def seed(self, seed: int | list[int | None] | dict[int, int], dynamic_seed: bool | None = None) -> None:
        """Sets the seeds that are sent with the next call of `reset` or `launch`, and kept for renewed processes.

        Args:
            seed: One each, by env id or in order; of an int env ``i`` has ``seed + i``.
            dynamic_seed: Passed to each env's ``seed``, unless it is None.

        Raises:
            AssertionError: A list of another length.
            TypeError: None of these.
        """
        if isinstance(seed, numbers.Integral):
            seed = [int(seed) + env_id for env_id in range(self._env_num)]
        if isinstance(seed, list):
            _require(len(seed) == self._env_num, f"{len(seed)} seeds for {self._env_num} envs: expected one an env")
            seed = dict(enumerate(seed))  # type: ignore[arg-type] # None is no seed
        if not isinstance(seed, dict):
            raise TypeError(f"seed is {seed!r}: expected an int, a list with one an env, or a dict by env id")
        self._check_ids(seed)
        self._env_seed.update(seed)
        self._env_dynamic_seed = dynamic_seed
        if seed.get(0) is not None:
            self._action_seed = seed[0]
            self._seed_actions()

    def enable_save_replay(self, replay_path: list[str] | str) -> None:
        """Has the envs save replays, from the next launch on; one path for all, or one an env."""
        paths = [replay_path] * self._env_num if isinstance(replay_path, str) else list(replay_path)
        _require(len(paths) == self._env_num, f"{len(paths)} paths for {self._env_num} envs: expected one an env")
        self._env_replay_path = paths

    def _check_ids(self, env_ids: Iterable[int]) -> None:
        unknown = [env_id for env_id in env_ids if env_id not in self._states]
        _require(not unknown, f"there are no envs {unknown}: expected ids from 0 to {self._env_num - 1}")

    # Resetting -------------------------------------------------------------------------------------------

    def reset(self, reset_param: Mapping[int, dict[str, Any] | None] | None = None) -> None:
        """Resets envs side by side; what they still owe of a step is dropped.

        Args:
            reset_param: The arguments of each env's ``reset``, by env id, kept for its automatic resets too; None for
                an env: without any. None: all envs, as the last time.

        Raises:
            AssertionError: The manager is closed; or there is no such env.
            RuntimeError: A reset has failed as often as it may; its last cause is ``__cause__``.
        """
        self._check_closed()
        reset_param = (
            {env_id: self._reset_param[env_id] for env_id in self._states} if reset_param is None else reset_param
        )
        self._check_ids(reset_param)
        for env_id, param in reset_param.items():
            _require(
                param is None or isinstance(param, dict),
                f"the reset_param of env {env_id} is {param!r}: a dict or None",
            )
        self._reset_param.update(reset_param)
        self._await(lambda: self._resets.keys().isdisjoint(reset_param))
        self._drop(self._waiting.intersection(reset_param))
        for env_id in reset_param:
            self._begin_reset(env_id, self._env_seed[env_id])
            self._env_seed[env_id] = None
        self._await(lambda: self._resets.keys().isdisjoint(reset_param))

    def _drop(self, env_ids: set[int]) -> None:
        """Takes in steps that nobody asks for any more."""
        if env_ids:
            try:
                self._actors._gather(self._actors._select(env_ids), None, None, "reset")
            except VectorStepError as error:
                _log.info("a step failed that a reset has overtaken: %s", error)
            self._waiting -= env_ids

    def _begin_reset(self, env_id: int, seed: int | None = None) -> None:
        self._states[env_id] = EnvState.RESET
        self._resets[env_id] = resetting = _Resetting(seed)
        self._try(env_id, resetting)

    def _try(self, env_id: int, resetting: _Resetting) -> None:
        actors = self._actors
        if self._on_failure == "raise" and actors[env_id].state is ActorState.DEAD:
            actors[env_id].renew()
        asked = {"param": self._reset_param[env_id], "dynamic_seed": self._env_dynamic_seed}
        try:
            [resetting.future] = actors._begin_reset(
                [actors._slots[env_id]], [resetting.seed], [asked], collected=False
            )
        except SerializationError as error:
            self._fail_reset(env_id, error)

    def _settle(self) -> None:
        """Takes in the resets that have ended, and begins the tries that are due."""
        for env_id, resetting in list(self._resets.items()):
            future = resetting.future
            if future is None:
                if time.monotonic() >= resetting.due:
                    self._try(env_id, resetting)
            elif future.done():
                error = future.exception()
                if error is None:
                    del self._resets[env_id]
                    self._take_reset(env_id, future)
                else:
                    self._retry(env_id, resetting, error)

    def _take_reset(self, env_id: int, future: EnvFuture) -> None:
        step = future.result()
        begun: Begun = step.info
        if begun.complaint is not None:
            _log.warning(
                "env %s was reset without its seed, since its seed method failed:\n%s", env_id, begun.complaint
            )
        [self._ready_obs[env_id]] = begun.misfit or (step.obs,)
        self._states[env_id] = EnvState.RUN

    def _retry(self, env_id: int, resetting: _Resetting, error: BaseException) -> None:
        resetting.failed += 1
        if resetting.failed >= self._max_retry:
            self._fail_reset(env_id, error)
        if (self._retry_type == "renew" and not _is_lost(error)) or _is_unreadable(error):
            self._actors[env_id].renew()
        resetting.future, resetting.due = None, time.monotonic() + self._retry_waiting_time

    def _fail_reset(self, env_id: int, error: BaseException) -> NoReturn:
        self.close()
        raise RuntimeError(
            f"the reset of env {env_id} has failed as often as it may (max_retry is {self._max_retry}), the last time "
            f"with {type(error).__name__}: {error}"
        ) from error

    def _await(self, done: Callable[[], bool]) -> None:
        """Waits for resets until something is so."""
        self._settle()
        while not done():
            running = [one.future for one in self._resets.values() if one.future is not None]
            dues = [one.due for one in self._resets.values() if one.future is None]
            pause = max(min(dues) - time.monotonic(), 0.0) if dues else None
            if running:
                wait_for(running, pause, FIRST_COMPLETED)
            else:
                time.sleep(pause or 0.0)
            self._settle()

    # Stepping --------------------------------------------------------------------------------------------

    def step(self, actions: Mapping[int, Any]) -> Any:
        """Steps envs; returns when enough of them have answered.

        That is when ``min(wait_num, len(actions))`` have and ``step_wait_timeout`` has passed (None: when all have),
        and not all that came are done, or when nothing is under way any more. Envs of earlier steps count too. Without
        actions it waits for one of these.

        Args:
            actions: Any actions, by env id.

        Returns:
            The timesteps ``(obs, reward, done, info)``, by env id.

        Raises:
            AssertionError: The manager is closed; or an env is not in RUN, or under way.
            Exception: What an env has raised, or the `ActorError` that ended its step; the manager is closed then.
            RuntimeError: A reset has failed as often as it may; its last cause is ``__cause__``.
        """
        return self._step(actions)

    def _step(self, actions: Mapping[int, Any]) -> dict[int, Any]:
        self._check_closed()
        self._settle()
        ids = list(actions)
        self._check_ready(ids)
        if self._waits_for_all and len(ids) == self._env_num:
            batch = self._as_batch([actions[env_id] for env_id in range(self._env_num)])
            if batch is not None:
                timesteps = self._step_all(batch)
                return {env_id: timesteps[env_id] for env_id in ids}
        self._send(ids, list(actions.values()))
        if self._waits_for_all:
            timesteps = {}
            while self._waiting:
                timesteps |= self._receive(None, None)
            return {env_id: timesteps[env_id] for env_id in ids}
        return self._receive_some(max(min(self._wait_num, len(ids)), 1))

    def _check_ready(self, ids: list[int]) -> None:
        states, waiting = self._states, self._waiting
        if all(env_id in states and states[env_id] is EnvState.RUN and env_id not in waiting for env_id in ids):
            return
        self._check_ids(ids)
        named = {env_id: states[env_id].name for env_id in ids}
        under_way = sorted(waiting.intersection(ids))
        raise AssertionError(
            f"step of envs whose states are {named}, and those under way {under_way}: expected all in RUN, and none "
            "under way"
        )

    def _as_batch(self, actions: list[Any]) -> Any:
        """One array of the actions, if they are just what the action space says; None where they are not."""
        spec = self._actors.action_spec
        if not isinstance(spec, ArraySpec) or not spec.batchable:
            return None
        try:
            batch = np.array(actions)
        except ValueError:  # ragged
            return None
        return batch if batch.dtype == spec.dtype and batch.shape == (len(actions), *spec.shape) else None

    def _send(self, ids: list[int], actions: list[Any]) -> None:
        batch = self._as_batch(actions)
        if batch is not None:
            self._actors.send(batch, ids)
        else:
            self._actors._begin_as_given(actions, self._actors._select(ids))
        self._waiting.update(ids)

    def _step_all(self, batch: Any) -> dict[int, Any]:
        actors = self._actors
        actors._check_open()
        try:
            actors._begin_all(batch)
            obs, rewards, done, _, infos = actors._finish_all(None, None)
        except VectorStepError as error:
            failed = error
        else:
            return self._take(range(self._env_num), obs, rewards, done, infos)
        return self._take_failed(failed)

    def _receive_some(self, enough: int) -> dict[int, Any]:
        timesteps: dict[int, Any] = {}
        while self._waiting:
            wanted = min(enough, len(self._waiting))
            came = self._receive(None, self._step_wait_timeout)
            while len(came) < wanted:
                came |= self._receive(wanted - len(came), None)
            timesteps |= came
            if not all(timestep.done for timestep in timesteps.values()):
                break
        return timesteps

    def _receive(self, least: int | None, timeout: float | None) -> dict[int, Any]:
        try:
            batch = self._actors.recv(least, timeout=timeout)
        except VectorStepError as error:
            failed = error
        else:
            return self._take_batch(batch)
        return self._take_failed(failed)

    def _take_batch(self, batch: Batch) -> dict[int, Any]:
        return self._take(batch.env_ids.tolist(), batch.obs, batch.rewards, batch.terminated, batch.infos)

    def _take_failed(self, error: VectorStepError) -> dict[int, Any]:
        """Makes abnormal timesteps of failures, or closes and raises the first."""
        timesteps = self._take_batch(error.batch)
        for env_id, failure in error.failures.items():
            info: dict[str, Any] = {"abnormal": True}
            state = self._actors[env_id].state
            if not _is_unreadable(failure):
                if self._on_failure == "raise" or state is ActorState.DEAD:
                    self.close()
                    raise failure
                info["failure"] = failure
            if not _is_lost(failure):
                self._actors[env_id].renew()
            timesteps |= self._take([env_id], [None], [None], np.zeros(1), [Given((None, None, None, info))])
        return timesteps

    def _take(self, ids: Sequence[int], obs: Any, rewards: Any, done: Any, infos: list[Any]) -> dict[int, Any]:
        """Makes timesteps, and takes them into account."""
        spec = self._actors.observation_spec
        rows = obs if isinstance(obs, (np.ndarray, list)) else split_batch(spec, obs, len(ids), "observations")
        if isinstance(rewards, np.ndarray):
            rewards = read_rewards(self._reward_spec, rewards)
        states, ready = self._states, self._ready_obs
        timesteps = {}
        self._waiting.difference_update(ids)
        for env_id, row, reward, over, info in zip(ids, rows, rewards, done.tolist(), infos, strict=True):
            if type(info) is Given:
                timestep = as_timestep(info.timestep)
                row, over, info = timestep.obs, timestep.done, timestep.info  # noqa: PLW2901
            else:
                timestep = BaseEnvTimestep(row, reward, over, info)
            timesteps[env_id] = timestep
            if info and is_abnormal(info):
                states[env_id] = EnvState.ERROR
            elif over:
                self._end(env_id, row)
            else:
                ready[env_id] = row
        return timesteps

    def _end(self, env_id: int, obs: Any) -> None:
        """Goes on after an episode."""
        self._env_episode_count[env_id] += 1
        if self._env_episode_count[env_id] >= self._episode_num:
            self._states[env_id] = EnvState.DONE
        elif not self._auto_reset:
            self._states[env_id] = EnvState.NEED_RESET
        elif self._reset_inplace:
            self._ready_obs[env_id] = obs
        else:
            self._begin_reset(env_id)


@register("actor")
class SyncActorEnvManager(AsyncActorEnvManager):
    """Steps envs and waits for all of them, under the interface of ``SyncSubprocessEnvManager``.

    Arguments and errors as for `AsyncActorEnvManager`; ``wait_num`` and ``step_wait_timeout`` mean nothing here.
    """

    config: dict[str, Any] = {  # noqa: RUF012 # as there
        **AsyncActorEnvManager.config,
        "wait_num": float("inf"),
        "step_wait_timeout": None,
    }
    _waits_for_all = True


@register("actor_v2")
class ActorEnvManagerV2(SyncActorEnvManager):
    """Takes and gives nested arrays, under the interface of ``SubprocessEnvManagerV2``.

    These are treetensor's where it is installed, else dicts of arrays whose keys are attributes too.
    """

    @property
    def ready_obs(self) -> Any:
        """The observations of the envs that are ready, stacked per leaf in the order of `ready_obs_id`.

        Waits and raises like that of `AsyncActorEnvManager`.
        """
        ready = list(self._ready_now().values())
        return stack_trees(ready) if ready else first_rows(stack_trees([self._ready_obs[0]]), 0)

    def step(self, actions: Any) -> list[Any]:
        """Steps the envs that are ready.

        Args:
            actions: One an env, in the order of `ready_obs_id`: a list, or arrays with the envs along axis 0.

        Returns:
            For each env ``obs``, ``reward``, ``done``, ``info`` and ``env_id``. The keys of an info are made
            identifiers, and its strings left out.

        Raises:
            Exception: As that of `AsyncActorEnvManager`.
        """
        self._check_closed()
        chosen = dict(zip(self.ready_obs_id, rows_of(actions), strict=False))
        return [timestep_tree(env_id, timestep) for env_id, timestep in self._step(chosen).items()]


def _require(condition: bool, otherwise: str) -> None:
    """Refuses as DI-engine does, whatever Python's options are."""
    if not condition:
        raise AssertionError(otherwise)


def _is_lost(error: BaseException) -> bool:
    """Whether the env's process is gone."""
    return isinstance(error, ActorError) and not isinstance(error, SerializationError)


def _is_unreadable(error: BaseException) -> bool:
    """Whether a reply came that could not be unpickled here; what the worker says has its traceback as a cause."""
    if not isinstance(error, SerializationError) or error.__cause__ is None:
        return False
    return not isinstance(error.__cause__.__cause__, RemoteTraceback)
