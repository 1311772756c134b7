"""One schedule of a few real threads, one of which runs at a time.

The code under test runs unchanged in these threads. They are switched at the lines of the traced modules, and where
they use one of `simulation.primitives` or `simulation.descriptors`.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import linecache
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Protocol

from envactors.system.threads import current_frames
from simulation.tasks import Aborted, Carriers, Interruption, Task
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
# The files whose frames do not count as places of the code under test.
_PRIMITIVES = {str(Path(__file__).with_name(name)) for name in ("primitives.py", "descriptors.py")}


class Chooser(Protocol):
    """Decides which thread runs."""

    def next_step(self, step: int) -> int:
        """Return the next step after ``step`` at which `choose` has to be asked even if the thread can continue."""

    def choose(self, step: int, costs: Sequence[int]) -> int:
        """Choose one of several options.

        Args:
            step: The number of the switch point.
            costs: How many preemptions each option takes; the first one takes none.
        """


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
        descriptors: What the numbers of descriptors stand for; see `simulation.descriptors`.
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
        # The next step at which a thread that can continue may be preempted.
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
        while frame is not None and frame.f_code.co_filename in _PRIMITIVES:
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
            staying: The current thread if it can continue.
            leaving: The current thread if it has not ended.
            can_interrupt: Whether it may be interrupted here.

        Raises:
            Interruption: It is to be interrupted.
        """
        if self.violation is not None:
            return None
        options, costs = self._options(staying, leaving)
        due = self._due()
        if not options and not self._may_pass_time():
            return None
        costs += [int(bool(options))] * len(due)
        options += due
        interrupted = len(options) if can_interrupt and staying is not None else -1
        costs += [1] * (interrupted >= 0)
        chosen = self._choose(costs)
        if chosen is None:
            return None
        if chosen == interrupted:
            self._interrupt(staying)
        task = options[chosen]
        if task in due and task.deadline is not None:
            self._note(f"step {self.step}: time passes")
            self.now = max(self.now, task.deadline)
        return task

    def _options(self, staying: Task | None, leaving: Task | None) -> tuple[list[Task], list[int]]:
        """Return the threads that can run now, the default one first, and how many preemptions each takes."""
        runnable = [task for task in self._tasks if task is not staying and task.can_run]
        if staying is not None:
            return [staying, *runnable], [0] + [1] * len(runnable)
        # A thread that spins, or keeps others from a lock, has to give way: to the one that has not run for longest.
        runnable.sort(key=lambda task: task.ran_at)
        if leaving not in runnable:
            return runnable, [0] * len(runnable)
        if len(runnable) > 1:
            runnable.remove(leaving)
        return runnable, [0] + [1] * (len(runnable) - 1)

    def _due(self) -> list[Task]:
        """Return the sleeping threads that have the first deadline."""
        sleeping = [task for task in self._tasks if not task.ended and task.deadline is not None and not task.can_run]
        first = min((task.deadline for task in sleeping if task.deadline is not None), default=None)
        return [task for task in sleeping if task.deadline == first]

    def _may_pass_time(self) -> bool:
        """Return whether the schedule continues with the first deadline, now that no thread can run."""
        if not self._is_quiet_in_order():
            return False
        left = [task for task in self._tasks if not task.ended]
        return any(not task.is_daemon for task in left) and any(task.deadline is not None for task in left)

    def _choose(self, costs: list[int]) -> int | None:
        """Return the option to take; None if the schedule cannot be replayed."""
        if not self._is_exploring:
            return 0
        chosen = self._chooser.choose(self.step, costs) if len(costs) > 1 else 0
        self._next = self._chooser.next_step(self.step)
        if chosen >= len(costs):
            self.violation = Violation(f"step {self.step} has {len(costs)} options, expected more than {chosen}")
            return None
        if chosen:
            self.deviations.append((self.step, chosen))
        return chosen

    def _interrupt(self, task: Task | None) -> None:
        assert task is not None, "only the current thread is interrupted"
        task.interruptible = frozenset()
        task.seen.clear()
        self._note(f"step {self.step}: {task.name} {self._where(task)} and is interrupted there")
        raise Interruption

    def _note(self, text: str) -> None:
        if self._tell is not None and self._is_exploring:
            self._tell(text)

    def _is_quiet_in_order(self) -> bool:
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
        if task.ran_at < 0:
            return "begins"
        frame = current_frames().get(task.ident)
        while frame is not None and frame.f_code.co_filename in {__file__, *_PRIMITIVES}:
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
