"""The request table against a plain model: nothing lost, nothing twice, always in order."""

from __future__ import annotations

import itertools
import sys

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from envactors.actor.requests import Request, RequestTable


def make_request(method: str = "work", bound: int | None = None) -> Request:
    # The table looks at a future's identity and at nothing else.
    return Request(2, b"", method, 0, None, 0, object(), bound)


class Tables(RuleBasedStateMachine):
    """The model: one that runs, a list that waits, and the set of those that were taken out."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable()
        self.running: Request | None = None
        self.waiting: list[Request] = []
        self.taken: list[Request] = []
        self.last_id = 0

    @rule(target=requests, bound=st.none() | st.integers(0, 1))
    def add(self, bound):
        request = make_request(bound=bound)
        self.table.add(request)
        assert request.call_id == self.last_id + 1
        self.last_id = request.call_id
        self.waiting.append(request)
        return request

    @rule()
    def start(self):
        started = self.table.start()
        if self.running is not None or not self.waiting:
            assert started is None
            return
        self.running = self.waiting.pop(0)
        assert started is self.running
        started.started += 1.0  # as the supervisor notes it when it sends the request

    @rule()
    def finish(self):
        call_id = 0 if self.running is None else self.running.call_id
        finished = self.table.finish(call_id)
        assert finished is self.running
        self.take(finished)

    @rule(request=requests)
    def a_late_reply_takes_nothing_out(self, request):
        if request is not self.running:
            assert self.table.finish(request.call_id) is None

    @rule(beyond=st.integers(1, 1000))
    def a_reply_to_nothing_takes_nothing_out(self, beyond):
        assert self.table.finish(self.last_id + beyond) is None
        assert self.table.finish(-beyond) is None

    @rule()
    def interrupt(self):
        interrupted = self.table.interrupt()
        assert interrupted is self.running
        self.take(interrupted)

    @rule()
    def interrupt_and_put_back(self):
        request = self.table.interrupt()
        assert request is self.running
        self.running = None
        if request is not None:
            self.table.put_back(request)
            self.waiting.insert(0, request)

    @rule(request=requests, retry=st.booleans())
    def withdraw(self, request, retry):
        withdrawn = self.table.withdraw(request.future, retry=retry)
        if request in self.waiting and (request.started > 0.0) is retry:
            assert withdrawn is request
            self.waiting.remove(request)
            self.taken.append(request)
        else:
            assert withdrawn is None

    @rule()
    def withdraw_a_stranger(self):
        assert self.table.withdraw(object()) is None
        assert self.table.withdraw(object(), retry=True) is None

    @rule(kept=st.lists(st.booleans(), max_size=8))
    def drain_and_restore(self, kept):
        drained = self.table.drain()
        assert drained == self.waiting
        assert len(self.table.queue) == 0
        self.waiting = []
        for i, request in enumerate(drained):
            if i < len(kept) and kept[i]:
                self.table.restore(request)
                self.waiting.append(request)
            else:
                self.taken.append(request)

    @rule(target=requests, bound=st.sampled_from([None, 0, 1]))
    def add_first(self, bound):
        request = make_request(bound=bound)
        self.table.add_first(request)
        assert request.call_id == self.last_id + 1
        self.last_id = request.call_id
        self.waiting.insert(0, request)
        return request

    @rule(target=requests)
    def add_two(self):
        return multiple(self.add(None), self.add(1))

    @rule(incarnation=st.integers(0, 2))
    def withdraw_all(self, incarnation):
        bound = [request for request in self.waiting if request.bound == incarnation]
        assert self.table.withdraw_all(lambda request: request.bound == incarnation) == bound
        self.waiting = [request for request in self.waiting if request not in bound]
        self.taken += bound

    def take(self, request):
        self.running = None
        if request is not None:
            self.taken.append(request)

    @invariant()
    def the_table_is_as_the_model(self):
        assert self.table.running is self.running
        assert len(self.table.queue) == len(self.waiting)

    @invariant()
    def every_request_is_in_one_place(self):
        places = [*self.waiting, *self.taken, *([] if self.running is None else [self.running])]
        assert sorted(request.call_id for request in places) == list(range(1, self.last_id + 1))

    def teardown(self):
        # What is left comes out in the order of the model.
        assert self.table.interrupt() is self.running
        while self.waiting:
            assert self.table.start() is self.waiting[0]
            assert self.table.finish(self.waiting.pop(0).call_id) is not None
        assert self.table.start() is None


Tables.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_tables = Tables.TestCase


def test_an_interrupt_at_any_line_of_start_loses_nothing():
    """Ctrl-C may come between any two lines; afterwards the request is there, once."""
    for line in itertools.count():
        table = RequestTable()
        first, second = make_request("first"), make_request("second")
        table.add(first)
        table.add(second)

        interrupted = interrupt_at_line(line, table.start)

        if table.interrupt() is None:
            assert table.start() is first
            assert table.interrupt() is first
        assert table.start() is second
        assert table.finish(second.call_id) is second
        assert table.start() is None
        if not interrupted:
            break
    assert line > 1, "the interrupts came"


def interrupt_at_line(line: int, method) -> bool:
    """Calls a method with a KeyboardInterrupt before its line number ``line``; False when it has no such line."""
    lines = itertools.count()

    def trace(frame, event, _arg):
        if frame.f_code is not method.__func__.__code__:
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        method()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
