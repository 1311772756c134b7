"""Steps of all envs on their way into the journals, which record several of them in a fraction of the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from envactors.mailbox.slab import BUFFER, RESET, Slab

# How many steps of all envs are recorded at once.
_MOST_STEPS: Final = 64


class Journal(Protocol):
    """A journal of one env: an `envactors.replay.Journal`."""

    def record_steps(self, actions: Sequence[bytes], resets: bytes, check: int) -> None:
        """Record consecutive steps and resets."""

    def forget(self) -> None:
        """Discard all requests."""


J = TypeVar("J", bound=Journal)


class StepBuffer(Generic[J]):
    """Keeps copies of plain steps, and of resets without a seed, until they are in the journals.

    Args:
        slab: The rows.
        ops: The operation of each row.

    Attributes:
        journals: The journal of each env.
        size: How many steps of all envs are kept.
    """

    def __init__(self, slab: Slab, ops: npt.NDArray[np.uint8]) -> None:
        self.journals: list[J] = []
        self.size: int = _MOST_STEPS
        self._arrays: list[npt.NDArray[Any]] = [ops, slab.checks, *slab.actions]
        self._copies: list[npt.NDArray[Any]] = []
        self._count = 0
        self._is_moving = False

    def record(self, ids: Sequence[int], *, is_all: bool) -> None:
        """Record the steps of these envs; ``is_all`` if these are all in ascending order."""
        if is_all:
            if not self._copies:
                self._copies = [np.empty((self.size, *array.shape), array.dtype) for array in self._arrays]
            for copies, array in zip(self._copies, self._arrays, strict=True):
                copies[self._count] = array
            self._count += 1
            if self._count == self.size:
                self.move_to_journals()
        else:
            self._move([array[np.newaxis] for array in self._arrays], ids, self.move_to_journals())

    def move_to_journals(self) -> list[J]:
        """Record in the journals what is kept here; return them."""
        if self._count:
            if self._is_moving:  # an interrupt has ended an earlier attempt in the middle
                for journal in self.journals:
                    journal.forget()
            self._is_moving = True
            self._move([copies[: self._count] for copies in self._copies], range(len(self.journals)), self.journals)
            self._count = 0
            self._is_moving = False
        return self.journals

    def _move(self, steps: Sequence[npt.NDArray[Any]], ids: Sequence[int], journals: Sequence[J]) -> None:
        ops, checks, *actions = steps
        resets = ops & RESET != 0
        for index in ids:
            check = int(checks[-1, ops[-1, index] & BUFFER, index])
            columns = [leaf[:, index].tobytes() for leaf in actions]
            journals[index].record_steps(columns, resets[:, index].tobytes(), check)
