"""Replacements of the reactor and the launcher, with the same interface, driven by the world instead of threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from envactors.actor.containment import Logs
from envactors.system.polling import READABLE, WRITABLE
from simulation.processes import Bell, End
from simulation.world import Queue, Violation, World

# How often a thread that was woken by the end of a process runs only once it was woken again, and after how many events
# in any case.
_LATE = 0.3
_MOST_LATE = 200

Event = tuple[str, Callable[[], None]]


class Callbacks(Queue):
    """Replaces the executor of users' callbacks."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "callbacks")

    def owns_current_thread(self) -> bool:
        return self._world.context == "callbacks"


class WaitSet:
    """The doorbells that the user's thread waits for; see `envactors.actor.wait_set.WaitSet`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.bells: list[Bell] = []

    def wait_rings(self, done: Callable[[], bool], key: Hashable, deadline: float | None) -> bool:
        return self._loop.wait(done, key, deadline, self, reads_replies=False)

    def watch_doorbell(self, bell: Bell) -> None:
        self.bells.append(bell)


class Loop:
    """Replaces `envactors.actor.reactor.Reactor`.

    Args:
        world: The world.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._reply_handlers: dict[int, Callable[[int], None]] = {}
        self._bells: dict[Bell, list[Callable[[], None]]] = {}
        self._others: list[Any] = []
        self._jobs: deque[Callable[[], None]] = deque()
        self._writable: set[int] = set()
        self.callbacks = Callbacks(world)
        self.printing = Queue(world, "printing")
        self.logs = Logs(self.printing.submit)
        # Of each wait of the user's, from the outermost: what wakes it besides replies, and whether it was woken.
        self._waits: list[_Wait] = []
        # Whether the end of a process was seen since a thread last looked at what it waits for.
        self._has_buried = False

    # The interface of the reactor ------------------------------------------------------------------------

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        self._handlers.pop(fd, None)

    def watch_channel(self, fd: int, handler: Callable[[int], None]) -> None:
        self._reply_handlers[fd] = handler

    def unwatch_channel(self, fd: int) -> None:
        self._reply_handlers.pop(fd, None)

    def want_write(self, fd: int, wanted: bool) -> None:
        (self._writable.add if wanted else self._writable.discard)(fd)

    def watch_bell(self, bell: Bell, on_ring: Callable[[], None]) -> None:
        callbacks = self._bells.setdefault(bell, [])
        if on_ring not in callbacks:
            callbacks.append(on_ring)

    def unwatch_bell(self, bell: Bell, on_ring: Callable[[], None]) -> None:
        callbacks = self._bells.get(bell, [])
        if on_ring in callbacks:
            callbacks.remove(on_ring)
        if not callbacks:
            self._bells.pop(bell, None)

    def make_wait_set(self) -> WaitSet:
        return WaitSet(self)

    def watch_timers(self, timed: Any) -> None:
        self._others.append(timed)

    def unwatch_timers(self, timed: Any) -> None:
        if timed in self._others:
            self._others.remove(timed)

    def note_timer(self, when: float) -> None:
        """Do nothing: the world looks at all timers."""

    def post(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)

    def wake(self, key: Hashable) -> None:
        for wait in self._waits:
            if wait.key is key:
                wait.is_woken = True

    def is_current_thread(self) -> bool:
        return self._world.context == "reactor"

    def owns_current_thread(self) -> bool:
        return self._world.context in ("reactor", "callbacks")

    def wait(
        self,
        done: Callable[[], bool],
        key: Hashable,
        deadline: float | None,
        wait_set: WaitSet | None = None,
        *,
        reads_replies: bool = True,
    ) -> bool:
        wait = _Wait(key, wait_set, reads_replies)
        self._waits.append(wait)
        try:
            while True:
                self._world.interrupt()
                if wait.is_woken:
                    self._be_late(wait, deadline)
                    wait.is_woken = False
                    if done():
                        return True
                if deadline is not None and self._world.now >= deadline:
                    return done()
                if not self._world.step(deadline) and not wait.is_woken:
                    if done():
                        raise Violation("a thread sleeps though what it waits for has come")
                    raise Violation("a thread waits for what never comes")
        finally:
            self._waits.remove(wait)

    def _be_late(self, wait: _Wait, deadline: float | None) -> None:
        """Let a thread run late, now and then: another process may have taken over when it looks what has happened."""
        has_buried, self._has_buried = self._has_buried, False
        if has_buried and self._world.chance(_LATE):
            wait.is_woken = False
            for _ in range(_MOST_LATE):
                if wait.is_woken or not self._world.step(deadline):
                    return

    # What happens ----------------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """Return what may happen next, besides what processes do."""
        events: list[Event] = []
        for process in self._world.processes:
            channel, bell = process.channel, process.page.to_parent
            if channel.fileno() in self._reply_handlers and channel.is_readable:
                events.append((f"replies of process {process.number} are read", lambda end=channel: self._read(end)))
            if process.has_ended and process.sentinel in self._handlers:
                events.append((f"the end of process {process.number} is seen", lambda one=process: self._bury(one)))
            if bell.rung and not bell.closed and self._is_heard(bell):
                events.append((f"the ring of process {process.number} is heard", lambda bell=bell: self._hear(bell)))
        if self._jobs:
            events.append(("the reactor runs a job", self._run_job))
        if self._due():
            events.append(("deadlines have passed", self._run_timers))
        return [*events, *self.callbacks.events(), *self.printing.events(), *self._launches()]

    def times(self) -> list[float]:
        """Return when something is due by itself."""
        return [timed.next_timer() for timed in self._others]

    def _due(self) -> bool:
        return any(when <= self._world.now for when in self.times())

    def _is_heard(self, bell: Bell) -> bool:
        return bell in self._bells or any(bell in wait.bells for wait in self._waits)

    def _read(self, end: End) -> None:
        # A thread that waits reads replies itself, and then looks at what it waits for.
        by_user = bool(self._waits) and self._waits[-1].reads_replies and self._world.chance(0.5)
        with self._world.as_thread("user" if by_user else "reactor"):
            self._world.contain(lambda: self._reply_handlers[end.fileno()](READABLE | WRITABLE))
        if by_user:
            self._waits[-1].is_woken = True

    def _bury(self, process: Any) -> None:
        self._has_buried = True
        with self._world.as_thread("reactor"):
            self._world.contain(lambda: self._handlers[process.sentinel](READABLE))

    def _hear(self, bell: Bell) -> None:
        if self._world.chance(0.9):  # else it is heard once more
            bell.clear()
        for on_ring in tuple(self._bells.get(bell, ())):
            with self._world.as_thread("reactor"):
                self._world.contain(on_ring)
        for wait in self._waits:
            wait.is_woken |= bell in wait.bells

    def _run_job(self) -> None:
        with self._world.as_thread("reactor"):
            self._world.contain(self._jobs.popleft())

    def _run_timers(self) -> None:
        with self._world.as_thread("reactor"):
            for timed in tuple(self._others):
                if timed.next_timer() <= self._world.now:
                    self._world.contain(lambda timed=timed: timed.on_timer(self._world.now))

    # Starting --------------------------------------------------------------------------------------------

    launcher: Launcher

    def _launches(self) -> list[Event]:
        return [("a process is launched", self.launcher.run_one)] if self.launcher.can_launch else []


class _Wait:
    """A wait of the user's thread."""

    def __init__(self, key: Hashable, wait_set: WaitSet | None, reads_replies: bool) -> None:
        self.key = key
        self.reads_replies = reads_replies
        self.bells = [] if wait_set is None else wait_set.bells
        self.is_woken = True


class Launcher:
    """Replaces `envactors.actor.engine.Launcher`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.queued: dict[Callable[[], None], int | None] = {}
        self._starting: set[Callable[[], None]] = set()

    def launch(self, job: Callable[[], None], limit: int | None) -> None:
        self.queued[job] = limit

    def withdraw(self, job: Callable[[], None]) -> bool:
        was_queued = job in self.queued
        self.queued.pop(job, None)
        return was_queued

    def finish(self, job: Callable[[], None]) -> None:
        self._starting.discard(job)

    @property
    def can_launch(self) -> bool:
        if not self.queued:
            return False
        limit = next(iter(self.queued.values()))
        return limit is None or len(self._starting) < limit

    def run_one(self) -> None:
        job, limit = next(iter(self.queued.items()))
        del self.queued[job]
        if limit is not None:
            self._starting.add(job)
        with self._world.as_thread("launcher"):
            job()


class Engine:
    """Replaces `envactors.actor.engine.Engine`."""

    def __init__(self, world: World) -> None:
        self.reactor = Loop(world)
        self.launcher = self.reactor.launcher = Launcher(world)
        self.members = Members()
        self.ended = False
        world.loop = self.reactor

    def release(self, member: Any) -> None:
        self.members.discard(member)
        self.reactor.unwatch_timers(member)

    def linger(self) -> None:
        """Do nothing: there are no threads."""


class Members(list[Any]):
    """The actors that have not ended, in the order in which they were made."""

    add = list.append

    def discard(self, member: Any) -> None:
        if member in self:
            self.remove(member)
