"""The doorbells of all workers of this process, with few descriptors for any number of workers.

With more workers than doorbells, workers share them if the system lets several processes hear the same one: a ring is
only a hint, and a process that it wakes for nothing reads its own counters and sleeps again.
"""

from __future__ import annotations

import os
import threading
from typing import Final, NamedTuple

from envactors.system.polling import Doorbell

# How many pairs are made at a time.
_PAIRS: Final = 32 if Doorbell.is_shareable else 1


class Doorbells(NamedTuple):
    """The doorbells of a worker: one rings it, and one rings the parent."""

    to_worker: Doorbell
    to_parent: Doorbell


class DoorbellPool:
    """Lends doorbells. It is thread-safe, and closes all of them when the last ones are returned."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # After a fork, those of the parent stay open: closing them would remove them from the parent's pollers.
        self._lock = threading.Lock()
        # How many workers use each pair.
        self._uses: dict[Doorbells, int] = {}

    def take(self) -> Doorbells:
        """Return the doorbells that the fewest workers use.

        Raises:
            OSError: Too many files are open.
        """
        with self._lock:
            if not self._uses or (not Doorbell.is_shareable and all(self._uses.values())):
                self._uses.update({Doorbells(Doorbell(), Doorbell()): 0 for _ in range(_PAIRS)})
            bells = min(self._uses, key=self._uses.__getitem__)
            self._uses[bells] += 1
            return bells

    def give_back(self, bells: Doorbells) -> None:
        """Return the doorbells of a worker that has ended."""
        with self._lock:
            self._uses[bells] -= 1
            if not any(self._uses.values()):
                for pair in self._uses:
                    for bell in pair:
                        bell.close()
                self._uses = {}


DOORBELLS = DoorbellPool()
