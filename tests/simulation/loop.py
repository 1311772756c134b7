"""Replacements of the reactor and the launcher, with the same interface, driven by the world instead of threads."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from envactors.actor.containment import Logs
from envactors.system.polling import READABLE, WRITABLE
from simulation.processes import Bell, End, Process
from simulation.world import Event, Queue, Violation, World

# How often a thread that was woken by the end of a process runs only once it was woken again, and after how many events
# in any case.
_LATE = 0.3
_MOST_LATE = 200
_NEVER = float("inf")


class Callbacks(Queue):
    """Replaces the executor of users' callbacks."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "callbacks")

    def owns_current_thread(self) -> bool:
        return self._world.context == "callbacks"


class WaitSet:
    """The doorbells that the user's thread waits for; see `envactors.actor.wait_set.WaitSet`."""

    def __init__(self) -> None:
        self.bells: list[Bell] = []

    def watch_doorbell(self, bell: Bell) -> None:
        self.bells.append(bell)


class News(NamedTuple):
    """What may be heard of a process."""

    replies: Event
    end: Event
    ring: Event


class Loop:
    """Replaces `envactors.actor.reactor.Reactor`.

    Args:
        world: The world.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._reply_handlers: dict[int, Callable[[int], None]] = {}
        self._bells: dict[Bell, Callable[[], None]] = {}
        # What has deadlines, and until when the reactor would sleep, for all that it knows of those.
        self._timed: dict[Any, None] = {}
        self._wakes_at = _NEVER
        self._jobs: deque[Callable[[], None]] = deque()
        self._writable: set[int] = set()
        self.callbacks = Callbacks(world)
        self.printing = Queue(world, "printing")
        self.launcher = Launcher(world)
        self.logs = Logs(self.printing.submit)
        # Of each wait of the user's, from the outermost: what wakes it besides replies, and whether it was woken.
        self._waits: list[_Wait] = []
        self._news: dict[Process, News] = {}
        self._job_event: Event = "the reactor runs a job", self._run_job
        self._timer_event: Event = "deadlines have passed", self._run_timers
        self._launch_event: Event = "a process is launched", self.launcher.run_one
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
        self._bells[bell] = on_ring

    def unwatch_bell(self, bell: Bell) -> None:
        self._bells.pop(bell, None)

    def make_wait_set(self) -> WaitSet:
        return WaitSet()

    def watch_timers(self, timed: Any) -> None:
        self._timed[timed] = None
        self._wakes_at = 0.0

    def unwatch_timers(self, timed: Any) -> None:
        self._timed.pop(timed, None)

    def note_timer(self, when: float) -> None:
        self._wakes_at = min(self._wakes_at, when)

    def post(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)

    def wake(self, key: Hashable) -> None:
        for wait in self._waits:
            if wait.key is key:
                wait.is_woken = True

    def sleeps_for(self, key: Hashable) -> bool:
        """Return whether a thread waits for something and was not woken."""
        return any(wait.key is key and not wait.is_woken for wait in self._waits)

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

    def admit(self, process: Process) -> None:
        """Have a process that was just started be heard of from now on."""
        number, bell = process.number, process.bell
        self._news[process] = News(
            (f"replies of process {number} are read", functools.partial(self._read, process.channel)),
            (f"the end of process {number} is seen", functools.partial(self._bury, process)),
            (f"the ring of process {number} is heard", functools.partial(self._hear, bell)),
        )

    def add_events(self, events: list[Event]) -> None:
        """Add what may happen next, besides what processes do."""
        for process, news in self._news.items():
            channel, bell = process.channel, process.bell
            if (channel.inbox or channel.is_cut) and channel.fileno() in self._reply_handlers:
                events.append(news.replies)
            if process.has_ended and process.sentinel in self._handlers:
                events.append(news.end)
            if bell.rung and not bell.closed and self._is_heard(bell):
                events.append(news.ring)
        if self._jobs:
            events.append(self._job_event)
        if self._wakes_at <= self._world.now:
            self._wakes_at = self._next_timer()
            if self._wakes_at <= self._world.now:
                events.append(self._timer_event)
        if self.callbacks.jobs:
            events.append(self.callbacks.event)
        if self.printing.jobs:
            events.append(self.printing.event)
        if self.launcher.can_launch:
            events.append(self._launch_event)

    def wakes_at(self) -> float:
        """Return when the reactor does something by itself; it sleeps past a deadline that it was not told of."""
        self._wakes_at = max(self._wakes_at, self._next_timer())
        return self._wakes_at

    def _next_timer(self) -> float:
        return min([timed.next_timer() for timed in self._timed], default=_NEVER)

    def _is_heard(self, bell: Bell) -> bool:
        return bell in self._bells or any(bell in wait.bells for wait in self._waits)

    def _serve(self, run: Callable[..., object], *args: object) -> None:
        """Run something in the reactor's thread, which then looks at all deadlines."""
        self._world.serve("reactor", run, *args)
        self._wakes_at = 0.0

    def _read(self, end: End) -> None:
        # A thread that waits reads replies itself, and then looks at what it waits for.
        by_user = bool(self._waits) and self._waits[-1].reads_replies and self._world.chance(0.5)
        handler = self._reply_handlers[end.fileno()]
        if by_user:
            self._world.serve("user", handler, READABLE | WRITABLE)
            self._waits[-1].is_woken = True
        else:
            self._serve(handler, READABLE | WRITABLE)

    def _bury(self, process: Process) -> None:
        self._has_buried = True
        self._serve(self._handlers[process.sentinel], READABLE)
        if process.is_reaped:  # nothing comes of it any more
            self._world.present.remove(process)
            del self._news[process]

    def _hear(self, bell: Bell) -> None:
        if self._world.chance(0.9):  # else it is heard once more
            bell.clear()
        if bell in self._bells:
            self._serve(self._bells[bell])
        for wait in self._waits:
            wait.is_woken |= bell in wait.bells

    def _run_job(self) -> None:
        self._serve(self._jobs.popleft())

    def _run_timers(self) -> None:
        for timed in tuple(self._timed):
            if timed.next_timer() <= self._world.now:
                self._serve(timed.on_timer, self._world.now)


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
        return self.queued.pop(job, self) is not self

    def finish(self, job: Callable[[], None]) -> None:
        self.queued.pop(job, None)
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
        before, self._world.context = self._world.context, "launcher"
        try:
            job()
        finally:
            self._world.context = before


class Engine:
    """Replaces `envactors.actor.engine.Engine`."""

    def __init__(self, world: World) -> None:
        self.reactor = Loop(world)
        self.launcher = self.reactor.launcher
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
