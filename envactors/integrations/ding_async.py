"""`AsyncActorEnvManager`, DI-engine's ``AsyncSubprocessEnvManager`` over actors.

    step    the facade's step of all envs, or send and recv for some of them ──▶ timesteps, by env id
    reset   a future an env, taken in by whatever is called next ──▶ RUN, or the next try

The mechanisms are those of `envactors.vector.facade.VectorEnv` with ``autoreset="disabled"``.
"""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envactors.actor.states import ActorState
from envactors.arrays.specs import ArraySpec, split_batch
from envactors.errors import VectorStepError
from envactors.integrations.ding_envs import Envs
from envactors.integrations.ding_resets import Resets, TriesSpentError, is_lost, is_unreadable
from envactors.integrations.ding_states import States, require
from envactors.integrations.ding_values import (
    CONTEXT,
    EnvState,
    config_dict,
    read_timesteps,
    register,
)
from envactors.integrations.inside_ding import Given
from envactors.options import RestartPolicy
from envactors.vector.batch import Batch

_log = logging.getLogger("envactors")


@register("async_actor")
class AsyncActorEnvManager(Envs):
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

    @classmethod
    def default_config(cls) -> Any:
        """A copy of the default configuration: an ``EasyDict`` where that is installed, else a dict much like one."""
        return config_dict({**cls.config, "cfg_type": f"{cls.__name__}Dict"})

    def __init__(
        self, env_fn: Sequence[Callable[[], Any]], cfg: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        for name in options:
            if name not in self.config:
                raise TypeError(f"{type(self).__name__} has no option {name!r}: expected some of {sorted(self.config)}")
        super().__init__(env_fn, config_dict({**self.config, **(cfg or {}), **options}))
        self._episode_num = self._cfg["episode_num"]
        self._max_retry = max(self._cfg["max_retry"], 1)
        self._retry_type = self._cfg["retry_type"]
        require(self._retry_type in ("reset", "renew"), f"retry_type is {self._retry_type!r}: 'reset' or 'renew'")
        self._on_failure = self._cfg["on_failure"]
        require(self._on_failure in ("raise", "renew"), f"on_failure is {self._on_failure!r}: 'raise' or 'renew'")
        self._retry_waiting_time = self._cfg["retry_waiting_time"]
        self._auto_reset = self._cfg["auto_reset"]
        require(
            self._auto_reset or not self._reset_inplace,
            "reset_inplace with auto_reset=False: expected both, or neither",
        )
        self._wait_num = self._cfg["wait_num"]
        self._step_wait_timeout = self._cfg["step_wait_timeout"]
        self._env_seed: dict[int, int | None] = dict.fromkeys(range(self._env_num))
        self._env_dynamic_seed: bool | None = None
        self._reset_param: dict[int, dict[str, Any] | None] = {}
        self._states = States(self._env_num, self._episode_num, self._auto_reset, self._reset_inplace)
        self._resets: Resets

    # Looking ---------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether all envs have had their episodes."""
        return all(state == EnvState.DONE for state in self._env_states.values())

    @property
    def active_env(self) -> list[int]:
        """The envs in RUN."""
        self._settle()
        return self._states.active

    @property
    def ready_env(self) -> list[int]:
        """The envs in RUN with nothing under way."""
        self._settle()
        return self._states.ready

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
        if self._resets.under_way:
            self._await(lambda: not self._resets.under_way or EnvState.RUN in self._states.by_id.values())
            self._settle()
        return self._states.shown

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
        return self._states.by_id

    @property
    def _env_episode_count(self) -> dict[int, int]:
        return self._states.episodes

    def random_action(self) -> dict[int, Any]:
        """A sample of the action space for each env that is ready."""
        return {env_id: self.action_space.sample() for env_id in self.ready_obs_id}

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
        require(self._closed, "the env manager is launched already: close it first")
        require(
            reset_param is None or len(reset_param) == self._env_num,
            f"launch with {len(reset_param or ())} entries for {self._env_num} envs: expected one an env",
        )
        renews = self._on_failure == "renew"
        # What is lost otherwise closes the manager, or is the affair of `_resets`.
        self._start(self._cfg["restart"] if renews else RestartPolicy(self._max_retry - 1))
        self._reward_spec = self._actors.call("envactors_reward_spec", env_ids=[0])[0]
        self._resets = Resets(self._actors, self._max_retry, self._retry_waiting_time, revives=not renews)
        self._reset_param = {env_id: {} for env_id in range(self._env_num)}
        self._states.launch()
        self._closed = False
        self.reset(reset_param)

    def close(self) -> None:
        super().close()
        self._states.close()

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
            require(len(seed) == self._env_num, f"{len(seed)} seeds for {self._env_num} envs: expected one an env")
            seed = dict(enumerate(seed))  # type: ignore[arg-type] # None is no seed
        if not isinstance(seed, dict):
            raise TypeError(f"seed is {seed!r}: expected an int, a list with one an env, or a dict by env id")
        self._states.check_ids(seed)
        self._env_seed.update(seed)
        self._env_dynamic_seed = dynamic_seed
        if seed.get(0) is not None:
            self._seed_actions(seed[0])

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
            {env_id: self._reset_param[env_id] for env_id in self._states.by_id} if reset_param is None else reset_param
        )
        self._states.check_ids(reset_param)
        for env_id, param in reset_param.items():
            require(
                param is None or isinstance(param, dict),
                f"the reset_param of env {env_id} is {param!r}: a dict or None",
            )
        self._reset_param.update(reset_param)
        self._await(lambda: not self._resets.under_way & reset_param.keys())
        self._drop(self._states.waiting.intersection(reset_param))
        for env_id in reset_param:
            self._begin_reset(env_id, self._env_seed[env_id])
            self._env_seed[env_id] = None
        self._await(lambda: not self._resets.under_way & reset_param.keys())

    def _drop(self, env_ids: set[int]) -> None:
        """Takes in steps that nobody asks for any more."""
        if env_ids:
            try:
                self._actors._gather(self._actors._select(env_ids), None, None, "reset")
            except VectorStepError as error:
                _log.info("a step failed that a reset has overtaken: %s", error)
            self._states.waiting -= env_ids

    def _begin_reset(self, env_id: int, seed: int | None = None) -> None:
        self._states.by_id[env_id] = EnvState.RESET
        try:
            self._resets.begin(env_id, seed, self._reset_options(env_id))
        except TriesSpentError as error:
            raise self._given_up(error) from error.__cause__

    def _reset_options(self, env_id: int) -> dict[str, Any]:
        return {"param": self._reset_param[env_id], "dynamic_seed": self._env_dynamic_seed}

    def _settle(self) -> None:
        """Takes in the resets that have ended, and begins the tries that are due."""
        if self._closed or not self._resets.under_way:
            return
        try:
            begun = self._resets.settle(self._reset_options, self._retry_type == "renew")
        except TriesSpentError as error:
            raise self._given_up(error) from error.__cause__
        for env_id, obs in begun.items():
            self._states.run(env_id, obs)

    def _given_up(self, error: TriesSpentError) -> RuntimeError:
        self.close()
        cause = error.__cause__
        return RuntimeError(
            f"the reset of env {error.env_id} has failed as often as it may (max_retry is {self._max_retry}), the last "
            f"time with {type(cause).__name__}: {cause}"
        )

    def _await(self, done: Callable[[], bool]) -> None:
        """Waits for resets until something is so."""
        self._settle()
        while not done():
            self._resets.wait()
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
        self._states.check(actions)
        return self._step_ready(actions)

    def _step_ready(self, actions: Mapping[int, Any]) -> dict[int, Any]:
        self._send(actions)
        enough = max(min(self._wait_num, len(actions)), 1)
        waiting = self._states.waiting
        timesteps: dict[int, Any] = {}
        while waiting:
            wanted = min(enough, len(waiting))
            came = self._receive(None, self._step_wait_timeout)
            while len(came) < wanted:
                came |= self._receive(wanted - len(came), None)
            timesteps |= came
            if not all(timestep.done for timestep in timesteps.values()):
                break
        return timesteps

    def _as_batch(self, actions: list[Any]) -> Any:
        """One array of the actions, if they are just what the action space says; None where they are not."""
        spec = self._actors.action_spec
        if not isinstance(spec, ArraySpec) or not spec.batchable:
            return None
        try:
            batch = np.array(actions)
        except ValueError:  # ragged
            return None
        return batch if batch.dtype == spec.dtype and batch.shape[1:] == spec.shape else None

    def _send(self, actions: Mapping[int, Any]) -> None:
        each = list(actions.values())
        batch = self._as_batch(each)
        if batch is not None:
            self._actors.send(batch, actions)
        else:
            self._actors._begin_as_given(each, self._actors._select(actions))
        self._states.waiting.update(actions)

    def _receive(self, least: int | None, timeout: float | None) -> dict[int, Any]:
        try:
            batch = self._actors.recv(least, timeout=timeout)
        except VectorStepError as error:
            failed = error
        else:
            return self._take_batch(batch)
        return self._take_failed(failed)

    def _take_batch(self, batch: Batch) -> dict[int, Any]:
        ids = batch.env_ids.tolist()
        return dict(zip(ids, self._take(ids, batch.obs, batch.rewards, batch.terminated, batch.infos), strict=True))

    def _take_failed(self, error: VectorStepError) -> dict[int, Any]:
        """Makes abnormal timesteps of failures, or closes and raises the first."""
        timesteps = self._take_batch(error.batch)
        for env_id, failure in error.failures.items():
            info: dict[str, Any] = {"abnormal": True}
            state = self._actors[env_id].state
            if not is_unreadable(failure):
                if self._on_failure == "raise" or state is ActorState.DEAD:
                    self.close()
                    raise failure
                info["failure"] = failure
            if not is_lost(failure):
                self._actors[env_id].renew()
            [timesteps[env_id]] = self._take([env_id], [None], [None], np.zeros(1), [Given((None, None, None, info))])
        return timesteps

    def _take(self, ids: Sequence[int], obs: Any, rewards: Any, done: Any, infos: list[Any]) -> list[Any]:
        """Makes timesteps, and takes them into account."""
        if not isinstance(obs, (np.ndarray, list)):
            obs = split_batch(self._actors.observation_spec, obs, len(ids), "observations")
        rows = list(obs)
        over = done.tolist()
        timesteps = read_timesteps(self._reward_spec, rows, rewards, over, infos)
        if True in over or any(infos):
            for env_id, timestep in zip(ids, timesteps, strict=True):
                if self._states.take(env_id, timestep):
                    self._begin_reset(env_id)
        else:
            self._states.go_on(ids, rows)
        return timesteps
