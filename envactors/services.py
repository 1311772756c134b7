"""Services, which run beside the actors of this process, from the first actor to the last one.

Packages above the actors register their services here when they are imported. `envactors.runtime` starts and closes
them. This module imports nothing, since every program and every worker imports it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than that of `envactors`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from envactors.loop import Loop

    class Service(Protocol):
        """A service that is running."""

        def close(self) -> None:
            """Tell it to end; do not wait for it."""

        def join(self, timeout: float) -> None:
            """Wait until it has ended, at most this long in seconds."""


# Called with the loop of each runtime that starts. Each returns the service that it has started, or None.
on_start: list[Callable[[Loop], Service | None]] = []
