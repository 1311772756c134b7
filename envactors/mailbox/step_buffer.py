"""Steps of all envs on their way into the journals, which record several of them in a fraction of the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from envactors.mailbox.slab import BUFFER, RESET, Slab


class Journal(Protocol):
    """A journal of one env: an `envactors.replay.Journal`."""

    def record_steps(self, actions: Sequence[bytes], resets: bytes, checksum: int) -> None:
        """Record consecutive steps and resets."""

    def forget(self) -> None:
        """Discard all requests."""


J = TypeVar("J", bound=Journal)


class StepBuffer(Generic[J]):
    """Keeps copies of plain steps, and of resets without a seed, until they are in the journals.

    Args:
        slab: The rows.
        ops: The operation of each row.
        journals: The journal of each env.
        size: How many steps of all envs are kept, and then recorded at once.
    """

    def __init__(self, slab: Slab, ops: npt.NDArray[np.uint8], journals: list[J], size: int) -> None:
        self._journals = journals
        self._size = size
        # Not copied: until the next step of an env is recorded, its worker writes the other buffer only.
        self._checksums = slab.checksums
        self._arrays: list[npt.NDArray[Any]] = [ops, *slab.actions]
        # The memory of the arrays: to copy it as bytes takes a third of the time of a copy into another array.
        self._memory = [array.reshape(-1).view(np.uint8).data for array in self._arrays]
        self._kept: list[list[bytes]] = []
        self._is_moving = False

    def record(self, ids: Sequence[int], *, is_all: bool) -> None:
        """Record the steps of these envs; ``is_all`` if these are all in ascending order."""
        if is_all:
            self._kept.append([memory.tobytes() for memory in self._memory])
            if len(self._kept) >= self._size:
                self.flush()
            return
        journals = self.flush()
        ops, *actions = self._arrays
        for index in ids:
            op = int(ops[index])
            row = [leaf[index].tobytes() for leaf in actions]
            journals[index].record_steps(row, bytes([op & RESET != 0]), int(self._checksums[op & BUFFER, index]))

    def flush(self) -> list[J]:
        """Record in the journals what is kept here; return them."""
        if not self._kept:
            return self._journals
        if self._is_moving:  # an interrupt has ended an earlier attempt in the middle
            for journal in self._journals:
                journal.forget()
        self._is_moving = True
        columns = zip(self._arrays, zip(*self._kept, strict=True), strict=True)
        ops, *actions = [np.ndarray((len(kept), *a.shape), a.dtype, b"".join(kept)) for a, kept in columns]
        for index, journal in enumerate(self._journals):
            checksum = int(self._checksums[ops[-1, index] & BUFFER, index])
            resets = (ops[:, index] & RESET != 0).tobytes()
            journal.record_steps([leaf[:, index].tobytes() for leaf in actions], resets, checksum)
        self._kept.clear()
        self._is_moving = False
        return self._journals
