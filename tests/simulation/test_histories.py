"""Some histories of the simulated world; `python -m tests.simulation` runs any number."""

from __future__ import annotations

import logging
import re

import pytest

from simulation.history import run_histories, run_history
from simulation.mutants import MUTANTS


@pytest.fixture(autouse=True)
def silent():
    """The library logs whatever happens to its actors, which is a lot."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_no_promise_is_broken(first):
    broken = {seed: str(violation) for seed, violation in run_histories(range(first, first + 25)) if violation}
    assert broken == {}


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_each_bug_can_be_planted(mutant):
    with mutant.planted():
        pass


def test_a_history_is_decided_by_its_seed():
    traces = [[], []]
    for trace in traces:
        run_history(5, trace.append)
    lines = [[re.sub(" at 0x[0-9a-f]+", "", line) for line in trace] for trace in traces]
    assert lines[0] == lines[1]
    assert len(lines[0]) > 50
