"""The journals of all envs of a vector."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from envactors.mailbox.step_buffer import StepBuffer
from envactors.replay import Journal
from envactors.vector.options import VectorSettings
from envactors.vector.rows import Rows

# How many steps of all envs wait until they are recorded together.
_BUFFER_SIZE = 256


class Journals(StepBuffer[Journal]):
    """The journal of each env. Bare steps wait in the buffer until many go into the journals at once.

    Args:
        rows: The rows of the vector.
        actors: The envs of each actor.
        settings: The options of the vector.

    Attributes:
        is_replayed: Whether lost episodes are brought back by replay.
        is_recorded: Whether steps and resets are recorded, for replays or for crash bundles.
        saves_due: The envs whose states are to be saved, so that their journals begin anew.
    """

    def __init__(self, rows: Rows, actors: Sequence[range], settings: VectorSettings) -> None:
        self.is_replayed: bool = settings.on_failure == "replay"
        self.is_recorded: bool = self.is_replayed or settings.crash_dir is not None
        self.saves_due: set[int] = set()
        save_every = None if settings.snapshot is None or not self.is_replayed else settings.snapshot.every
        journals = [
            Journal(position, settings.max_journal, save_every, functools.partial(self.saves_due.add, index))
            for envs in actors
            for position, index in enumerate(envs)
        ]
        # A journal finds that a save is due when it records the step, so with saves no step may wait.
        size = _BUFFER_SIZE if save_every is None else 1
        super().__init__(rows.slab, np.frombuffer(rows.ops, np.uint8), journals, size)

    def flushed(self, index: int) -> Journal:
        """Return the journal of an env. This moves the steps that wait, of all envs, into their journals."""
        return self.flush()[index]
