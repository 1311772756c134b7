"""Report of a chaos run, and the counters that it is built from."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Mapping, Sequence

from chaos.faults import FaultKind

_MOST_PROBLEMS = 20  # problems described in words; further ones are only counted


@dataclasses.dataclass(frozen=True)
class ChaosReport:
    """Result of a chaos run. `ok` is True if all faults happened and all counts of `wrong` are 0.

    Attributes:
        planned: Number of planned faults.
        seed: Seed of the plan.
        on_failure: Failure policy of the vector env.
        faults: Number of faults that have happened, by the value of their `FaultKind`.
        renewals: Number of processes that replaced others.
        delivered: Number of delivered results.
        failures: Number of results with ``info["failure"]``.
        compared: True if results were compared with those of the oracle; False if the env is not deterministic.
        lost: Results that never came, and steps that were skipped.
        duplicated: Results that came twice, and steps that were executed twice.
        mixed_up: Results that belong to another call.
        torn_observations: Observations that mix two writes; for a user's own env they count as ``mixed_up``.
        not_replayed: Failures that were delivered under ``on_failure="replay"``.
        unexplained: Processes and nodes that were lost without a fault.
        miscounted: Envs whose steps, as counted by ``stats()``, are not as many as were delivered, and whatever else of
            what observers read does not add up.
        replaced_nodes: Nodes that were lost although they were not to end; a busy machine may cause that.
        longest_stall: Longest time from a request to its result, in seconds.
        stalls: Number of results that took longer than the deadline plus 2 s, plus the start of a process if one had
            to start, plus the time by which the machine was late meanwhile.
        reproduced: Number of crash bundles that end as their faults did, or not, after a kill from outside.
        wrong_bundles: Number of faults without a bundle, and of bundles that end in another way or are of no fault.
        leaks: Descriptions of what was left behind.
        problems: Descriptions of the first problems.
        seconds: Duration of the run.
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
    torn_observations: int
    not_replayed: int
    unexplained: int
    miscounted: int
    replaced_nodes: int
    longest_stall: float
    stalls: int
    reproduced: int
    wrong_bundles: int
    leaks: Sequence[str]
    problems: Sequence[str]
    seconds: float

    @property
    def injected(self) -> int:
        """Number of faults that have happened."""
        return sum(self.faults.values())

    @property
    def ok(self) -> bool:
        """True if all planned faults have happened and all counts of `wrong` are 0."""
        return self.injected == self.planned and not any(self.wrong.values())

    @property
    def wrong(self) -> dict[str, int]:
        """Counts that must be 0, by the name that the command prints."""
        return {
            "lost": self.lost,
            "duplicated": self.duplicated,
            "mixed up": self.mixed_up,
            "torn": self.torn_observations,
            "not replayed": self.not_replayed,
            "lost without a fault": self.unexplained,
            "miscounted": self.miscounted,
            "stalls": self.stalls,
            "wrong bundles": self.wrong_bundles,
            "leaks": len(self.leaks),
        }


class ReportBuilder:
    """Counters of a chaos run.

    Attributes:
        round: Number of requests made so far, of any number of envs each.
        progress: Time of the last fault or result (`time.monotonic`).
    """

    def __init__(self, planned: int, seed: int, on_failure: str) -> None:
        self.planned = planned
        self.seed = seed
        self.on_failure = on_failure
        self.faults = {kind.value: 0 for kind in FaultKind}
        self.renewals = self.delivered = self.failures = 0
        self.compared = True
        self.lost = self.duplicated = self.mixed_up = self.torn_observations = 0
        self.not_replayed = self.unexplained = self.miscounted = self.stalls = self.replaced_nodes = 0
        self.reproduced = self.wrong_bundles = 0
        self.longest_stall = 0.0
        self.leaks: list[str] = []
        self.problems: list[str] = []
        self.round = 0
        self.begun = self.progress = time.monotonic()
        self.seconds: float | None = None

    @property
    def replays(self) -> bool:
        """True if lost steps are replayed (``on_failure="replay"``)."""
        return self.on_failure == "replay"

    def count_fault(self, kind: enum.Enum) -> None:
        """Count a fault that has happened."""
        self.faults[kind.value] = self.faults.get(kind.value, 0) + 1
        self.progress = time.monotonic()

    def count_miscounted(self, problem: str) -> None:
        """Count a number that does not add up."""
        self.miscounted += 1
        self.add_problem(problem)

    def count_wrong_bundle(self, problem: str) -> None:
        """Count a fault whose bundle does not lead to it again."""
        self.wrong_bundles += 1
        self.add_problem(problem)

    def count_lost_nodes(self, replaced: Sequence[str], unexplained: Sequence[str]) -> None:
        """Count the nodes that were replaced, and those of them that no busy machine explains."""
        self.replaced_nodes = len(replaced)
        self.unexplained += len(unexplained)
        for node in unexplained:
            self.add_problem(f"{node} was lost without a fault, while the machine was not late")

    def add_problem(self, problem: str, env_id: int | None = None) -> None:
        """Add the description of a problem, of one env or of all, unless there are enough."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(problem if env_id is None else f"round {self.round}, env {env_id}: {problem}")

    def report(self) -> ChaosReport:
        """Return the report as of now."""
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
            torn_observations=self.torn_observations,
            not_replayed=self.not_replayed,
            unexplained=self.unexplained,
            miscounted=self.miscounted,
            replaced_nodes=self.replaced_nodes,
            longest_stall=self.longest_stall,
            stalls=self.stalls,
            reproduced=self.reproduced,
            wrong_bundles=self.wrong_bundles,
            leaks=list(self.leaks),
            problems=list(self.problems),
            seconds=time.monotonic() - self.begun if self.seconds is None else self.seconds,
        )
