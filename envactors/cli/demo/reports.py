"""Results of the demo, and its output without a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TextIO

from envactors.cli.units import count


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
        lost: Number of episodes that a failure has ended.
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
        nodes = "" if self.nodes_lost is None else f"Nodes lost: {self.nodes_lost}. "
        lines = [
            (
                f"{headline}: the learnt policy's mean return over {self.episodes} evaluation episodes is "
                f"{mean_return} (wanted: at least {self.goal:.0f})."
            ),
            (
                f"{count(self.actors, 'actor')} made {self.steps:,} steps in {self.seconds:.1f} s, "
                f"{self.steps / self.seconds:,.0f} steps/s, for {count(self.generations, 'generation')} and the "
                f"evaluation; starting took {self.start_seconds:.1f} s."
            ),
            f"Where the time went: {self.where}.",
            (
                f"Faults injected: {fault_counts(self.faults)}. Restarts: {self.restarts}. {nodes}"
                f"Episodes lost: {self.lost}."
            ),
        ]
        if self.stopped_by is not None:
            lines.append(f"Learning was ended by the {self.stopped_by}, not because the policy was good enough.")
        return lines


class Reporter:
    """Prints one line per generation, and the summary; a context manager.

    Args:
        stream: Stream to print to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def opened(self, title: str) -> None:
        """Show that the run begins."""
        self._print(title)

    def phase(self, name: str) -> None:
        """Show the name of the current phase."""

    def tick(self, faults: Mapping[str, int], done: int, total: int) -> None:
        """Show progress, if enough time has passed.

        Args:
            faults: Number of injected faults so far, by kind.
            done: Number of finished episodes of this phase.
            total: Number of episodes of this phase.
        """

    def generation(self, generation: Generation) -> None:
        """Show a finished generation."""
        line = (
            f"generation {generation.number:2d}: mean return {generation.mean_return:5.1f}, "
            f"best {generation.best_return:5.1f}, {generation.steps:7,} steps"
        )
        if generation.check_return is not None:
            line += f", policy checked: {generation.check_return:.1f}"
        self._print(line)

    def finished(self, summary: Summary) -> None:
        """Show the summary, after the end of the run."""
        self._print("\n".join(summary.lines()))

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def fault_counts(faults: Mapping[str, int]) -> str:
    """Format the number of faults: ``3 (SIGKILL 2, exception 1)``."""
    kinds = ", ".join(f"{kind} {number}" for kind, number in faults.items() if number)
    return f"{sum(faults.values())} ({kinds})" if kinds else "none"
