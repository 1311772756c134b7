"""User code that raises or blocks in the caller's threads affects no other actor."""

from __future__ import annotations

import contextlib
import logging
import re
import threading

import pytest
from helpers import SOON, Counter, wait_until

import envactors as ea

ABOUT_ACTORS = "envactors.actors"
OF_ENVS = "some.env"


class Talkative(Counter):
    """An env that logs."""

    def log_numbers(self, count):
        for number in range(count):
            logging.getLogger(OF_ENVS).warning("%d", number)
        return count


@contextlib.contextmanager
def filtered(name, handle):
    """Has a logger call a function with each record."""

    class Calls(logging.Filter):
        def filter(self, record):
            handle(record)
            return True

    logger, calls = logging.getLogger(name), Calls()
    logger.addFilter(calls)
    try:
        yield
    finally:
        logger.removeFilter(calls)


def check_that_others_go_on():
    """A deadline, a crash and a result of other actors."""
    quick = ea.Deadlines(call=0.5)
    with ea.spawn(Counter, deadlines=quick) as hangs, ea.spawn(Counter) as dies, ea.spawn(Counter) as adds:
        asked = [hangs.sleep(100), dies.die(), adds.add(2)]
        with pytest.raises(ea.ActorTimeoutError):
            asked[0].result(SOON)
        with pytest.raises(ea.ActorDiedError):
            asked[1].result(SOON)
        assert asked[2].result(SOON) == 2


def test_a_log_filter_that_raises_changes_nothing_but_the_log(caplog):
    def fail(_record):
        raise LookupError("a filter that is wrong")

    caplog.set_level(logging.INFO, "envactors")
    with filtered(ABOUT_ACTORS, fail), ea.spawn(Counter, restart=ea.RestartPolicy(max_restarts=1)) as actor:
        with pytest.raises(ea.ActorDiedError):
            actor.die().result(SOON)
        assert actor.add(3).result(SOON) == 3
        check_that_others_go_on()
        wait_until(lambda: "a filter that is wrong" in caplog.text)


def test_a_log_filter_that_blocks_does_not_delay_other_actors(caplog):
    caplog.set_level(logging.INFO, "envactors")
    goes_on = threading.Event()
    with filtered(ABOUT_ACTORS, lambda _record: goes_on.wait()):
        try:
            with ea.spawn(Counter, restart=ea.RestartPolicy(max_restarts=1)) as actor:
                with pytest.raises(ea.ActorDiedError):
                    actor.die().result(SOON)
                assert actor.add(3).result(SOON) == 3
                check_that_others_go_on()
                goes_on.set()
        finally:
            goes_on.set()


def test_log_records_that_wait_are_limited_and_the_others_are_counted(caplog):
    """A handler that blocks for as long as a worker logs."""
    goes_on, sent = threading.Event(), 20_000

    def numbers():
        return [int(record.getMessage()) for record in caplog.records if record.name == OF_ENVS]

    def dropped():
        return sum(map(int, re.findall(r"(\d+) log records were dropped", caplog.text)))

    with filtered(OF_ENVS, lambda _record: goes_on.wait()):
        try:
            with ea.spawn(Talkative) as actor:
                assert actor.log_numbers(sent).result(6 * SOON) == sent
                goes_on.set()
                wait_until(lambda: "were dropped" in caplog.text)
                assert actor.log_numbers(1).result(SOON) == 1
                wait_until(lambda: len(numbers()) + dropped() >= sent + 1)
        finally:
            goes_on.set()
    assert numbers()[:100] == list(range(100))
    assert len(numbers()) < 12_000
    assert len(numbers()) + dropped() == sent + 1
