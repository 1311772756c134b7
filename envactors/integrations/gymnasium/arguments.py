"""Check the arguments that `ActorVectorEnv` takes over from Gymnasium. Spaces and actions are checked elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.vector.options import CommonOptions


def check_worker(worker: Any) -> None:
    """Raise if a worker function is given.

    Raises:
        ValueError: A worker function is given.
    """
    if worker is not None:
        raise ValueError(
            "A custom `worker` must accept 8 arguments, among them the pipes and the queue of Gymnasium's own "
            f"processes. Actors have no such pipes, so {worker!r} cannot run. Move its code into a gymnasium.Wrapper, "
            "or use gymnasium.vector.AsyncVectorEnv"
        )


def checked_limit(max_concurrency: Any, options: CommonOptions) -> int | None:
    """Return the largest number of envs that run at once.

    Raises:
        ValueError: ``max_concurrency`` is not a positive int, or ``max_running`` is given too.
    """
    if max_concurrency is not None and "max_running" in options:
        raise ValueError(
            f"max_concurrency={max_concurrency!r} and max_running={options['max_running']!r} mean the same: expected "
            "only one"
        )
    if max_concurrency is None:
        return None
    if not isinstance(max_concurrency, (int, np.integer)):
        raise ValueError(f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}.")
    if max_concurrency < 1:
        raise ValueError(f"`max_concurrency` must be a positive or None, got {max_concurrency}.")
    return int(max_concurrency)


def checked_mask(mask: Any, num_envs: int) -> npt.NDArray[np.bool_]:
    """Return the mask of a partial reset.

    Raises:
        TypeError: The mask is not an array of bools.
        ValueError: The mask does not have one entry per env, or selects no env.
    """
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return mask
