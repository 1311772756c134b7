"""The search for planted bugs, which shares between all of them what it takes to see where histories come to."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from envactors.system.cpus import usable_cores
from simulation.forks import run_forked
from simulation.history import run_histories
from simulation.mutants import Mutant
from simulation.reach import watched
from simulation.world import Violation

# How many histories the first round has, and how many times as many each further one has.
_FIRST_ROUND = 100
_GROWTH = 1.5
# How many histories a process runs before it tells of them.
_MOST_PER_TASK = 100


class Task(NamedTuple):
    """Histories with one bug.

    Attributes:
        number: Its number.
        seeds: The seeds of the histories.
    """

    number: int
    seeds: Sequence[int]


class Search:
    """Runs histories with each of some bugs until one violates a promise.

    In rounds: those of a round run once without any bug, to see which bugs they come to, and then with each of those
    bugs that was not found yet. The first rounds are short, and most bugs are found there.

    Args:
        mutants: The bugs.
        first: The seed of the first history.
        most: How many histories there are.

    Attributes:
        found: How each of the bugs that was found violates a promise, by its number.
    """

    def __init__(self, mutants: Sequence[Mutant], first: int, most: int) -> None:
        self._mutants = mutants
        self._seeds = range(first, first + most)
        self.found: dict[int, str] = {}

    def run(self) -> Iterator[int]:
        """Search; yield the number of each bug as it is found.

        Raises:
            Violation: A promise does not hold without a bug either.
        """
        size = done = _FIRST_ROUND
        seeds = self._seeds[:size]
        while seeds and len(self.found) < len(self._mutants):
            yield from self._find(self._see_reached(seeds))
            size = round(size * _GROWTH)
            seeds = self._seeds[done : done + size]
            done += size

    def _see_reached(self, seeds: range) -> dict[int, list[int]]:
        """Return the seeds of the histories that come to each of the bugs that were not found."""
        numbers = [number for number in range(len(self._mutants)) if number not in self.found]
        size = min(_MOST_PER_TASK, -(-len(seeds) // usable_cores()))
        pieces = [seeds[start : start + size] for start in range(0, len(seeds), size)]
        reaching: dict[int, list[int]] = collections.defaultdict(list)
        # The processes inherit the probes.
        with watched([self._mutants[number] for number in numbers]) as reached:
            ended = list(run_forked(functools.partial(_see, reached=reached), pieces))
        for piece, seen in sorted(ended, key=lambda each: each[0].start):
            for seed, (positions, violation) in zip(piece, seen, strict=True):
                if violation is not None:
                    raise Violation(f"seed {seed}, without a bug: {violation}")
                for position in positions:
                    reaching[numbers[position]].append(seed)
        return reaching

    def _find(self, reaching: dict[int, list[int]]) -> Iterator[int]:
        """Run histories with the bugs that they come to; yield the number of each bug as it is found."""
        pieces = [
            [Task(number, seeds[start : start + _MOST_PER_TASK]) for start in range(0, len(seeds), _MOST_PER_TASK)]
            for number, seeds in sorted(reaching.items(), key=lambda item: -len(item[1]))
        ]
        in_turns = (task for turn in itertools.zip_longest(*pieces) for task in turn if task is not None)
        for task, how in run_forked(self._try, (task for task in in_turns if task.number not in self.found)):
            if how is not None and task.number not in self.found:
                self.found[task.number] = how
                yield task.number

    def _try(self, task: Task) -> str | None:
        """Run histories with a bug until one violates a promise; return how, None if none does."""
        with self._mutants[task.number].planted():
            for seed, violation in run_histories(task.seeds):
                if violation is not None:
                    return f"seed {seed}: {violation}"
        return None


def _see(seeds: range, reached: set[int]) -> list[tuple[set[int], Violation | None]]:
    """Run histories without a bug; return which bugs each one comes to, and what it violates."""
    seen = []
    for _, violation in run_histories(seeds):
        seen.append((set(reached), violation))
        reached.clear()
    return seen
