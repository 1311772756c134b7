"""The value and base classes of DI-engine's env managers, or replacements if DI-engine is not installed.

This module also decodes the values that workers send; `envactors.integrations.ding.adapter` encodes them.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from envactors.integrations.ding.adapter import RawReward, RawTimestep
from envactors.mailbox.specs import ArraySpec

_T = TypeVar("_T", bound=type)

_spec = importlib.util.find_spec("ding")
# A folder with the name "ding" is found too, but has no origin.
if not TYPE_CHECKING and _spec is not None and _spec.origin is not None:
    from ding.envs import BaseEnvTimestep
    from ding.envs.env_manager.base_env_manager import BaseEnvManager, EnvState
    from ding.utils import ENV_MANAGER_REGISTRY

    register = ENV_MANAGER_REGISTRY.register
    # Importing DI-engine takes seconds in each worker, so the helper imports it once.
    PRELOAD: Sequence[str] = ("ding.envs",)
else:
    PRELOAD = ()

    class BaseEnvManager:
        """Replacement for the base class of managers."""

    class BaseEnvTimestep(NamedTuple):
        """Result of a step."""

        obs: Any
        reward: Any
        done: Any
        info: Any

    class EnvState(enum.IntEnum):
        """The state of an env, with the names and values of DI-engine."""

        VOID = 0
        INIT = 1
        RUN = 2
        RESET = 3
        DONE = 4
        ERROR = 5
        NEED_RESET = 6

    def register(_name: str) -> Callable[[_T], _T]:
        """Return a decorator that does nothing, since only DI-engine has a registry."""
        return lambda manager: manager


# In C, which takes two thirds of the time of calling the class.
_make_timestep: Callable[[Iterable[Any]], Any] = functools.partial(tuple.__new__, BaseEnvTimestep)

try:
    import treetensor.numpy as tnp
except ImportError:
    tnp = None


class AttrDict(dict[str, Any]):
    """A dict whose items, and those of nested dicts, are also attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({key: AttrDict(value) if isinstance(value, dict) else value for key, value in values.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def config_dict(values: Mapping[str, Any]) -> Any:
    """Return a configuration: an ``EasyDict`` if it is installed, else an `AttrDict`."""
    try:
        from easydict import EasyDict
    except ImportError:
        return AttrDict(values)
    return EasyDict(values)


def make_timesteps(
    reward_spec: ArraySpec | None,
    rows: Sequence[Any],
    rewards: npt.NDArray[np.float64],
    done: Sequence[bool],
    infos: Sequence[Any],
) -> list[Any]:
    """Return the timesteps of results; those with infos then need `restore`.

    Args:
        reward_spec: Spec of the env's rewards; None for floats.
        rows: One observation per env.
        rewards: The reward in the row of each env.
        done: One flag per env.
        infos: One info, `RawReward`, or `RawTimestep` per env.
    """
    if reward_spec is None:
        each: Any = rewards.tolist()
    else:
        each = rewards.astype(reward_spec.dtype).reshape(len(rewards), *reward_spec.shape)
    return list(map(_make_timestep, zip(rows, each, done, infos, strict=False)))


def restore(timestep: Any) -> Any:
    """Return a timestep with the values that its row does not hold; a longer one keeps the class that the env uses."""
    info = timestep.info
    if type(info) is RawReward:
        return timestep._replace(reward=info.reward, info=info.info)
    return _as_timestep(info.timestep) if type(info) is RawTimestep else timestep


def _as_timestep(values: Sequence[Any]) -> Any:
    return BaseEnvTimestep(*values) if len(values) == 4 else values


def stack_trees(values: Sequence[Any]) -> Any:
    """Stack values per leaf, along a new axis 0."""
    if tnp is not None:
        return tnp.stack([tnp.array(value) for value in values])
    first = values[0]
    if isinstance(first, dict):
        return AttrDict({key: stack_trees([value[key] for value in values]) for key in first})
    return np.stack(values)


def first_rows(tree: Any, count: int) -> Any:
    """Return the first ``count`` rows of each leaf."""
    if isinstance(tree, AttrDict):
        return AttrDict({key: first_rows(value, count) for key, value in tree.items()})
    return tree[:count]


def rows_of(actions: Any) -> Sequence[Any]:
    """Return one action per env, from a list or from arrays with the envs along axis 0."""
    if isinstance(actions, dict):
        columns = {key: rows_of(value) for key, value in actions.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if tnp is not None and isinstance(actions, tnp.ndarray):
        return [actions[row] for row in range(len(rows_of(actions.json())))]
    rows: Sequence[Any] = actions
    return rows


def timestep_tree(env_id: int, timestep: Any) -> Any:
    """Return a timestep as a tree with named fields and its env id."""
    fields = {"obs": timestep.obs, "reward": timestep.reward, "done": timestep.done}
    tree = {**fields, "info": _named(timestep.info), "env_id": env_id}
    return AttrDict(tree) if tnp is None else tnp.array(tree)


def _named(info: Any) -> Any:
    if not isinstance(info, dict):
        return [_named(one) for one in info]  # one per agent
    return {_identifier(key): value for key, value in info.items() if not isinstance(value, str)}


def _identifier(key: object) -> str:
    return re.sub(r"\W|^(?=\d)", "_", str(key))
