"""What the two halves of an actor see at a glance: a page of shared memory with a few numbers, and two doorbells.

Each number has one writer. The numbers tell what is true; rings only say that it may be worth a look, so that lost
and extra ones do no harm. Nothing here can be left locked by a process that is killed.
"""

from __future__ import annotations

import mmap
from typing import Final

from envactors.system import Doorbell, give_way

PAGE: Final = mmap.PAGESIZE

# Written by the parent: how many frames it has sent; the last turn that it has ordered, by call id; whether that
# one's results are wanted one by one; how to wait for what comes next, as `waiting_on` says: asleep, or looking for it
# with open eyes first, perhaps with the caller looking for the end, too, and on which core.
FRAMES_DOWN: Final = 0
ORDERED: Final = 1
ONE_BY_ONE: Final = 2
WAIT: Final = 3
ASLEEP: Final = 0
LOOKING: Final = 1
BOTH_LOOKING: Final = 3
# Written by the worker, in cache lines of its own: how many frames it has sent; the last turn that it has begun, and
# the last that it has finished; of how many envs it has sent something besides; which of its envs it is at; whether
# in a reset within a step; since when.
FRAMES_UP: Final = 32
BEGUN: Final = 33
FINISHED: Final = 34
MAILED: Final = 35
PLACE: Final = 36
RESETTING: Final = 37
SINCE: Final = 38


def waiting_on(core: int, wait: int) -> int:
    """`ASLEEP`, `LOOKING` or `BOTH_LOOKING`, and on a core of this number rather than wherever."""
    return wait | (core + 1) << 2


def core_of(wait: int) -> int | None:
    """The core that `waiting_on` named; None for wherever."""
    return (wait >> 2) - 1 if wait >> 2 else None


class Board:
    """The shared page of one incarnation.

    Args:
        page: The page.
        to_worker: Rung by the parent.
        to_parent: Rung by the worker.

    Attributes:
        words: Its numbers, 64 bits each, by the names above.
        times: The same memory as times of `time.monotonic`, in seconds.
    """

    def __init__(self, page: mmap.mmap, to_worker: Doorbell, to_parent: Doorbell) -> None:
        self.words = memoryview(page).cast("q")
        self.times = memoryview(page).cast("d")
        self.to_worker = to_worker
        self.to_parent = to_parent

    def order(self, call_id: int, wait: int, one_by_one: bool) -> bool:
        """Orders a turn; called by the parent, while nobody closes the bells.

        Returns:
            Whether it rang: not where both sides look for each other, and then `ring_for` is to follow.
        """
        words = self.words
        words[WAIT] = wait
        words[ONE_BY_ONE] = one_by_one
        words[ORDERED] = call_id
        rings = wait & BOTH_LOOKING != BOTH_LOOKING
        if rings:
            self.to_worker.ring_open()
        return rings

    def ring_for(self, call_id: int) -> None:
        """Rings for a turn that was ordered, if the worker has not begun it; called by the parent."""
        if self.words[BEGUN] != call_id:
            self.to_worker.ring()

    def finish(self, call_id: int) -> None:
        """Says that a turn is finished, and rings unless the parent has seen it; called by the worker."""
        words = self.words
        words[FINISHED] = call_id
        if words[WAIT] & BOTH_LOOKING == BOTH_LOOKING:
            give_way()  # on this core the caller sees it without a ring, and the sooner
            if words[ORDERED] != call_id:
                return
        self.to_parent.ring_open()

    def close_bells(self) -> None:
        """Closes the doorbells; the numbers stay readable."""
        self.to_worker.close()
        self.to_parent.close()
