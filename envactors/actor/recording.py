"""The recorder of this process, which is told what happens to actors and vectors; by default it ignores that.

`envactors.observe.trace` records while a trace runs.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Protocol

from envactors.actor.base import ActorBase
from envactors.actor.job import Activity


class RecordedVector(Protocol):
    """The statistics of a vector, as a recorder uses them."""

    # The method, the begin, and the end of each wait of the caller; None while nobody records them.
    waits: deque[tuple[str, float, float]] | None

    def begin_timing(self) -> None:
        """Have steps, resets, and waits timed from now on, if they are not."""


class Recorder:
    """Ignores everything; the base class of recorders.

    Actors call it, often under their locks, so its methods are short and never call actors. Times are those of
    `time.monotonic`, in seconds.
    """

    def on_vector(self, vector: RecordedVector) -> None:
        """Record that a vector was made. No lock is held."""

    def on_span(self, actor: ActorBase, name: str, begin: float) -> None:
        """Record what a process has done from ``begin`` until now: its start, or a call."""

    def on_notice(self, actor: ActorBase | None, text: str) -> None:
        """Record a log message about an actor, or about something else if that is None."""

    def on_exit(self, actor: ActorBase, activity: Activity | None) -> None:
        """Record that the process of an actor has ended, which is still ``actor.process``.

        Args:
            actor: The actor.
            activity: What the process was running; None if it was idle.
        """


_NOBODY = Recorder()
recorder: Recorder = _NOBODY


def is_recording() -> bool:
    """Return whether somebody records."""
    return recorder is not _NOBODY


def end_recording() -> None:
    """Ignore everything from now on."""
    global recorder
    recorder = _NOBODY


os.register_at_fork(after_in_child=end_recording)
