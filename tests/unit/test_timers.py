"""The deadlines of one actor, against a plain model."""

from __future__ import annotations

from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from envactors.actor.timers import Timers

kinds = st.sampled_from(["start", "call", "kill", "close", "backoff"])
times = st.floats(0.0, 100.0) | st.just(float("inf"))
changes = st.lists(
    st.one_of(
        st.tuples(st.just("set"), kinds, times),
        st.tuples(st.just("set_earlier"), kinds, times),
        st.tuples(st.just("cancel"), kinds),
        st.tuples(st.just("pop_due"), times),
    )
)


@settings(max_examples=examples(200))
@given(changes)
def test_no_deadline_is_lost_and_none_passes_twice(changes):
    told, expected = [], {}
    timers = Timers(told.append)
    for change, *arguments in changes:
        if change in ("set", "set_earlier"):
            kind, when = arguments
            getattr(timers, change)(*arguments)
            if change == "set" or when < expected.get(kind, float("inf")):
                expected[kind] = when
                # The reactor sleeps no longer than until what it was told of.
                assert when == float("inf") or told[-1] == when
        elif change == "cancel":
            expected.pop(arguments[0], None)
            timers.cancel(*arguments)
        else:
            (now,) = arguments
            due = {kind for kind, when in expected.items() if when <= now}
            found = timers.pop_due(now)
            assert set(found) == due
            assert len(found) == len(due)
            expected = {kind: when for kind, when in expected.items() if kind not in due}
        assert timers.next() == min(expected.values(), default=float("inf"))
    assert float("inf") not in told
