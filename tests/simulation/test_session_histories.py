"""Some histories of pools of sessions in the simulated world."""

from __future__ import annotations

import logging

import pytest

from simulation.history import run_histories
from simulation.session_history import SessionHistory
from simulation.session_mutants import SESSION_MUTANTS


@pytest.fixture(autouse=True)
def silent():
    """The library tells of all that befalls its actors, which is a lot."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_the_promises_of_sessions_hold_in_random_histories():
    kinds = set()
    for seed in range(40):
        history = SessionHistory(seed)
        history.run()
        kinds |= {visit.kind for visit in history.users.visits}
    assert {"completed", "died", "exception", "cancelled", "idle"} <= kinds


def test_a_history_of_sessions_is_decided_by_its_seed():
    traces = [[], []]
    for trace in traces:
        for seed in range(5):
            SessionHistory(seed, trace.append).run()
    assert traces[0] == traces[1]
    assert len(traces[0]) > 250


# Every fifth history is one of sessions.
@pytest.mark.parametrize("mutant", SESSION_MUTANTS[::7], ids=lambda mutant: mutant.where)
def test_a_planted_bug_of_sessions_is_found(mutant):
    with mutant.planted():
        assert any(violation for _, violation in run_histories(range(0, 1500, 5)))
