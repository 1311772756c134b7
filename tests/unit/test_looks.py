"""When what a worker runs is looked at, and what a warning about a slow call shows of its stacks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import envactors as ea
from envactors.actor.requests import Request
from envactors.actor.watch import next_look, order_stacks

seconds = st.floats(0.01, 100.0) | st.just(math.inf)


@given(st.floats(0.0, 1000.0), st.floats(0.0, 100.0), st.none() | seconds, seconds, seconds)
def test_the_slow_call_check_runs_when_the_first_threshold_passes(since, age, limit, slow, shortest):
    now, shortest = since + age, min(shortest, slow)
    look = next_look(Request("step", 0, limit, started=since), now, slow, shortest)
    assert now < look <= now + shortest
    for mark in (slow, math.inf if limit is None else limit):
        assert look <= since + mark or since + mark <= now


def test_a_call_that_was_reported_is_looked_at_no_more_often_than_another_can_become_slow():
    assert next_look(Request("step", 0, started=100.0), 131.0, 30.0, 30.0) == 161.0


def test_slow_is_on_by_default_and_checked_like_a_deadline():
    assert ea.Deadlines().slow == 30.0
    assert ea.Deadlines(slow=None).slow is None
    with pytest.raises(
        ValueError, match=r"^Deadlines\(slow=\.\.\.\) is -1: expected seconds >= 0, or None for no limit$"
    ):
        ea.Deadlines(slow=-1)


PROCESS_STACKS = """Thread 0x00007f69981fd000 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/home/user/simulator.py", line 9 in poll

Current thread 0x00007f69981fdb80 (most recent call first):
  File "/home/user/env.py", line 4 in wait_for_reply
  File "/site-packages/gymnasium/core.py", line 327 in step
  File "/site-packages/envactors/worker/host.py", line 210 in call
  File "/site-packages/envactors/worker/main.py", line 132 in serve
  File "<string>", line 8 in <module>
"""

CALLER_STACK = """  File "/home/user/train.py", line 8, in <module>
    envs.step(actions)
  File "/site-packages/envactors/vector/facade.py", line 200, in step
    self._stepper.step(actions)
  File "/site-packages/envactors/worker/host.py", line 210, in step
    self.env.step(action)
  File "/home/user/env.py", line 20, in step
    self.wait_for_reply()
  File "/home/user/env.py", line 4, in wait_for_reply
    time.sleep(60)
"""


def test_the_frame_of_the_env_comes_first_and_those_of_the_library_are_left_out():
    assert order_stacks(PROCESS_STACKS) == (
        "Current thread 0x00007f69981fdb80 (most recent call first):\n"
        '  File "/home/user/env.py", line 4 in wait_for_reply\n'
        '  File "/site-packages/gymnasium/core.py", line 327 in step\n'
        "\n"
        "Thread 0x00007f69981fd000 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n'
        '  File "/home/user/simulator.py", line 9 in poll'
    )


def test_a_stack_of_the_caller_is_turned_round():
    assert order_stacks(CALLER_STACK) == (
        '  File "/home/user/env.py", line 4, in wait_for_reply\n'
        "    time.sleep(60)\n"
        '  File "/home/user/env.py", line 20, in step\n'
        "    self.wait_for_reply()"
    )


def test_frames_of_the_library_that_the_env_has_called_are_kept():
    nested = PROCESS_STACKS.replace(
        '  File "/home/user/env.py"',
        '  File "/site-packages/envactors/actor/reactor.py", line 9 in wait\n  File "/home/user/env.py"',
    )
    assert order_stacks(nested).splitlines()[1:3] == [
        '  File "/site-packages/envactors/actor/reactor.py", line 9 in wait',
        '  File "/home/user/env.py", line 4 in wait_for_reply',
    ]


@pytest.mark.parametrize("text", ["it runs nothing", "no stacks came within 1 s: process 7 is stopped"])
def test_a_line_that_says_why_there_are_no_stacks_is_kept(text):
    assert order_stacks(f"{text}\n") == text
