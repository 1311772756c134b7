"""The lease: however late, lost or out of order beats and echoes are, no two processes of an actor run at once."""

from __future__ import annotations

import heapq

from hypothesis import given, settings
from hypothesis import strategies as st

from envactors.remote.lease import NodeLease, WorkerLease

LEASE, HEARTBEAT = 10.0, 1.0
rates = st.floats(0.99, 1.01)
# What becomes of each beat or echo on its way: seconds until it comes, or None if it is lost.
journeys = st.lists(st.none() | st.floats(0.0, 30.0), max_size=60)


@settings(max_examples=500, deadline=None)
@given(rates, rates, st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), journeys, journeys)
def test_the_caller_never_counts_a_lease_as_over_that_is_not(rate, callers_rate, offset, callers_offset, beats, echoes):
    def at_agent(time):
        return offset + rate * time

    def at_caller(time):
        return callers_offset + callers_rate * time

    def true_time_of_agent(clock):
        return (clock - offset) / rate

    def true_time_of_caller(clock):
        return (clock - callers_offset) / callers_rate

    agent, caller = WorkerLease(LEASE, at_agent(0.0)), NodeLease(LEASE, at_caller(0.0))
    newest = at_agent(0.0)
    caller.echo(at_caller(0.0))
    events = [(number * HEARTBEAT + delay, number, "beat", at_agent(number * HEARTBEAT))
              for number, delay in enumerate(beats) if delay is not None]  # fmt: skip
    heapq.heapify(events)
    ways = iter(echoes)
    while events:
        time, number, what, stamp = heapq.heappop(events)
        if what == "beat":
            newest = max(newest, stamp)
            if true_time_of_caller(caller.over_at) <= time:
                break  # it is given up, and hears nothing any more
            caller.hear(at_caller(time))
            caller.echo(at_caller(time))
            if (delay := next(ways, None)) is not None:
                heapq.heappush(events, (time + delay, number, "echo", newest))
        elif true_time_of_agent(agent.until) > time:  # else its workers have been ended
            agent.renew(stamp)
    assert true_time_of_agent(agent.until) <= true_time_of_caller(caller.over_at)


def test_a_beat_that_was_held_back_prolongs_nothing():
    agent = WorkerLease(LEASE, 0.0)
    agent.renew(3.0)
    agent.renew(1.0)
    assert agent.until == 13.0


def test_a_node_is_silent_a_lease_after_it_was_heard_of():
    caller = NodeLease(LEASE, 100.0)
    assert caller.silent_at == 110.0
    caller.hear(104.0)
    caller.echo(104.0)
    assert (caller.silent_at, caller.over_at) == (114.0, 115.0)
