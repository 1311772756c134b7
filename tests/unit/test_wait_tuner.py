"""How to wait is chosen by measuring: a pure function of how long calls took and of a clock."""

from __future__ import annotations

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from envactors.actor.wait_tuner import BOTH_SPIN, SLEEP, WORKERS_SPIN, WaitTuner

SHORT = (SLEEP, WORKERS_SPIN, BOTH_SPIN)


def run(waiting, cost, clock, seconds):
    """Makes calls for so long, each as long as its way of waiting costs; gives the clock and the time of each way."""
    end = clock + seconds
    taken = dict.fromkeys(cost, 0)
    while clock < end:
        way = waiting.strategy
        taken[way] += 1
        clock += cost[way]
        waiting.record(cost[way], clock)
    return clock, taken


def costs(ways, low, high):
    # Whole nanoseconds: what differs by less than sums are rounded is not told apart.
    cost = st.integers(round(low * 1e9), round(high * 1e9)).map(lambda nanoseconds: nanoseconds * 1e-9)
    each = st.lists(cost, min_size=len(ways), max_size=len(ways), unique=True)
    return each.map(lambda values: dict(zip(ways, values, strict=True)))


@settings(max_examples=examples(25))
@given(costs(SHORT, 100e-6, 900e-6))
def test_the_fastest_wait_mode_is_found(cost):
    waiting = WaitTuner(may_spin=True)
    _, taken = run(waiting, cost, 0.0, 2.0)
    assert max(taken, key=taken.__getitem__) == min(cost, key=cost.__getitem__)


@settings(max_examples=examples(25))
@given(costs(SHORT, 100e-6, 900e-6), costs(SHORT, 100e-6, 900e-6))
def test_the_fastest_wait_mode_is_found_again_after_a_change(cost, changed):
    waiting = WaitTuner(may_spin=True)
    clock, _ = run(waiting, cost, 0.0, 1.0)
    clock, _ = run(waiting, changed, clock, 12.0)
    begun = clock
    clock, taken = run(waiting, changed, clock, 2.0)
    assert clock - begun < 1.2 * sum(taken.values()) * min(changed.values())


@settings(max_examples=examples(25))
@given(st.booleans(), costs(SHORT, 2e-3, 50e-3))
def test_the_caller_sleeps_through_long_calls(may_spin, cost):
    waiting = WaitTuner(may_spin)
    clock, _ = run(waiting, cost, 0.0, 1.0)
    _, taken = run(waiting, cost, clock, 20.0)
    ways = (SLEEP, WORKERS_SPIN) if may_spin else (SLEEP,)
    assert sum(taken.values()) == sum(taken[way] for way in ways)
    assert max(ways, key=taken.__getitem__) == min(ways, key=cost.__getitem__)


@settings(max_examples=examples(25))
@given(costs(SHORT, 2e-3, 20e-3), costs(SHORT, 100e-6, 900e-6))
def test_spinning_is_tried_again_when_calls_become_short(long, short):
    waiting = WaitTuner(may_spin=True)
    clock, _ = run(waiting, long, 0.0, 3.0)
    clock, _ = run(waiting, short, clock, 5.0)
    _, taken = run(waiting, short, clock, 2.0)
    assert max(taken, key=taken.__getitem__) == min(short, key=short.__getitem__)


def test_trying_other_wait_modes_costs_less_than_five_percent():
    waiting = WaitTuner(may_spin=True)
    cost = {SLEEP: 100e-6, WORKERS_SPIN: 500e-6, BOTH_SPIN: 500e-6}
    clock, _ = run(waiting, cost, 0.0, 2.0)
    begun = clock
    clock, taken = run(waiting, cost, clock, 10.0)
    assert clock - begun < 1.05 * sum(taken.values()) * cost[SLEEP]
    assert taken[WORKERS_SPIN] > 0, "the others are tried again"


def test_a_wait_mode_with_rare_stalls_is_not_chosen():
    """As looking is where somebody else computes: quick, until the core is gone for milliseconds."""
    waiting = WaitTuner(may_spin=True)
    clock, calls = 0.0, 0
    while clock < 60.0:
        calls += 1
        both_spin = 3e-3 if calls % 50 == 0 else 20e-6
        seconds = {SLEEP: 50e-6, WORKERS_SPIN: 80e-6, BOTH_SPIN: both_spin}[waiting.strategy]
        clock += seconds
        waiting.record(seconds, clock)
    assert clock / calls < 1.25 * 50e-6  # 1.6 where it is taken


def test_without_spinning_only_sleeping_is_chosen():
    waiting = WaitTuner(may_spin=False)
    _, taken = run(waiting, dict.fromkeys(SHORT, 100e-6), 0.0, 1.0)
    assert taken[WORKERS_SPIN] == taken[BOTH_SPIN] == 0


def test_a_trial_whose_end_was_interrupted_ends_later(monkeypatch):
    cost = {SLEEP: 900e-6, WORKERS_SPIN: 500e-6, BOTH_SPIN: 200e-6}
    waiting = WaitTuner(may_spin=True)
    with monkeypatch.context() as patch:
        patch.setattr(waiting, "_choose_next", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(waiting, cost, 0.0, 5.0)
    _, taken = run(waiting, cost, 5.0, 2.0)
    assert max(taken, key=taken.__getitem__) == BOTH_SPIN


def interrupted(_now):
    raise KeyboardInterrupt
