"""Limits how many actors of a vector step or reset at the same time (``max_running``)."""

from __future__ import annotations

import itertools
from typing import Protocol


class PermitHolder(Protocol):
    """An actor whose steps and resets need permits."""

    def proceed_soon(self) -> None:
        """Have the loop start its queued jobs, as far as it may."""


class Permits:
    """The permits of a vector: an actor holds one while it runs a job that steps or resets envs.

    A free permit goes to the actor whose next job is the oldest. Everything happens under the lock of the vector.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._holders: set[PermitHolder] = set()
        # The ticket of the next job of each actor that waits for a permit.
        self._waiting: dict[PermitHolder, int] = {}
        self._tickets = itertools.count(1)

    def next_ticket(self) -> int:
        """Return the ticket of a new job."""
        return next(self._tickets)

    def try_take(self, actor: PermitHolder, ticket: int) -> bool:
        """Take a permit for an actor that runs nothing, or have it wait for one; return whether it has one.

        Args:
            actor: The actor. If it still holds the permit of its last job, that is given back first.
            ticket: The ticket of the job that it wants to start. The lowest one is served first.
        """
        self._holders.discard(actor)
        self._waiting[actor] = ticket
        if actor not in self._find_next():
            self._wake_next()
            return False
        del self._waiting[actor]
        self._holders.add(actor)
        return True

    def release(self, actor: PermitHolder) -> None:
        """Take back the permit of an actor that needs none now, or have it wait for none."""
        self._holders.discard(actor)
        self._waiting.pop(actor, None)
        self._wake_next()  # in any case: an interrupt may have come before it

    def _find_next(self) -> list[PermitHolder]:
        """Return the actors that may have the permits that are free, those with the oldest jobs first."""
        free = self._count - len(self._holders)
        return sorted(self._waiting, key=self._waiting.__getitem__)[:free] if free > 0 else []

    def _wake_next(self) -> None:
        for actor in self._find_next():
            actor.proceed_soon()
