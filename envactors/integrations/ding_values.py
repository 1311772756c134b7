"""What DI-engine's env managers are made of and give: its own classes where it is installed, else stand-ins."""

from __future__ import annotations

import enum
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from envactors.arrays.specs import ArraySpec
from envactors.integrations.inside_ding import OF_THE_SPACE, REWARD_KINDS, Given

_T = TypeVar("_T", bound=type)

_spec = importlib.util.find_spec("ding")
# Any folder of that name would be found, too, but has no origin.
if not TYPE_CHECKING and _spec is not None and _spec.origin is not None:
    from ding.envs import BaseEnvTimestep
    from ding.envs.env_manager.base_env_manager import BaseEnvManager, EnvState
    from ding.utils import ENV_MANAGER_REGISTRY

    register = ENV_MANAGER_REGISTRY.register
    # Its imports take seconds, in each worker that is not a copy of one that has them.
    PRELOAD: Sequence[str] = ("ding.envs",)
else:
    PRELOAD = ()

    class BaseEnvManager:
        """What managers derive from."""

    class BaseEnvTimestep(NamedTuple):
        """What an env's step gives."""

        obs: Any
        reward: Any
        done: Any
        info: Any

    class EnvState(enum.IntEnum):
        """Where an env stands, with the names and numbers of DI-engine."""

        VOID = 0
        INIT = 1
        RUN = 2
        RESET = 3
        DONE = 4
        ERROR = 5
        NEED_RESET = 6

    def register(_name: str) -> Callable[[_T], _T]:
        """Makes a decorator that enters a manager in DI-engine's registry, if there were one."""
        return lambda manager: manager


CONTEXT = "forkserver" if PRELOAD and hasattr(os, "pidfd_open") else "loky"

try:
    import treetensor.numpy as tnp
except ImportError:
    tnp = None


class AttrDict(dict[str, Any]):
    """A dict whose keys are attributes too, and those of the dicts in it."""

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
    """A configuration as DI-engine has them: an ``EasyDict`` where that is installed, else an `AttrDict`."""
    try:
        from easydict import EasyDict
    except ImportError:
        return AttrDict(values)
    return EasyDict(values)


def _read_rewards(spec: ArraySpec, numbers: npt.NDArray[np.float64]) -> list[Any]:
    """The rewards behind what workers wrote; see `DingGuest`."""
    kinds = numbers[:, -1].tolist()
    arrays: Sequence[Any] = ()
    if OF_THE_SPACE in kinds:
        arrays = list(numbers[:, :-1].astype(spec.dtype).reshape(len(numbers), *spec.shape))
        if kinds.count(OF_THE_SPACE) == len(kinds):
            return arrays
    singles = numbers[:, 0].tolist()
    return [
        arrays[row] if kind == OF_THE_SPACE else REWARD_KINDS[int(kind)](singles[row]) for row, kind in enumerate(kinds)
    ]


def read_timesteps(
    reward_spec: ArraySpec, rows: Sequence[Any], rewards: Any, done: Sequence[bool], infos: Sequence[Any]
) -> list[Any]:
    """The timesteps behind what workers wrote; one with more than the usual four fields is of the env's own class.

    Args:
        reward_spec: As `DingGuest` has it.
        rows: One observation an env.
        rewards: One an env, as numbers or as they are.
        done: One an env.
        infos: One an env, or `Given` in its place.
    """
    if isinstance(rewards, np.ndarray):
        rewards = _read_rewards(reward_spec, rewards)
    return [
        BaseEnvTimestep(row, reward, over, info) if type(info) is not Given else _given(info.timestep)
        for row, reward, over, info in zip(rows, rewards, done, infos, strict=True)
    ]


def _given(values: Sequence[Any]) -> Any:
    return BaseEnvTimestep(*values) if len(values) == 4 else values


def stack_trees(values: Sequence[Any]) -> Any:
    """Stacks values per leaf, along a new axis 0."""
    if tnp is not None:
        return tnp.stack([tnp.array(value) for value in values])
    first = values[0]
    if isinstance(first, dict):
        return AttrDict({key: stack_trees([value[key] for value in values]) for key in first})
    return np.stack(values)


def first_rows(tree: Any, count: int) -> Any:
    """The first rows of each leaf."""
    if isinstance(tree, AttrDict):
        return AttrDict({key: first_rows(value, count) for key, value in tree.items()})
    return tree[:count]


def rows_of(actions: Any) -> Sequence[Any]:
    """One action an env, of a list or of arrays with the envs along axis 0."""
    if isinstance(actions, dict):
        columns = {key: rows_of(value) for key, value in actions.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if tnp is not None and isinstance(actions, tnp.ndarray):
        return [actions[row] for row in range(len(rows_of(actions.json())))]
    rows: Sequence[Any] = actions
    return rows


def timestep_tree(env_id: int, timestep: Any) -> Any:
    """A timestep with its env's id, its values by name."""
    fields = {"obs": timestep.obs, "reward": timestep.reward, "done": timestep.done}
    tree = {**fields, "info": _named(timestep.info), "env_id": env_id}
    return AttrDict(tree) if tnp is None else tnp.array(tree)


def _named(info: Any) -> Any:
    if not isinstance(info, dict):
        return [_named(one) for one in info]  # one an agent
    return {_identifier(key): value for key, value in info.items() if not isinstance(value, str)}


def _identifier(key: object) -> str:
    return re.sub(r"\W|^(?=\d)", "_", str(key))
