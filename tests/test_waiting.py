"""How to wait is chosen by measuring: a pure function of how long calls took and of a clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from envactors.system import Waiting, look_out

seconds = st.floats(1e-6, 1.0)


def way(waiting):
    return waiting.workers_look + waiting.all_look


def run(waiting, cost, clock, calls):
    """Makes calls, each as long as its way of waiting costs; gives the clock and how often each way was taken."""
    taken = [0, 0, 0]
    for _ in range(calls):
        taken[way(waiting)] += 1
        clock += cost[way(waiting)]
        waiting.note(cost[way(waiting)], clock)
    return clock, taken


@given(st.lists(seconds, min_size=3, max_size=3, unique=True))
def test_the_quickest_way_is_found(cost):
    waiting = Waiting(may_look=True)
    run(waiting, cost, 0.0, 36)
    assert way(waiting) == cost.index(min(cost))


@given(st.permutations([1e-6, 1e-5, 1e-4]), st.permutations([0, 1, 2]))
def test_it_is_found_again_when_others_come_or_go(cost, order):
    waiting = Waiting(may_look=True)
    clock, _ = run(waiting, cost, 0.0, 36)
    changed = [cost[i] for i in order]
    for _ in range(60):
        clock, _ = run(waiting, changed, clock + 10.0, 1 + 24)
    assert way(waiting) == changed.index(min(changed))


def test_trying_costs_little():
    waiting = Waiting(may_look=True)
    cost = [100e-6, 500e-6, 500e-6]
    clock, _ = run(waiting, cost, 0.0, 20_000)
    begun = clock
    clock, taken = run(waiting, cost, clock, 100_000)
    assert clock - begun < 1.05 * 100_000 * min(cost)
    assert taken[1] > 0, "the others are tried again"


def test_a_way_that_is_quick_but_for_rare_stalls_is_not_taken():
    """As looking is where somebody else computes: quick, until the core is gone for milliseconds."""
    waiting = Waiting(may_look=True)
    clock, calls = 0.0, 0
    while clock < 60.0:
        calls += 1
        seconds = (50e-6, 80e-6, 3e-3 if calls % 50 == 0 else 20e-6)[way(waiting)]
        clock += seconds
        waiting.note(seconds, clock)
    assert clock / calls < 1.25 * 50e-6  # 1.6 where it is taken


def test_where_nobody_may_look_nobody_does():
    waiting = Waiting(may_look=False)
    _, taken = run(waiting, [1.0, 1e-6, 1e-6], 0.0, 500)
    assert taken == [500, 0, 0]


def test_a_look_ends_by_itself():
    looks = []
    assert not look_out(lambda: looks.append(1))
    assert 100 < len(looks) < 10_000
    assert look_out(lambda: len(looks) > 700 or looks.append(1))
