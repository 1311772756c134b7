"""What is counted while a storm lasts, and told afterwards."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

from envactors.testing.sabotage import FaultKind

_MOST_PROBLEMS = 20  # that are described


@dataclasses.dataclass(frozen=True)
class ChaosReport:
    """What a storm has shown; `ok` says whether there are zeros where zeros belong.

    Attributes:
        planned: How many faults were planned.
        seed: The plan's seed.
        on_failure: The vector env's.
        faults: How many have happened, by the values of `FaultKind`.
        renewals: How many processes took the place of others.
        delivered: How many results were handed out.
        failures: How many of them told of a failure.
        compared: Whether results were compared with the rehearsal; not where the env gives others each time.
        lost: Results that never came, and steps that were left out.
        duplicated: Results that came twice, and steps that were done twice.
        mixed_up: Results that are not those of their call.
        torn: Observations that were not in one piece; those of a user's own env count as mixed up.
        not_replayed: Failures that were told although everything was to be replayed.
        unexplained: Processes that were lost without a fault.
        longest_stall: The longest time between asking an env and its result, in seconds.
        stalls: How many took longer than the deadline and 2 s, and where a process had to start the time for that.
        leaks: What was left behind.
        problems: The first of what went wrong, in words.
        seconds: How long the storm lasted.
    """

    planned: int
    seed: int
    on_failure: str
    faults: Mapping[str, int]
    renewals: int
    delivered: int
    failures: int
    compared: bool
    lost: int
    duplicated: int
    mixed_up: int
    torn: int
    not_replayed: int
    unexplained: int
    longest_stall: float
    stalls: int
    leaks: Sequence[str]
    problems: Sequence[str]
    seconds: float

    @property
    def injected(self) -> int:
        """How many faults have happened."""
        return sum(self.faults.values())

    @property
    def ok(self) -> bool:
        """Whether all faults happened and nothing came of them that should not."""
        return self.injected == self.planned and not any(self.wrong.values())

    @property
    def wrong(self) -> dict[str, int]:
        """What must be zero, by name."""
        return {
            "lost": self.lost,
            "duplicated": self.duplicated,
            "mixed up": self.mixed_up,
            "torn": self.torn,
            "not replayed": self.not_replayed,
            "lost without a fault": self.unexplained,
            "stalls": self.stalls,
            "leaks": len(self.leaks),
        }


class Tally:
    """What is counted while the storm lasts.

    Attributes:
        turn: How often envs were asked.
        progress: When a fault or a result last came, a time of `time.monotonic`.
    """

    def __init__(self, planned: int, seed: int, on_failure: str) -> None:
        self.planned = planned
        self.seed = seed
        self.on_failure = on_failure
        self.faults = {kind.value: 0 for kind in FaultKind}
        self.renewals = self.delivered = self.failures = 0
        self.compared = True
        self.lost = self.duplicated = self.mixed_up = self.torn = 0
        self.not_replayed = self.unexplained = self.stalls = 0
        self.longest_stall = 0.0
        self.leaks: list[str] = []
        self.problems: list[str] = []
        self.turn = 0
        self.begun = self.progress = time.monotonic()
        self.seconds: float | None = None

    @property
    def replays(self) -> bool:
        """Whether everything that is lost is to be replayed."""
        return self.on_failure == "replay"

    def happened(self, kind: FaultKind) -> None:
        """Counts a fault."""
        self.faults[kind.value] += 1
        self.progress = time.monotonic()

    def note(self, problem: str, env_id: int | None = None) -> None:
        """Describes what went wrong, with an env or with all, unless there is enough of that."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(problem if env_id is None else f"turn {self.turn}, env {env_id}: {problem}")

    def report(self) -> ChaosReport:
        """What has been shown so far."""
        return ChaosReport(
            planned=self.planned,
            seed=self.seed,
            on_failure=self.on_failure,
            faults=dict(self.faults),
            renewals=self.renewals,
            delivered=self.delivered,
            failures=self.failures,
            compared=self.compared,
            lost=self.lost,
            duplicated=self.duplicated,
            mixed_up=self.mixed_up,
            torn=self.torn,
            not_replayed=self.not_replayed,
            unexplained=self.unexplained,
            longest_stall=self.longest_stall,
            stalls=self.stalls,
            leaks=list(self.leaks),
            problems=list(self.problems),
            seconds=time.monotonic() - self.begun if self.seconds is None else self.seconds,
        )
