"""The simulated world: one virtual clock, and everything that can happen next, one of which a generator picks.

The code of the library runs unchanged. What it runs on is simulated: processes are threads of which one runs at a time,
and which stop at each store to memory that two processes share; doorbells, channels, and ends of processes are events
that come late, twice, or in another order; time passes only when the world says so.
"""

from __future__ import annotations

import _thread
import contextlib
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# The most events of one history: one that takes longer goes round in circles.
_MOST_EVENTS = 20_000
# How likely everything stands still after an event, and for how long, in seconds on average.
_HICCUPS = 0.02
_HICCUP = 0.001
# How likely another process runs before a store.
_PAUSES = 0.3
# How likely a signal comes before one event.
_INTERRUPTS = 0.1
# What runs in the caller's process, and how much larger the id of each thread is than that of the first.
_CONTEXTS = {name: number for number, name in enumerate(("user", "reactor", "callbacks", "launcher", "printing"))}
_get_ident = threading.get_ident
_NEVER = float("inf")

# What it is called in traces, and what then happens.
Event = tuple[str, Callable[[], None]]


class Violation(AssertionError):
    """A promise that does not hold."""


class Interrupted(Exception):
    """What a signal handler of the user's raises while the user waits."""


class Killed(BaseException):
    """Raised in a simulated process that ends."""


class Fiber:
    """A thread that runs only while the world waits for it.

    Args:
        world: The world.
        run: What it runs.
    """

    def __init__(self, world: World, run: Callable[[], None]) -> None:
        self._world = world
        self._run = run
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        # How many more stores it makes until it is killed; None if it continues.
        self.stores_left: int | None = None
        # What it waits for; None while it can run.
        self.blocked_on: Callable[[], bool] | None = None
        self.is_killed = False
        self.ended = False
        _thread.start_new_thread(self._main, ())

    @property
    def can_run(self) -> bool:
        """Whether there is anything to do for it."""
        if self.ended:
            return False
        return self.is_killed or self.blocked_on is None or self.blocked_on()

    def resume(self) -> None:
        """Let it run until it pauses or ends."""
        before, self._world.fiber = self._world.fiber, self
        self._go.release()
        self._back.acquire()
        self._world.fiber = before

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
        fiber: The simulated process that runs now; None while it is the caller's.
        context: Which of the caller's threads runs now: ``"user"``, ``"reactor"``, ``"callbacks"``, and so on.
        processes: All simulated processes, oldest first.
        present: Those of them of which anything may still come.
        loop: What stands for the reactor.
        errors: What was raised where nothing may be.
        log: What envs have run: (env, token of the action or None, process).
        running: How many envs run a step or a reset now.
        interrupts: Whether signals come while the user waits.
        signal_is_due: Whether one comes as soon as the user waits.
        troubles: How often something has happened for which a request may fail.
        completed: Which rows workers have completed, without failures: (env, call id).
        on_signal: What a signal handler of the user's does.
        raised: How often steps have raised, by their tokens.
        failed_seeds: The seeds of resets that have raised: (env, seed).
        failed_resets: The envs that have raised in a reset since their last result.
        hung: What the envs run that hang (see ``log``), by the number of their process and their index.
        late: How long the log was when a process began to hang, by its number.
        check: Called before each event, when no thread of the caller's is in the middle of a change.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.fiber: Fiber | None = None
        self.context = "user"
        self.processes: list[Any] = []
        self.present: list[Any] = []
        self.loop: Any = None
        self.errors: list[BaseException] = []
        self.log: list[tuple[int, int | None, int]] = []
        self.running = 0
        self.troubles = 0
        self.completed: set[tuple[int, int]] = set()
        self.on_signal: Callable[[], None] = lambda: None
        self.raised: Counter[int] = Counter()
        self.failed_seeds: set[tuple[int, int]] = set()
        self.failed_resets: set[int] = set()
        self.hung: dict[tuple[int, int], set[int | None]] = {}
        self.late: dict[int, int] = {}
        self.check: Callable[[], None] = lambda: None
        self.interrupts = self.signal_is_due = False
        self._caller = _get_ident()
        self._trace = trace
        self._events = 0
        self._fds = 1_000_000

    def monotonic(self) -> float:
        """Stand for `time.monotonic`; it never returns the same time twice."""
        self.now += 1e-7
        return self.now

    def note(self, text: object) -> None:
        """Write a line of the trace."""
        if self._trace is not None:
            self._trace(f"{self.now - 1000.0:10.6f}  {text}")

    def add_process(self, process: Any) -> None:
        """Have a process that was just started take part."""
        self.processes.append(process)
        self.present.append(process)
        self.loop.admit(process)

    def new_fd(self) -> int:
        """Return a number that stands for a descriptor."""
        self._fds += 1
        return self._fds

    def interrupt(self) -> None:
        """Called where a handler of the user's may run: now and then it raises."""
        if not self.interrupts or self.context != "user" or not (self.signal_is_due or self.chance(_INTERRUPTS)):
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

    def hang(self, process: int, env_ids: Iterable[int], *, in_policy: bool = False) -> None:
        """Note that some envs of a process, or its policy, hang, at least for longer than their deadline."""
        for env_id in env_ids:
            ran = [token for env, token, place in self.log if (env, place) == (env_id, process)]
            # A reset may belong to the step before it.
            runs = set(ran[-2:] if ran[-1:] == [None] else ran[-1:])
            self.hung.setdefault((process, env_id), set()).update(set() if in_policy else runs)
        self.late.setdefault(process, len(self.log))

    def serve(self, context: str, run: Callable[..., object], *args: object) -> None:
        """Run something in a thread that serves all actors, where nothing may be raised."""
        before, self.context = self.context, context
        try:
            run(*args)
        except Violation:
            raise
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.context = before

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    # Stores ----------------------------------------------------------------------------------------------

    def at_store(self) -> None:
        """Called before each store to shared memory: another process may run first."""
        if self.fiber is not None:
            if self.fiber.stores_left is not None:
                self.fiber.stores_left -= 1
                self.fiber.is_killed |= self.fiber.stores_left <= 0
            if self.fiber.is_killed or self.chance(_PAUSES):
                self.fiber.pause()
        elif self.chance(_PAUSES):
            self.run_processes(self.random.randrange(4))

    def pause_worker(self) -> None:
        """Called in workers, between stores: other processes may run meanwhile."""
        if self.fiber is not None:
            self.fiber.pause()

    def run_processes(self, slices: int) -> None:
        """Let processes run while a thread of the caller is between two steps."""
        for _ in range(slices):
            runnable = [process for process in self.present if process.fiber.can_run]
            if not runnable:
                return
            self.random.choice(runnable).run_slice()

    # Events ----------------------------------------------------------------------------------------------

    def step(self, deadline: float | None = None) -> bool:
        """Let one thing happen; return False if nothing can any more.

        Args:
            deadline: Until when the caller waits; time passes no further.
        """
        self._events += 1
        if self._events > _MOST_EVENTS:
            raise Violation("it goes on for ever")
        self.check_errors()
        self.check()
        events: list[Event] = []
        for process in self.present:
            process.add_events(events)
        self.loop.add_events(events)
        if events:
            name, happen = self.random.choice(events)
            self.note(name)
            happen()
            if self.chance(_HICCUPS):
                self.now += self.random.expovariate(1 / _HICCUP)
            return True
        times = [process.wakes_at for process in self.present if process.wakes_at is not None]
        times += [] if deadline is None else [deadline]
        later = min(self.loop.wakes_at(), *times) if times else self.loop.wakes_at()
        if later == _NEVER:
            return False
        self.now = max(self.now, later + 1e-6)
        self.note("time passes")
        return True

    def check_errors(self) -> None:
        """Check that nothing was raised where nothing may be."""
        if self.errors:
            raise Violation(f"an error reached a thread that serves all actors: {self.errors[0]!r}") from self.errors[0]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have the library see this world's clock, and its threads."""
        real = time.monotonic, threading.get_ident
        time.monotonic, threading.get_ident = self.monotonic, self._get_ident
        try:
            yield
        finally:
            time.monotonic, threading.get_ident = real

    def _get_ident(self) -> int:
        me = _get_ident()
        return me + _CONTEXTS[self.context] if me == self._caller else me

    def end(self) -> None:
        """End all processes that are left."""
        for process in self.processes:
            while not process.fiber.ended:
                process.fiber.is_killed = True
                process.fiber.resume()


class Queue:
    """Functions that a thread of the caller's runs one after the other, when the world lets it.

    Attributes:
        jobs: Those that wait.
        event: That the next one runs.
    """

    def __init__(self, world: World, context: str) -> None:
        self._world = world
        self._context = context
        self.jobs: deque[Callable[[], object]] = deque()
        self.event: Event = f"{context} runs what was queued", self.run_one

    def submit(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)

    def run_one(self) -> None:
        self._world.serve(self._context, self.jobs.popleft())
