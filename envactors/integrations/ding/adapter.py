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
from envactors.integrations.adapter import EnvAdapter
from envactors.mailbox.pickling import safe_traceback
from envactors.mailbox.specs import ArraySpec, conform, leaves, spec_of_space, unflatten


class RawTimestep(NamedTuple):
    """Replaces the info of a timestep that does not fit the spaces, and contains the whole timestep.

    Attributes:
        timestep: The timestep as the env returned it.
    """

    timestep: Any


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


class _Space:
    """A minimal space: a shape and a dtype. Without a shape, values are pickled."""

    def __init__(self, shape: tuple[int, ...] | None = None) -> None:
        self.shape = shape
        self.dtype = np.dtype(np.float64)

    def sample(self) -> None:
        """Do nothing. This method exists because specs recognize a space by it."""


# A number after the reward encodes its type: an index of these types, or `AS_IN_SPACE` for an array that fits the
# reward space.
REWARD_KINDS = (float, int, bool)
AS_IN_SPACE = len(REWARD_KINDS)
_EXACT = 2**53  # float64 represents all integers up to this one exactly

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
        spaces: dict[str, Any] = dict.fromkeys(_SPACES, _Space())
        if shared:
            spaces = self._spaces()
            if spaces["observation_space"] is None:
                spaces["observation_space"] = _Space()
            self._reward_spec = _reward_spec(spaces["reward_space"])
            self._reward = np.zeros(math.prod(self._reward_spec.shape) + 1)
            self._numbers = self._reward.data  # writing to a memoryview takes a third of the time
            spaces["reward_space"] = _Space(self._reward.shape)
        self._shared = shared
        self.__dict__.update(spaces)
        self._spec = spec_of_space(spaces["observation_space"])
        blanks = [np.zeros(leaf.shape, leaf.dtype) if leaf.batchable else None for leaf in leaves(self._spec)]
        self._blank = unflatten(self._spec, iter(blanks))

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
        if not self._shared:
            return None, None, False, False, RawTimestep(tuple(timestep) if len(timestep) == 4 else timestep)
        if len(timestep) == 4 and not abnormal:
            obs, reward, done, info = timestep
            if self._write(reward):
                try:
                    return conform(self._spec, obs, "the observation"), self._reward, done, False, info
                except SpaceMismatchError:
                    pass
            timestep = tuple(timestep)  # the caller may be unable to import its class
        return self._blank, self._reward, False, False, RawTimestep(timestep)

    def _write(self, reward: Any) -> bool:
        """Encode a reward as numbers and its type; return False if that would not preserve it exactly."""
        numbers, spec, kind = self._numbers, self._reward_spec, type(reward)
        single = len(numbers) == 2
        if single and kind in REWARD_KINDS and (kind is not int or abs(reward) <= _EXACT):
            numbers[0] = reward
            numbers[1] = REWARD_KINDS.index(kind)
            return True
        if not isinstance(reward, (np.ndarray, np.generic)) or reward.dtype != spec.dtype or reward.shape != spec.shape:
            return False
        if single:
            numbers[0] = reward.item()
        else:
            self._reward[:-1] = reward.reshape(-1)
        numbers[-1] = AS_IN_SPACE
        return True

    def envactors_reward_spec(self) -> ArraySpec | None:
        """Return the spec of rewards that are `AS_IN_SPACE`, or None if rewards are pickled."""
        return self._reward_spec if self._shared else None

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


def _reward_spec(space: Any) -> ArraySpec:
    """Return the spec of array rewards if float64 represents them exactly, else the spec of a single number."""
    spec = None if space is None else spec_of_space(space)
    if isinstance(spec, ArraySpec) and np.can_cast(spec.dtype, np.float64) and spec.dtype not in (np.int64, np.uint64):
        return spec
    return ArraySpec((), np.dtype(np.float64))
