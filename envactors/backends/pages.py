"""The control pages and doorbells of all workers of this process: a few descriptors, however many workers there are.

A page belongs to one worker, and to the next one only after that has ended. Doorbells are shared once there are more
workers than bells: a ring is only a hint, so whoever it wakes for nothing looks at its own counters and sleeps again.
"""

from __future__ import annotations

import heapq
import os
import threading
from typing import NamedTuple

from envactors.system.memory import SharedFile
from envactors.system.polling import Doorbell
from envactors.wire.control_page import PAGE, ControlPage

# How many pages a file has; they take memory only once they are used.
_PAGES = 1 << 10
_BELLS = 32


class PageSlot(NamedTuple):
    """The place of one worker.

    Attributes:
        number: The number of its page.
        page: Its control page, with its doorbells.
        file: The descriptor of the file that has the page.
        place: Where the page is in that file, in pages.
    """

    number: int
    page: ControlPage
    file: int
    place: int


class PagePool:
    """Hands out pages and doorbells. It is thread-safe; all of it is freed when the last page is given back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def _forget(self) -> None:
        # The files with the pages, mapped.
        self._files: list[tuple[SharedFile, memoryview]] = []
        # (to the worker, to the parent)
        self._bells: list[tuple[Doorbell, Doorbell]] = []
        # The numbers below `_highest` that nobody has.
        self._free: list[int] = []
        self._highest = 0

    def _reset_after_fork(self) -> None:
        # The parent's stay open: closing a bell would take it out of the parent's pollers, and a worker that was forked
        # from its caller uses them.
        self._lock = threading.Lock()
        self._of_parent = self._files, self._bells
        self._forget()

    def take(self) -> PageSlot:
        """Return an empty page that nobody else has.

        Raises:
            OSError: There is not enough memory, or there are no more descriptors.
        """
        with self._lock:
            if not self._bells:
                self._bells = [(Doorbell(), Doorbell()) for _ in range(_BELLS)]
            number = self._free[0] if self._free else self._highest
            which, place = divmod(number, _PAGES)
            if which == len(self._files):
                file = SharedFile("envactors-pages")
                self._files.append((file, memoryview(file.map(_PAGES * PAGE))))
            file, memory = self._files[which]
            file.reserve(place * PAGE, PAGE)
            if self._free:
                heapq.heappop(self._free)
            self._highest = max(self._highest, number + 1)
            own = memory[place * PAGE : (place + 1) * PAGE]
            own[:] = bytes(PAGE)
            return PageSlot(number, ControlPage(own, *self._bells[number % _BELLS]), file.fileno(), place)

    def give_back(self, number: int) -> None:
        """Take a page back whose worker has ended."""
        with self._lock:
            heapq.heappush(self._free, number)
            if len(self._free) < self._highest:
                return
            for bell in (bell for bells in self._bells for bell in bells):
                bell.close()
            for file, _ in self._files:
                file.close()
            self._forget()


PAGES = PagePool()
