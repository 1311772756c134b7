"""Bugs of threads that wait, each of which `simulation.interleavings` must find: most of them the library once had."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from envactors.actor import wait_set
from envactors.actor.pool import PoolFuture
from envactors.actor.wait_set import LockGate, WaitSet
from envactors.system.polling import remaining
from simulation.mutants import Mutant
from simulation.scenarios import SCENARIOS
from simulation.schedule import Scenario
from simulation.waits import crossed_calls, installed, ring_sleepers, sleepers


class SkippingParking:
    """Wakes the threads of a list from which a woken thread takes itself out meanwhile: the one after it is skipped."""

    def __init__(self) -> None:
        self.gates: dict[Hashable, list[LockGate | WaitSet]] = {}

    def sleep(self, done: Callable[[], bool], key: Hashable, gate: LockGate | WaitSet, deadline: float | None) -> None:
        gates = self.gates.setdefault(key, [])
        gates.append(gate)
        try:
            if not done():
                gate.sleep(remaining(deadline))
        finally:
            if gate in gates:
                gates.remove(gate)

    def wake(self, key: Hashable) -> None:
        for gate in self.gates.get(key, ()):
            gate.release()


class LosingParking(SkippingParking):
    """Takes the list out as it wakes the threads: one that has just looked the list up adds itself in vain."""

    def wake(self, key: Hashable) -> None:
        for gate in tuple(self.gates.pop(key, ())):
            gate.release()


class EarlyLookParking(wait_set.Parking):
    """Has a thread look at its condition before it can be woken, and not afterwards."""

    def sleep(self, done: Callable[[], bool], key: Hashable, gate: LockGate | WaitSet, deadline: float | None) -> None:
        if not done():
            super().sleep(lambda: False, key, gate, deadline)


class LockingCalls:
    """Takes a lock to run deferred calls, under which it comes to the lock of another actor's calls."""

    def __init__(self, *safe: object) -> None:
        del safe
        self._lock = threading.RLock()
        self.waiting: deque[Callable[[], None]] = deque()

    def run(self) -> None:
        with self._lock:
            while self.waiting:
                self.waiting.popleft()()


@contextlib.contextmanager
def _lock_order() -> Iterator[None]:
    """Take the lock of an actor under that of its pool, and the lock of the pool under that of an actor."""

    def mark_cancelled(self: PoolFuture) -> None:
        super(PoolFuture, self).mark_cancelled()
        self._leave_actor()

    look = Mutant("actor.pool:ActorPool._match", "actor._supervisor.is_usable", "actor.state.value != 'dead'", "")
    PoolFuture.mark_cancelled = mark_cancelled  # type: ignore[method-assign,assignment]
    try:
        with look.planted():
            yield
    finally:
        del PoolFuture.mark_cancelled


@dataclasses.dataclass
class Planted:
    """A bug.

    Attributes:
        what: What it does.
        scenario: The scenario that shows it.
        context: Plants it.
    """

    what: str
    scenario: Scenario
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def __str__(self) -> str:
        return f"{self.what} ({self.scenario.name})"


def _replaced(name: str, build: Callable[..., Any]) -> Scenario:
    """Return a scenario of classes of this module."""
    modules = (*SCENARIOS["sleepers-same-key"].modules, sys.modules[__name__])
    return Scenario(name, modules, build, installed)


def _mutant(what: str, scenario: str, where: str, old: str, new: str) -> Planted:
    return Planted(what, SCENARIOS[scenario], Mutant(where, old, new, what).planted)


_REACTOR = "actor.reactor:Reactor."
_POOL = "actor.pool:"

PLANTED = [
    Planted("a woken thread hides the next one", _replaced("locks", sleepers(SkippingParking, "a", "a"))),
    Planted("a woken thread hides the next one", _replaced("bells", ring_sleepers(SkippingParking))),
    Planted("a thread enters a list that was taken out", _replaced("locks", sleepers(LosingParking, "a"))),
    Planted("a thread enters a list that was taken out", _replaced("bells", ring_sleepers(LosingParking))),
    Planted("a thread looks too early", _replaced("locks", sleepers(EarlyLookParking, "a"))),
    Planted("deferred calls lock each other out", _replaced("calls", crossed_calls(LockingCalls))),
    Planted("pool and actor are locked in two orders", SCENARIOS["pool-cancel"], _lock_order),
    _mutant(
        "an interrupt keeps an actor from becoming idle",
        "pool-interrupt",
        _POOL + "PoolFuture.settle",
        "super().settle(value, error, incarnation)\n    self._leave_actor()",
        "is_new = not self.settled()\n    ActorFuture.settle(self, value, error, incarnation)\n"
        "    self._owner.reactor.wake(self)\n    if is_new:\n        self._leave_actor()",
    ),
    _mutant(
        "a thread that waits is not woken where it reads replies",
        "one-waiter",
        _REACTOR + "wake",
        "self._nudge.ring()",
        "pass",
    ),
    _mutant(
        "a thread that sleeps is not woken",
        "same-key-without-reply",
        _REACTOR + "wake",
        "self._parking.wake(key)",
        "pass",
    ),
    _mutant(
        "replies stay masked after a loop of waits",
        "loop",
        _REACTOR + "_run_once",
        "wake_at = min(wake_at, due)",
        "pass",
    ),
    _mutant(
        "a nested wait leaves the outer one asleep",
        "nested-after-look",
        _REACTOR + "pump",
        "self._nudge.ring()  # what the outer wait waits for may have come in this one",
        "pass",
    ),
    _mutant(
        "an actor that becomes idle gets no call",
        "pool-submit",
        _POOL + "PoolFuture._leave_actor",
        "self._pool.assign_waiting()",
        "pass",
    ),
]
