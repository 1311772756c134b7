"""What the facade hands out."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.actor.states import ActorStats


class EnvStep(NamedTuple):
    """One env's step, as the futures of `VectorEnv.submit` give it.

    Attributes:
        env_id: Which env.
        obs: Its observation, arrays in the shape and dtype of the observation spec.
        reward: A float, or a float64 array where the env's rewards are vectors.
        terminated: Whether the episode reached its end.
        truncated: Whether the episode was cut.
        info: The env's own dict.
        incarnation: The process that the result comes from.
    """

    env_id: int
    obs: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    incarnation: int


class Batch(NamedTuple):
    """Results of several envs; row ``k`` belongs to env ``env_ids[k]``.

    Attributes:
        env_ids: int64, shape (n,).
        obs: Per leaf of the observation spec an array of shape (n, ...); a list for what cannot be batched.
        rewards: float64, shape (n,) and the reward spec's.
        terminated: bool, shape (n,).
        truncated: bool, shape (n,).
        infos: Each env's own dict.
        incarnations: int64, shape (n,).
    """

    env_ids: npt.NDArray[np.int64]
    obs: Any
    rewards: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]
    incarnations: npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class VectorStats:
    """Counts over a vector env's life.

    Attributes:
        steps: Steps of each env.
        episodes: Episodes that ended, of each env.
        actors: The counts of each actor.
    """

    steps: list[int]
    episodes: list[int]
    actors: list[ActorStats]
