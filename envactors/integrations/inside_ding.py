"""What the drop-ins for DI-engine run in the worker, around its env; imports no framework."""

from __future__ import annotations

import contextlib
import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import numpy as np

from envactors.arrays.specs import ArraySpec, conform, leaves, spec_of_space, unflatten
from envactors.errors import SpaceMismatchError
from envactors.integrations.inside import Guest


class Given(NamedTuple):
    """Stands in place of an info for a whole timestep that the spaces do not describe.

    Attributes:
        timestep: As the env gave it.
    """

    timestep: Any


class Begun(NamedTuple):
    """What a DI-engine env's reset gives besides an observation that fits its space.

    Attributes:
        misfit: The observation alone, where it does not; else nothing.
        complaint: The traceback of a ``seed`` that failed, or None.
    """

    misfit: tuple[Any, ...]
    complaint: str | None


def is_abnormal(info: Any) -> bool:
    """Whether a timestep's info says that it is not to be used; of several agents' either of the first two.

    Raises:
        TypeError: It is neither a mapping nor a sequence of them.
    """
    if isinstance(info, Mapping):
        return bool(info.get("abnormal", False))
    if isinstance(info, (list, tuple)):
        return any(is_abnormal(one) for one in info[:2])
    raise TypeError(f"the info of a timestep is {info!r}: expected a dict, or a list or tuple of dicts")


class _Space:
    """A space as far as workers look at it; without a shape that of values that are sent as they are."""

    def __init__(self, shape: tuple[int, ...] | None = None) -> None:
        self.shape = shape
        self.dtype = np.dtype(np.float64)

    def sample(self) -> None:
        """Marks a space; there is nothing to sample."""


# What a reward was, as the number behind it says: one of these types, or an array as the reward space has it.
REWARD_KINDS = (float, int, bool)
OF_THE_SPACE = len(REWARD_KINDS)
_EXACT = 2**53  # integers beyond it are not all float64's

_SPACES = ("observation_space", "action_space", "reward_space")


class DingGuest(Guest):
    """An env as DI-engine treats it: ``reset(**param) -> obs``, ``step(action) -> (obs, reward, done, info)``.

    Args:
        factory: Makes the env.
        shared: Whether values that are as the env's spaces say travel as arrays; others are sent as they are.
        reset_inplace: Whether the step that ends an episode resets.
        replay_path: Where the env shall save replays, or None.
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
            self._numbers = self._reward.data  # written to in a third of the time that arrays take
            spaces["reward_space"] = _Space(self._reward.shape)
        self._shared = shared
        self.__dict__.update(spaces)
        self._spec = spec_of_space(spaces["observation_space"])
        blanks = [np.zeros(leaf.shape, leaf.dtype) if leaf.batchable else None for leaf in leaves(self._spec)]
        self._blank = unflatten(self._spec, iter(blanks))

    def _spaces(self) -> dict[str, Any]:
        """The env's spaces, None for each that it does not have.

        Some of DI-engine's envs know them only once they were reset, and are, as there.
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
            except Exception:
                complaint = traceback.format_exc()
        try:
            obs = self._env.reset(**(options.get("param") or {}))
        except BaseException:
            with contextlib.suppress(Exception):
                self._env.close()  # as there: what a failed reset leaves behind is not used
            raise
        try:
            return conform(self._spec, obs, "the observation"), Begun((), complaint)
        except SpaceMismatchError:
            return self._blank, Begun((obs,), complaint)

    def step(self, action: Any) -> Any:
        timestep = self._env.step(action)
        abnormal = timestep[3] != {} and is_abnormal(timestep[3])
        if self._reset_inplace and timestep[2] and not abnormal:
            obs = self._env.reset()
            timestep = timestep._replace(obs=obs) if hasattr(timestep, "_replace") else (obs, *timestep[1:])
        if not self._shared:
            return None, None, False, False, Given(tuple(timestep) if len(timestep) == 4 else timestep)
        if len(timestep) == 4 and not abnormal:
            obs, reward, done, info = timestep
            if self._write(reward):
                try:
                    return conform(self._spec, obs, "the observation"), self._reward, done, False, info
                except SpaceMismatchError:
                    pass
            timestep = tuple(timestep)  # its class need not be known to the caller
        return self._blank, self._reward, False, False, Given(timestep)

    def _write(self, reward: Any) -> bool:
        """Writes a reward as numbers, and last what it was; False where that would not bring it back as it is."""
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
        numbers[-1] = OF_THE_SPACE
        return True

    def envactors_reward_spec(self) -> ArraySpec | None:
        """What rewards are where they are `OF_THE_SPACE`; None where they do not travel as numbers."""
        return self._reward_spec if self._shared else None

    def envactors_spaces(self) -> tuple[Any, ...]:
        """The env's observation, action and reward space."""
        return tuple(self._spaces().values())

    def envactors_look(self, name: str) -> tuple[bool, Any]:
        """Whether an attribute is a method; and its value where it is none."""
        value = getattr(self._env, name)
        return (True, None) if isinstance(value, MethodType) else (False, value)

    def envactors_invoke(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the env."""
        return getattr(self._env, name)(*args, **kwargs)

    def envactors_render(self, mode: str) -> Any:
        """A frame of the env that DI-engine's wraps as ``_env``, or where there is none of the env itself."""
        env = getattr(self._env, "_env", self._env)
        if hasattr(env, "sim"):  # MuJoCo's frames are upside down
            return env.sim.render(camera_name="track", height=128, width=128)[::-1]
        parameters = inspect.signature(env.render).parameters.values()
        if any(one.name == "mode" or one.kind is one.VAR_KEYWORD for one in parameters):
            return env.render(mode=mode)
        return env.render()


def _reward_spec(space: Any) -> ArraySpec:
    """What an env's arrays of rewards look like, if float64 holds them; else what single numbers do."""
    spec = None if space is None else spec_of_space(space)
    if isinstance(spec, ArraySpec) and np.can_cast(spec.dtype, np.float64) and spec.dtype not in (np.int64, np.uint64):
        return spec
    return ArraySpec((), np.dtype(np.float64))
