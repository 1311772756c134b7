"""Data that the demo reports, the interface of its outputs, and the plain text output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TextIO, TypeVar

from envactors.cli.units import count

_View = TypeVar("_View", bound="LineView")


@dataclasses.dataclass(frozen=True)
class ActorRow:
    """Snapshot of one actor.

    Attributes:
        name: Name of the actor.
        state: Value of its `envactors.ActorState`, such as ``"idle"``.
        pid: Process id; None while there is no process.
        incarnation: Number of its process; 0 for the first.
        steps: Steps of its env so far.
        steps_per_second: Steps per second over the last seconds.
        restarts: Number of its processes that replaced a lost one.
        last_failure: Short description of the last failure; empty if there was none.
        node: Name of the machine that its process runs on; None for this one.
    """

    name: str
    state: str
    pid: int | None
    incarnation: int
    steps: int
    steps_per_second: float
    restarts: int
    last_failure: str
    node: str | None = None


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Snapshot of all actors.

    Attributes:
        seconds: Time since the actors were ready.
        rows: One row per actor.
        faults: Number of injected faults so far, by kind.
    """

    seconds: float
    rows: list[ActorRow]
    faults: Mapping[str, int]

    @property
    def steps(self) -> int:
        """Steps of all envs together."""
        return sum(row.steps for row in self.rows)

    @property
    def steps_per_second(self) -> float:
        """Steps per second of all envs together, over the last seconds."""
        return sum(row.steps_per_second for row in self.rows)

    @property
    def restarts(self) -> int:
        """Restarts of all actors together."""
        return sum(row.restarts for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Generation:
    """One generation of learning.

    Attributes:
        number: Number of the generation, from 1.
        mean_return: Mean return of its candidates.
        best_return: Highest return of its candidates.
        steps: Steps of all episodes so far.
        check_return: Mean return of the resulting policy in a check; None if it was not checked.
    """

    number: int
    mean_return: float
    best_return: float
    steps: int
    check_return: float | None


@dataclasses.dataclass(frozen=True)
class Summary:
    """Result of a demo run.

    Attributes:
        mean_return: Mean return of the learnt policy over the evaluation episodes; None if not all were played.
        episodes: Number of evaluation episodes.
        goal: Mean return to reach.
        generations: Number of completed generations.
        stopped_by: Limit that ended learning; None if the policy was good enough.
        actors: Number of actors.
        steps: Steps of all episodes.
        start_seconds: Time that the actors took to start.
        seconds: Duration of everything after the start.
        where: Where the time went, in a line.
        faults: Number of injected faults, by kind.
        restarts: Number of processes that replaced a lost one.
        repeated: Number of episodes that a failure interrupted and that were played again.
        lost: Number of episodes that never came back.
        nodes_lost: Number of nodes that were lost; None if there were none to lose.
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
    where: str
    faults: Mapping[str, int]
    restarts: int
    repeated: int
    lost: int
    nodes_lost: int | None = None

    @property
    def goal_met(self) -> bool:
        """True if the mean return reaches the goal."""
        return self.mean_return is not None and self.mean_return >= self.goal

    def lines(self) -> list[str]:
        """Return the summary in words; the first line says whether the goal was met."""
        headline = "Goal met" if self.goal_met else "Goal missed"
        mean_return = "unknown, they were not all played" if self.mean_return is None else f"{self.mean_return:.1f}"
        quality = (
            f"{headline}: the learnt policy's mean return over {self.episodes} evaluation episodes is "
            f"{mean_return} (wanted: at least {self.goal:.0f})."
        )
        work = (
            f"{count(self.actors, 'actor')} made {self.steps:,} steps in {self.seconds:.1f} s, "
            f"{self.steps / self.seconds:,.0f} steps/s, for {count(self.generations, 'generation')} and the "
            f"evaluation; starting took {self.start_seconds:.1f} s."
        )
        nodes = "" if self.nodes_lost is None else f"Nodes lost: {self.nodes_lost}. "
        trouble = (
            f"Faults injected: {fault_counts(self.faults)}. Renewals: {self.restarts}. Episodes broken off and played "
            f"again: {self.repeated}. {nodes}Results lost: {self.lost}."
        )
        lines = [quality, work, f"Where the time went: {self.where}.", trouble]
        if self.stopped_by is not None:
            lines.append(f"Learning was ended by the {self.stopped_by}, not because the policy was good enough.")
        return lines


class Reporter(AbstractContextManager["Reporter"], Protocol):
    """Output of a run; a context manager. `finished` is called after its end."""

    def opened(self, title: str) -> None:
        """Show that the run begins."""

    def phase(self, name: str) -> None:
        """Show the name of the current phase."""

    def tick(self, snapshot: Callable[[], Fleet], done: int, total: int) -> None:
        """Show progress, if enough time has passed.

        Args:
            snapshot: Returns a snapshot of the actors; called only if it is shown.
            done: Number of finished episodes of this phase.
            total: Number of episodes of this phase.
        """

    def generation(self, generation: Generation) -> None:
        """Show a finished generation."""

    def finished(self, summary: Summary) -> None:
        """Show the summary."""


class LineView:
    """Prints lines; a context manager.

    Args:
        stream: Stream to print to.
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
    """Prints one line per generation, and the summary."""

    def opened(self, title: str) -> None:
        self._print(title)

    def phase(self, name: str) -> None:
        pass

    def tick(self, snapshot: Callable[[], Fleet], done: int, total: int) -> None:
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


def fault_counts(faults: Mapping[str, int]) -> str:
    """Format the number of faults: ``3 (SIGKILL 2, exception 1)``."""
    kinds = ", ".join(f"{kind} {number}" for kind, number in faults.items() if number)
    return f"{sum(faults.values())} ({kinds})" if kinds else "none"
