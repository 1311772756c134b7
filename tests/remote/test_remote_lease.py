"""The lease: however late, lost or out of order beats and echoes are, no two processes of an actor run at once."""

from __future__ import annotations

from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from envactors.remote.lease import NodeLease, WorkerLease

LEASE = 10.0
rates = st.floats(0.99, 1.01)
moments = st.floats(0.0, 3 * LEASE)
choices = st.integers(0, 1 << 16)


class Clock:
    """A clock that may be too fast or too slow, and shows anything at the beginning."""

    def __init__(self, rate, shown):
        self._rate, self._shown = rate, shown

    def at(self, time):
        return self._shown + self._rate * time

    def true_time(self, shown):
        return (shown - self._shown) / self._rate


class LeaseMachine(RuleBasedStateMachine):
    """An agent and its caller, each with a clock, and a network that delays and drops at random."""

    @initialize(
        rate=rates, callers_rate=rates, shown=st.floats(0.0, 1e6), callers_shown=st.floats(0.0, 1e6), late=moments
    )
    def greet(self, rate, callers_rate, shown, callers_shown, late):
        self.time = 0.0
        self.agents_clock, self.callers_clock = Clock(rate, shown), Clock(callers_rate, callers_shown)
        self.agent = WorkerLease(LEASE, self.agents_clock.at(0.0))
        self.time += late
        self.caller = NodeLease(LEASE, self.callers_clock.at(self.time))
        self.is_given_up = False
        # The stamps of those on their way, in any order.
        self.beats, self.echoes = [], []

    @rule(seconds=moments)
    def wait(self, seconds):
        self.time += seconds

    @rule()
    def send_beat(self):
        self.beats.append(self.agents_clock.at(self.time))

    @precondition(lambda self: self.beats)
    @rule(which=choices)
    def lose_beat(self, which):
        self.beats.pop(which % len(self.beats))

    @precondition(lambda self: self.echoes)
    @rule(which=choices)
    def lose_echo(self, which):
        self.echoes.pop(which % len(self.echoes))

    @precondition(lambda self: self.beats)
    @rule(which=choices, again=st.booleans())
    def deliver_beat(self, which, again):
        stamp = self.beats[which % len(self.beats)]
        if not again:
            self.beats.remove(stamp)
        if not self.is_given_up:
            now = self.callers_clock.at(self.time)
            self.caller.hear(now)
            self.caller.echo(now)
            self.echoes.append(stamp)

    @precondition(lambda self: self.echoes)
    @rule(which=choices, again=st.booleans())
    def deliver_echo(self, which, again):
        # Also to an agent that has ended, which is more than may happen.
        stamp = self.echoes[which % len(self.echoes)]
        if not again:
            self.echoes.remove(stamp)
        self.agent.renew(stamp)

    @rule()
    def give_up(self):
        """Its link may break at any time."""
        self.is_given_up = True

    @rule()
    def look_at_the_time(self):
        self.is_given_up |= self.callers_clock.at(self.time) >= self.caller.silent_at

    @invariant()
    def no_lease_is_over_for_the_caller_that_is_not_for_the_agent(self):
        is_over = self.callers_clock.at(self.time) >= self.caller.over_at
        may_run = self.agents_clock.at(self.time) < self.agent.until
        assert not (is_over and may_run)
        # Nor at any later time, even if nothing more is delivered.
        until = self.agents_clock.true_time(self.agent.until)
        assert until <= self.callers_clock.true_time(self.caller.over_at)


def test_the_caller_never_counts_a_lease_as_over_that_is_not():
    machine = LeaseMachine.TestCase
    machine.settings = settings(max_examples=examples(300), stateful_step_count=40)
    machine().runTest()


@settings(max_examples=examples(300))
@given(rates, st.floats(0.0, 2 * LEASE), st.floats(0.0, LEASE / 2), st.lists(st.floats(0.0, LEASE / 20), min_size=1))
def test_a_cut_of_half_a_lease_ends_nothing(rate, cut_at, length, delays):
    """With a heartbeat of a tenth of the lease, as it is unless told otherwise, and a network that is quick else."""
    clock, heartbeat = Clock(rate, 0.0), LEASE / 10
    agent, caller = WorkerLease(LEASE, 0.0), NodeLease(LEASE, 0.0)

    def deliver(time, number):
        """Return when what is sent comes, in order: what is cut comes after the cut."""
        arrives = time + delays[number % len(delays)]
        return max(arrives, cut_at + length) if time < cut_at + length and arrives > cut_at else arrives

    last_beat = last_echo = 0.0
    for number in range(60):
        sent = number * heartbeat
        last_beat = max(last_beat, deliver(sent, 2 * number))
        assert last_beat < caller.silent_at
        caller.hear(last_beat)
        caller.echo(last_beat)
        last_echo = max(last_echo, deliver(last_beat, 2 * number + 1))
        assert clock.at(last_echo) < agent.until
        agent.renew(clock.at(sent))


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
