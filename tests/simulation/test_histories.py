"""Some histories of the simulated world; `python -m tests.simulation` runs as many as one likes."""

from __future__ import annotations

import logging
import re

import pytest

from simulation.history import run_histories, run_history
from simulation.mutants import MUTANTS
from simulation.reach import watched
from simulation.session_mutants import SESSION_MUTANTS


@pytest.fixture(autouse=True)
def silent():
    """The library tells of all that befalls its actors, which is a lot."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, 80, 40))
def test_no_promise_is_broken(first):
    broken = {seed: str(violation) for seed, violation in run_histories(range(first, first + 40)) if violation}
    assert broken == {}


def test_each_bug_can_be_planted():
    for mutant in MUTANTS + SESSION_MUTANTS:
        with mutant.planted():
            pass


def trace_of(seed):
    lines = []
    run_history(seed, lines.append)
    return [re.sub(" at 0x[0-9a-f]+", "", line) for line in lines]


def test_a_bug_leaves_a_history_as_it_is_that_does_not_come_to_it():
    seed = 4
    with watched(MUTANTS) as reached:
        real = trace_of(seed)
    assert reached
    unreached = [mutant for number, mutant in enumerate(MUTANTS) if number not in reached]
    for mutant in unreached[::8]:
        with mutant.planted():
            assert trace_of(seed) == real, mutant.where


def test_a_history_is_decided_by_its_seed():
    traces = [[], []]
    for trace in traces:
        run_history(5, trace.append)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 50
