"""Explores the interleavings of a few real threads, one of which runs at a time.

A thread may be switched at every line of the traced modules and at every lock, condition, doorbell, and poller of
`simulation.primitives`. This module knows nothing of the code under test: a `Scenario` names the modules, builds the
objects, and adds the threads. `explore` enumerates schedules by the number of their preemptions, fewest first, and
`explore_randomly` draws them from a seed. Each schedule has a name, such as ``17:1,42:2``, that replays it.

A schedule violates a promise if no thread can run while some have not ended, if a thread sleeps although the condition
that it waits for holds, if a thread raises, or if the scenario's own check fails.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import gc
import linecache
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Protocol

from simulation.world import Violation

# A thread that comes to one line this often while no other thread runs is spinning; the others get their turn.
_SPINS = 6
# A schedule with more switch points than this never ends.
_MOST_STEPS = 20_000
# How long one schedule may take before a thread must be blocked outside of the explorer's control, in seconds.
_PATIENCE = 60.0
# How long a thread may take to end once the schedule is over, in seconds.
_ABORT_PATIENCE = 5.0
# A thread that is being ended and catches this many exceptions is left where it is.
_MOST_ABORTS = 100
# How many schedules run between two collections of garbage, which is switched off within schedules.
_SCHEDULES_PER_COLLECTION = 200
_PRIMITIVES = str(Path(__file__).with_name("primitives.py"))

# The options other than the default one that a schedule takes: (step, option).
Deviations = tuple[tuple[int, int], ...]


class Aborted(BaseException):
    """Raised in the threads that are left when a schedule is over."""


class Interruption(BaseException):
    """Raised at a line of a thread that may be interrupted, as a signal handler may do."""


class Task:
    """One thread of a schedule.

    Args:
        name: Its name in messages.
        function: What it runs.
        go: A lock that is released when the thread may run.
        is_daemon: Whether the schedule may end before the thread does.

    Attributes:
        blocked_on: Returns whether the thread can go on; None while nothing keeps it from running.
        deadline: When it goes on in any case (virtual time); None for never.
        place: What it is blocked on, for messages.
        is_at_lock: Whether that is a lock, which its owner should release.
        condition: What it waits for, if it has said so with `Run.waiting_for`.
        interruptible: The ids of the code at whose lines it may be interrupted; empty once it was.
        seen: The lines of this code that it has come to, by frame.
        ran_at: The step at which it was last switched to.
        is_fresh: Whether it has been at a switch point since it last used a primitive.
        ended: Whether it has ended.
        error: What it raised.
        aborts: How many times `Aborted` was raised in it.
        ident: The id of the thread.
        owner: The `simulation.primitives.Thread` that it runs for, if any.
    """

    def __init__(self, name: str, function: Callable[[], object], go: Any, *, is_daemon: bool) -> None:
        self.name = name
        self.function = function
        self.go = go
        self.is_daemon = is_daemon
        self.blocked_on: Callable[[], bool] | None = None
        self.deadline: float | None = None
        self.place = ""
        self.is_at_lock = False
        self.condition: Callable[[], bool] | None = None
        self.interruptible: frozenset[int] = frozenset()
        self.seen: set[tuple[FrameType, int]] = set()
        self.ran_at = -1
        self.is_fresh = False
        self.ended = False
        self.error: BaseException | None = None
        self.aborts = 0
        self.ident = 0
        self.owner: object = None

    @property
    def can_run(self) -> bool:
        """Whether it has something to do now."""
        return not self.ended and (self.blocked_on is None or self.blocked_on())


class Chooser(Protocol):
    """Decides which thread runs."""

    def next_step(self, step: int) -> int:
        """Return the next step after ``step`` at which `choose` has to be asked even if the thread can go on."""

    def choose(self, step: int, costs: Sequence[int]) -> int:
        """Choose one of several options.

        Args:
            step: The number of the switch point.
            costs: How many preemptions each option takes; the first one takes none.
        """


class Directed:
    """Takes the default option except at given steps, and notes the alternatives after the last of these.

    Args:
        deviations: The steps and what to choose there.
        budget: The most preemptions that an alternative may take.

    Attributes:
        alternatives: The step, the option, and the cost of what could have been chosen instead.
    """

    def __init__(self, deviations: Deviations, budget: int) -> None:
        self._deviations = dict(deviations)
        self._last = deviations[-1][0] if deviations else -1
        self._budget = budget
        self.alternatives: list[tuple[int, int, int]] = []

    def next_step(self, step: int) -> int:
        later = [one for one in self._deviations if one > step]
        if later:
            return min(later)
        return step + 1 if self._budget else sys.maxsize

    def choose(self, step: int, costs: Sequence[int]) -> int:
        option = self._deviations.get(step, 0)
        if step > self._last:
            self.alternatives += [(step, one, cost) for one, cost in enumerate(costs) if one and cost <= self._budget]
        return option


class AtRandom:
    """Preempts at a few steps, and chooses at random there and where a thread cannot go on.

    Args:
        generator: Decides.
        steps: The steps at which a thread is preempted.
    """

    def __init__(self, generator: random.Random, steps: Sequence[int]) -> None:
        self._random = generator
        self._steps = sorted(steps)

    def next_step(self, step: int) -> int:
        return next((one for one in self._steps if one > step), sys.maxsize)

    def choose(self, step: int, costs: Sequence[int]) -> int:
        if step in self._steps:
            return self._random.randrange(1, len(costs))
        return self._random.choice([option for option, cost in enumerate(costs) if cost == 0])


class Carriers:
    """Real threads that run tasks and are used again: starting one takes longer than most schedules."""

    def __init__(self) -> None:
        self._idle: list[_Carrier] = []
        # The ids of all of them: threads with other ids use the real primitives.
        self.idents: set[int] = set()

    def assign(self, run: Run, name: str, function: Callable[[], object], *, is_daemon: bool) -> Task:
        """Make a task of an idle thread or a new one."""
        carrier = self._idle.pop() if self._idle else _Carrier(self)
        task = Task(name, function, carrier.go, is_daemon=is_daemon)
        task.ident = carrier.ident
        self.idents.add(carrier.ident)
        carrier.work = (run, task)
        return task

    def put_back(self, carrier: _Carrier) -> None:
        self._idle.append(carrier)

    def close(self) -> None:
        """End the threads that are idle; others are blocked for good."""
        for carrier in self._idle:
            carrier.work = None
            carrier.go.release()
            carrier.join()


class _Carrier:
    """A real thread that runs one task after the other."""

    def __init__(self, carriers: Carriers) -> None:
        self._carriers = carriers
        self.go = _thread.allocate_lock()
        self.go.acquire()
        self.work: tuple[Run, Task] | None = None
        self._thread = threading.Thread(target=self._main, name="explored", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None, "it has started"
        self.ident = self._thread.ident

    def join(self) -> None:
        self._thread.join()

    def _main(self) -> None:
        self.go.acquire()
        while self.work is not None:
            run, task = self.work
            try:
                if not run.is_aborting:
                    run.begin_tracing()
                    task.function()
            except Aborted:
                pass
            except BaseException as error:
                task.error = error
            finally:
                sys.settrace(None)
            self.work = None
            del task.function
            self._carriers.put_back(self)
            run.end(task)
            del run, task
            self.go.acquire()


@dataclasses.dataclass
class Scenario:
    """Threads that share something.

    Attributes:
        name: Its name on the command line.
        modules: The modules at whose lines threads are switched.
        build: Makes what the threads share and adds them with `Run.add_thread`. It may return a function that checks
            what has come of it, which is called once all of them have ended.
        context: Entered around all schedules of the scenario.
    """

    name: str
    modules: tuple[ModuleType, ...]
    build: Callable[[Run], Callable[[], None] | None]
    context: Callable[[Carriers], contextlib.AbstractContextManager[object]]


class Run:
    """One schedule of a scenario.

    Args:
        scenario: The scenario.
        carriers: The real threads.
        chooser: Decides which thread runs.
        tell: Gets a line for each switch; None for nobody.

    Attributes:
        now: The virtual time, in seconds. It passes only while threads sleep.
        current: The thread that runs; None before and after the schedule.
        step: How many switch points there were.
        is_aborting: Whether the schedule is over and what is left of it ends.
        violation: What was found.
        deviations: The options other than the default one that were taken.
        descriptors: What the numbers of descriptors stand for; see `simulation.primitives`.
    """

    active: Run | None = None

    def __init__(
        self, scenario: Scenario, carriers: Carriers, chooser: Chooser, tell: Callable[[str], None] | None = None
    ) -> None:
        self.now = 1000.0
        self.current: Task | None = None
        self.step = 0
        self.is_aborting = False
        self.violation: Violation | None = None
        self.deviations: list[tuple[int, int]] = []
        self.descriptors: dict[int, Any] = {}
        self._scenario = scenario
        self._carriers = carriers
        self._chooser = chooser
        self._tell = tell
        self._files = {str(module.__file__) for module in scenario.modules}
        self._tasks: list[Task] = []
        # The threads of the scenario, which start once what they share has been built.
        self._added: list[tuple[str, Callable[[], object], frozenset[int]]] = []
        self._is_exploring = False
        # The next step at which a thread that can go on may be preempted.
        self._next = sys.maxsize
        # How often the current thread has come to each line since it was switched to.
        self._visits: dict[tuple[Any, ...], int] = {}
        self._is_over = _thread.allocate_lock()
        self._is_over.acquire()

    def execute(self) -> None:
        """Run the schedule from its beginning to its end."""
        Run.active = self
        check: list[Callable[[], None] | None] = []
        try:
            self._start_task("build", lambda: check.append(self._scenario.build(self)), is_daemon=False)
            self._go_on()
            if self.violation is None:
                self._is_exploring = True
                self.step = 0
                self._next = self._chooser.next_step(0)
                for name, function, interruptible in self._added:
                    self._start_task(name, function, is_daemon=False).interruptible = interruptible
                self._go_on()
            self._is_exploring = False
            if self.violation is None and check[0] is not None:
                try:
                    check[0]()
                except AssertionError as error:
                    self.violation = Violation(f"the check fails: {error}")
        finally:
            self._abort()
            Run.active = None

    # What scenarios use ----------------------------------------------------------------------------------

    def add_thread(self, name: str, function: Callable[[], object], interruptible: Sequence[Any] = ()) -> None:
        """Add a thread.

        Args:
            name: Its name in messages.
            function: What it runs.
            interruptible: The functions at whose lines `Interruption` may be raised in it, once. That counts as a
                preemption.
        """
        self._added.append((name, function, frozenset(id(one.__code__) for one in interruptible)))

    @contextlib.contextmanager
    def waiting_for(self, condition: Callable[[], bool]) -> Iterator[None]:
        """Tell what the current thread waits for: it must not sleep while nothing else can run and this holds."""
        task = self.current
        assert task is not None, "called in a thread of the scenario"
        outer = task.condition
        task.condition = condition
        try:
            yield
        finally:
            task.condition = outer

    def pause(self) -> None:
        """Be at a switch point."""
        task = self.current
        assert task is not None, "called in a thread of the scenario"
        task.is_fresh = False
        self.enter()

    # What primitives use ---------------------------------------------------------------------------------

    def start_task(self, name: str, function: Callable[[], object], owner: object) -> Task:
        """Start a thread of the code under test."""
        task = self._start_task(name, function, is_daemon=True)
        task.owner = owner
        return task

    def enter(self) -> Task | None:
        """Called before a primitive is used: return the current thread, None outside of the schedule.

        Raises:
            Aborted: The schedule is over.
        """
        task = self.current
        if task is None or _thread.get_ident() != task.ident:
            return None
        if self.is_aborting:
            self._raise_aborted(task)
        if sys.gettrace() is None:
            self.begin_tracing()
        if task.is_fresh:
            task.is_fresh = False
        else:
            self._at_point(task, is_spinning=self._count_visit(self._caller()) > _SPINS)
        return task

    def block(self, until: Callable[[], bool], deadline: float | None, place: str, *, is_lock: bool = False) -> bool:
        """Have the current thread sleep; return False if the deadline has passed and ``until()`` does not hold."""
        task = self.current
        assert task is not None, "only threads of the schedule sleep"
        task.blocked_on, task.deadline, task.place, task.is_at_lock = until, deadline, place, is_lock
        self.step += 1
        self._switch(task, can_stay=False)
        task.blocked_on = task.deadline = None
        if sys.gettrace() is None:
            self.begin_tracing()
        return until()

    def give_way(self) -> None:
        """Let another thread run, for whom this one has left nothing for too long."""
        task = self.current
        if task is not None:
            self.step += 1
            self._switch(task, can_stay=False)

    def begin_tracing(self) -> None:
        """Trace the current thread from here on, if what is explored has begun.

        Building is not traced, which takes long. An interruption has ended the tracing of its thread, too.
        """
        if not self._is_exploring:
            return
        sys.settrace(self.trace)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                frame.f_trace = self._trace_lines
            frame = frame.f_back

    # Switching -------------------------------------------------------------------------------------------

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """Trace the lines of the scenario's modules."""
        return self._trace_lines if frame.f_code.co_filename in self._files else None

    def _trace_lines(self, frame: FrameType, event: str, argument: object) -> Any:
        if event != "line" or not self._is_exploring:
            return self._trace_lines
        task = self.current
        if task is None:
            return self._trace_lines
        line = (frame.f_code.co_filename, frame.f_lineno)
        is_spinning = self._count_visit(line) > _SPINS
        if id(frame.f_code) in task.interruptible and (frame, frame.f_lineno) not in task.seen:
            # A line to which a frame comes back may be the end of a ``with``, where no signal handler runs.
            task.seen.add((frame, frame.f_lineno))
            self._at_point(task, is_spinning=is_spinning, can_interrupt=True)
        else:
            self._at_point(task, is_spinning=is_spinning)
        task.is_fresh = True
        return self._trace_lines

    def _count_visit(self, place: tuple[Any, ...]) -> int:
        """Return how often the current thread has been at a place while no other thread ran."""
        count = self._visits[place] = self._visits.get(place, 0) + 1
        return count

    @staticmethod
    def _caller() -> tuple[Any, ...]:
        """Return the place from which a primitive is used."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename == _PRIMITIVES:
            frame = frame.f_back
        assert frame is not None, "primitives do not call each other from nowhere"
        return frame.f_code.co_filename, frame.f_lineno, "primitive"

    def _at_point(self, task: Task, *, is_spinning: bool, can_interrupt: bool = False) -> None:
        """Let another thread run if the schedule says so."""
        self.step += 1
        if is_spinning:
            self._visits.clear()
            self._switch(task, can_stay=False)
        elif self.step >= self._next and self._is_exploring:
            self._switch(task, can_stay=True, can_interrupt=can_interrupt)

    def _switch(self, task: Task, *, can_stay: bool, can_interrupt: bool = False) -> None:
        if self.step > _MOST_STEPS:
            self._violate("the threads run for ever")
        chosen = self._decide(task if can_stay else None, task, can_interrupt=can_interrupt)
        if chosen is None:
            self._is_over.release()
            task.go.acquire()
        elif chosen is not task:
            self._hand_over(chosen)
            task.go.acquire()
        if self.is_aborting:
            self._raise_aborted(task)

    def _hand_over(self, task: Task) -> None:
        if self._tell is not None and self._is_exploring:
            self._tell(f"step {self.step}: {task.name} {self._where(task)}")
        self._visits.clear()
        task.ran_at = self.step
        self.current = task
        task.go.release()

    def _decide(self, staying: Task | None, leaving: Task | None, *, can_interrupt: bool = False) -> Task | None:
        """Return the thread that runs next; None if none can any more, or a promise is broken.

        Args:
            staying: The current thread if it can go on.
            leaving: The current thread if it has not ended.
            can_interrupt: Whether it may be interrupted here.

        Raises:
            Interruption: It is to be interrupted.
        """
        if self.violation is not None:
            return None
        runnable = [task for task in self._tasks if task is not staying and task.can_run]
        # A thread that spins, or keeps others from a lock, has to give way: to the one that has not run for longest.
        is_forced = staying is None and leaving in runnable
        if is_forced and leaving is not None and len(runnable) > 1:
            runnable.remove(leaving)
        if staying is None:
            runnable.sort(key=lambda task: task.ran_at)
        options = runnable if staying is None else [staying, *runnable]
        costs = [int(number > 0 and (staying is not None or is_forced)) for number in range(len(options))]
        sleeping = [task for task in self._tasks if not task.ended and task.deadline is not None and not task.can_run]
        first = min((task.deadline for task in sleeping if task.deadline is not None), default=None)
        if not options:
            if not self._is_quiet_for_good():
                return None
            if first is None or not any(not task.is_daemon for task in self._tasks if not task.ended):
                return None
        due = [task for task in sleeping if task.deadline == first]
        costs += [int(bool(options))] * len(due)
        options = options + due
        interrupted = len(options) if can_interrupt and staying is not None else -1
        costs += [1] * (interrupted >= 0)
        chosen = 0
        if self._is_exploring and len(costs) > 1:
            chosen = self._chooser.choose(self.step, costs)
            if chosen >= len(costs):
                self.violation = Violation(f"step {self.step} has {len(costs)} options, expected more than {chosen}")
                return None
            if chosen:
                self.deviations.append((self.step, chosen))
        if self._is_exploring:
            self._next = self._chooser.next_step(self.step)
        if chosen == interrupted:
            self._interrupt(staying)
        task = options[chosen]
        if task in due and first is not None:
            self._note(f"step {self.step}: time passes")
            self.now = max(self.now, first)
        return task

    def _interrupt(self, task: Task | None) -> None:
        assert task is not None, "only the current thread is interrupted"
        task.interruptible = frozenset()
        task.seen.clear()
        self._note(f"step {self.step}: {task.name} {self._where(task)} and is interrupted there")
        raise Interruption

    def _note(self, text: str) -> None:
        if self._tell is not None and self._is_exploring:
            self._tell(text)

    def _is_quiet_for_good(self) -> bool:
        """Check the promises now that no thread can run unless time passes; return whether they hold."""
        left = [task for task in self._tasks if not task.ended]
        for task in left:
            if task.condition is not None and task.condition():
                self._violate(f"{task.name} sleeps although what it waits for holds")
                return False
        if any(not task.is_daemon for task in left):
            is_stuck = all(task.deadline is None for task in left)
        else:
            is_stuck = any(task.is_at_lock and task.deadline is None for task in left)
        if is_stuck:
            self._violate("deadlock: no thread can run")
        return not is_stuck

    def _violate(self, what: str) -> None:
        if self.violation is None:
            lines = [what, *(f"    {task.name} {self._where(task)}" for task in self._tasks if not task.ended)]
            self.violation = Violation("\n".join(lines))

    def _where(self, task: Task) -> str:
        """Describe where a thread stands."""
        frame = sys._current_frames().get(task.ident)
        while frame is not None and frame.f_code.co_filename in (__file__, _PRIMITIVES):
            frame = frame.f_back
        state = "can run" if task.blocked_on is None else f"waits for {task.place}"
        if frame is None:
            return state
        name, line = frame.f_code.co_filename, frame.f_lineno
        return f"{state} at {Path(name).name}:{line}: {linecache.getline(name, line).strip()}"

    # Beginning and end -----------------------------------------------------------------------------------

    def _start_task(self, name: str, function: Callable[[], object], *, is_daemon: bool) -> Task:
        task = self._carriers.assign(self, name, function, is_daemon=is_daemon)
        self._tasks.append(task)
        return task

    def _go_on(self) -> None:
        """Let the threads run until none can any more, or a promise is broken."""
        task = self._decide(None, None)
        if task is None:
            return
        self._hand_over(task)
        if not self._is_over.acquire(timeout=_PATIENCE):
            self.is_aborting = True
            where = "\n".join(f"    {one.name} {self._where(one)}" for one in self._tasks if not one.ended)
            raise RuntimeError(f"a thread waits for what the explorer does not control:\n{where}")
        self.current = None

    def end(self, task: Task) -> None:
        """Called by the thread of a task that has ended."""
        task.ended = True
        task.blocked_on = task.condition = None
        task.seen.clear()
        if self.is_aborting:
            self._is_over.release()
            return
        if task.error is not None and self.violation is None:
            self._violate(f"{task.name} raises {task.error!r}")
            assert self.violation is not None, "just found"
            self.violation.__cause__ = task.error
        self.step += 1
        following = self._decide(None, None)
        if following is None:
            self._is_over.release()
        else:
            self._hand_over(following)

    def _raise_aborted(self, task: Task) -> None:
        task.aborts += 1
        if task.aborts > _MOST_ABORTS:
            self._is_over.release()
            threading.Event().wait()
        raise Aborted

    def _abort(self) -> None:
        """End the threads that are left, one after the other."""
        self._is_exploring = False
        self.is_aborting = True
        for task in self._tasks:
            if not task.ended:
                self.current = task
                task.go.release()
                self._is_over.acquire(timeout=_ABORT_PATIENCE)
        self.current = None
        self._tasks.clear()


# Many schedules ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Report:
    """What has come of the schedules of a scenario.

    Attributes:
        scenario: Its name.
        schedules: How many were run.
        violation: The first violation; None if there was none.
        name: The schedule that has it.
        preemptions: How many preemptions it has.
        is_complete: Whether all schedules up to the bound were run.
    """

    scenario: str
    schedules: int = 0
    violation: Violation | None = None
    name: str = ""
    preemptions: int = 0
    is_complete: bool = True


def as_name(deviations: Deviations) -> str:
    """Return the name of a schedule."""
    return ",".join(f"{step}:{option}" for step, option in deviations) or "default"


def as_deviations(name: str) -> Deviations:
    """Return the schedule with a name.

    Raises:
        ValueError: No schedule can have this name.
    """
    if name == "default":
        return ()
    pairs = [pair.split(":") for pair in name.split(",")]
    return tuple((int(step), int(option)) for step, option in pairs)


@contextlib.contextmanager
def _prepared(scenario: Scenario) -> Iterator[Callable[..., Run]]:
    """Return a function that runs a schedule."""
    carriers = Carriers()
    count = 0
    # A finalizer that runs at another step in each run would make another schedule of it.
    was_enabled = gc.isenabled()
    gc.disable()

    def run(chooser: Chooser, tell: Callable[[str], None] | None = None) -> Run:
        nonlocal count
        count += 1
        if count % _SCHEDULES_PER_COLLECTION == 0:
            gc.collect()
        one = Run(scenario, carriers, chooser, tell)
        one.execute()
        return one

    try:
        with scenario.context(carriers):
            run(Directed((), 0))  # what is cached or made only once is there from now on
            yield run
    finally:
        carriers.close()
        if was_enabled:
            gc.enable()


def explore(scenario: Scenario, bound: int = 2, limit: int | None = None, seed: int = 0) -> Report:
    """Run the schedules of a scenario, those with fewer preemptions first, until one violates a promise.

    Args:
        scenario: The scenario.
        bound: The most preemptions of a schedule.
        limit: The most schedules. If there are more, those that run are drawn at random among the ones with the most
            preemptions.
        seed: Decides which ones.
    """
    report = Report(scenario.name)
    levels: list[list[Deviations]] = [[()], *([] for _ in range(bound))]
    generator = random.Random(seed)
    with _prepared(scenario) as run:
        for level, pending in enumerate(levels):
            while pending:
                if limit is not None and report.schedules >= limit:
                    report.is_complete = False
                    return report
                if limit is not None and len(pending) > limit - report.schedules:
                    other = generator.randrange(len(pending))
                    pending[other], pending[-1] = pending[-1], pending[other]
                deviations = pending.pop()
                chooser = Directed(deviations, bound - level)
                one = run(chooser)
                report.schedules += 1
                if one.violation is not None:
                    report.violation = one.violation
                    report.name = as_name(deviations)
                    report.preemptions = level
                    return report
                for step, option, cost in chooser.alternatives:
                    levels[level + cost].append((*deviations, (step, option)))
    return report


def explore_randomly(scenario: Scenario, schedules: int, seed: int = 0, most: int = 4) -> Report:
    """Run schedules that are drawn at random until one violates a promise.

    Args:
        scenario: The scenario.
        schedules: How many to run.
        seed: Decides which ones.
        most: The most preemptions of a schedule.
    """
    report = Report(scenario.name, is_complete=False)
    generator = random.Random(seed)
    with _prepared(scenario) as run:
        length = run(Directed((), 0)).step
        for _ in range(schedules):
            steps = [generator.randrange(length + 1) for _ in range(generator.randint(1, most))]
            one = run(AtRandom(generator, steps))
            length = max(1, one.step)
            report.schedules += 1
            if one.violation is not None:
                report.violation = one.violation
                report.name = as_name(tuple(one.deviations))
                report.preemptions = len(steps)
                return report
    return report


def replay(scenario: Scenario, name: str, tell: Callable[[str], None]) -> Violation | None:
    """Run the schedule with a name, and tell of each switch."""
    with _prepared(scenario) as run:
        return run(Directed(as_deviations(name), 0), tell).violation
