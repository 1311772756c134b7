"""The control pages and doorbells of all workers of this process, with few descriptors for any number of workers.

A page belongs to one worker at a time. With more workers than doorbells, workers share doorbells if the system lets
several processes hear the same one: a ring is only a hint, and a process that it wakes for nothing reads its own
counters and sleeps again.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter, defaultdict
from typing import NamedTuple

from envactors.mailbox.control_page import PAGE, TIMED, ControlPage, PagePlace, page_size
from envactors.system.memory import SharedFile, map_part
from envactors.system.polling import Doorbell

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
            self.file.reserve(self.place.start + PAGE, self.place.size - PAGE)
            self.page.spans.clear()
            self.page.counters[TIMED] = True


class PagePool:
    """Lends pages and doorbells. It is thread-safe, and frees all of them when the last page is returned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def _forget(self) -> None:
        # The file that contains the pages.
        self._file: SharedFile | None = None
        # The places that were returned, by size.
        self._free: defaultdict[int, list[PagePlace]] = defaultdict(list)
        # The pairs (to the worker, to the parent) by id, and how many workers use each pair.
        self._bells: dict[int, tuple[Doorbell, Doorbell]] = {}
        self._uses: Counter[int] = Counter()

    def _reset_after_fork(self) -> None:
        # Those of the parent stay open: closing a doorbell would remove it from the parent's pollers, and a worker that
        # was forked from its caller uses them.
        self._lock = threading.Lock()
        self._of_parent = self._file, self._bells
        self._forget()

    def take(self, envs: int = 1) -> PageSlot:
        """Return a zeroed page for one worker, followed by timing storage for ``envs`` envs.

        Raises:
            OSError: There is not enough memory, or too many files are open.
        """
        size = page_size(envs)
        with self._lock:
            file = self._file = self._file or SharedFile("envactors-pages")
            free = self._free[size]
            if not free:
                free.append(PagePlace(file.grow(size), size))
            place = free[-1]
            file.reserve(place.start, PAGE)
            memory = map_part(file.fileno(), size, place.start)
            memory[:PAGE] = bytes(PAGE)
            bell = self._choose_bell()
            free.pop()
            self._uses[bell] += 1
            return PageSlot(ControlPage(memory, *self._bells[bell]), file, place, bell)

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
            self._free[slot.place.size].append(slot.place)
            if self._uses.total():
                return
            for bell in itertools.chain(*self._bells.values()):
                bell.close()
            slot.file.close()
            self._forget()


PAGES = PagePool()
