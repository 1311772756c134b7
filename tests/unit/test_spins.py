"""Spinning on counters in shared memory: what ends a spin, and how long it lasts when nothing does."""

from __future__ import annotations

import array
import itertools
import sys
import threading
import types

import pytest
from helpers import SOON
from interleaving import Lines, StoppingThread

from envactors.mailbox import control_page
from envactors.mailbox.control_page import (
    AWAITED,
    NO_SPIN,
    POSTS,
    SPINNING,
    WAIT,
    ControlPage,
    page_size,
    spin_until_all,
)

ROUNDS = 20


def counters(*values):
    return memoryview(array.array("q", values))


class Scripted:
    """Memory in which the given values are seen one after the other, and then the last one forever."""

    def __init__(self, *values, after_each_look=lambda: None):
        self.values = itertools.chain(values, itertools.repeat(values[-1]))
        self.looks = 0
        self.after_each_look = after_each_look

    def __getitem__(self, index):
        assert index == 3
        self.looks += 1
        self.after_each_look()
        return next(self.values)


def spin(memory):
    """Waits until one counter is 1."""
    return spin_until_all([(memory, 1)], 3)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the spins, which stands still: on a busy machine a real one ends them after any number of rounds."""
    clock = [0.0]
    monkeypatch.setattr(control_page, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("looks_in_vain", [0, 1, 3, 4, 5, 50, 400])
def test_spin_ends_with_the_read_that_sees_the_change(looks_in_vain):
    memory = Scripted(*[0] * looks_in_vain, 1)
    assert spin(memory)
    assert memory.looks == looks_in_vain + 1


@pytest.mark.usefixtures("clock")
def test_spin_ends_without_a_change():
    memory = Scripted(0)
    assert not spin(memory)
    assert 0 < memory.looks < 10_000
    assert not spin(counters(0, 0, 0, 0))
    assert spin(counters(0, 0, 0, 1))


def test_spin_is_bounded_in_time_when_each_round_loses_the_core(clock):
    def lose_the_core():
        clock[0] += 0.004

    memory = Scripted(0, after_each_look=lose_the_core)
    assert not spin(memory)
    assert clock[0] < 0.02  # 2.4 without a bound in seconds


@pytest.mark.parametrize("value", [0, 1])
def test_a_spin_calls_no_python_function(value):
    memory, calls = counters(0, 0, 0, value), []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        spin_until_all([(memory, 1)], 3)
    finally:
        sys.setprofile(before)
    assert calls == ["spin_until_all"]


def test_all_counters_have_to_reach_their_targets():
    one, two = counters(0, 4), counters(0, 9)
    assert spin_until_all([], 1)
    assert spin_until_all([(one, 4), (two, 8)], 1)
    for pairs in ([(one, 5), (two, 8)], [(one, 4), (two, 10)]):
        assert not spin_until_all(pairs, 1)


@pytest.mark.usefixtures("clock")
def test_counter_that_has_reached_its_target_is_not_read_again():
    quick, slow = Scripted(2), Scripted(*[1] * 100, 2)
    assert spin_until_all([(quick, 2), (slow, 2)], 3)
    assert (quick.looks, slow.looks) == (1, 101)


def test_two_threads_take_turns_by_spinning():
    """One asks by writing a number, the other answers by writing it to a counter of its own."""
    asked, answered = counters(0), counters(0)
    seen = []

    def answer():
        for number in range(ROUNDS):
            while not spin_until_all([(asked, number + 1)], 0):
                pass
            seen.append(asked[0])
            answered[0] = number + 1

    thread = threading.Thread(target=answer)
    thread.start()
    for number in range(1, ROUNDS + 1):
        asked[0] = number
        while not spin_until_all([(asked, number), (answered, number)], 0):
            assert thread.is_alive() or answered[0] == number
    thread.join(SOON)
    assert seen == list(range(1, ROUNDS + 1))
    assert not thread.is_alive()


class Bell:
    def __init__(self):
        self.rings = 0

    def ring_open(self):
        self.rings += 1


@pytest.fixture
def pages():
    """The page of the parent, and that of the worker, over the same memory."""
    memory, bell = bytearray(page_size(1)), Bell()
    return ControlPage(memory, bell, bell), ControlPage(memory, bell, bell)


def sees(page, handled):
    """Whether a worker sees a post before it falls asleep."""
    page.spin_for_post(handled)
    return page.counters[POSTS] > handled


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("stopped", ["look", "post"])
def test_a_post_is_seen_or_rings_wherever_either_side_is(pages, stopped):
    page, workers = pages
    page.counters[WAIT] = 1
    lines = Lines()
    for line in lines:
        handled, rings, seen = page.counters[POSTS], page.to_worker.rings, []
        page.counters[AWAITED] = handled + 1  # as if the worker had spun for a while
        sides = {
            "look": lambda n=handled, seen=seen: seen.append(sees(workers, n)),
            "post": lambda n=handled: page.post_step(n + 1, 1, streams=False),
        }
        thread = StoppingThread(sides.pop(stopped), line, ("mailbox/control_page.py",)).start()
        lines.has_stopped = thread.stops()
        sides.popitem()[1]()
        thread.go_on()
        assert thread.ends_within(SOON)
        assert seen[0] or page.to_worker.rings > rings, f"stopped after {line} lines"
    assert lines.count > 10


def test_a_post_rings_unless_the_worker_spins_for_it(pages):
    page, workers = pages
    page.post_step(1, SPINNING, streams=False)  # the worker has not started
    assert page.to_worker.rings == 1
    assert sees(workers, 0)
    page.post_step(2, SPINNING, streams=False)  # it runs the first
    assert page.to_worker.rings == 2
    assert not sees(workers, 2)
    page.post_step(3, NO_SPIN, streams=False)  # its spin has ended
    assert page.to_worker.rings == 3
    assert not sees(workers, 3)
    page.post_step(4, NO_SPIN, streams=False)  # it sleeps at once
    assert page.to_worker.rings == 4
