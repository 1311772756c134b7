"""Some histories of the simulated world; `python -m tests.simulation` runs as many as one likes."""

from __future__ import annotations

import logging

import pytest

from simulation.history import run_history
from simulation.mutants import MUTANTS
from simulation.session_mutants import SESSION_MUTANTS


@pytest.fixture(autouse=True)
def silent():
    """The library tells of all that befalls its actors, which is a lot."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, 80, 40))
def test_no_promise_is_broken(first):
    broken = {seed: str(violation) for seed in range(first, first + 40) if (violation := run_history(seed))}
    assert broken == {}


def test_each_bug_can_be_planted():
    for mutant in MUTANTS + SESSION_MUTANTS:
        with mutant.planted():
            pass


def test_a_history_is_decided_by_its_seed():
    traces = [[], []]
    for trace in traces:
        run_history(5, trace.append)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 50
