"""Records events of actors and vectors while a trace runs, and nothing at other times."""

from __future__ import annotations

import os
from typing import Any, Protocol


class Recorder(Protocol):
    """A trace that runs. Actors call it under their locks: it must neither wait nor call them."""

    def on_vector(self, statistics: Any) -> None:
        """Record what the caller of a new vector does, given its `envactors.vector.statistics.VectorStatistics`."""

    def on_process_end(self, core: Any, process: Any) -> None:
        """Collect what the process of an actor has left: its page is about to be used by another."""

    def on_span(self, core: Any, name: str, begin: float, end: float) -> None:
        """Record what an actor's process did from one time (`time.monotonic`) to another."""

    def on_notice(self, core: Any, text: str) -> None:
        """Record something that happens to an actor or, if ``core`` is None, to others now."""


# The trace that runs, None if none does.
recorder: Recorder | None = None


def _reset_after_fork() -> None:
    global recorder
    recorder = None


os.register_at_fork(after_in_child=_reset_after_fork)
