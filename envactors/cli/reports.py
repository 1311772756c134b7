"""What a command tells of its work, the one interface of everything that shows it, and the plain one of those."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TextIO, TypeVar

_View = TypeVar("_View", bound="LineView")


@dataclasses.dataclass(frozen=True)
class ActorRow:
    """One actor at one moment.

    Attributes:
        name: Its name.
        state: The value of its `envactors.ActorState`.
        pid: Its process id, None while there is no process.
        incarnation: 0 for its first process.
        steps: The steps its env has made.
        steps_per_second: Those of the last seconds.
        restarts: How many of its processes replaced a lost one.
        last_failure: How the last one was lost, in a few words; empty where none was.
    """

    name: str
    state: str
    pid: int | None
    incarnation: int
    steps: int
    steps_per_second: float
    restarts: int
    last_failure: str


@dataclasses.dataclass(frozen=True)
class Fleet:
    """All actors at one moment.

    Attributes:
        seconds: Since the actors were ready.
        rows: One an actor.
        faults: How many were injected so far, by kind.
    """

    seconds: float
    rows: list[ActorRow]
    faults: Mapping[str, int]

    @property
    def steps(self) -> int:
        """The steps of all envs."""
        return sum(row.steps for row in self.rows)

    @property
    def steps_per_second(self) -> float:
        """The steps of all envs in one of the last seconds."""
        return sum(row.steps_per_second for row in self.rows)

    @property
    def restarts(self) -> int:
        """The restarts of all actors."""
        return sum(row.restarts for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Generation:
    """One generation of the learning.

    Attributes:
        number: Counted from 1.
        mean_return: The mean return of its candidates.
        best_return: The highest of them.
        steps: The steps of all episodes since learning began, its own included.
        check_return: The mean return of the policy that came of it, None where that was not worth a check.
    """

    number: int
    mean_return: float
    best_return: float
    steps: int
    check_return: float | None


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
        mean_return: The learnt policy's, over the evaluation episodes; None where they were not all played.
        episodes: How many evaluation episodes there were.
        goal: The mean return that was to be reached.
        generations: How many generations were completed.
        stopped_by: What ended the learning where the policy was not good enough yet, None where it was.
        actors: How many actors there were.
        steps: The steps of all episodes.
        start_seconds: How long the actors took to start.
        seconds: How long everything after that took.
        faults: How many were injected, by kind.
        restarts: How many processes replaced a lost one.
        repeated: How many episodes were broken off by a failure and played again.
        lost: How many episodes were asked for and never came.
    """

    mean_return: float | None
    episodes: int
    goal: float
    generations: int
    stopped_by: str | None
    actors: int
    steps: int
    start_seconds: float
    seconds: float
    faults: Mapping[str, int]
    restarts: int
    repeated: int
    lost: int

    @property
    def goal_met(self) -> bool:
        """Whether the policy is as good as it was to become."""
        return self.mean_return is not None and self.mean_return >= self.goal

    def lines(self) -> list[str]:
        """The summary in plain words; the first line says whether the goal was met."""
        verdict = "Goal met" if self.goal_met else "Goal missed"
        mean_return = "unknown, they were not all played" if self.mean_return is None else f"{self.mean_return:.1f}"
        quality = (
            f"{verdict}: the learnt policy's mean return over {self.episodes} evaluation episodes is "
            f"{mean_return} (wanted: at least {self.goal:.0f})."
        )
        work = (
            f"{count(self.actors, 'actor')} made {self.steps:,} steps in {self.seconds:.1f} s, "
            f"{self.steps / self.seconds:,.0f} steps/s, for {count(self.generations, 'generation')} and the "
            f"evaluation; starting took {self.start_seconds:.1f} s."
        )
        trouble = (
            f"Faults injected: {fault_counts(self.faults)}. Renewals: {self.restarts}. Episodes broken off and played "
            f"again: {self.repeated}. Results lost: {self.lost}."
        )
        lines = [quality, work, trouble]
        if self.stopped_by is not None:
            lines.append(f"Learning was ended by the {self.stopped_by}, not because the policy was good enough.")
        return lines


class Reporter(AbstractContextManager["Reporter"], Protocol):
    """Shows a run; also a context manager, which `finished` comes after."""

    def opened(self, title: str) -> None:
        """The run begins."""

    def phase(self, name: str) -> None:
        """Something else is being done from now on."""

    def tick(self, look: Callable[[], Fleet], done: int, total: int) -> None:
        """Time has passed.

        Args:
            look: Tells how the actors are; to be called only when that is shown.
            done: How many episodes of this phase are over.
            total: How many it has.
        """

    def generation(self, generation: Generation) -> None:
        """A generation is over."""

    def finished(self, summary: Summary) -> None:
        """The run is over."""


class LineView:
    """Prints lines; also a context manager.

    Args:
        stream: Where to print.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self: _View) -> _View:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class PlainReporter(LineView):
    """Prints a line a generation, and the summary."""

    def opened(self, title: str) -> None:
        self._print(title)

    def phase(self, name: str) -> None:
        pass

    def tick(self, look: Callable[[], Fleet], done: int, total: int) -> None:
        pass

    def generation(self, generation: Generation) -> None:
        line = (
            f"generation {generation.number:2d}: mean return {generation.mean_return:5.1f}, "
            f"best {generation.best_return:5.1f}, {generation.steps:7,} steps"
        )
        if generation.check_return is not None:
            line += f", policy checked: {generation.check_return:.1f}"
        self._print(line)

    def finished(self, summary: Summary) -> None:
        for line in summary.lines():
            self._print(line)


def count(number: int, noun: str) -> str:
    """A number and its noun: ``1 actor``, ``2 actors``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def fault_counts(faults: Mapping[str, int]) -> str:
    """How many faults there were: ``3 (SIGKILL 2, exception 1)``."""
    kinds = ", ".join(f"{kind} {number}" for kind, number in faults.items() if number)
    return f"{sum(faults.values())} ({kinds})" if kinds else "none"
