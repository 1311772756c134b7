"""The state of ALE."""

from __future__ import annotations

from typing import Any


def capture_ale(ale: Any) -> Any:
    """Return the state of ALE with its random generator, from which sticky actions draw."""
    return ale.cloneState(include_rng=True)


def restore_ale(ale: Any, state: Any) -> None:
    """Put ALE into a state. Its screen follows with the next frame."""
    ale.restoreState(state)
