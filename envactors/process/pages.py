"""The control pages and doorbells of all workers of this process, with few descriptors for any number of workers.

A page belongs to one worker at a time. With more workers than doorbells, workers share doorbells if the system lets
several processes hear the same one: a ring is only a hint, and a process that it wakes for nothing reads its own
counters and sleeps again.
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

# How many pages a file has. A page takes memory only once it is used.
_PAGES = 1 << 10
_BELLS = 32


class PageSlot(NamedTuple):
    """The place of one worker.

    Attributes:
        page: The control page, with its doorbells.
        file: The file that contains the page.
        place: Where the page is in that file.
        bell: The id of its pair of doorbells.
    """

    page: ControlPage
    file: SharedFile
    place: PagePlace
    bell: int

    def begin_timing(self) -> None:
        """Have the worker time steps and resets; see `envactors.backends.base.Worker.begin_timing`."""
        if not self.page.counters[TIMED]:
            self.file.reserve((self.place.first + 1) * PAGE, (self.place.length - 1) * PAGE)
            self.page.spans.clear()
            self.page.counters[TIMED] = True


class PagePool:
    """Lends pages and doorbells. It is thread-safe, and frees all of them when the last page is returned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def _forget(self) -> None:
        # The files that contain the pages, and their memory.
        self._files: list[tuple[SharedFile, memoryview]] = []
        # The pairs (to the worker, to the parent) by id, and how many workers use each pair.
        self._bells: dict[int, tuple[Doorbell, Doorbell]] = {}
        self._uses: Counter[int] = Counter()
        # The returned places by length: (index of the file, first page).
        self._free: dict[int, list[tuple[int, int]]] = {}
        # The first page of the last file that was never lent.
        self._next = 0

    def _reset_after_fork(self) -> None:
        # Those of the parent stay open: closing a doorbell would remove it from the parent's pollers, and a worker that
        # was forked from its caller uses them.
        self._lock = threading.Lock()
        self._of_parent = self._files, self._bells
        self._forget()

    def take(self, envs: int = 1) -> PageSlot:
        """Return a zeroed page for one worker, followed by timing storage for ``envs`` envs.

        Raises:
            OSError: There is not enough memory, or too many files are open.
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
        """Return the id of the doorbells that the fewest workers use, or of new ones if workers cannot share them."""
        if not Doorbell.is_shareable:
            bell = max(self._bells, default=-1) + 1
            self._bells[bell] = Doorbell(), Doorbell()
            return bell
        if not self._bells:
            self._bells = {bell: (Doorbell(), Doorbell()) for bell in range(_BELLS)}
        return min(self._bells, key=self._uses.__getitem__)

    def give_back(self, slot: PageSlot) -> None:
        """Return a page whose worker has ended."""
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
