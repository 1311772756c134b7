"""Runs histories: ``python -m tests.simulation --schedules 1000 --seed 0``."""

from __future__ import annotations

import argparse
import concurrent.futures
import logging
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from envactors.system.cpus import usable_cores
from simulation.history import run_history
from simulation.mutants import MUTANTS

# How many histories a process runs before it tells of them.
_CHUNK = 50
# How many histories may pass until a planted bug is found.
_MOST_PER_MUTANT = 5000


def run_some(seeds: range) -> list[tuple[int, str]]:
    """Run histories; return the seeds of those that violate a promise, and how."""
    logging.disable()
    return [(seed, str(violation)) for seed in seeds if (violation := run_history(seed)) is not None]


def run_all(first: int, count: int) -> int:
    """Run histories on all cores, and tell of each violation at once; return how many there are."""
    chunks = [range(start, min(start + _CHUNK, first + count)) for start in range(first, first + count, _CHUNK)]
    violations = 0
    with concurrent.futures.ProcessPoolExecutor(usable_cores()) as pool:
        for found in pool.map(run_some, chunks):
            violations += len(found)
            for seed, what in found:
                print(f"seed {seed}: {what}", flush=True)
    return violations


def find(number: int, first: int) -> str | None:
    """Run histories with a planted bug until one violates a promise; return how, None if none does."""
    logging.disable()
    with MUTANTS[number].planted():
        for seed in range(first, first + _MOST_PER_MUTANT):
            if (violation := run_history(seed)) is not None:
                return f"seed {seed}: {violation}"
    return None


def find_all(first: int) -> int:
    """Plant each of the known bugs; return how many of them are not found."""
    missed = 0
    with concurrent.futures.ProcessPoolExecutor(usable_cores()) as pool:
        tasks = [pool.submit(find, number, first) for number in range(len(MUTANTS))]
        for mutant, task in zip(MUTANTS, tasks, strict=True):
            how = task.result()
            missed += how is None
            print(f"{mutant}\n    {'not found' if how is None else how:.150}", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} mutants found")
    return missed


def trace(seed: int) -> int:
    """Print what happens in one history."""
    logging.disable()
    violation = run_history(seed, print)
    if violation is not None:
        traceback.print_exception(violation, file=sys.stdout)
    return int(violation is not None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Runs histories at random.")
    parser.add_argument("--schedules", type=int, default=1000, metavar="N", help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the seed of the first one (default: 0)")
    parser.add_argument("--trace", action="store_true", help="print what happens in the one with this seed")
    parser.add_argument("--mutants", action="store_true", help="plant known bugs one by one, and look for each")
    options = parser.parse_args()
    if options.mutants:
        violations = find_all(options.seed)
    elif options.trace:
        violations = trace(options.seed)
        print(f"1 schedules, {violations} violations")
    else:
        violations = run_all(options.seed, options.schedules)
        print(f"{options.schedules} schedules, {violations} violations")
    return int(violations > 0)


if __name__ == "__main__":
    sys.exit(main())
