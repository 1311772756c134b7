"""Sampling of actions from an env's own action space."""

from __future__ import annotations

from typing import Any


def sample_actions(env: Any, maker: str, count: int, seed: int) -> list[Any]:
    """Sample actions from an env's action space.

    Args:
        env: Env with an ``action_space`` that has a method ``sample``.
        maker: Name of the factory that made the env, used in the error message.
        count: Number of actions.
        seed: Seed of the space; ignored if the space has no ``seed``.

    Raises:
        ValueError: The env has no action space to sample from.
    """
    space: Any = getattr(env, "action_space", None)
    if not callable(getattr(space, "sample", None)):
        raise ValueError(
            f"{maker} makes a {type(env).__name__} without an action_space to sample from: give the env one, such as "
            "gymnasium.spaces.Discrete(2), or any object with a method sample() that returns an action"
        )
    if hasattr(space, "seed"):
        space.seed(seed)
    return [space.sample() for _ in range(count)]
