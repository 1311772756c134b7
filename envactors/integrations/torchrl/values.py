"""Create TorchRL's specs for Gymnasium's spaces, and convert batches between the two.

The specs of one env are those of TorchRL's ``GymWrapper``, so that programs see the same keys, shapes, and dtypes.
TorchRL cannot represent a tuple of different spaces, so a tuple becomes a composite with the keys ``"0"``, ``"1"``, and
so on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import Space, spaces
from tensordict import TensorDictBase, unravel_key
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import GymWrapper

from envactors.errors import SpaceMismatchError
from envactors.mailbox.pickling import safe_repr, safe_str
from envactors.mailbox.specs import ArraySpec, Spec, flatten, flattener, leaves, unflatten

# Specs with one dense tensor of fixed shape per env. MultiOneHot is a subclass of OneHot.
_DENSE = (Binary, Bounded, Categorical, MultiCategorical, OneHot, Unbounded)


class EnvSpecs(NamedTuple):
    """Specs of TorchRL for all envs.

    Attributes:
        observation: Composite of the observations.
        action: Composite of the action.
        done: Composite of ``done``, ``terminated``, and ``truncated``, each of shape ``[num_envs, 1]``.
    """

    observation: Composite
    action: Composite
    done: Composite


def make_specs(observation_space: Any, action_space: Any, num_envs: int, *, categorical: bool) -> EnvSpecs:
    """Return the specs of ``num_envs`` envs with these spaces.

    Args:
        observation_space: Observation space of one env.
        action_space: Action space of one env.
        num_envs: Number of envs.
        categorical: True to encode discrete values as categories, False to encode them as one-hot vectors.

    Raises:
        SpaceMismatchError: A space is not from Gymnasium, has no fixed shape, or has no spec in TorchRL.
    """
    for name, space in (("observation", observation_space), ("action", action_space)):
        if not isinstance(space, Space):
            raise SpaceMismatchError(f"the {name} space is {space!r}: expected a gymnasium.spaces.Space")
    spaces = _SpacesOnly(_without_tuples("observation", observation_space), _without_tuples("action", action_space))
    try:
        env = GymWrapper(spaces, categorical_action_encoding=categorical)
    except Exception as error:
        raise SpaceMismatchError(
            f"TorchRL has no spec for the observation space {observation_space} or the action space {action_space}: "
            f"{error}"
        ) from error
    single = {"observation": env.observation_spec, "action": env.full_action_spec}
    for name, composite in single.items():
        for key, spec in composite.items(True, True):
            if not isinstance(spec, _DENSE):
                raise SpaceMismatchError(
                    f"the {name} {key!r} has the spec {type(spec).__name__}: expected a space of fixed shape. Text, "
                    "Sequence, Graph, OneOf, and MultiDiscrete with two axes are not supported"
                )
    if shared := set(single["observation"].keys()) & set(single["action"].keys()):
        raise SpaceMismatchError(
            f"observations and actions share the keys {sorted(shared)}: expected different keys, since both "
            "are entries of one TensorDict"
        )
    return EnvSpecs(
        env.observation_spec.expand(num_envs),
        env.full_action_spec.expand(num_envs),
        env.full_done_spec.expand(num_envs),
    )


class _SpacesOnly(gymnasium.Env[Any, Any]):
    """An env that only has spaces; it cannot be reset or stepped."""

    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        self.observation_space = observation_space
        self.action_space = action_space


def _without_tuples(name: str, space: Space[Any], at_root: bool = True) -> Space[Any]:
    """Return a space with dicts in place of tuples; a tuple at the root becomes an entry with the given name."""
    # `Dict` sorts the keys of a dict, but not pairs; random actions are drawn in their order.
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, _without_tuples(key, inner, False)) for key, inner in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        parts = [(str(i), _without_tuples(str(i), inner, False)) for i, inner in enumerate(space.spaces)]
        return spaces.Dict([(name, spaces.Dict(parts))] if at_root else parts)
    return space


class _Leaf(NamedTuple):
    """A leaf of a space.

    Attributes:
        key: Key of its entry in a TensorDict.
        path: The same as a tuple.
        shape: Shape of the facade's batch.
        start: The smallest value in the env, since TorchRL counts categories from 0; None for 0.
        encode: Makes the entry from values of all envs that count from 0.
        decode: Returns such values from an entry.
    """

    key: str | tuple[str, ...]
    path: tuple[str, ...]
    shape: tuple[int, ...]
    start: Any
    encode: Callable[[npt.NDArray[Any]], torch.Tensor]
    decode: Callable[[torch.Tensor], npt.NDArray[Any]]


class Values:
    """Converts the values of a space between batches of the facade and entries of a TensorDict.

    Args:
        space: Space of one env.
        spec: The facade's spec of that space.
        composite: TorchRL's specs of all envs.

    Attributes:
        are_nested: Whether keys of entries are paths.
    """

    def __init__(self, space: Space[Any], spec: Spec, composite: Composite) -> None:
        self._spec, self._flatten = spec, flattener(spec)
        self._num_envs = composite.shape[0]
        # TorchRL calls an observation of bytes "pixels", and any other one "observation".
        tree = _tree_of_leaves(space, () if isinstance(space, spaces.Dict) else tuple(composite.keys()))
        self._leaves = [
            _make_leaf(path, composite[path], leaf, start)
            for (path, start), leaf in zip(flatten(spec, tree), leaves(spec), strict=True)
        ]
        self.are_nested: bool = not all(isinstance(leaf.key, str) for leaf in self._leaves)

    def encode(self, batch: Any, env_ids: Sequence[int] | None) -> dict[str | tuple[str, ...], torch.Tensor]:
        """Return entries with one row per env; arrays of the right dtype are not copied.

        Args:
            batch: Batch of the facade.
            env_ids: Envs of the batch, while the rows of the others are zero; None for all, in order.
        """
        entries = {}
        for leaf, values in zip(self._leaves, self._flatten(batch), strict=True):
            rows = values if leaf.start is None else values - leaf.start
            if env_ids is not None:
                rows = spread(rows, env_ids, self._num_envs)
            entries[leaf.key] = leaf.encode(rows)
        return entries

    def decode(self, tensordict: TensorDictBase, env_ids: Sequence[int] | None) -> Any:
        """Return the batch of the facade for the given envs, or for all if ``env_ids`` is None."""
        parts = []
        for leaf in self._leaves:
            # `get` would take four times as long.
            values = leaf.decode(tensordict._get_tuple(leaf.path, None)).reshape(leaf.shape)  # noqa: SLF001 # as in TorchRL
            values = values if leaf.start is None else values + leaf.start
            parts.append(values if env_ids is None else values[env_ids])
        return unflatten(self._spec, iter(parts))


class Infos:
    """Reads entries of infos into entries of a TensorDict.

    Args:
        specs: Spec of each entry for one env.

    Raises:
        SpaceMismatchError: A spec is not that of a tensor.
    """

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        for key, spec in specs.items():
            if any(isinstance(leaf, NonTensor) for leaf in Composite({key: spec}).values(True, True)):
                raise SpaceMismatchError(
                    f"info_spec contains {key!r} with a NonTensor: expected specs of tensors. Read strings and other "
                    "values from infos and reset_infos"
                )
        self._specs = dict(specs)

    def specs_of(self, num_envs: int) -> dict[str, TensorSpec]:
        """Return the specs for ``num_envs`` envs."""
        return {key: spec.expand(num_envs, *spec.shape) for key, spec in self._specs.items()}

    def encode(self, infos: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return entries with one row per env; entries that an env's info does not contain are zero.

        Raises:
            SpaceMismatchError: An entry does not fit its spec.
        """
        entries = {}
        for key, spec in self._specs.items():
            rows = entries[key] = spec.zero((len(infos),))
            for i, info in enumerate(infos):
                if (value := info.get(key)) is not None:
                    try:
                        rows[i] = spec.encode(value)
                    except Exception as error:  # of many types
                        raise SpaceMismatchError(
                            f"the info entry {key!r} of env {i} is {safe_repr(value)}, which does not fit its spec in "
                            f"info_spec, {type(spec).__name__} with shape {tuple(spec.shape)} ({safe_str(error)}): "
                            "expected numbers. Read strings and other values from infos and reset_infos"
                        ) from error
        return entries


def spread(values: Any, env_ids: Sequence[int], num_envs: int) -> Any:
    """Return an array with one row per env: the given rows for some envs, and zeros for the others."""
    rows = np.zeros((num_envs, *values.shape[1:]), values.dtype)
    rows[env_ids] = values
    return rows


def _make_leaf(path: tuple[str, ...], spec: TensorSpec, leaf: ArraySpec, start: Any) -> _Leaf:
    """Return a leaf with the fastest conversions for its spec."""
    shape = (spec.shape[0], *leaf.shape)
    zeros = torch.from_numpy(np.zeros(shape, leaf.dtype))
    encode: Any = functools.partial(spec.encode, ignore_device=True)
    decode: Any = functools.partial(spec.to_numpy, safe=False)
    if type(spec) is OneHot and not spec.use_register and leaf.dtype == np.int64 and not spec.dtype.is_floating_point:
        encode, decode = _one_hot_encoder(spec), lambda tensor: tensor.numpy(force=True).argmax(-1)
    elif start is None and not isinstance(spec, OneHot) and (zeros.shape, zeros.dtype) == (spec.shape, spec.dtype):
        encode = torch.from_numpy
    return _Leaf(unravel_key(path), path, shape, start, encode, decode)


def _one_hot_encoder(spec: OneHot) -> Callable[[npt.NDArray[np.int64]], torch.Tensor]:
    table = np.eye(int(spec.space.n), dtype=spec.zero().numpy().dtype)

    def encode(values: npt.NDArray[np.int64]) -> torch.Tensor:
        # Comparing the array takes four times as long for a few envs. `take` would count negative values from the end.
        if min(numbers := values.ravel().tolist()) < 0 or max(numbers) >= len(table):
            spec.encode(values, ignore_device=True)  # raises an error
        return torch.from_numpy(table.take(values, 0))

    return encode


def _tree_of_leaves(space: Space[Any], path: tuple[str, ...]) -> Any:
    """Return the path and the start of each leaf of a space, in the structure of the space."""
    if isinstance(space, spaces.Dict):
        names = {key: key for key in space.spaces}
        if "observation" not in names and "state" in names:
            names["state"] = "observation"  # as in TorchRL's conversion of spaces
        return {key: _tree_of_leaves(inner, (*path, names[key])) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_tree_of_leaves(inner, (*path, str(i))) for i, inner in enumerate(space.spaces))
    start = np.asarray(getattr(space, "start", 0))
    return path, (start if start.any() else None)
