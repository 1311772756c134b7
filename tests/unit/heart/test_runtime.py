"""The log of a runtime: how many records wait for slow handlers."""

from __future__ import annotations

import threading

import pytest
from fakes import SOON

from envactors import runtime as runtimes
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
    assert "7 log records of workers were dropped" in caplog.text
