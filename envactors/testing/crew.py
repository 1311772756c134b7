"""One actor in a storm: the faults that are to befall its envs, each when its time has come."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
from collections.abc import Iterable

from envactors.actor.handle import ActorHandle
from envactors.testing.census import Census
from envactors.testing.plan import Fault
from envactors.testing.sabotage import Order, Orders, Place
from envactors.testing.tally import Tally
from envactors.testing.track import Track

_UNFIRED_RESULTS = 30  # after which an env is reset by hand, if its reset is to suffer


class Crew:
    """One actor, and what is to happen to its envs.

    Args:
        actor: Its handle.
        tracks: Its envs.
        plan: The faults, among them those of other actors.
        orders: What its envs obey.
        census: Knows of its processes.
        tally: Where faults are counted.
        deadline: Of a step or reset, in seconds.

    Attributes:
        tracks: Its envs.
        ends: How many of its processes have been ended, at most.
    """

    def __init__(
        self,
        actor: ActorHandle,
        tracks: list[Track],
        plan: Iterable[Fault],
        orders: Orders,
        census: Census,
        tally: Tally,
        deadline: float,
    ) -> None:
        self.tracks = tracks
        self.ends = 0
        self._actor = actor
        self._orders = orders
        self._census = census
        self._tally = tally
        self._deadline = deadline
        self._ids = {track.env_id for track in tracks}
        self._queue = collections.deque(fault for fault in plan if fault.env_id in self._ids)
        # Those that were ordered and have not happened.
        self._armed: list[Fault] = []
        # How many results come before the next fault, and how many have come since a fault was ordered.
        self._gap = self._queue[0].gap if self._queue else 0
        self._unfired = 0
        # The envs that have given no result since the last fault, and from which incarnation on results count as such.
        self._unsettled: set[int] = set()
        self._successor = 0

    @property
    def faults(self) -> list[Fault]:
        """Those that have not happened yet."""
        return [*self._armed, *self._queue]

    @property
    def is_held(self) -> bool:
        """Whether its envs are not to be asked, since its process is to be killed while it is idle."""
        fault = self._next()
        return fault is not None and fault.place in (None, Place.FACTORY)

    def sabotage(self) -> None:
        """Orders the next faults where their time has come."""
        self.look()
        while (fault := self._next()) is not None:
            if self._tally.replays:
                # The next one waits for what takes the place of the process now.
                self._successor = self._actor.incarnation + (2 if fault.place is Place.FACTORY else 1)
            if fault.place in (None, Place.FACTORY) and not self._kill_idle(fault):
                return
            self._queue.popleft()
            self._unfired = 0
            if self._queue:
                self._gap = self._queue[0].gap
            if fault.place is None:
                self._happened(fault)
            else:
                self._armed.append(fault)
                if fault.place is not Place.FACTORY:
                    self._orders.give(fault.env_id, fault.place, Order(fault.kind, self._deadline + fault.overrun))

    def look(self) -> None:
        """Notes which of the faults that were ordered have happened."""
        for fault in list(self._armed):
            assert fault.place is not None, "what happens to an idle process is not ordered"
            if not self._orders.waits(fault.env_id, fault.place):
                self._armed.remove(fault)
                self._happened(fault)

    def give(self, env_id: int, incarnation: int | None) -> None:
        """Notes that an env has given a result.

        Args:
            env_id: Which.
            incarnation: The process that it comes from; None: the one that there is now.
        """
        self._gap -= 1
        self._unfired += 1
        # A process that is being killed may give another result or two.
        where = self._actor.incarnation if incarnation is None else incarnation
        if where >= self._successor or self._unfired > _UNFIRED_RESULTS:
            self._unsettled.discard(env_id)

    def due(self) -> set[int]:
        """The envs that are to be reset by hand, for their resets to suffer."""
        return {
            fault.env_id
            for fault in self._armed
            if fault.place is Place.RESET and (fault.by_hand or self._unfired > _UNFIRED_RESULTS)
        }

    def _next(self) -> Fault | None:
        """The next fault, if it may come now."""
        if not self._queue:
            return None
        fault = self._queue[0]
        if self._armed or self._unsettled:
            if self._tally.replays or not fault.joined:
                return None
            if fault.place is not None and self._orders.waits(fault.env_id, fault.place):
                return None
        elif self._gap > 0:
            return None
        return fault

    def _kill_idle(self, fault: Fault) -> bool:
        """Kills the process if it has nothing to do; False where it cannot be now."""
        pid = self._actor.pid
        if pid is None or any(track.asked is not None for track in self.tracks):
            return False
        if fault.place is Place.FACTORY:
            self._orders.give(fault.env_id, fault.place, Order(fault.kind))
            self.ends += 1
        self._census.remember(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    def _happened(self, fault: Fault) -> None:
        self._tally.happened(fault.kind)
        self.ends += 1
        self._unfired = 0
        self._unsettled = set(self._ids)
