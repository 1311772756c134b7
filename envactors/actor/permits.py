"""Limits how many actors of a vector step or reset at the same time; the requests of the others wait, by age."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Protocol

from envactors.actor.requests import Entry


class Holder(Protocol):
    """An actor that needs permits."""

    @property
    def queue(self) -> deque[Entry]:
        """The waiting requests, the next one first."""

    def dispatch(self) -> None:
        """Send waiting requests; raises nothing."""


class Permits:
    """The permits of steps and resets: an actor holds one from their start to their end.

    A permit that is given back starts a request of another actor, in whichever thread that happens, under the lock that
    the actors of a vector share.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._holders: set[Holder] = set()
        # The age of what heads the queue of each actor that waits. Empty while there is a permit left, except in
        # `_grant`.
        self._waiting: dict[Holder, int] = {}
        self._ages = itertools.count(1)
        self._is_granting = False

    def next_age(self) -> int:
        """Return the age of a new request: the older it is, the lower."""
        return next(self._ages)

    def acquire(self, holder: Holder, age: int) -> bool:
        """Return whether an actor may start a request now; if not, its ``dispatch`` is called once it may."""
        if holder in self._holders:
            return True
        if len(self._holders) < self._count and age <= min(self._waiting.values(), default=age):
            self._holders.add(holder)
            return True
        self._waiting[holder] = age
        return False

    def release(self, holder: Holder) -> None:
        """Take back the permit of an actor, if it has one, and start waiting requests, also of this actor."""
        if holder in self._holders:
            self._holders.remove(holder)
            if holder.queue:
                self._waiting[holder] = holder.queue[0].age
            self._grant()

    def withdraw(self, holder: Holder) -> None:
        """Take the permit of an actor back that has lost its process: until it has another, it waits for nothing."""
        self._holders.discard(holder)
        self._waiting.pop(holder, None)
        self._grant()

    def _grant(self) -> None:
        if self._is_granting:
            return  # a request ended as soon as it was started: the outer call continues the loop
        self._is_granting = True
        try:
            while self._waiting and len(self._holders) < self._count:
                holder = min(self._waiting, key=self._waiting.__getitem__)
                del self._waiting[holder]
                holder.dispatch()  # what waited may be gone; if it is not the oldest any more, it waits again
        finally:
            self._is_granting = False
