"""The request table against a plain model: nothing lost, nothing twice, always in order."""

from __future__ import annotations

from collections import deque

import pytest
from budget import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from envactors.actor.batch_step import FrameBatchStep, StepRequest
from envactors.actor.future import ActorFuture
from envactors.actor.requests import CallRequest, RequestTable
from envactors.wire.messages import Kind, Step


def make_call(bound: int | None = None) -> CallRequest:
    return CallRequest("work", 0, None, ActorFuture(None, None), bound=bound, kind=Kind.CALL)


def make_batch(envs) -> FrameBatchStep:
    requests = []
    for env in range(envs):
        request = StepRequest(Step(env, 0, False, None), env, lambda *_: None, 0, pickled=False)
        request.future = ActorFuture(None, None)
        requests.append(request)
    return FrameBatchStep(requests, stream=True)


class PipeliningStep:
    """As a batch step in shared memory: no future waits for it, and any number may run."""

    pipelines = True
    parts = ()

    def __init__(self):
        self.call_id = 0
        self.started = 0.0

    def withdraw(self, future):
        return None


class Tables(RuleBasedStateMachine):
    """The model: a list of what runs, a list of what waits, and what was taken out."""

    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable()
        self.running: list[object] = []
        self.waiting: list[object] = []
        self.taken: list[object] = []
        self.last_id = 0

    @rule(
        target=entries,
        entry=st.one_of(
            st.builds(make_call, st.none() | st.integers(0, 1)),
            st.builds(make_batch, st.integers(1, 3)),
            st.builds(PipeliningStep),
        ),
        at_front=st.booleans(),
    )
    def add(self, entry, at_front):
        self.table.add(entry, at_front=at_front)
        self.last_id += 1
        assert entry.call_id == self.last_id
        assert all(part.call_id == self.last_id for part in entry.parts)
        self.waiting.insert(0 if at_front else len(self.waiting), entry)
        return entry

    @rule()
    def start_next(self):
        """At most one call runs at a time; batch steps that pipeline run behind others that do, and behind no call."""
        may_run = bool(self.waiting) and (
            not self.running or (self.waiting[0].pipelines and all(entry.pipelines for entry in self.running))
        )
        started = self.table.start_next()
        if not may_run:
            assert started is None
            return
        self.running.append(self.waiting.pop(0))
        assert started is self.running[-1]
        started.started += 1.0  # as is noted when it is sent

    @rule()
    def the_oldest_ends(self):
        if self.running:
            self.table.running.remove(self.running[0])
            self.taken.append(self.running.pop(0))

    @rule(entry=entries)
    def a_reply_finds_the_running_entry_and_no_other(self, entry):
        found = self.table.find_running(entry.call_id)
        assert found is (entry if entry in self.running else None)

    @rule(beyond=st.integers(1, 1000))
    def a_reply_to_nothing_finds_nothing(self, beyond):
        assert self.table.find_running(self.last_id + beyond) is None
        assert self.table.find_running(-beyond) is None

    @rule()
    def interrupt(self):
        assert self.table.interrupt() == self.running
        self.taken += self.running
        self.running = []

    @rule()
    def interrupt_and_put_back(self):
        """As after a death: what ran comes before all that waits, in its order, under the numbers that it has."""
        interrupted = self.table.interrupt()
        assert interrupted == self.running
        numbers = [entry.call_id for entry in interrupted]
        for entry in reversed(interrupted):
            self.table.queue.appendleft(entry)
        assert [entry.call_id for entry in interrupted] == numbers
        self.waiting[:0] = self.running
        self.running = []

    @rule(entry=entries, part=st.integers(0, 2), retry=st.booleans())
    def withdraw(self, entry, part, retry):
        if not entry.parts:
            return
        request = entry.parts[part % len(entry.parts)]
        withdrawn = self.table.withdraw(request.future, retry=retry)
        if entry in self.waiting and (entry.started > 0.0) is retry:
            assert withdrawn is request
            if isinstance(entry, CallRequest) or not entry.parts:
                self.waiting.remove(entry)
                self.taken.append(entry)
            else:
                assert request not in entry.parts, "the others of its batch still wait"
        else:
            assert withdrawn is None

    @rule(retry=st.booleans())
    def withdraw_a_stranger(self, retry):
        assert self.table.withdraw(ActorFuture(None, None), retry=retry) is None

    @rule(incarnation=st.integers(0, 2))
    def withdraw_all(self, incarnation):
        def unwanted(entry):
            return any(part.bound == incarnation for part in entry.parts)

        expected = [entry for entry in self.waiting if unwanted(entry)]
        assert self.table.withdraw_all(unwanted) == expected
        self.waiting = [entry for entry in self.waiting if entry not in expected]
        self.taken += expected

    @rule(kept=st.lists(st.booleans(), max_size=8))
    def drain(self, kept):
        """Drained requests may be queued again while the rest is handled, as a dead actor does after a renewal."""
        drained = self.table.withdraw_all(lambda _: True)
        assert list(self.table.queue) == []
        expected, self.waiting = self.waiting, []
        for i, entry in enumerate(drained):
            assert entry is expected[i]
            if i < len(kept) and kept[i]:
                self.table.queue.append(entry)
                self.waiting.append(entry)
            else:
                self.taken.append(entry)

    @invariant()
    def the_table_is_as_the_model(self):
        assert self.table.running == self.running
        assert list(self.table.queue) == self.waiting

    @invariant()
    def every_entry_is_in_one_place(self):
        places = [*self.waiting, *self.taken, *self.running]
        assert sorted(entry.call_id for entry in places) == list(range(1, self.last_id + 1))

    @invariant()
    def at_most_one_entry_runs_unless_all_pipeline(self):
        assert len(self.running) <= 1 or all(entry.pipelines for entry in self.running)


Tables.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
test_tables = Tables.TestCase


class Interrupted(deque):
    """A queue whose next `popleft` is interrupted, before or after it has taken the entry out."""

    when: str | None = None

    def popleft(self):
        when, self.when = self.when, None
        if when == "before":
            raise KeyboardInterrupt
        entry = super().popleft()
        if when == "after":
            raise KeyboardInterrupt
        return entry


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_in_the_middle_of_a_start_loses_nothing(when):
    """What interrupts a change takes out what runs; the entry is there then, once."""
    table = RequestTable()
    first, second = make_call(), make_call()
    table.queue = Interrupted()
    table.add(first)
    table.add(second)
    table.queue.when = when
    with pytest.raises(KeyboardInterrupt):
        table.start_next()
    assert table.interrupt() == [first]
    assert table.start_next() is second
    assert table.interrupt() == [second]
    assert table.start_next() is None
