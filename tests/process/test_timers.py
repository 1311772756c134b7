"""Timers of actors that are interrupted while they are set."""

from __future__ import annotations

import itertools
import threading

from helpers import SOON
from interrupting import interrupt

from envactors.actor.timers import Timers
from envactors.loop import Loop


def test_a_timer_whose_setting_was_interrupted_raises_nothing_in_the_loop():
    errors = []
    loop = Loop(errors.append)
    timers = Timers(lambda: loop, lambda event: event())
    for number in itertools.count():
        where = interrupt(lambda: timers.set("name", 0.0, lambda: None), number, only={"set", "call_at"})
        passed = threading.Event()
        loop.call_at(0.0, passed.set)  # behind the timer
        assert passed.wait(SOON)
        assert errors == [], where
        if where is None:
            break
    loop.stop()
    loop.join(SOON)
