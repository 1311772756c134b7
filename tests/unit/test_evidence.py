"""The stacks that a fatal error leaves in the stderr of a worker: frames of env code come first."""

from __future__ import annotations

import pytest

from envactors.actor.evidence import order_fatal_error

DUMP = """\
Fatal Python error: Segmentation fault

Thread 0x00007f4aab (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 5 in wait

Current thread 0x00007f9cee (most recent call first):
  File "/home/me/env.py", line 6 in render
  File "/home/me/env.py", line 4 in step
  File "/site/envactors/worker/host.py", line 98 in step
  File "/site/envactors/worker/main.py", line 118 in serve
  File "<string>", line 8 in <module>

Extension modules: numpy (total: 1)"""

ORDERED = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f9cee (most recent call first):
  File "/home/me/env.py", line 6 in render
  File "/home/me/env.py", line 4 in step

Thread 0x00007f4aab (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 5 in wait

Extension modules: numpy (total: 1)"""

TRACEBACK = """\
Traceback (most recent call last):
  File "/site/envactors/worker/host.py", line 98 in step
    self.env.step()
  File "/home/me/env.py", line 4, in step
    raise ValueError
ValueError

some text"""


def test_the_thread_of_the_env_comes_first_without_the_frames_of_this_library():
    assert order_fatal_error(DUMP) == ORDERED
    assert order_fatal_error(ORDERED) == ORDERED


def test_the_thread_that_failed_comes_before_that_of_the_env():
    crashed = 'Current thread 0x00007f4aab (most recent call first):\n  File "/home/me/env.py", line 9 in simulate'
    head, env, _, end = ORDERED.split("\n\n")
    waiting = env.replace("Current thread", "Thread")
    assert order_fatal_error("\n\n".join([head, waiting, crashed, end])) == "\n\n".join([head, crashed, waiting, end])


def test_of_many_stacks_the_first_ones_are_left_and_the_lines_around_them():
    idle = 'Thread 0x00007f4aab (most recent call first):\n  File "/home/me/env.py", line 3 in wait'
    dump = "\n\n".join(["before", "Fatal Python error: Aborted", *[idle] * 99, DUMP.split("\n\n")[2], "after"])
    lines = order_fatal_error(dump).split("\n")
    assert len(lines) <= 50
    assert (lines[0], lines[2], lines[-1]) == ("before", "Fatal Python error: Aborted", "after")
    assert lines[5] == '  File "/home/me/env.py", line 6 in render'


def test_everything_else_in_stderr_stays_as_it_is():
    assert order_fatal_error(f"{TRACEBACK}\n{DUMP}\nlast words\n") == f"{TRACEBACK}\n{ORDERED}\nlast words\n"
    for text in ("", "\n", "last words", TRACEBACK):
        assert order_fatal_error(text) == text


@pytest.mark.parametrize("module", ["state/gymnasium_state.py", "worker/host.py"])
def test_frames_of_modules_that_call_env_code_are_left_out(module):
    stack = 'Current thread 0x00007f9cee (most recent call first):\n  File "/home/me/env.py", line 6 in get_state'
    assert order_fatal_error(f'{stack}\n  File "/site/envactors/{module}", line 98 in get') == stack


@pytest.mark.parametrize("where", ["worker/my_env.py", "pools/host.py", "rollout\\my.py", "actor/" + "x" * 5000])
def test_frames_of_users_whose_directories_have_the_names_of_this_package_stay(where):
    head = "Current thread 0x00007f9cee (most recent call first):\n"
    mine = f'  File "/home/me/envactors/{where}", line 6 in step\n'
    ours = '  File "C:\\site\\envactors\\worker\\host.py", line 98 in step'
    assert order_fatal_error(head + mine + ours) == head + mine.rstrip()
