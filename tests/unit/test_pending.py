"""What is in flight, against a plain model: every env that was asked is delivered exactly once."""

from __future__ import annotations

import pytest
from budget import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import envactors as ea
from envactors.vector.pending import IDLE, IN_FLIGHT, READY, SUBMITTED, Pending, ReadyResult

some_envs = st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True)


class Deliveries(RuleBasedStateMachine):
    """The model: which envs were asked and by whom, which results have come, and what was delivered how often."""

    @initialize(count=st.integers(1, 5))
    def begin(self, count):
        self.count = count
        self.pending = Pending(count)
        self.asked: dict[int, int] = {}  # env -> number of the request
        self.submitted: set[int] = set()
        self.ready: dict[int, int] = {}
        self.delivered: list[int] = []
        self.last_number = 0

    def of(self, envs):
        return [env for env in envs if env < self.count]

    @rule(envs=some_envs, all_at_once=st.booleans(), submits=st.booleans())
    def ask(self, envs, all_at_once, submits):
        envs = list(range(self.count)) if all_at_once else self.of(envs)
        busy = [env for env in envs if env in self.asked or env in self.ready or env in self.submitted]
        if busy:
            before = bytes(self.pending.states)
            with pytest.raises(ea.AlreadyPendingError, match=str(busy).replace("[", r"\[")):
                self.pending.check_idle(envs)
            assert bytes(self.pending.states) == before
            return
        self.pending.check_idle(envs)
        if submits:
            self.pending.mark(envs, SUBMITTED)
            self.submitted |= set(envs)
            return
        if all_at_once and self.pending.states == self.pending.all_idle:
            self.pending.states[:] = self.pending.all_in_flight
        else:
            self.pending.mark(envs, IN_FLIGHT)
        for env in envs:
            self.last_number += 1
            self.asked[env] = self.last_number

    @rule(env=st.integers(0, 4), fails=st.booleans())
    def a_result_comes(self, env, fails):
        """Also one that nobody waits for, or that has come already: it is dropped."""
        if env >= self.count:
            return
        number = self.asked.pop(env, None)
        error = ValueError(number) if fails else None
        self.pending.complete(ReadyResult(env, float(number or 0), None, error))
        if number is not None:
            self.ready[env] = number

    @rule(env=st.integers(0, 4))
    def a_future_is_settled(self, env):
        if env in self.submitted:
            self.submitted.discard(env)
            self.pending.states[env] = IDLE

    @rule(most=st.integers(1, 5))
    def receive(self, most):
        """In the order of completion, as many as are wanted."""
        results = sorted(self.pending.ready.values(), key=lambda result: result.when)[:most]
        self.deliver([result.env_id for result in results])

    @rule(envs=some_envs)
    def gather(self, envs):
        envs = self.of(envs)
        assert self.pending.in_flight(envs) == [env for env in envs if env in self.asked]
        if all(env in self.ready for env in envs):
            self.deliver(envs)

    def deliver(self, envs):
        results = self.pending.take(envs)
        assert [result.env_id for result in results] == envs
        for result in results:
            number = self.ready.pop(result.env_id)
            assert result.when == number
            assert number not in self.delivered
            self.delivered.append(number)

    @invariant()
    def it_is_as_the_model(self):
        if not hasattr(self, "pending"):
            return
        expected = [IDLE] * self.count
        for envs, state in ((self.asked, IN_FLIGHT), (self.ready, READY), (self.submitted, SUBMITTED)):
            for env in envs:
                assert expected[env] == IDLE
                expected[env] = state
        assert list(self.pending.states) == expected
        assert self.pending.ready.keys() == self.ready.keys()
        assert self.pending.receivable == len(self.asked) + len(self.ready)

    def teardown(self):
        """Every request is delivered once in the end."""
        if not hasattr(self, "pending"):
            return
        for env in list(self.asked):
            self.a_result_comes(env, fails=False)
        self.deliver(list(self.ready))
        assert sorted(self.delivered) == list(range(1, self.last_number + 1))
        for env in list(self.submitted):
            self.a_future_is_settled(env)
        assert self.pending.states == self.pending.all_idle


Deliveries.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
test_deliveries = Deliveries.TestCase
