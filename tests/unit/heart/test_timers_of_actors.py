"""The named timers of an actor, and the watch over its deadlines."""

from __future__ import annotations

import time

import pytest

import envactors as ea
from envactors.actor.change import ChangeLock
from envactors.actor.job import Activity
from envactors.actor.request_stack import InlineRequest, RequestStack
from envactors.actor.timers import DeadlineWatch, Timers


class BrokenLoop:
    """A loop whose caller is interrupted."""

    def call_at(self, when, callback):
        raise KeyboardInterrupt


def test_a_timer_whose_setting_was_interrupted_is_not_set():
    timers = Timers(BrokenLoop, lambda event, *args: event(*args))
    with pytest.raises(KeyboardInterrupt):
        timers.set("check", 1.0, print)
    timers.cancel("check")


class IdleLoop:
    """A loop that runs nothing, and counts the timers that were set."""

    def __init__(self):
        self.times = []

    def call_at(self, when, callback):
        self.times.append(when)
        return self

    def cancel(self):
        pass


@pytest.mark.parametrize(("limits", "is_slow"), [({"slow": 0.0}, True), ({"step": 0.0, "slow": None}, False)])
def test_limits_of_zero_seconds_are_checked_again_after_a_pause(limits, is_slow):
    loop = IdleLoop()
    timers = Timers(lambda: loop, lambda event, *args: event(*args))
    watch = DeadlineWatch(ea.Deadlines(**limits), timers, print)
    now = time.monotonic()
    activity = Activity("call", 0, 1, now)
    assert [watch.check_again(activity), watch.check_again(activity)] == [is_slow, False]
    assert min(loop.times) >= now + 0.005


def test_a_slow_step_is_reported_once_although_its_start_is_an_estimate():
    timers = Timers(IdleLoop, lambda event, *args: event(*args))
    watch = DeadlineWatch(ea.Deadlines(slow=1.0), timers, print)
    now = time.monotonic()
    judged = [watch.check_again(Activity("step", 0, 1, now - ago)) for ago in (3.0, 3.1, 2.9, 1.0, 1.1)]
    assert judged == [True, False, False, True, False]


class Request(InlineRequest):
    def get_context(self):
        return None

    def describe(self):
        return None


def test_code_in_this_process_that_is_slow_after_zero_seconds_is_looked_at_with_pauses():
    loop = IdleLoop()
    now = time.monotonic()
    stack = RequestStack(ChangeLock(), lambda: loop, 0.0)
    stack.push(Request(stack, 0))
    assert min(loop.times) >= now + 0.005


def test_a_request_that_an_interrupt_has_left_behind_does_not_count_as_running():
    stack = RequestStack(ChangeLock(), IdleLoop, None)
    stack.push(Request(stack, 0))  # the interrupt comes before the context begins
    assert stack.thread_of(range(1)) is None
    assert not stack.is_within(range(1))


def test_a_step_that_began_when_the_machine_had_just_booted_is_reported(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 90.0)
    watch = DeadlineWatch(ea.Deadlines(slow=60.0), Timers(IdleLoop, lambda event, *args: event(*args)), print)
    assert watch.check_again(Activity("step", 0, 1, 20.0))
