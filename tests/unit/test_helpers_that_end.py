"""A helper process that ends again before the thread that waits for it has looked."""

from __future__ import annotations

import threading

import pytest

from envactors.process import helper as helpers
from envactors.process.helper import Helper, HelperProcess


class Fleeting(HelperProcess):
    """A process that has ended already, unless it stays."""

    def __init__(self, *, stays):
        super().__init__()
        self.stays = stays
        self._ended = threading.Event()
        if not stays:
            self._ended.set()

    def wait(self):
        self._ended.wait()

    def kill(self):
        self._ended.set()

    def hang_up(self):
        self._ended.set()


class LateCondition(threading.Condition):
    """Wakes threads that wait for a process only once that has ended, unless it stays."""

    def __init__(self, helper, begin):
        super().__init__()
        self._helper = helper
        self._begin = begin

    def notify_all(self):
        if self._helper._running is None or self._helper._running.stays:
            super().notify_all()

    def wait_for(self, predicate, timeout=None):
        self._begin.set()
        super().notify_all()
        return super().wait_for(predicate, timeout)


@pytest.fixture
def make_helper(monkeypatch):
    """Returns a function that makes a helper, whose first process starts once a thread waits for it."""
    monkeypatch.setattr(helpers, "_PAUSE", 0.001)
    made = []

    def make(*starts):
        begin, left = threading.Event(), list(starts)

        def start():
            begin.wait()
            begun = left.pop(0) if left else starts[-1]
            if isinstance(begun, Exception):
                raise begun
            return Fleeting(stays=begun)

        helper = Helper("fleeting", start)
        helper._changed = LateCondition(helper, begin)
        made.append(helper)
        return helper

    yield make
    for helper in made:
        helper.stop()


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_the_next_process_is_waited_for_if_one_has_ended_again(make_helper, lost):
    assert make_helper(*[False] * lost, True).current().stays


def test_a_thread_waits_for_a_limited_number_of_processes(make_helper):
    with pytest.raises(ConnectionError, match="ended 10 times in a row"):
        make_helper(False).current()


def test_a_process_that_cannot_be_started_is_an_error_at_once(make_helper):
    with pytest.raises(FileNotFoundError):
        make_helper(False, FileNotFoundError()).current()
