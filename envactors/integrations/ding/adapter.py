"""The adapter around a DI-engine env in its worker. It imports no framework.

`envactors.integrations.ding.values` decodes the values that it sends.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import numpy as np

from envactors.errors import SpaceMismatchError
from envactors.integrations.adapter import ANY, EnvAdapter, exact_check
from envactors.mailbox.pickling import safe_traceback
from envactors.mailbox.slab import PLAIN_REWARD
from envactors.mailbox.specs import ArraySpec, conform, spec_of_space, zeros


class RawTimestep(NamedTuple):
    """Replaces the info of a timestep that does not fit the spaces, and contains the whole timestep.

    Attributes:
        timestep: The timestep as the env returned it.
    """

    timestep: Any


class RawReward(NamedTuple):
    """Replaces the info of a timestep whose reward does not fit the reward space.

    Attributes:
        reward: The reward as the env returned it.
        info: The info.
    """

    reward: Any
    info: Any


class ResetInfo(NamedTuple):
    """Info of a reset.

    Attributes:
        misfit: A tuple with the observation if it does not fit the space; else empty.
        complaint: The traceback of a ``seed`` that failed, or None.
        seed: The seed, or None.
    """

    misfit: tuple[Any, ...]
    complaint: str | None
    seed: int | None = None


def is_abnormal(info: Any) -> bool:
    """Return whether the info, or with several agents one of the first two infos, marks a timestep as abnormal.

    Raises:
        TypeError: The info is neither a mapping nor a sequence of mappings.
    """
    if isinstance(info, Mapping):
        return bool(info.get("abnormal", False))
    if isinstance(info, (list, tuple)):
        return any(is_abnormal(one) for one in info[:2])
    raise TypeError(f"the info of a timestep is {info!r}: expected a dict, or a list or tuple of dicts")


_SPACES = ("observation_space", "action_space", "reward_space")


class DingEnvAdapter(EnvAdapter):
    """An env with the semantics of DI-engine: ``reset(**param) -> obs``, ``step(action) -> (obs, reward, done, info)``.

    Args:
        factory: Creates the env.
        shared: True to send values that fit the env's spaces as arrays; all others are pickled.
        reset_inplace: True if the step that ends an episode also resets.
        replay_path: Directory for the env's replays, or None.
    """

    def __init__(
        self, factory: Callable[[], Any], shared: bool, reset_inplace: bool, replay_path: str | None = None
    ) -> None:
        super().__init__(factory)
        self._reset_inplace = reset_inplace
        if replay_path is not None:
            self._env.enable_save_replay(replay_path)
        self._shared = shared
        spaces = self._spaces() if shared else {}
        # Without a space, rewards are floats.
        self._reward_spec = _reward_spec(spaces.get("reward_space"))
        self.observation_space: Any = ANY if (space := spaces.get("observation_space")) is None else space
        self.action_space: Any = spaces.get("action_space")
        self.reward_space: ArraySpec | None = None
        if self._reward_spec is not None and math.prod(self._reward_spec.shape) != 1:
            self.reward_space = self._reward_spec
        self._spec = spec_of_space(self.observation_space)
        self._fits = exact_check(self._spec)
        self._blank, self._no_reward = zeros(self._spec), zeros(self.reward_space or PLAIN_REWARD)

    def _spaces(self) -> dict[str, Any]:
        """Return the env's spaces, with None for each missing one.

        Some envs of DI-engine know their spaces only after a reset, so this method resets them first, as DI-engine
        does.
        """
        env = self._env
        with contextlib.suppress(Exception):
            if any(hasattr(type(env), name) and not hasattr(env, name) for name in _SPACES):
                env.reset()
        return {name: getattr(env, name, None) for name in _SPACES}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        options = options or {}
        complaint = None
        if seed is not None:
            dynamic = options.get("dynamic_seed")
            try:
                self._env.seed(seed, *(() if dynamic is None else (dynamic,)))
            except Exception as error:
                complaint = "".join(safe_traceback(error))
        try:
            obs = self._env.reset(**(options.get("param") or {}))
        except BaseException:
            with contextlib.suppress(Exception):
                self._env.close()  # DI-engine does the same, since nobody uses an env after a failed reset
            raise
        try:
            return conform(self._spec, obs, "the observation"), ResetInfo((), complaint, seed)
        except SpaceMismatchError:
            return self._blank, ResetInfo((obs,), complaint, seed)

    def step(self, action: Any) -> Any:
        timestep = self._env.step(action)
        abnormal = timestep[3] != {} and is_abnormal(timestep[3])
        if self._reset_inplace and timestep[2] and not abnormal:
            obs = self._env.reset()
            timestep = timestep._replace(obs=obs) if hasattr(timestep, "_replace") else (obs, *timestep[1:])
        raw: RawTimestep | RawReward
        obs = self._blank
        if len(timestep) == 4 and not abnormal and self._shared:
            obs, reward, done, info = timestep
            number = self._number_of(reward)
            try:
                if not self._fits(obs):
                    obs = conform(self._spec, obs, "the observation")
            except SpaceMismatchError:
                obs = self._blank
            else:
                if number is None:
                    number, info = self._no_reward, RawReward(reward, info)
                return obs, number, bool(done), False, info
        # As a plain tuple, since the caller may be unable to import its class.
        raw = RawTimestep(tuple(timestep) if len(timestep) == 4 else timestep)
        return obs, self._no_reward, False, False, raw

    def _number_of(self, reward: Any) -> Any:
        """Return a reward as it is written to its row; None if that would not preserve its type exactly."""
        spec = self._reward_spec
        if spec is None:
            return reward if type(reward) is float else None
        if not isinstance(reward, (np.ndarray, np.generic)) or reward.dtype != spec.dtype or reward.shape != spec.shape:
            return None
        return reward if self.reward_space is not None else float(reward.item())

    def envactors_reward_spec(self) -> ArraySpec | None:
        """Return the spec of the rewards in rows, or None for floats."""
        return self._reward_spec

    def envactors_spaces(self) -> tuple[Any, ...]:
        """Return the observation, action, and reward space of the env."""
        return tuple(self._spaces().values())

    def envactors_inspect(self, name: str) -> tuple[bool, Any]:
        """Return whether an attribute is a method, and its value if it is not."""
        value = getattr(self._env, name)
        return (True, None) if isinstance(value, MethodType) else (False, value)

    def envactors_invoke(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env."""
        return getattr(self._env, name)(*args, **kwargs)

    def envactors_render(self, mode: str) -> Any:
        """Return a frame of the env that DI-engine wraps as ``_env``, or of the env itself."""
        env = getattr(self._env, "_env", self._env)
        if hasattr(env, "sim"):  # MuJoCo's frames are upside down
            return env.sim.render(camera_name="track", height=128, width=128)[::-1]
        parameters = inspect.signature(env.render).parameters.values()
        if any(one.name == "mode" or one.kind is one.VAR_KEYWORD for one in parameters):
            return env.render(mode=mode)
        return env.render()


def _reward_spec(space: Any) -> ArraySpec | None:
    """Return the spec of array rewards if float64 represents them exactly, else None."""
    spec = None if space is None else spec_of_space(space)
    if isinstance(spec, ArraySpec) and np.can_cast(spec.dtype, np.float64) and spec.dtype not in (np.int64, np.uint64):
        return spec
    return None
