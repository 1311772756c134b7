"""`callbacks`: ``reset`` and ``step`` of a vector env as functions that compiled JAX code can call.

    reset, step ──▶ ``io_callback`` with the shapes of the specs ──▶ `HostCalls` ──▶ `VectorEnv.reset`, `VectorEnv.step`

The calls are ordered, so that one thread at a time uses the vector env. `HostCalls` has the half that runs in the
thread of the compiled program, which must not wait for JAX: it computes with NumPy only.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import io_callback

from envactors.errors import SpaceMismatchError
from envactors.integrations.access import VectorAccess
from envactors.mailbox.specs import ArraySpec, Spec, leaves, unflatten
from envactors.vector_env import VectorEnv


class Reset(Protocol):
    """The type of `Callbacks.reset`."""

    def __call__(self, seed: Any = None) -> Any: ...


class Step(Protocol):
    """The type of `Callbacks.step`."""

    def __call__(self, actions: Any) -> tuple[Any, Any, Any, Any]: ...


class Callbacks(NamedTuple):
    """The functions that `callbacks` returns.

    Attributes:
        reset: Resets all envs and returns their observations. Its argument ``seed`` is one integer, which gives env
            ``i`` the seed ``seed + i``, or an array of one per env; None (default) for a reset without seeds.
        step: Steps all envs with a batch of actions and returns ``(obs, rewards, terminated, truncated)``.
    """

    reset: Reset
    step: Step


def callbacks(envs: VectorEnv) -> Callbacks:
    """Return functions that reset and step a vector env from JAX code, compiled by ``jax.jit`` or not.

    They work in ``jax.lax.scan``, ``while_loop`` and ``cond``, in the order of the program. ``jax.vmap`` and
    derivatives of them are refused by JAX. All arrays have the envs along axis 0, with the shapes and dtypes of the
    specs; 64-bit dtypes become 32-bit ones unless ``jax_enable_x64`` is set when this function is called. Infos do not
    reach JAX.

    A failure that the vector env raises ends the compiled program with a ``jax.errors.JaxRuntimeError`` that contains
    it. With ``on_failure="renew"`` or ``"replay"`` the program continues.

    Args:
        envs: The vector env, which stays the caller's: to use directly between two programs, and to close.

    Raises:
        SpaceMismatchError: The observations, rewards or actions cannot be batched in arrays, or the shapes of the
            observations are not known before the first reset.
    """
    observations = _batched("observations", envs.observation_spec, envs.num_envs)
    rewards = _batched("rewards", envs.reward_spec, envs.num_envs)
    if envs.action_spec is not None:
        _batched("actions", envs.action_spec, envs.num_envs)
    flags = jax.ShapeDtypeStruct((envs.num_envs,), np.bool_)
    calls = HostCalls(envs, observations, rewards)

    def reset(seed: Any = None) -> Any:
        seeds = () if seed is None else (seed,)
        return io_callback(calls.reset, observations, *seeds, ordered=True)

    def step(actions: Any) -> tuple[Any, Any, Any, Any]:
        results: tuple[Any, Any, Any, Any] = io_callback(
            calls.step, (observations, rewards, flags, flags), actions, ordered=True
        )
        return results

    return Callbacks(reset, step)


class HostCalls:
    """The functions that a compiled program calls, in one of its threads.

    Args:
        envs: The vector env.
        observations: Shapes and dtypes of a batch of observations.
        rewards: Those of a batch of rewards.
    """

    def __init__(self, envs: VectorEnv, observations: Any, rewards: Any) -> None:
        self._envs = envs
        self._observations = observations
        self._rewards = rewards

    def reset(self, seed: Any = None) -> Any:
        """Reset all envs.

        Args:
            seed: An array of no axis or of one, or None.
        """
        seeds = None if seed is None else _own(seed).tolist()
        obs, _ = self._envs.reset(seed=seeds)
        return _cast(self._observations, obs)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any]:
        """Step all envs with a batch of actions."""
        obs, rewards, terminated, truncated, _ = VectorAccess(self._envs).step(jax.tree.map(_own, actions))
        return _cast(self._observations, obs), _cast(self._rewards, rewards), terminated, truncated


def _own(array: Any) -> npt.NDArray[Any]:
    """Return a copy, since JAX reuses the memory of an argument once the callback has returned."""
    return np.array(array)


def _cast(shapes: Any, values: Any) -> Any:
    """Return values in the dtypes that were promised to JAX."""
    return jax.tree.map(lambda shape, value: np.asarray(value, shape.dtype), shapes, values)


def _batched(what: str, spec: Spec | None, num_envs: int) -> Any:
    """Return the shapes and dtypes of a batch of values.

    Raises:
        SpaceMismatchError: The spec is missing, or has values that form no arrays.
    """
    if spec is None:
        raise SpaceMismatchError(
            f"the envs have no space for {what}, so that JAX cannot know the shapes: give them one, or call "
            "envs.reset() once before callbacks(envs)"
        )
    described = leaves(spec)
    if odd := [leaf for leaf in described if not leaf.batchable]:
        raise SpaceMismatchError(
            f"the {what} have values without a fixed shape and a numeric dtype ({odd[0].dtype}), which JAX cannot "
            "take: expected spaces such as Box and Discrete, and Dict or Tuple of them"
        )
    return unflatten(spec, iter([_shape(leaf, num_envs) for leaf in described]))


def _shape(leaf: ArraySpec, num_envs: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_envs, *leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype))
