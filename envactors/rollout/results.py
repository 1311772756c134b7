"""Results of rollouts and evaluations."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Rollout(NamedTuple):
    """``t`` steps of ``n`` envs, time-major.

    Attributes:
        env_ids: Ids of the envs; int64, shape (n,).
        obs: Observations that the actions were chosen for; an array of shape (t, n, ...) per leaf of the observation
            spec.
        actions: Actions; an array of shape (t, n, ...) per leaf of the action spec. None if the envs have no action
            space, and an error has ended the rollout before the policy chose actions.
        rewards: Rewards; float64, shape (t, n, ...).
        terminated: Whether the episode ended with the step; bool, shape (t, n).
        truncated: Whether the episode was cut off at the step; bool, shape (t, n).
        starts: Whether an observation is the first of its episode; bool, shape (t, n).
        extras: Arrays that the policy returned besides the actions, by name; shape (t, n, ...). Zeros
            where it returned none.
        last_obs: Observations after the last step; shape (n, ...) per leaf. Zeros, or None for leaves that are
            objects, for an env whose last step did not run, since an error has ended the rollout.
        infos: ``(step, env id, info)`` of every step whose info is not empty.
        failures: ``(step, env id, exception)`` of every step whose env raised or crashed, or whose actor could not run
            it.
        policy_version: How often the user had given parameters since `VectorEnv.set_policy`; int64, one per actor.
        valid: Whether the row is a step; False for resets, repeats, failed steps, and rows that did not run; bool,
            shape (t, n).
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
    """Whole episodes in the order of their indices. Every episode counts, however long it takes.

    Attributes:
        returns: Sum of the rewards of each episode; float64, shape (k, ...).
        lengths: Number of steps of each episode; int64, shape (k,).
        seeds: Seed that the env of each episode was reset with; int64, shape (k,).
        failures: ``(episode index, exception)`` of every attempt that was repeated because its env raised or crashed.
    """

    returns: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    seeds: npt.NDArray[np.int64]
    failures: list[tuple[int, BaseException]]
