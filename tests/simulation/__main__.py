"""Runs histories, ``python -m tests.simulation --schedules 1000 --seed 0``, or interleavings of threads that wait.

``--interleavings`` enumerates the schedules of each scenario in `simulation.scenarios` up to a number of preemptions,
and draws further ones at random. With ``--mutants`` it looks for known bugs of threads that wait instead.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.forks import run_forked
from simulation.history import run_histories, run_history
from simulation.interleavings import Report, explore, explore_randomly, replay
from simulation.mutants import MUTANTS
from simulation.planted_waits import PLANTED
from simulation.scenarios import SCENARIOS
from simulation.search import Search
from simulation.session_mutants import SESSION_MUTANTS

# How many histories a process runs before it tells of them.
_CHUNK = 100
# How many histories may pass until a planted bug is found.
_MOST_PER_MUTANT = 20_000
# How many schedules of each scenario are drawn at random for one that is enumerated.
_AT_RANDOM = 0.2
# How many histories run, and how many schedules of each scenario are enumerated, unless the command line says so.
_HISTORIES = 1000
_MOST_SCHEDULES = 4000


def run_some(seeds: range) -> list[tuple[int, str]]:
    """Run histories; return the seeds of those that violate a promise, and how."""
    return [(seed, str(violation)) for seed, violation in run_histories(seeds) if violation is not None]


def run_all(first: int, count: int) -> int:
    """Run histories on all cores, and tell of each violation at once; return how many there are."""
    chunks = [range(start, min(start + _CHUNK, first + count)) for start in range(first, first + count, _CHUNK)]
    violations = 0
    for _, found in run_forked(run_some, chunks):
        violations += len(found)
        for seed, what in found:
            print(f"seed {seed}: {what}", flush=True)
    return violations


def find_all(first: int, where: str) -> int:
    """Plant each of the known bugs in functions with this in their names; return how many of them are not found."""
    mutants = [mutant for mutant in MUTANTS + SESSION_MUTANTS if where in mutant.where]
    search = Search(mutants, first, _MOST_PER_MUTANT)
    for number in search.run():
        print(f"{mutants[number]}\n    {search.found[number]:.150}", flush=True)
    for number, mutant in enumerate(mutants):
        if number not in search.found:
            print(f"{mutant}\n    not found")
    print(f"{len(search.found)} of {len(mutants)} mutants found")
    return len(mutants) - len(search.found)


def trace(seed: int) -> int:
    """Print what happens in one history."""
    violation = run_history(seed, print)
    if violation is not None:
        traceback.print_exception(violation, file=sys.stdout)
    return int(violation is not None)


def explore_one(name: str, bound: int, limit: int, seed: int) -> Report:
    """Run the schedules of one scenario."""
    report = explore(SCENARIOS[name], bound, limit, seed)
    if report.violation is None and not report.is_complete:
        at_random = explore_randomly(SCENARIOS[name], round(limit * _AT_RANDOM), seed)
        at_random.schedules += report.schedules
        return at_random
    return report


def explore_all(names: list[str], bound: int, limit: int, seed: int) -> int:
    """Run the schedules of some scenarios on all cores; return how many violate a promise."""
    schedules = violations = 0
    for name, report in run_forked(functools.partial(explore_one, bound=bound, limit=limit, seed=seed), names):
        schedules += report.schedules
        extent = "all" if report.is_complete else "a part"
        print(f"{name}: {report.schedules} schedules, {extent} of those with up to {bound} preemptions", flush=True)
        if report.violation is not None:
            violations += 1
            print(f"  {report.violation}")
            schedule = f"{name}/{report.name}"
            print(f"  replay it: python -m tests.simulation --interleavings --replay {schedule}", flush=True)
    print(f"{schedules} schedules, {violations} violations")
    return violations


def find_planted(bound: int, limit: int, seed: int) -> int:
    """Plant each of the known bugs of threads that wait; return how many of them are not found."""
    missed = 0
    for planted in PLANTED:
        with planted.context():
            report = explore(planted.scenario, bound, limit, seed)
        missed += report.violation is None
        text = "not found" if report.violation is None else f"{report.violation}".partition("\n")[0]
        print(f"{planted}\n    {text}, {report.schedules} schedules", flush=True)
    print(f"{len(PLANTED) - missed} of {len(PLANTED)} mutants found")
    return missed


def replay_one(name: str) -> int:
    """Print what happens in one schedule; return how many promises it violates."""
    scenario, _, schedule = name.partition("/")
    violation = replay(SCENARIOS[scenario], schedule, print)
    if violation is not None:
        traceback.print_exception(violation, file=sys.stdout)
    print(f"1 schedules, {int(violation is not None)} violations")
    return int(violation is not None)


def run_interleavings(options: argparse.Namespace) -> int:
    """Do what the options for interleavings say; return how much went wrong."""
    if options.replay is not None:
        return replay_one(options.replay)
    limit = _MOST_SCHEDULES if options.schedules is None else options.schedules
    if options.mutants:
        return find_planted(options.preemptions, limit, options.seed)
    return explore_all(options.scenario or list(SCENARIOS), options.preemptions, limit, options.seed)


def main() -> int:
    description = "Runs histories at random, or the interleavings of threads that wait."
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=description)
    schedules = f"how many (default: {_HISTORIES}); with --interleavings, of each scenario (default: {_MOST_SCHEDULES})"
    parser.add_argument("--schedules", type=int, metavar="N", help=schedules)
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the seed of the first one (default: 0)")
    parser.add_argument("--trace", action="store_true", help="print what happens in the one with this seed")
    parser.add_argument("--mutants", action="store_true", help="plant known bugs one by one, and look for each")
    where = "with --mutants: only in functions with this in their names, such as rollout.part"
    parser.add_argument("--where", default="", metavar="TEXT", help=where)
    parser.add_argument("--interleavings", action="store_true", help="run the interleavings of threads that wait")
    parser.add_argument("--preemptions", type=int, default=2, metavar="N", help="the most of a schedule (default: 2)")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="one of the scenarios (default: all)")
    parser.add_argument("--replay", metavar="SCENARIO/SCHEDULE", help="print what happens in one schedule")
    options = parser.parse_args()
    if options.interleavings:
        return int(run_interleavings(options) > 0)
    logging.disable()
    histories = _HISTORIES if options.schedules is None else options.schedules
    if options.mutants:
        violations = find_all(options.seed, options.where)
    elif options.trace:
        violations = trace(options.seed)
        print(f"1 schedules, {violations} violations")
    else:
        violations = run_all(options.seed, histories)
        print(f"{histories} schedules, {violations} violations")
    return int(violations > 0)


if __name__ == "__main__":
    sys.exit(main())
