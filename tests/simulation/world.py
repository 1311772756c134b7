"""The simulated world: one virtual clock, and everything that can happen next, one of which a generator picks.

The code of the library runs unchanged. What it runs on is simulated: workers, and the library's own threads that may
block, are real threads of which only one runs at a time; doorbells, channels, timers, and exits of processes are events
that come late or in another order; time passes only when nothing else can happen.
"""

from __future__ import annotations

import _thread
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Protocol

# The most events of one history: one that takes longer goes round in circles.
_MOST_EVENTS = 30_000
# How likely everything stands still after an event, and for how long, in seconds on average.
_HICCUPS = 0.02
_HICCUP = 0.001
# How likely another process runs before a store.
_PAUSES = 0.3
# How likely something happens in other threads before a thread enters a lock, and how many things at most.
_PREEMPTIONS = 0.05
_MOST_PREEMPTIONS = 4
# How likely a thread whose condition holds wakes up, rather than let other things happen first.
_WAKES = 0.3
# How likely a signal comes before one event.
_INTERRUPTS = 0.05
_get_ident = threading.get_ident
_START = 1000.0
_NEVER = float("inf")

# What it is called in traces, and what then happens.
Event = tuple[str, Callable[[], None]]


class Violation(AssertionError):
    """A promise that does not hold."""


class Interrupted(Exception):
    """Raised by a signal handler of the user."""


class Killed(BaseException):
    """Raised in a simulated process that ends."""


class Source(Protocol):
    """Something that adds events to a world."""

    def add_events(self, events: list[Event]) -> None:
        """Add what may happen next."""

    def wakes_at(self) -> float:
        """Return when it does something by itself; infinity for never."""


class Fiber:
    """A thread that runs only while the world waits for it.

    Args:
        world: The world.
        run: What it runs.
        context: Which thread of the caller's process it stands for; ``"worker"`` for a process.
    """

    def __init__(self, world: World, run: Callable[[], None], context: str) -> None:
        self._world = world
        self._run = run
        self._context = context
        self._go = _thread.allocate_lock()
        self._back = _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        # How many more stores a worker makes until it is killed; None if it continues.
        self.stores_left: int | None = None
        # What it waits for; None while it can run.
        self.blocked_on: Callable[[], bool] | None = None
        self.is_killed = False
        self.ended = False
        _thread.start_new_thread(self._main, ())

    @property
    def is_worker(self) -> bool:
        return self._context == "worker"

    @property
    def can_run(self) -> bool:
        """Whether there is anything to do for it."""
        if self.ended:
            return False
        return self.is_killed or self.blocked_on is None or self.blocked_on()

    def resume(self) -> None:
        """Let it run until it pauses or ends."""
        world = self._world
        before, context = world.fiber, world.context
        world.fiber, world.context = self, self._context
        self._go.release()
        self._back.acquire()
        world.fiber, world.context = before, context

    def pause(self, until: Callable[[], bool] | None = None) -> None:
        """Called in the fiber: stop here, until the world resumes it.

        Raises:
            Killed: The process has ended.
        """
        if not self.is_killed:
            self.blocked_on = until
            self._back.release()
            self._go.acquire()
            self.blocked_on = None
        if self.is_killed:
            raise Killed

    def end(self) -> None:
        """End it where it is."""
        while not self.ended:
            self.is_killed = True
            self.resume()

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self.is_killed:
                self._run()
        except Killed:
            pass
        except BaseException as error:
            self._world.errors.append(error)
        finally:
            self.ended = True
            self._back.release()


class World:
    """Everything that happens in one history.

    Args:
        seed: Decides what happens.
        trace: Gets a line per event; None for nobody.

    Attributes:
        random: Decides what happens next.
        now: The virtual time, in seconds.
        fiber: The fiber that runs now; None while the main thread does.
        context: The thread of the caller's process that runs now: ``"user"``, ``"loop"``, ``"launcher"``, and so on;
            ``"worker"`` if a process does.
        processes: All simulated processes, oldest first.
        present: Those of which anything may still come.
        sources: Everything else that adds events.
        descriptors: Whether each simulated descriptor is readable.
        locks: The locks of all actors.
        errors: What was raised where nothing may be.
        log: What envs have run: (env, token of the action or None, process).
        interrupts: Whether signals come while the user waits.
        signal_is_due: Whether one comes as soon as the user waits.
        is_interrupted_anywhere: Whether the user has been interrupted outside of a wait, too.
        troubles: How often something has happened for which a request may fail.
        aborts: How many requests the user has aborted while they ran.
        completed: Which rows workers have completed, without failures: (env, call id).
        on_signal: What a signal handler of the user does.
        raised: How often steps have raised, by their tokens.
        failed_seeds: The seeds of resets that have raised: (env, seed).
        failed_resets: The envs that have raised in a reset since their last result.
        hung: What the envs run that hang (see ``log``), by the number of their process and their index.
        late: The numbers of the processes in which something has hung.
        too_late: The processes in which a step takes longer than its deadline, by its env and token.
        replies: The call ids of all calls that workers have replied to.
        conditions: For each thread that waits for results, from the outermost: how many are missing.
        check: Called before each event while no change is being made.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.random = random.Random(seed)
        self.now = _START
        self.fiber: Fiber | None = None
        self.context = "user"
        self.processes: list[Any] = []
        self.present: list[Any] = []
        self.sources: list[Source] = []
        self.descriptors: dict[int, Callable[[], bool]] = {}
        self.locks: list[Any] = []
        self.errors: list[BaseException] = []
        self.log: list[tuple[int, int | None, int]] = []
        self.troubles = 0
        self.aborts = 0
        self.completed: set[tuple[int, int]] = set()
        self.on_signal: Callable[[], None] = lambda: None
        self.raised: Counter[int] = Counter()
        self.failed_seeds: set[tuple[int, int]] = set()
        self.failed_resets: set[int] = set()
        self.hung: dict[tuple[int, int], set[int | None]] = {}
        self.late: set[int] = set()
        self.too_late: dict[tuple[int, int | None], set[int]] = defaultdict(set)
        self.replies: set[int] = set()
        self.conditions: list[Callable[[], int]] = []
        self.check: Callable[[], None] = lambda: None
        self.interrupts = self.signal_is_due = False
        self._main_ident = _get_ident()
        self._trace = trace
        self._events = 0
        self._fds = 1_000_000
        # When sleeping fibers wake up.
        self._alarms: list[float] = []

    # The clock, names of threads, descriptors ------------------------------------------------------------

    def monotonic(self) -> float:
        """Stand for `time.monotonic`; it never returns the same time twice."""
        self.now += 1e-7
        return self.now

    def get_ident(self) -> int:
        """Stand for `threading.get_ident`: the loop and the user share the main thread."""
        me = _get_ident()
        return me + (self.context == "loop") if me == self._main_ident else me

    def runs_library_code_only(self) -> bool:
        """Stand for `envactors.threads.runs_library_code_only`."""
        return self.context in ("loop", "envactors-launcher")

    def new_fd(self, is_readable: Callable[[], bool]) -> int:
        """Return a number that stands for a descriptor."""
        self._fds += 1
        self.descriptors[self._fds] = is_readable
        return self._fds

    def reuse_fd(self, fd: int) -> None:
        """Have the number of a closed descriptor stand for another one, of which nothing is known."""
        self.descriptors[fd] = lambda: self.chance(0.5)

    def note(self, text: object) -> None:
        """Write a line of the trace."""
        if self._trace is not None:
            self._trace(f"{self.now - _START:10.6f}  {text}")

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def add_process(self, process: Any) -> None:
        """Have a process that was just started take part."""
        self.processes.append(process)
        self.present.append(process)

    def hang(self, process: int, env_id: int) -> None:
        """Note that an env of a process hangs, perhaps for longer than its deadline."""
        ran = [token for env, token, place in self.log if (env, place) == (env_id, process)]
        # A reset may belong to the step before it.
        self.hung.setdefault((process, env_id), set()).update(ran[-2:] if ran[-1:] == [None] else ran[-1:])
        self.late.add(process)

    # Where other threads may run -------------------------------------------------------------------------

    def at_store(self) -> None:
        """Called before each store to shared memory: another process may run first."""
        fiber = self.fiber
        if fiber is not None and fiber.is_worker:
            if fiber.stores_left is not None:
                fiber.stores_left -= 1
                fiber.is_killed |= fiber.stores_left <= 0
            if fiber.is_killed or self.chance(_PAUSES):
                fiber.pause()
        elif self.chance(_PAUSES):
            self.run_processes(self.random.randrange(4))

    def pause_worker(self) -> None:
        """Called in workers, between stores: other processes may run meanwhile."""
        if self.fiber is not None and self.fiber.is_worker:
            self.fiber.pause()

    def run_processes(self, slices: int) -> None:
        """Let processes run while a thread of the caller is between two steps."""
        for _ in range(slices):
            runnable = [process for process in self.present if process.fiber.can_run]
            if not runnable:
                return
            self.random.choice(runnable).run_slice()

    def at_lock(self) -> None:
        """Called before a thread enters a lock that it does not have: other threads may run first."""
        if not self.chance(_PREEMPTIONS):
            return
        if self.fiber is not None:
            self.fiber.pause()
        elif self.context == "user":
            for _ in range(self.random.randint(1, _MOST_PREEMPTIONS)):
                self._happen()

    # Waiting ---------------------------------------------------------------------------------------------

    def wait(
        self, is_ready: Callable[[], bool], seconds: float | None, has_missed: Callable[[], bool] = lambda: False
    ) -> bool:
        """Stand for a wait of a thread of the caller; return whether it was woken.

        Args:
            is_ready: Whether it was woken.
            seconds: How long to wait; None for no limit.
            has_missed: Whether it should have been woken once nothing else happens.

        Raises:
            Interrupted: A signal handler has raised.
            Violation: Nothing can happen any more, or the thread waits where it may not.
        """
        deadline = _NEVER if seconds is None else self.now + seconds
        if any(lock._is_owned() for lock in self.locks):
            raise Violation("a thread waits while it holds the lock of its actors")
        if self.fiber is not None:
            self._wait_in_fiber(self.fiber, is_ready, deadline)
            return is_ready()
        if self.context != "user":
            raise Violation(f"the thread of the {self.context} waits")
        while True:
            self._interrupt()
            if is_ready() or self.now >= deadline:
                if self.chance(_WAKES) or not self._happen():
                    return is_ready()
            elif not self._happen():
                missed = has_missed()
                if is_ready():
                    continue  # a signal handler has run within it, and has let other things happen: that answer is old
                if missed:
                    raise Violation("a thread sleeps although all results that it waits for are there")
                if not self.step(deadline):
                    raise Violation("a thread waits for what never comes")

    def _wait_in_fiber(self, fiber: Fiber, is_ready: Callable[[], bool], deadline: float) -> None:
        if deadline != _NEVER:
            self._alarms.append(deadline)
        fiber.pause(lambda: is_ready() or self.now >= deadline)

    def _interrupt(self) -> None:
        """Run a signal handler now and then."""
        if not self.interrupts or not (self.signal_is_due or self.chance(_INTERRUPTS)):
            return
        if self.signal_is_due or self.chance(0.85):
            self.signal_is_due = False
            self.note("a signal handler runs")
            self.interrupts = False
            try:
                self.on_signal()
            finally:
                self.interrupts = True
            return
        self.note("a signal handler raises")
        self.troubles += 1
        raise Interrupted

    # Events ----------------------------------------------------------------------------------------------

    def step(self, deadline: float = _NEVER) -> bool:
        """Let one thing happen, or time pass; return False if nothing can happen any more.

        Args:
            deadline: Until when the user waits; time passes no further.
        """
        if self._happen():
            return True
        times = [process.wakes_at for process in self.present if process.wakes_at is not None]
        self._alarms = [alarm for alarm in self._alarms if alarm > self.now]
        later = min([deadline, *times, *self._alarms, *(source.wakes_at() for source in self.sources)])
        if later == _NEVER:
            return False
        self.now = max(self.now, later + 1e-6)
        self.note("time passes")
        return True

    def _happen(self) -> bool:
        """Let one thing happen now; return False if nothing can."""
        self._events += 1
        if self._events > _MOST_EVENTS:
            raise Violation("it goes on for ever")
        self.check_errors()
        self.serve("world", self.check)
        events: list[Event] = []
        for source in (*self.present, *self.sources):
            source.add_events(events)
        if not events:
            return False
        name, happen = self.random.choice(events)
        self.note(name)
        happen()
        if self.chance(_HICCUPS):
            self.now += self.random.expovariate(1 / _HICCUP)
        return True

    def serve(self, context: str, run: Callable[..., object], *args: object) -> None:
        """Run something in a thread of the library that never blocks, where nothing may be raised."""
        before, self.context = self.context, context
        try:
            run(*args)
        except Violation:
            raise
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.context = before

    def check_errors(self) -> None:
        """Check that nothing was raised where nothing may be."""
        if self.errors:
            raise Violation(f"an error reached a thread of the library: {self.errors[0]!r}") from self.errors[0]

    def end(self) -> None:
        """End all fibers that are left."""
        for process in self.processes:
            process.fiber.end()
        for source in self.sources:
            for fiber in getattr(source, "fibers", ()):
                fiber.end()
