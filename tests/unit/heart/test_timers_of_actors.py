"""The named timers of an actor."""

from __future__ import annotations

import pytest

from envactors.actor.timers import Timers


class BrokenLoop:
    """A loop whose caller is interrupted."""

    def call_at(self, when, callback):
        raise KeyboardInterrupt


def test_a_timer_whose_setting_was_interrupted_is_not_set():
    timers = Timers(BrokenLoop, lambda event, *args: event(*args))
    with pytest.raises(KeyboardInterrupt):
        timers.set("check", 1.0, print)
    timers.cancel("check")
