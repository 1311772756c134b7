"""The request table against a plain model: nothing lost, nothing twice, always in order."""

from __future__ import annotations

from collections import deque

import pytest
from budget import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

import envactors as ea
from envactors.actor.future import ActorFuture
from envactors.actor.requests import CallIds, CallRequest, Group, RequestTable
from envactors.mailbox.control_page import METHOD_CALL, METHOD_RESET, METHOD_STEP, PAGE, SINCE, ControlPage
from envactors.mailbox.messages import Kind
from envactors.system.polling import Doorbell


def make_call(bound: int | None = None) -> CallRequest:
    return CallRequest("work", 0, future=ActorFuture(None, None), bound=bound, kind=Kind.CALL)


def make_group(indices) -> Group:
    return Group(list(indices))


class Tables(RuleBasedStateMachine):
    """The model: the call that runs, a list of what waits, and what was taken out."""

    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable(CallIds())
        self.running: CallRequest | None = None
        self.waiting: list[object] = []
        self.taken: list[object] = []
        self.added: list[object] = []
        self.last_id = 0

    @rule(
        target=entries,
        entry=st.one_of(
            st.builds(make_call, st.none() | st.integers(0, 1)),
            st.builds(make_group, st.lists(st.integers(0, 3), min_size=1, unique=True)),
        ),
        at_front=st.booleans(),
    )
    def add(self, entry, at_front):
        self.table.add(entry, at_front=at_front)
        self.added.append(entry)
        self.waiting.insert(0 if at_front else len(self.waiting), entry)
        if isinstance(entry, CallRequest):
            self.last_id += 1
            assert entry.call_id == self.last_id
        return entry

    @rule()
    def post_rows(self):
        """Rows take their numbers from the same count as calls."""
        self.table.ids.last += 1
        self.last_id += 1

    @precondition(lambda self: self.running is None and self.waiting and isinstance(self.waiting[0], CallRequest))
    @rule()
    def start_the_next_call(self):
        started = self.table.start_call(self.table.queue[0])
        self.running = self.waiting.pop(0)
        assert started is self.running
        assert started.future.running()
        assert not any(entry.future.running() for entry in self.waiting if isinstance(entry, CallRequest))

    @precondition(lambda self: self.waiting and isinstance(self.waiting[0], Group))
    @rule()
    def post_the_next_group(self):
        self.taken.append(self.table.queue.popleft())
        self.waiting.pop(0)

    @rule()
    def the_call_ends(self):
        if self.running is not None:
            self.table.running = None
            self.taken.append(self.running)
            self.running = None

    @rule()
    def interrupt(self):
        assert self.table.interrupt() is self.running
        if self.running is not None:
            self.taken.append(self.running)
        self.running = None

    @rule()
    def interrupt_and_put_back(self):
        """As after a crash: what had not begun comes before all that waits, under the number that it has."""
        interrupted = self.table.interrupt()
        assert interrupted is self.running
        if interrupted is not None:
            self.table.queue.appendleft(interrupted)
            self.waiting.insert(0, interrupted)
        self.running = None

    @rule(entry=entries)
    def withdraw(self, entry):
        if isinstance(entry, Group):
            return
        withdrawn = self.table.withdraw(entry.future)
        if entry not in self.waiting:
            assert withdrawn is None, "it runs, or was taken out before"
            return
        assert withdrawn is entry
        self.waiting.remove(entry)
        self.taken.append(entry)

    @rule()
    def withdraw_a_stranger(self):
        assert self.table.withdraw(ActorFuture(None, None)) is None

    @rule(bound=st.integers(0, 2))
    def withdraw_calls(self, bound):
        expected = [entry for entry in self.waiting if isinstance(entry, CallRequest) and entry.bound == bound]
        assert self.table.withdraw_calls(lambda call: call.bound == bound) == expected
        self.waiting = [entry for entry in self.waiting if entry not in expected]
        self.taken += expected

    @rule(unwanted=st.integers(0, 3))
    def take_envs_out_of_groups(self, unwanted):
        """A group that is left without envs leaves the queue."""
        expected = [entry for entry in self.waiting if isinstance(entry, Group)]
        found = []
        for group in self.table.groups():
            found.append(group)
            if unwanted in group.indices:
                group.indices.remove(unwanted)
        assert found == expected
        emptied = [group for group in expected if not group.indices]
        self.waiting = [entry for entry in self.waiting if entry not in emptied]
        self.taken += emptied

    @invariant()
    def the_table_is_as_the_model(self):
        assert self.table.running is self.running
        assert list(self.table.queue) == self.waiting
        assert self.table.ids.last == self.last_id

    @invariant()
    def every_entry_is_in_one_place(self):
        places = [*self.waiting, *self.taken, *([] if self.running is None else [self.running])]
        assert sorted(map(id, places)) == sorted(map(id, self.added))


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
    """What interrupts a change takes out what runs; the call is there then, once."""
    table = RequestTable(CallIds())
    first, second = make_call(), make_call()
    table.queue = Interrupted()
    table.add(first)
    table.add(second)
    table.queue.when = when
    with pytest.raises(KeyboardInterrupt):
        table.start_call(first)
    assert table.interrupt() is first
    assert table.start_call(table.queue[0]) is second
    assert table.interrupt() is second
    assert not table.queue


# Deadlines -----------------------------------------------------------------------------------------------


@pytest.fixture
def page():
    page = ControlPage(bytearray(PAGE), Doorbell(), Doorbell())
    yield page
    page.to_worker.close()
    page.to_parent.close()


def facts(request):
    return request.index, request.method, request.started, request.timeout


def test_the_deadline_of_a_call_counts_from_when_it_was_sent(page):
    call = CallRequest("work", 3, timeout=5.0, kind=Kind.CALL, started=100.0)
    assert facts(call.turn(page, ea.Deadlines(call=1.0))) == (3, "work", 100.0, 5.0)


@pytest.mark.parametrize(
    ("number", "method", "limit"),
    [(METHOD_CALL, "call", 500.0), (METHOD_STEP, "step", 5.0), (METHOD_RESET, "reset", 50.0)],
)
def test_each_part_of_a_replay_has_the_deadline_of_its_method(page, number, method, limit):
    deadlines = ea.Deadlines(call=500.0, step=5.0, reset=50.0)
    replay = CallRequest("replay", 3, kind=Kind.REPLAY, call_id=40, started=100.0)
    page.last_call = 40
    page.start_request(40, METHOD_CALL, 0)
    page.record_env(number, 0)
    turn = replay.turn(page, deadlines)
    assert facts(turn) == (3, method, page.times[SINCE], limit)
    replay.on_overdue(turn, page)
    assert replay.timeout == limit, "for the error"


def test_a_replay_that_has_not_begun_is_late_from_when_it_was_sent(page):
    replay = CallRequest("replay", 3, kind=Kind.REPLAY, call_id=40, started=100.0)
    page.last_call = 40
    page.start_request(39, METHOD_RESET, 0)  # another request's progress says nothing of it
    assert facts(replay.turn(page, ea.Deadlines(step=5.0, reset=50.0))) == (3, "step", 100.0, 5.0)
    assert facts(replay.turn(page, ea.Deadlines(reset=50.0))) == (3, "step", 100.0, None)
