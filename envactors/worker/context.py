"""Who is running: what env code can ask about itself."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ActorContext:
    """The actor whose code is running.

    Attributes:
        name: The actor's name.
        index: The index of the env whose code is running.
        incarnation: 0 for the first process, one more for each further one.
    """

    name: str
    index: int
    incarnation: int


_current: ActorContext | None = None


def current_actor() -> ActorContext | None:
    """The actor whose code is running; None outside a worker."""
    return _current


def enter(context: ActorContext) -> None:
    """Says whose code runs from here on."""
    global _current
    _current = context
