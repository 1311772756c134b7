"""Combine the spaces of envs to those of a vector env by Gymnasium's rules, and check that they agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from gymnasium import Space, spaces
from gymnasium.error import CustomSpaceError
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space, create_shared_memory

ObservationMode: TypeAlias = str | tuple[Space[Any], Space[Any]]


class Spaces(NamedTuple):
    """Spaces of a vector env, by Gymnasium's names."""

    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]


def check_mode(mode: ObservationMode) -> None:
    """Raise if an observation mode is invalid, as Gymnasium does.

    Raises:
        TypeError: A tuple has elements that are not spaces.
        ValueError: The mode is invalid in another way.
    """
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
            )
    elif mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {mode}"
        )


def agree(
    kind: str, mode: ObservationMode, observation_spaces: Sequence[Space[Any]], action_spaces: Sequence[Space[Any]]
) -> Spaces:
    """Return the spaces of a vector env.

    Args:
        kind: Name of the vector env's class, for errors.
        mode: Observation mode, which controls how observation spaces may differ.
        observation_spaces: One per env.
        action_spaces: One per env.

    Raises:
        RuntimeError: The spaces differ more than the mode allows.
    """
    batched, single = mode if isinstance(mode, tuple) else (None, observation_spaces[0])
    if mode == "same":
        same = all(other == single for other in observation_spaces)
    else:
        same = all(is_space_dtype_shape_equiv(single, other) for other in observation_spaces)
    if not same:
        raise RuntimeError(unequal("observation", kind, mode))
    action = action_spaces[0]
    if any(other != action for other in action_spaces):
        raise RuntimeError(unequal("action", kind, mode))
    if mode == "same":
        batched = batch_space(single, len(observation_spaces))
    elif mode == "different":
        batched = batch_differing_spaces(observation_spaces)
    assert batched is not None, "the mode was checked"
    return Spaces(single, batched, action, batch_space(action, len(action_spaces)))


def unequal(what: Literal["action", "observation"], kind: str, mode: ObservationMode) -> str:
    """Return the message for spaces that differ; see `agree`."""
    if what == "action":
        return "The action spaces of the environments differ: expected equal action spaces"
    if mode == "same":
        return (
            f"{kind}(..., observation_mode='same') however some of the sub-environments observation "
            "spaces are not equivalent. If this is intentional, use `observation_mode='different'` instead."
        )
    return (
        f"{kind}(..., observation_mode='different' or custom space) however the sub-environments' "
        "observation spaces do not share a common shape and dtype."
    )


def check_shareable(space: Space[Any]) -> None:
    """Raise if an observation space is custom, as Gymnasium does with shared memory.

    Raises:
        ValueError: The space or a part of it is custom.
    """
    custom = _custom(space)
    if custom is not None:
        raise ValueError(
            f"shared_memory=True with the custom observation space {custom!r}, whose size is unknown: omit "
            "shared_memory to share only values of fixed size, or pass shared_memory=False"
        ) from CustomSpaceError(f"{custom!r} is not one of Gymnasium's own spaces")


def _custom(space: Space[Any]) -> Space[Any] | None:
    """Return the first part of a space that Gymnasium cannot put into shared memory, or None."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        inner: Iterable[Space[Any]] = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return next((part for part in map(_custom, inner) if part is not None), None)
    unknown = create_shared_memory.dispatch(Space)
    return space if create_shared_memory.dispatch(type(space)) is unknown else None
