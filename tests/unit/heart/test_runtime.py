"""The log of a runtime: how many records wait for slow handlers."""

from __future__ import annotations

import contextlib
import threading

import pytest
from fakes import SOON
from interrupting import Interrupt, interrupt

from envactors import runtime as runtimes
from envactors import services
from envactors.runtime import Runtime


@pytest.fixture
def runtime(monkeypatch):
    monkeypatch.setattr(runtimes, "_MOST_RECORDS", 3)
    runtime = Runtime()
    yield runtime
    runtime.end_if_unused()
    runtime.join_if_ended()


def test_interrupts_between_records_do_not_lower_the_limit(runtime, monkeypatch):
    logged = threading.Event()

    def interrupted(_function):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runtime.printer, "submit", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                runtime.log(print)
    runtime.log(logged.set)
    assert logged.wait(SOON)


def test_records_above_the_limit_are_dropped_and_counted(runtime, caplog):
    gate, is_busy, logged = threading.Event(), threading.Event(), []
    runtime.printer.submit(lambda: (is_busy.set(), gate.wait()))  # a slow handler
    assert is_busy.wait(SOON)
    for number in range(10):
        runtime.log(lambda number=number: logged.append(number))
    gate.set()
    runtime.printer.stop()
    runtime.printer.join(SOON)
    assert logged == [0, 1, 2]
    assert "7 log records were dropped" in caplog.text


class Member:
    """An actor, as the runtime has it."""


def alive(before):
    return [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("envactors-")]


@pytest.fixture
def unused(monkeypatch):
    """Have no runtime; return the threads of other tests."""
    monkeypatch.setattr(runtimes, "_runtime", None)
    return set(threading.enumerate())


@pytest.mark.parametrize("number", range(40))
def test_an_interrupted_end_of_the_runtime_leaves_no_thread(unused, number):
    member = Member()
    runtimes.enroll(member)
    threads = alive(unused)
    with contextlib.suppress(Interrupt):
        interrupt(lambda: member.runtime.leave(member), number, only={"leave", "end_if_unused", "stop"})
    if member in member.runtime.members:  # nothing has happened, so the user tries again
        member.runtime.leave(member)
    for thread in threads:
        thread.join(SOON)
    assert not alive(unused)


def test_a_service_that_raises_fails_the_actor_and_leaves_no_thread(unused, monkeypatch):
    def refuse(_loop):
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(services, "on_start", [refuse])
        with pytest.raises(OSError, match="no room"):
            runtimes.enroll(Member())
    for thread in alive(unused):
        thread.join(SOON)
    assert not alive(unused)
    member = Member()
    runtimes.enroll(member)
    member.runtime.leave(member)


def test_a_runtime_that_cannot_be_made_leaves_no_thread(unused, monkeypatch):
    def refuse():
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(runtimes, "Launcher", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            runtimes.enroll(Member())
    for thread in alive(unused):
        thread.join(SOON)
    assert not alive(unused)
