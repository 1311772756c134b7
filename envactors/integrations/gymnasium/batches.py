"""Convert batches between the form that Gymnasium uses and that of `envactors.vector_env.VectorEnv`.

Spaces are combined in `envactors.integrations.gymnasium.spaces`.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from envactors.mailbox.specs import ArraySpec, Spec


class Actions:
    """Decides whether batches of actions fit the action space.

    Args:
        spec: Spec of one env's action.
        num_envs: Number of envs.
    """

    def __init__(self, spec: Spec | None, num_envs: int) -> None:
        self._spec = spec
        self._num_envs = num_envs
        self._dtype, self._shape = None, None
        if isinstance(spec, ArraySpec) and spec.batchable:
            self._dtype, self._shape = spec.dtype, (num_envs, *spec.shape)

    def fits(self, actions: Any) -> bool:
        """Return whether a batch can be converted to the action spec without loss."""
        if type(actions) is np.ndarray and actions.dtype == self._dtype and actions.shape == self._shape:
            return True
        return _fits(self._spec, actions, self._num_envs)


class Observations:
    """The last observation of each env, as one batch in Gymnasium's form.

    Args:
        space: Observation space of one env.
        spec: Spec of one env's observation.
        num_envs: Number of envs.

    Attributes:
        batch: The observations; None before the first reset.
    """

    def __init__(self, space: Space[Any], spec: Spec | None, num_envs: int) -> None:
        self.batch: Any = None
        self._space = space
        self._num_envs = num_envs
        # Whether a batch is a single array in both forms.
        self._is_array = not isinstance(batch_space(space, 1), (spaces.Dict, spaces.Tuple)) and getattr(
            spec, "batchable", False
        )
        self._translate = _translator(space)

    def replace_all(self, obs: Any) -> None:
        """Store the observations of all envs."""
        self.batch = obs if self._is_array else self._translate(obs)

    def replace_some(self, env_ids: Iterable[int], obs: Any) -> None:
        """Store the observations of some envs."""
        ids = list(env_ids)
        if not ids:
            return
        before = self.batch
        if before is None:
            before = create_empty_array(self._space, self._num_envs, np.zeros)
        self.batch = _merged(self._space, before, obs if self._is_array else self._translate(obs), ids)

    def current(self, copy: bool) -> Any:
        """Return the batch, or a copy of it."""
        return _copied(self.batch) if copy else self.batch


def _fits(spec: Any, actions: Any, num_envs: int) -> bool:
    if isinstance(spec, dict):
        same = isinstance(actions, Mapping) and actions.keys() == spec.keys()
        return same and all(_fits(inner, actions[key], num_envs) for key, inner in spec.items())
    if isinstance(spec, tuple):
        same = isinstance(actions, tuple) and len(actions) == len(spec)
        return same and all(_fits(inner, part, num_envs) for inner, part in zip(spec, actions, strict=True))
    if not spec.batchable:
        return isinstance(actions, (tuple, list)) and len(actions) == num_envs
    try:
        array = np.asarray(actions)
    except ValueError:
        return False
    return array.shape == (num_envs, *spec.shape) and np.can_cast(array.dtype, spec.dtype, "safe")


def _translator(space: Space[Any]) -> Callable[[Any], Any]:
    """Return a function that converts a batch to Gymnasium's form, which has tuples where `VectorEnv` has lists.

    Building batched spaces takes far longer than a step, so the function knows what they are.
    """
    if isinstance(space, spaces.Dict):
        inner = {key: _translator(one) for key, one in space.spaces.items()}
        return lambda obs: {key: translate(obs[key]) for key, translate in inner.items()}
    if isinstance(space, spaces.Tuple):
        parts = [_translator(one) for one in space.spaces]
        return lambda obs: tuple([translate(part) for translate, part in zip(parts, obs, strict=True)])
    if isinstance(batch_space(space, 1), spaces.Tuple):
        return tuple

    def translate(obs: Any) -> Any:
        if not isinstance(obs, list):
            return obs
        empty: Any = create_empty_array(space, len(obs))
        return concatenate(space, obs, empty)

    return translate


def _merged(space: Space[Any], before: Any, fresh: Any, env_ids: list[int]) -> Any:
    """Return a copy of a batch with the observations of some envs replaced."""
    if isinstance(space, spaces.Dict):
        return {key: _merged(inner, before[key], fresh[key], env_ids) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, before, fresh, strict=True)
        return tuple(_merged(inner, old, new, env_ids) for inner, old, new in parts)
    merged = before.copy() if isinstance(before, np.ndarray) else list(before)
    for i, one in zip(env_ids, fresh, strict=True):
        merged[i] = one
    return merged if isinstance(before, np.ndarray) else tuple(merged)


def _copied(obs: Any) -> Any:
    if type(obs) is np.ndarray:
        return obs.copy()
    if type(obs) is dict:
        return {key: _copied(part) for key, part in obs.items()}
    if type(obs) is tuple:
        return tuple(map(_copied, obs))
    return copying.deepcopy(obs)
