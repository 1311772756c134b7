"""Explores the interleavings of a few real threads, one of which runs at a time.

A thread may be switched at every line of the traced modules and at every lock, condition, doorbell, and poller that a
schedule controls. This module knows nothing of the code under test: a `Scenario` names the modules, builds the
objects, and adds the threads. `explore` enumerates schedules by the number of their preemptions, fewest first, and
`explore_randomly` draws them from a seed. Each schedule has a name, such as ``17:1,42:2``, that replays it.

A schedule violates a promise if no thread can run while some have not ended, if a thread sleeps although the condition
that it waits for holds, if a thread raises, or if the scenario's own check fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence

from simulation.schedule import Chooser, Run, Scenario
from simulation.tasks import Carriers
from simulation.world import Violation

# How many schedules run between two collections of garbage, which is switched off within schedules.
_SCHEDULES_PER_COLLECTION = 200
# The options other than the default one that a schedule takes: (step, option).
Deviations = tuple[tuple[int, int], ...]


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
    """Preempts at a few steps, and chooses at random there and where a thread cannot continue.

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


@dataclasses.dataclass
class Report:
    """The results of the schedules of a scenario.

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
