"""Steps of all envs on their way into the journals, which record several of them in a fraction of the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from envactors.mailbox.slab import BUFFER, RESET, Slab

# How many steps of all envs are recorded at once.
MOST_STEPS: Final = 64


class Journal(Protocol):
    """A journal, which is an `envactors.replay.Journal`."""

    def record_steps(self, actions: Sequence[bytes], resets: bytes, check: int) -> None:
        """Record consecutive steps and resets."""

    def forget(self) -> None:
        """Discard all requests."""


class StepBuffer:
    """Keeps copies of the actions of all envs until they are recorded.

    Args:
        slab: The rows.
        ops: The operation of each row.
        size: How many steps it keeps.

    Attributes:
        count: How many steps it has.
        is_full: Whether it has no room for another one.
    """

    def __init__(self, slab: Slab, ops: npt.NDArray[np.uint8], size: int) -> None:
        arrays: list[npt.NDArray[Any]] = [ops, slab.checks, *slab.actions]
        self._copies = [(np.empty((size, *array.shape), array.dtype), array) for array in arrays]
        self._size = size
        self._is_writing = False
        self.count: int = 0

    @property
    def is_full(self) -> bool:
        return self.count == self._size

    def add(self) -> None:
        """Add a plain step, or a reset without a seed, of each env."""
        for copies, array in self._copies:
            copies[self.count] = array
        self.count += 1

    def move_to(self, journals: Sequence[Journal]) -> None:
        """Record the steps in the journals of the envs."""
        if self._is_writing:  # an interrupt has ended an earlier attempt in the middle
            for journal in journals:
                journal.forget()
        self._is_writing = True
        ops, checks, *actions = [copies[: self.count] for copies, _ in self._copies]
        resets = (ops & RESET != 0).T
        columns = [leaf.swapaxes(0, 1) for leaf in actions]
        for index, journal in enumerate(journals):
            check = int(checks[-1, ops[-1, index] & BUFFER, index])
            journal.record_steps([column[index].tobytes() for column in columns], resets[index].tobytes(), check)
        self.count = 0
        self._is_writing = False
