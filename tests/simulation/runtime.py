"""The threads of the library in a simulated world: the loop is a source of events, the others are fibers.

`installed` has the library use them, and the world's clock, locks, and descriptors.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import select
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from envactors import runtime as runtimes
from envactors import services
from envactors.actor import change, latch, spawn
from envactors.actor.change import ChangeLock
from envactors.backends import local
from envactors.loop import Timer
from envactors.system.polling import READABLE, WRITABLE
from envactors.vector import build, table, waiting
from envactors.vector.waiting import ResultWaiters
from envactors.worker import main as worker
from simulation.envs import Misbehaving
from simulation.processes import Bell, CallerPoller, WorkerPoller
from simulation.world import Event, Fiber, Violation, World

_NEVER = float("inf")
# The most threads of one pool.
_MOST_FIBERS = 3


class SimulatedLoop:
    """Replaces `envactors.loop.Loop`: whatever it would do is an event.

    Args:
        world: The world.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._callbacks: dict[int, Callable[[int], object]] = {}
        self._bells: dict[int, tuple[Bell, Callable[[], object]]] = {}
        self._lent: set[int] = set()
        self._writable: set[int] = set()
        self._soon: deque[Callable[[], object]] = deque()
        self._wakes: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        # The bells that were rung, and not heard; see `Bell`.
        self.rung: set[Bell] = set()
        self._soon_event: Event = "the loop runs what was queued", self._run_soon
        self._wakes_event: Event = "the loop wakes other threads", self._run_wakes
        self._timer_event: Event = "the loop runs a timer", self._run_timer
        world.sources.append(self)

    # The interface of the loop ---------------------------------------------------------------------------

    def watch(self, fd: int, callback: Callable[[int], object]) -> None:
        self._callbacks[fd] = callback

    def watch_bell(self, bell: Bell, callback: Callable[[], object]) -> None:
        self._bells[bell.fileno()] = bell, callback
        bell.register(self)

    def unwatch(self, fd: int) -> None:
        self._callbacks.pop(fd, None)
        self._lent.discard(fd)
        self._writable.discard(fd)
        if fd in self._bells:
            self._bells.pop(fd)[0].unregister(self)

    def want_write(self, fd: int, wanted: bool) -> None:
        (self._writable.add if wanted else self._writable.discard)(fd)

    def set_lent(self, fd: int, is_lent: bool) -> None:
        if is_lent and fd in self._callbacks:
            self._lent.add(fd)
        elif not is_lent:
            self._lent.discard(fd)

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._soon.append(callback)

    def wake_after_events(self, wake: Callable[[], object], *, is_urgent: bool = True) -> None:
        del is_urgent
        if self.is_current_thread():
            self._wakes.append(wake)
        else:
            wake()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(when, callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def is_current_thread(self) -> bool:
        return self._world.context == "loop"

    def stop(self) -> None:
        self._world.sources.remove(self)
        self._run_wakes()

    def join(self, timeout: float) -> None:
        """Do nothing: there is no thread."""

    # What happens ----------------------------------------------------------------------------------------

    def add_events(self, events: list[Event]) -> None:
        is_readable = self._world.descriptors
        for fd, callback in self._callbacks.items():
            mask = READABLE if fd not in self._lent and is_readable[fd]() else 0
            mask |= WRITABLE if fd in self._writable else 0
            if mask:
                events.append((f"the loop reads {fd}", lambda call=callback, mask=mask: self._serve(call, mask)))
        for bell, callback in self._bells.values():
            if bell in self.rung:
                events.append(
                    (f"the loop hears {bell.fileno()}", lambda call=callback, one=bell: self._hear(one, call))
                )
        if self._soon:
            events.append(self._soon_event)
        if self._wakes:
            events.append(self._wakes_event)
        if self._timers and self._timers[0][0] <= self._world.now:
            events.append(self._timer_event)

    def wakes_at(self) -> float:
        while self._timers and self._timers[0][2]._callback is None:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else _NEVER

    def _serve(self, callback: Callable[..., object], *args: object) -> None:
        self._world.serve("loop", callback, *args)

    def _hear(self, bell: Bell, callback: Callable[[], object]) -> None:
        self.rung.discard(bell)
        self._serve(callback)

    def _run_soon(self) -> None:
        self._serve(self._soon.popleft())

    def _run_wakes(self) -> None:
        while self._wakes:
            self._serve(self._wakes.popleft())

    def _run_timer(self) -> None:
        self._serve(heapq.heappop(self._timers)[2].run)


class SimulatedPool:
    """Replaces `envactors.runtime.ThreadPool`: its threads are fibers.

    Args:
        world: The world.
        name: Which threads these are.
        loop: None if there is only one thread.
    """

    def __init__(self, world: World, name: str, loop: object) -> None:
        self._world = world
        self._name = name
        self._most = 1 if loop is None else _MOST_FIBERS
        self._functions: deque[Callable[[], object]] = deque()
        self.fibers: list[Fiber] = []
        world.sources.append(self)

    def submit(self, function: Callable[[], object]) -> None:
        self._functions.append(function)

    def count_waiting(self) -> int:
        return len(self._functions)

    def stop(self) -> None:
        """Do nothing: functions that were queued still run."""

    def join(self, timeout: float) -> None:
        """Do nothing: the world runs everything."""

    def add_events(self, events: list[Event]) -> None:
        events += [(f"{self._name} continues", fiber.resume) for fiber in self.fibers if fiber.can_run]
        is_free = any(fiber.blocked_on == self._has_functions for fiber in self.fibers)
        if self._functions and not is_free and len(self.fibers) < self._most:
            events.append((f"a thread is added to {self._name}", self._add_fiber))

    def wakes_at(self) -> float:
        return _NEVER

    def _has_functions(self) -> bool:
        return bool(self._functions)

    def _add_fiber(self) -> None:
        self.fibers.append(Fiber(self._world, self._run, self._name))
        self.fibers[-1].resume()

    def _run(self) -> None:
        while True:
            if not self._functions:
                assert self._world.fiber is not None, "it runs in a fiber"
                self._world.fiber.pause(self._has_functions)
            if self._functions:
                self._functions.popleft()()


class SimulatedLock(ChangeLock):
    """A lock before which other threads may run."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.world.locks.append(self)

    def __enter__(self) -> bool:
        if not self._is_owned():
            self.world.at_lock()
        return super().__enter__()


class Gate:
    """Replaces the lock on which a thread sleeps in `envactors.actor.latch`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_locked = False

    def acquire(self, timeout: float = -1) -> bool:
        if self._is_locked:
            return self._world.wait(lambda: not self._is_locked, None if timeout < 0 else timeout)
        self._is_locked = True
        return True

    def release(self) -> None:
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False


class ReplyPoll:
    """Replaces `select.poll` in `envactors.backends.local`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._fds: list[int] = []

    def register(self, fd: int, events: int) -> None:
        self._fds.append(fd)

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        self._world.wait(lambda: bool(self._ready()), milliseconds / 1000)
        return [(fd, READABLE) for fd in self._ready()]

    def _ready(self) -> list[int]:
        return [fd for fd in self._fds if self._world.descriptors[fd]()]


class SimulatedWaiters(ResultWaiters):
    """Tells the world what a thread waits for."""

    world: World

    def wait(self, count_missing: Callable[[], int], deadline: float | None, *, until_failure: bool = False) -> bool:
        conditions = self.world.conditions
        conditions.append(count_missing)
        try:
            return super().wait(count_missing, deadline, until_failure=until_failure)
        finally:
            conditions.remove(count_missing)


@contextlib.contextmanager
def installed(world: World) -> Iterator[None]:
    """Have the library use this world in place of threads, processes, and the clock."""
    WorkerPoller.world = CallerPoller.world = Misbehaving.world = SimulatedLock.world = SimulatedWaiters.world = world
    select_module = types.SimpleNamespace(poll=lambda: ReplyPoll(world), POLLIN=select.POLLIN)
    replacements: list[tuple[Any, str, Any]] = [
        (time, "monotonic", world.monotonic),
        (threading, "get_ident", world.get_ident),
        (runtimes, "_runtime", None),
        (services, "on_start", []),
        (runtimes, "Loop", lambda on_error: SimulatedLoop(world)),
        (runtimes, "ThreadPool", lambda name, *, runs_user_code, loop=None: SimulatedPool(world, name, loop)),
        (change, "runs_library_code_only", world.runs_library_code_only),
        (latch, "allocate_lock", lambda: Gate(world)),
        (local, "select", select_module),
        (build, "ChangeLock", SimulatedLock),
        (spawn, "ChangeLock", SimulatedLock),
        (waiting, "Poller", CallerPoller),
        (waiting, "Doorbell", lambda: Bell(world)),
        (table, "ResultWaiters", SimulatedWaiters),
        (worker, "Poller", WorkerPoller),
    ]
    real = [getattr(owner, name) for owner, name, _ in replacements]
    for owner, name, ours in replacements:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(replacements, real, strict=True):
            setattr(owner, name, value)


def run_to_end(world: World) -> None:
    """Let everything happen that still can, and check that no process is left."""
    while world.step():
        pass
    if left := [one.number for one in world.processes if not one.has_ended]:
        raise Violation(f"the processes {left} are left")
