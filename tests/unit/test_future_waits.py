"""A future that is waited for while other threads read what it waits for."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
from helpers import SOON

from envactors.actor.future import ActorFuture


class HastyActor:
    """Ends waits although the future is not settled, as where another thread has read the reply a moment ago."""

    def __init__(self):
        self.waits = 0
        self.reactor = SimpleNamespace(wake=lambda _future: None)

    def wait(self, future, done, deadline):
        self.waits += 1
        if self.waits == 3:
            future.settle("value", None, 0)


def test_a_wait_without_a_limit_lasts_until_the_future_is_settled():
    owner = HastyActor()
    assert ActorFuture(owner, None).result() == "value"
    assert owner.waits == 3


def test_a_wait_with_a_timeout_ends_in_time():
    class Idle(HastyActor):
        def wait(self, future, done, deadline):
            threading.Event().wait(max(0.0, deadline - time.monotonic()))

    with pytest.raises(concurrent.futures.TimeoutError):
        ActorFuture(Idle(), None).result(0.01)
    owner = HastyActor()
    assert ActorFuture(owner, None).result(SOON) == "value"


def test_a_thread_that_waits_is_woken_although_an_exception_has_ended_the_settling():
    woken = []

    def wake(future):
        woken.append(future)
        if len(woken) == 1:
            raise KeyboardInterrupt

    class Sleepy(HastyActor):
        def wait(self, future, done, deadline):
            with contextlib.suppress(KeyboardInterrupt):
                future.settle("value", None, 0)
            future.settle("value", None, 0)  # once more, in a thread that nothing interrupts

    owner = Sleepy()
    owner.reactor.wake = wake
    future = ActorFuture(owner, None)
    assert future.result() == "value"
    assert woken == [future, future]
