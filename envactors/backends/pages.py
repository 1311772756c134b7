"""The control pages and doorbells of all workers of this process: a few descriptors, however many workers there are.

A page belongs to one worker, and to the next one only after that has ended. Doorbells are shared, where the system lets
several processes hear one, once there are more workers than bells: a ring is only a hint, and a process that it wakes
for nothing reads its own counters and sleeps again.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
from collections import Counter
from typing import NamedTuple

from envactors.mailbox.control_page import PAGE, TIMED, ControlPage, PagePlace, page_size
from envactors.system.memory import SharedFile
from envactors.system.polling import Doorbell

# How many pages a file has; they take memory only once they are used.
_PAGES = 1 << 10
_BELLS = 32


class PageSlot(NamedTuple):
    """The place of one worker.

    Attributes:
        page: Its control page, with its doorbells.
        file: The file that has the page.
        place: Where the page is in that file.
        bell: The number of its doorbells.
    """

    page: ControlPage
    file: SharedFile
    place: PagePlace
    bell: int

    def begin_timing(self) -> None:
        """Have its worker time steps and resets; see `envactors.backends.base.Worker.begin_timing`."""
        if not self.page.counters[TIMED]:
            self.file.reserve((self.place.first + 1) * PAGE, (self.place.length - 1) * PAGE)
            self.page.spans.clear()
            self.page.counters[TIMED] = True


class PagePool:
    """Hands out pages and doorbells. It is thread-safe; all of it is freed when the last page is given back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def _forget(self) -> None:
        # The files with the pages, mapped.
        self._files: list[tuple[SharedFile, memoryview]] = []
        # (to the worker, to the parent) by their number, and how many workers have them.
        self._bells: dict[int, tuple[Doorbell, Doorbell]] = {}
        self._uses: Counter[int] = Counter()
        # The places that were given back, by their length: (index of the file, first page).
        self._free: dict[int, list[tuple[int, int]]] = {}
        # The first page of the last file that nobody has had.
        self._next = 0

    def _reset_after_fork(self) -> None:
        # The parent's stay open: closing a bell would take it out of the parent's pollers, and a worker that was forked
        # from its caller uses them.
        self._lock = threading.Lock()
        self._of_parent = self._files, self._bells
        self._forget()

    def take(self, envs: int = 1) -> PageSlot:
        """Return an empty page that nobody else has, with room for the durations of so many envs behind it.

        Raises:
            OSError: There is not enough memory, or there are no more descriptors.
        """
        length = -(-page_size(envs) // PAGE)
        with self._lock:
            free = self._free.setdefault(length, [])
            if not free:
                free.append(self._next_place(length))
            which, first = free[0]
            file, memory = self._files[which]
            file.reserve(first * PAGE, PAGE)
            bell = self._choose_bell()
            heapq.heappop(free)
            own = memory[first * PAGE : (first + length) * PAGE]
            own[:PAGE] = bytes(PAGE)
            self._uses[bell] += 1
            return PageSlot(ControlPage(own, *self._bells[bell]), file, PagePlace(first, length), bell)

    def _next_place(self, length: int) -> tuple[int, int]:
        if not self._files or self._next + length > len(self._files[-1][1]) // PAGE:
            file = SharedFile("envactors-pages")
            self._files.append((file, memoryview(file.map(max(_PAGES, length) * PAGE))))
            self._next = 0
        self._next += length
        return len(self._files) - 1, self._next - length

    def _choose_bell(self) -> int:
        """Return the number of the doorbells that the fewest workers have; of new ones where workers cannot share."""
        if not Doorbell.is_shareable:
            number = max(self._bells, default=-1) + 1
            self._bells[number] = Doorbell(), Doorbell()
            return number
        if not self._bells:
            self._bells = {number: (Doorbell(), Doorbell()) for number in range(_BELLS)}
        return min(self._bells, key=self._uses.__getitem__)

    def give_back(self, slot: PageSlot) -> None:
        """Take a page back whose worker has ended."""
        with self._lock:
            self._uses[slot.bell] -= 1
            if not Doorbell.is_shareable:
                for bell in self._bells.pop(slot.bell):
                    bell.close()
            which = next(index for index, (file, _) in enumerate(self._files) if file is slot.file)
            heapq.heappush(self._free[slot.place.length], (which, slot.place.first))
            if self._uses.total():
                return
            for bell in itertools.chain(*self._bells.values()):
                bell.close()
            for file, _ in self._files:
                file.close()
            self._forget()


PAGES = PagePool()
