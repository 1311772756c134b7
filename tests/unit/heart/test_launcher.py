"""The launcher: how many workers start at the same time."""

from __future__ import annotations

import functools
import itertools
import queue

import pytest
from fakes import SOON
from interrupting import Interrupt, interrupt

from envactors.runtime import Launcher


@pytest.fixture
def launcher():
    launcher = Launcher()
    yield launcher
    launcher.stop()
    launcher.join(SOON)


def begin(launcher, begun, *starts):
    """Submit starts, each a name and its limit; return one function per start."""
    functions = [functools.partial(begun.put, name) for name, _ in starts]
    for function, (_, limit) in zip(functions, starts, strict=True):
        launcher.submit(function, limit)
    return functions


def test_starts_without_a_limit_do_not_delay_others(launcher):
    begun = queue.Queue()
    begin(launcher, begun, *((f"remote-{number}", None) for number in range(8)), ("process", 1))
    assert [begun.get(timeout=SOON) for _ in range(9)][-1] == "process"


def test_starts_without_a_limit_do_not_wait_behind_others(launcher):
    begun = queue.Queue()
    first, *_ = begin(launcher, begun, ("first", 1), ("second", 1), ("thread", None))
    assert [begun.get(timeout=SOON) for _ in range(2)] == ["first", "thread"]
    assert begun.empty()
    launcher.finish(first)
    assert begun.get(timeout=SOON) == "second"


def test_a_start_with_a_higher_limit_does_not_wait_behind_one_with_a_lower_limit(launcher):
    begun = queue.Queue()
    begin(launcher, begun, ("first", 1), ("serial", 1), ("other", 4))
    assert [begun.get(timeout=SOON) for _ in range(2)] == ["first", "other"]


def test_an_interrupt_at_any_line_of_finish_loses_no_start_of_another():
    for number in itertools.count():
        launcher, begun = Launcher(), queue.Queue()
        first, _ = begin(launcher, begun, ("first", 1), ("second", 1))
        assert begun.get(timeout=SOON) == "first"
        try:
            was_interrupted = interrupt(functools.partial(launcher.finish, first), number) is not None
        except Interrupt:
            was_interrupted = True
        if was_interrupted:
            launcher.finish(first)  # the repair of the interrupted actor does this
        assert begun.get(timeout=SOON) == "second"
        launcher.stop()
        launcher.join(SOON)
        assert begun.empty()
        if not was_interrupted:
            break
    assert number > 1
