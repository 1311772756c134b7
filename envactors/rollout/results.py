"""What rollouts hand out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Rollout(NamedTuple):
    """Some steps of some envs, time-major: ``t`` steps of ``n`` envs.

    Attributes:
        env_ids: int64, shape (n,).
        obs: Per leaf of the observation spec an array of shape (t, n, ...): what the actions were chosen for.
        actions: Per leaf of the action spec an array of shape (t, n, ...).
        rewards: float64, shape (t, n) and the reward spec's.
        terminated: bool, shape (t, n).
        truncated: bool, shape (t, n).
        starts: bool, shape (t, n): whether an observation is the first one of its episode.
        extras: What the policy has returned beside the actions: arrays of shape (t, n, ...), by name.
        last_obs: The observations after the last step, of shape (n, ...) per leaf.
        infos: Of each step with an info that is not empty: the step, the env, the info.
        failures: Of each step whose env was lost or has raised: the step, the env, the exception.
        policy_version: int64, shape (a,): how often parameters were given, per actor.
        valid: bool, shape (t, n): False where an episode was reset rather than stepped, and for what did not run.
    """

    env_ids: npt.NDArray[np.int64]
    obs: Any
    actions: Any
    rewards: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.bool_]
    extras: dict[str, npt.NDArray[Any]]
    last_obs: Any
    infos: list[tuple[int, int, dict[str, Any]]]
    failures: list[tuple[int, int, BaseException]]
    policy_version: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]


class Evaluation(NamedTuple):
    """Whole episodes, in the order of their numbers: however long one takes, it counts.

    Attributes:
        returns: float64, shape (k,) and the reward spec's: the sum of the rewards of each episode.
        lengths: int64, shape (k,): how many steps each has.
        seeds: int64, shape (k,): the seed that its env was reset with.
        failures: Of each episode that had to be repeated, since its env was lost or raised: its number, the exception.
    """

    returns: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    seeds: npt.NDArray[np.int64]
    failures: list[tuple[int, BaseException]]
