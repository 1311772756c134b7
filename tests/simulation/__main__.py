"""Runs histories: ``python -m tests.simulation --schedules 1000 --seed 0``."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.forks import run_forked
from simulation.history import run_histories, run_history
from simulation.mutants import MUTANTS, Mutant

# How many histories a process runs before it reports.
_CHUNK = 50
# How long they may take, in real seconds. If they take longer, a thread waits for a real lock for ever.
_PATIENCE = 300
# How many histories run unless the command line says so: in all, and with each planted bug.
_HISTORIES, _HISTORIES_PER_MUTANT = 1000, 2000


def run_some(seeds: range) -> list[tuple[int, str]]:
    """Run histories; return the seeds of those that violate a promise, and how."""
    faulthandler.dump_traceback_later(_PATIENCE, exit=True)
    return [(seed, str(violation)) for seed, violation in run_histories(seeds) if violation is not None]


def run_all(first: int, count: int) -> int:
    """Run histories on all cores, and print each violation at once; return how many there are."""
    chunks = [range(start, min(start + _CHUNK, first + count)) for start in range(first, first + count, _CHUNK)]
    violations = 0
    for _, found in run_forked(run_some, chunks):
        violations += len(found)
        for seed, text in found:
            print(f"seed {seed}: {text:.600}", flush=True)
    return violations


def trace(seed: int) -> int:
    """Print what happens in one history; return 1 if it violates a promise."""
    violation = run_history(seed, print)
    if violation is not None:
        traceback.print_exception(violation, file=sys.stdout)
    return int(violation is not None)


def find_mutant(mutant: Mutant, seeds: range) -> str | None:
    """Run histories with a planted bug until one violates a promise; return how, None if none does."""
    with mutant.planted():
        for seed, violation in run_histories(seeds):
            if violation is not None:
                return f"seed {seed}: {violation}"
    return None


def find_all(seeds: range, where: str) -> int:
    """Plant each of the known bugs in functions with this in their names; return how many are not found."""
    mutants = [mutant for mutant in MUTANTS if where in mutant.where]
    missed = 0
    for mutant, found in run_forked(lambda mutant: find_mutant(mutant, seeds), mutants):
        missed += found is None
        print(f"{mutant}\n    {'not found' if found is None else found.splitlines()[0][:150]}", flush=True)
    print(f"{len(mutants) - missed} of {len(mutants)} mutants found")
    return missed


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Runs histories at random.")
    schedules = f"how many (default: {_HISTORIES}); with --mutants, for each (default: {_HISTORIES_PER_MUTANT})"
    parser.add_argument("--schedules", type=int, metavar="N", help=schedules)
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the seed of the first one (default: 0)")
    parser.add_argument("--trace", action="store_true", help="print what happens in the one with this seed")
    parser.add_argument("--mutants", action="store_true", help="plant known bugs one by one, and look for each")
    where = "with --mutants: only in functions with this in their names, such as vector.engine"
    parser.add_argument("--where", default="", metavar="TEXT", help=where)
    options = parser.parse_args()
    logging.disable()
    if options.mutants:
        count = options.schedules or _HISTORIES_PER_MUTANT
        return int(find_all(range(options.seed, options.seed + count), options.where) > 0)
    if options.trace:
        count, violations = 1, trace(options.seed)
    else:
        count = _HISTORIES if options.schedules is None else options.schedules
        violations = run_all(options.seed, count)
    print(f"{count} schedules, {violations} violations")
    return int(violations > 0)


if __name__ == "__main__":
    sys.exit(main())
