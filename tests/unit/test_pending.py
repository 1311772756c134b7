"""What waits to be delivered, against a plain model: every env that was asked is delivered exactly once."""

from __future__ import annotations

import pytest
from budget import examples
from helpers import SOON, Echo, wait_until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from plainrows import make_slots

import envactors as ea
from envactors.actor.future import ActorFuture
from envactors.actor.slots import ARRIVED, ASKED, IDLE, POSTED, READY, Op
from envactors.envs.pending import Pending, ReadyResult

some_envs = st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True)


class Deliveries(RuleBasedStateMachine):
    """The model: the state of each env, the number of its request, who gets the result, and what was delivered."""

    @initialize(count=st.integers(1, 5))
    def begin(self, count):
        self.count = count
        self.slots = make_slots(count)
        self.pending = Pending(self.slots)
        self.states = [IDLE] * count
        self.numbers = [0] * count
        self.has_future = [False] * count
        self.settled: list[int] = []
        self.order: list[int] = []
        self.delivered: list[int] = []
        self.last_number = 0

    def of(self, envs):
        return [env for env in envs if env < self.count]

    def move(self, env, state):
        self.states[env] = self.slots.states[env] = state

    @rule(envs=some_envs, submits=st.booleans())
    def ask(self, envs, submits):
        envs = self.of(envs)
        busy = [env for env in envs if self.states[env] != IDLE]
        if busy:
            with pytest.raises(ea.AlreadyPendingError, match=str(busy).replace("[", r"\[")):
                self.pending.check_idle(envs)
            return
        self.pending.check_idle(envs)
        for env in envs:
            self.last_number += 1
            self.numbers[env] = self.last_number
            self.has_future[env] = submits
            self.slots.of[env].op = Op("step", future=ActorFuture(None, None)) if submits else None
            self.move(env, ASKED)

    @rule(env=st.integers(0, 4))
    def go_on(self, env):
        """An env is posted, and its outcome arrives."""
        if env < self.count and self.states[env] in (ASKED, POSTED):
            self.move(env, self.states[env] + 1)

    @rule(env=st.integers(0, 4))
    def run_again(self, env):
        """Its process was lost, or is discarded."""
        if env < self.count and self.states[env] in (POSTED, ARRIVED):
            self.move(env, ASKED)

    @rule(env=st.integers(0, 4), fails=st.booleans())
    def read(self, env, fails):
        if env >= self.count or self.states[env] != ARRIVED:
            return
        number = self.numbers[env]
        if self.has_future[env]:
            self.slots.make_idle(env)
            self.states[env] = IDLE
            self.settled.append(number)
            return
        self.pending.add(env, ReadyResult(error=ValueError(number) if fails else None))
        self.order.append(env)
        self.states[env] = READY

    @rule(most=st.integers(1, 5))
    def receive(self, most):
        """In the order of completion, as many as are wanted."""
        assert self.pending.ready_ids() == self.order
        self.deliver(self.order[:most])

    @rule(envs=some_envs)
    def gather(self, envs):
        envs = self.of(envs)
        assert self.pending.in_flight(envs) == [env for env in envs if self.states[env] in (ASKED, POSTED, ARRIVED)]
        if all(self.states[env] == READY for env in envs):
            self.deliver(envs)

    def deliver(self, envs):
        self.pending.take(envs)
        for env in envs:
            self.states[env] = IDLE
            self.order.remove(env)
            assert self.numbers[env] not in self.delivered
            self.delivered.append(self.numbers[env])

    @invariant()
    def it_is_as_the_model(self):
        if not hasattr(self, "pending"):
            return
        assert list(self.pending.slots.states) == self.states
        assert [env for env in range(self.count) if self.states[env] == READY] == sorted(self.pending.ready)
        mine = [env for env in range(self.count) if self.states[env] != IDLE and not self.has_future[env]]
        assert len(self.pending.receivable) == len(mine)

    def teardown(self):
        """Every request is delivered once in the end."""
        if not hasattr(self, "pending"):
            return
        for env in range(self.count):
            self.go_on(env)
            self.go_on(env)
            self.read(env, fails=False)
        self.deliver(self.pending.ready_ids())
        assert sorted([*self.delivered, *self.settled]) == list(range(1, self.last_number + 1))
        assert self.states == [IDLE] * self.count


Deliveries.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
test_deliveries = Deliveries.TestCase


def test_an_interrupt_disturbs_and_an_error_of_the_library_does_not():
    pending = Pending(make_slots(2))
    before = bytes(pending.slots.states)
    pending.note_failure(ea.AlreadyPendingError("busy"), before)
    assert not pending.is_disturbed
    pending.note_failure(KeyboardInterrupt(), before)
    assert pending.is_disturbed
    assert not pending.was_disturbed, "nothing was asked"
    pending.slots.states[1] = POSTED
    pending.note_failure(KeyboardInterrupt(), before)
    assert pending.was_disturbed


def test_envs_of_open_actors_can_be_used_after_a_request_that_a_closed_one_refuses():
    with ea.VectorEnv([Echo] * 3, backend="thread") as envs:
        envs.reset()
        envs[1].close()
        with pytest.raises(ea.ActorClosedError):
            envs.submit([1, 1, 1])
        wait_until(lambda: envs._core.slots.states[0] == IDLE)  # env 0 was posted before it was refused
        envs.send([1], env_ids=[2])
        assert envs.recv(timeout=SOON).env_ids.tolist() == [2]
        with pytest.raises(ea.ActorClosedError):
            envs.send([1, 1, 1])
        envs.reset(env_ids=[0, 2], timeout=SOON)
        assert envs.step([1, 1], env_ids=[2, 0], timeout=SOON)[1].tolist() == [1, 1]


def test_a_result_whose_delivery_an_exception_has_interrupted_is_not_waited_for():
    slots = make_slots(2)
    pending = Pending(slots)
    for env in range(2):
        slots.states[env] = ARRIVED
        pending.add(env, ReadyResult())

    class Interrupted(dict):
        def pop(self, *_):
            raise KeyboardInterrupt

    pending.ready = Interrupted(pending.ready)
    with pytest.raises(KeyboardInterrupt):
        pending.take([0])
    assert pending.ready_ids() == [1]
    assert len(pending.receivable) == 1
