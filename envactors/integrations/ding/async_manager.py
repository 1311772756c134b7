"""`AsyncActorEnvManager`: DI-engine's ``AsyncSubprocessEnvManager`` on actors.

    step    a step of all envs, or send and recv for some envs ──▶ timesteps, by env id
    reset   one future per env, collected by the next call ──▶ state RUN, or the next attempt

`envactors.vector_env.VectorEnv` runs the envs, with ``autoreset="disabled"``. The states of envs and the attempts of
resets live in `envactors.integrations.ding.states` and `envactors.integrations.ding.resets`.
"""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envactors.actor.future import BoundToProcess
from envactors.actor.states import ActorState
from envactors.errors import NothingPendingError, SpaceMismatchError, VectorStepError, VectorTimeoutError
from envactors.integrations.ding.adapter import RawTimestep
from envactors.integrations.ding.config import CONFIG, check_entries, check_values
from envactors.integrations.ding.envs import Envs
from envactors.integrations.ding.resets import Resets, TriesSpentError, is_lost, is_unreadable
from envactors.integrations.ding.states import States, require
from envactors.integrations.ding.values import EnvState, config_dict, make_timesteps, register, restore
from envactors.mailbox.factory import Factory
from envactors.mailbox.slab import PLAIN_REWARD
from envactors.mailbox.specs import batches_alike, row_splitter, zeros
from envactors.options import RestartPolicy
from envactors.vector.inputs import seeds_for
from envactors.vector.results import Batch

_log = logging.getLogger("envactors")


@register("async_actor")
class AsyncActorEnvManager(BoundToProcess, Envs):
    """Steps some envs at a time, one per actor, with the interface of ``AsyncSubprocessEnvManager``.

    Args:
        env_fn: One callable per env; called only in the workers.
        cfg: Mapping of entries that differ from `default_config`; unknown entries are ignored.
        **options: The same entries as keyword arguments; unknown ones raise an error.

    Entries, with times in seconds: ``episode_num`` (episodes per env), ``max_retry`` (how often a reset is attempted),
    ``retry_type`` (``"reset"`` retries in the same process, ``"renew"`` in a new one), ``retry_waiting_time``,
    ``auto_reset``, ``reset_inplace`` (the step that ends an episode also resets), ``step_timeout`` and
    ``reset_timeout`` (deadlines, after which the process is killed), ``connect_timeout`` (deadline of each attempt to
    reset, and of the start of a process if it is more than 60), ``wait_num`` and ``step_wait_timeout`` (when a step
    returns), ``shared_memory`` (True to transfer values that fit the spaces through shared memory), ``copy_on_get``
    (False to return observations as views, valid until the env's next step), and ``context`` (``"loky"``, or the
    default of `ProcessBackend`, which DI-engine's ``"fork"``, ``"spawn"``, and ``"forkserver"`` stand for).

    The other entries are those of `envactors.VectorOptions` that apply to DI-engine: ``on_failure`` (with ``"raise"``,
    a failed step raises and closes the manager; with ``"renew"``, it returns an abnormal timestep with the exception as
    ``info["failure"]``, and the next reset of the env runs in a new process), ``restart`` (restart limits for
    ``"renew"``), ``seed_episodes`` (`episode_seeds` contains the seeds; not with ``reset_inplace``), ``max_running``,
    ``recycle``, ``standbys``, ``snapshot``, ``env_vars``, and ``backend`` (instead of a ``context``).

    Raises:
        AssertionError: An entry is invalid. Invalid calls of methods raise this type too.
        TypeError: An option is unknown.
        VectorInputError: An option does not apply to DI-engine.
    """

    config: dict[str, Any] = CONFIG

    @classmethod
    def default_config(cls) -> Any:
        """Return a copy of the default configuration, an ``EasyDict`` if it is installed, else a similar dict."""
        return config_dict({**cls.config, "cfg_type": f"{cls.__name__}Dict"})

    def __init__(self, env_fn: Sequence[Factory], cfg: Mapping[str, Any] | None = None, **options: Any) -> None:
        check_entries(type(self).__name__, options)
        super().__init__(env_fn, config_dict({**self.config, **(cfg or {}), **options}))
        check_values(self._cfg)
        self._episode_num = self._cfg["episode_num"]
        self._max_retry = max(self._cfg["max_retry"], 1)
        self._retry_type = self._cfg["retry_type"]
        self._on_failure = self._cfg["on_failure"]
        self._retry_waiting_time = self._cfg["retry_waiting_time"]
        self._auto_reset = self._cfg["auto_reset"]
        self._wait_num = self._cfg["wait_num"]
        self._step_wait_timeout = self._cfg["step_wait_timeout"]
        self._all_ids = list(range(self._env_num))
        self._env_seed: dict[int, int | None] = dict.fromkeys(self._all_ids)
        self._env_dynamic_seed: bool | None = None
        self._reset_param: dict[int, dict[str, Any] | None] = {}
        self._states = States(self._env_num, self._episode_num, self._auto_reset, self._reset_inplace)
        self._resets: Resets

    # State -----------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """True if all envs have finished their episodes."""
        return all(state == EnvState.DONE for state in self._env_states.values())

    @property
    def active_env(self) -> list[int]:
        """Ids of the envs in state RUN."""
        self._settle()
        return self._states.active

    @property
    def ready_env(self) -> list[int]:
        """Ids of the envs in state RUN without a pending step."""
        self._settle()
        return self._states.ready

    @property
    def ready_obs_id(self) -> list[int]:
        """Ids of the envs in `ready_obs`."""
        return self.ready_env

    @property
    def ready_obs(self) -> Any:
        """Observations of the ready envs, by env id. Waits until an env is in state RUN or no reset is pending.

        Raises:
            RuntimeError: A reset failed ``max_retry`` times; the last error is ``__cause__``.
        """
        self._check_closed()
        if self._resets.pending:
            self._await(lambda: not self._resets.pending or EnvState.RUN in self._states.by_id.values())
            self._settle()
        return self._states.shown

    @property
    def episode_seeds(self) -> dict[int, int | None]:
        """The seed of each env's last reset, by env id; None for a reset without a seed."""
        self._check_closed()
        self._settle()
        return dict(self._resets.seeds)

    @property
    def ready_imgs(self) -> dict[int, Any]:
        """Frames of the ready envs, by env id."""
        ids = self.ready_env
        self._check_closed()
        return dict(zip(ids, self._ask(ids, "envactors_render", "rgb_array"), strict=True))

    def env_state_done(self, env_id: int) -> bool:
        """Return whether an env has finished its episodes."""
        return bool(self._env_states[env_id] == EnvState.DONE)

    @property
    def _env_states(self) -> dict[int, Any]:
        self._settle()
        return self._states.by_id

    @property
    def _env_episode_count(self) -> dict[int, int]:
        return self._states.episodes

    def random_action(self) -> dict[int, Any]:
        """Return a sampled action for each ready env, by env id."""
        return {env_id: self.action_space.sample() for env_id in self.ready_obs_id}

    # Launching and closing -------------------------------------------------------------------------------

    def launch(self, reset_param: Mapping[int, dict[str, Any] | None] | None = None) -> None:
        """Start all envs in parallel and reset them.

        Args:
            reset_param: Arguments of each env's ``reset``, by env id.

        Raises:
            AssertionError: The manager is not closed, or there is not one entry per env.
            RuntimeError: An env could not be created, or its reset failed ``max_retry`` times.
            SpaceMismatchError: The envs' spaces differ, and ``shared_memory`` is True.
        """
        require(self._closed, "the env manager has already been launched: call close() first")
        require(
            reset_param is None or len(reset_param) == self._env_num,
            f"reset_param has {len(reset_param or ())} entries for {self._env_num} envs: expected one per env",
        )
        renews = self._on_failure == "renew"
        # Without "renew", a process that crashes in a step closes the manager. If it crashes in a reset, `_resets`
        # restarts it.
        self._start(self._cfg["restart"] if renews else RestartPolicy(self._max_retry - 1))
        self._reward_spec, *others = self._vector.call("envactors_reward_spec")
        if different := [spec for spec in others if not batches_alike(spec, self._reward_spec)]:
            self._vector.close()
            raise SpaceMismatchError(
                f"rewards have the specs {self._reward_spec} and {different[0]}: expected one spec"
            )
        assert self._vector.observation_spec is not None, "the adapter has a space"
        self._split_rows = row_splitter(self._vector.observation_spec)
        self._resets = Resets(self._vector, self._max_retry, self._retry_waiting_time, revives=not renews)
        self._reset_param = {env_id: {} for env_id in range(self._env_num)}
        self._states.launch()
        self._closed = False
        self.reset(reset_param)

    def close(self) -> None:
        super().close()
        self._states.close()

    def seed(self, seed: int | list[int | None] | dict[int, int], dynamic_seed: bool | None = None) -> None:
        """Set the seeds for the next `reset` or `launch`.

        Args:
            seed: One seed per env, as a list or by env id; an int gives env ``i`` the seed ``seed + i``.
            dynamic_seed: Passed to each env's ``seed``, unless it is None.

        Raises:
            AssertionError: The list does not have one seed per env.
            TypeError: ``seed`` is not an int, a list, or a dict.
            VectorInputError: A seed is neither an int >= 0 nor None.
        """
        if isinstance(seed, numbers.Integral):
            seed = [int(seed) + env_id for env_id in range(self._env_num)]
        if isinstance(seed, list):
            require(len(seed) == self._env_num, f"{len(seed)} seeds for {self._env_num} envs: expected one per env")
            seed = dict(enumerate(seed))  # type: ignore[arg-type] # a list may hold None
        if not isinstance(seed, dict):
            raise TypeError(f"seed is {seed!r}: expected an int, a list with one per env, or a dict by env id")
        self._states.check_ids(seed)
        self._env_seed.update(zip(seed, seeds_for(list(seed.values()), list(seed)), strict=True))
        self._env_dynamic_seed = dynamic_seed
        if seed.get(0) is not None:
            self._seed_actions(seed[0])

    # Resetting -------------------------------------------------------------------------------------------

    def reset(self, reset_param: Mapping[int, dict[str, Any] | None] | None = None) -> None:
        """Reset envs in parallel and discard their pending steps.

        Args:
            reset_param: Arguments of each env's ``reset``, by env id, also for later automatic resets; None for an env
                means no arguments. None resets all envs with their last arguments.

        Raises:
            AssertionError: The manager is closed, or an env id is unknown.
            RuntimeError: A reset failed ``max_retry`` times; the last error is ``__cause__``.
        """
        self._check_closed()
        reset_param = (
            {env_id: self._reset_param[env_id] for env_id in self._states.by_id} if reset_param is None else reset_param
        )
        self._states.check_ids(reset_param)
        for env_id, param in reset_param.items():
            require(
                param is None or isinstance(param, dict),
                f"the reset_param of env {env_id} is {param!r}: expected a dict or None",
            )
        self._reset_param.update(reset_param)
        self._access.discard(list(reset_param))
        self._states.waiting.difference_update(reset_param)
        self._await(lambda: not self._resets.pending & reset_param.keys())
        for env_id in reset_param:
            self._begin_reset(env_id, self._env_seed[env_id])
            self._env_seed[env_id] = None
        self._await(lambda: not self._resets.pending & reset_param.keys())

    def _begin_reset(self, env_id: int, seed: int | None = None) -> None:
        self._states.by_id[env_id] = EnvState.RESET
        try:
            self._resets.begin(env_id, seed, self._reset_options(env_id))
        except TriesSpentError as error:
            raise self._given_up(error) from error.__cause__

    def _reset_options(self, env_id: int) -> dict[str, Any]:
        return {"param": self._reset_param[env_id], "dynamic_seed": self._env_dynamic_seed}

    def _settle(self) -> None:
        """Collect finished resets and start the attempts that are due."""
        if self._closed:
            return
        if self._states.waiting:
            self._states.waiting.intersection_update(self._access.receivable())  # a step may have been interrupted
        if not self._resets.pending:
            return
        try:
            begun = self._resets.settle(self._reset_options, self._retry_type == "renew")
        except TriesSpentError as error:
            raise self._given_up(error) from error.__cause__
        for env_id, obs in begun.items():
            self._states.run(env_id, obs)

    def _given_up(self, error: TriesSpentError) -> RuntimeError:
        self.close()
        return RuntimeError(str(error))

    def _await(self, done: Callable[[], bool]) -> None:
        """Process resets until ``done()`` is true."""
        self._settle()
        while not done():
            self._resets.wait()
            self._settle()

    # Stepping --------------------------------------------------------------------------------------------

    def step(self, actions: Mapping[int, Any]) -> Any:
        """Step envs and return as soon as enough of them have answered.

        The method returns once at least ``min(wait_num, len(actions))`` envs have answered, ``step_wait_timeout`` has
        passed (with None, once all have answered), and at least one result is not done. It also returns if no step is
        pending any more. Envs of earlier steps count too; without actions, the method waits for one of those.

        Args:
            actions: Actions by env id.

        Returns:
            Timesteps ``(obs, reward, done, info)`` by env id.

        Raises:
            AssertionError: The manager is closed, or an env is not in state RUN or has a pending step.
            Exception: The exception from an env, or the `ActorError` that ended its step; the manager is closed.
            RuntimeError: A reset failed ``max_retry`` times; the last error is ``__cause__``.
        """
        self._check_closed()
        self._settle()
        self._states.check(actions.keys())
        return self._step_ready(actions)

    def _step_ready(self, actions: Mapping[int, Any]) -> dict[int, Any]:
        if actions:
            self._send(actions)
        enough = max(min(self._wait_num, len(actions)), 1)
        waiting = self._states.waiting
        timesteps: dict[int, Any] = {}
        while waiting:
            wanted = min(enough, len(waiting))
            received = self._receive(None, self._step_wait_timeout)
            while waiting and len(received) < wanted:
                received |= self._receive(wanted - len(received), None)
            timesteps |= received
            if not all(timestep.done for timestep in timesteps.values()):
                break
        return timesteps

    def _send(self, actions: Mapping[int, Any]) -> None:
        is_all = len(actions) == self._env_num
        ids = self._all_ids if is_all else list(actions)
        each, env_ids = [*map(actions.__getitem__, ids)], None if is_all else ids
        self._states.waiting.update(actions)
        start = self._access.start_as_given
        self._access.retry_interrupted(lambda: start(env_ids, each, streams=not is_all), env_ids)

    def _receive(self, least: int | None, timeout: float | None) -> dict[int, Any]:
        try:
            batch = self._collect(least, timeout)
        except VectorStepError as error:
            failed = error
        except NothingPendingError:  # an interrupted change has ended the steps
            self._states.waiting.clear()
            return {}
        else:
            return self._timesteps_of_batch(batch)
        return self._timesteps_of_failures(failed)

    def _collect(self, least: int | None, timeout: float | None) -> Batch:
        if least is None and len(self._states.waiting) == self._env_num:  # all envs at once are collected faster
            try:
                return self._access.gather(None, timeout, "step")
            except VectorTimeoutError:
                timeout = 0.0
        return self._vector.recv(least, timeout=timeout)

    def _timesteps_of_batch(self, batch: Batch) -> dict[int, Any]:
        return self._make_timesteps(batch.env_ids.tolist(), batch.obs, batch.rewards, batch.terminated, batch.infos)

    def _timesteps_of_failures(self, error: VectorStepError) -> dict[int, Any]:
        """Return abnormal timesteps for failures, or close the manager and raise the first failure."""
        timesteps = self._timesteps_of_batch(error.batch)
        for env_id, failure in error.failures.items():
            info: dict[str, Any] = {"abnormal": True}
            actor = self._vector.actors[env_id]
            if not is_unreadable(failure):
                if self._on_failure == "raise" or actor.state is ActorState.DEAD:
                    self.close()
                    raise failure
                info["failure"] = failure
            if not is_lost(failure):
                actor.renew()
            raw, no_reward = RawTimestep((None, None, None, info)), zeros(self._reward_spec or PLAIN_REWARD)
            timesteps |= self._make_timesteps([env_id], [None], np.array([no_reward]), np.zeros(1), [raw])
        return timesteps

    def _make_timesteps(self, ids: list[int], obs: Any, rewards: Any, done: Any, infos: list[Any]) -> dict[int, Any]:
        """Return timesteps by env id. This updates the states of their envs, and starts automatic resets."""
        rows = obs if isinstance(obs, list) else self._split_rows(obs, len(ids))
        over, have_infos = done.tolist(), any(infos)
        timesteps = make_timesteps(self._reward_spec, rows, rewards, over, infos)
        if have_infos:
            timesteps = [*map(restore, timesteps)]
        if have_infos or True in over:
            for env_id, timestep in zip(ids, timesteps, strict=True):
                if self._states.record_timestep(env_id, timestep):
                    self._begin_reset(env_id)
        else:
            self._states.record_rows(ids, rows)
        return dict(zip(ids, timesteps, strict=False))
