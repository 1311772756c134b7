"""Actions for an env, sampled from its own space."""

from __future__ import annotations

from typing import Any


def sample_actions(env: Any, maker: str, count: int, seed: int) -> list[Any]:
    """Samples actions.

    Args:
        env: Whose action space is sampled.
        maker: What has made it, for the error.
        count: How many actions.
        seed: Of the space, where that can be seeded.

    Raises:
        ValueError: There is nothing to sample from.
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
