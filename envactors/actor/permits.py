"""At most so many actors of a vector step or reset at once; the requests of the others wait in the caller, by age."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from envactors.actor.requests import Entry, RequestTable


class Permits:
    """What steps and resets need to run: each holds one permit from its start to its end.

    A permit that is given back starts a request of another actor, in whichever thread that happens. So the actors that
    share permits share one lock: none waits for the lock of another while it holds its own.

    Args:
        count: How many there are.

    Attributes:
        lock: The lock of the actors.
    """

    def __init__(self, count: int) -> None:
        self.lock = threading.RLock()
        self._count = count
        self._holders: set[LimitedTable] = set()
        # The number of what heads the queue of each actor that waits. Empty while there is a permit left, except in
        # `_grant`.
        self._waiting: dict[LimitedTable, int] = {}
        self._numbers = itertools.count(1)
        self._is_granting = False

    def next_number(self) -> int:
        """Return the number of a new request: the older it is, the lower."""
        return next(self._numbers)

    def acquire(self, table: LimitedTable, number: int) -> bool:
        """Return whether an actor may start a request now; if not, its table's ``dispatch`` is called once it may."""
        if len(self._holders) < self._count and number <= min(self._waiting.values(), default=number):
            self._holders.add(table)
            return True
        self._waiting[table] = number
        return False

    def release(self, table: LimitedTable) -> None:
        """Take the permit of an actor back, if it has one, and start what waits, its own requests included."""
        if table in self._holders:
            self._holders.remove(table)
            if table.queue:
                self._waiting[table] = table.queue[0].number
            self._grant()

    def withdraw(self, table: LimitedTable) -> None:
        """Take the permit of an actor back that has lost its process: until it has another, it waits for nothing."""
        self._holders.discard(table)
        self._waiting.pop(table, None)
        self._grant()

    def _grant(self) -> None:
        if self._is_granting:
            return  # a request has ended as soon as it was started: the loop further out goes on
        self._is_granting = True
        try:
            while self._waiting and len(self._holders) < self._count:
                table = min(self._waiting, key=self._waiting.__getitem__)
                del self._waiting[table]
                table.dispatch()  # what waited may be gone; if it is not the oldest any more, it waits again
        finally:
            self._is_granting = False


class LimitedTable(RequestTable):
    """The requests of an actor that needs permits; they run one at a time.

    Args:
        permits: Shared with other actors.

    Attributes:
        dispatch: Sends what waits, and raises nothing.
    """

    is_limited = True

    def __init__(self, permits: Permits) -> None:
        super().__init__()
        self.dispatch: Callable[[], None]
        self._permits = permits

    def add(self, entry: Entry, *, at_front: bool = False) -> None:
        super().add(entry, at_front=at_front)
        entry.number = 0 if at_front else self._permits.next_number()

    def start_next(self) -> Entry | None:
        if self.running or not self.queue:
            return None
        entry = self.queue[0]
        if entry.needs_permit and not self._permits.acquire(self, entry.number):
            return None
        return super().start_next()

    def end_running(self) -> None:
        self._permits.release(self)

    def interrupt(self) -> list[Entry]:
        entries = super().interrupt()
        self._permits.withdraw(self)
        return entries
