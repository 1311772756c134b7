"""The reactor: descriptors that are added and removed while their events are pending."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from helpers import SOON, Counter

import envactors as ea
from envactors.actor.reactor import Reactor
from envactors.system.polling import Doorbell


def test_a_late_reply_is_not_taken_for_a_crash():
    """One descriptor's number goes from a channel to a sentinel while the channel's event is on its way.

    So a live process was taken for dead, and left running without its actor.
    """
    taken_for_dead = threading.Event()
    reactor = Reactor()
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(reactor.join, SOON)
        cleanup.callback(reactor.stop)
        doorbells = [cleanup.enter_context(contextlib.closing(Doorbell())) for _ in range(3)]
        sentinel, *channels = doorbells
        numbers = [os.dup(channel.fileno()) for channel in channels]
        for number in numbers:
            cleanup.callback(os.close, number)
        handled = []

        def reuse(number, other):
            if not handled:
                reactor.unwatch_channel(other)
                os.dup2(sentinel.fileno(), other)
                reactor.watch(other, lambda _mask: taken_for_dead.set())
                cleanup.callback(reactor.unwatch, other)
            handled.append(number)

        first, second = numbers
        cleanup.enter_context(reactor._pump_lock)
        reactor._mask(True)  # the reactor's own thread stays away
        reactor.watch_channel(first, lambda _mask: reuse(first, second))
        reactor.watch_channel(second, lambda _mask: reuse(second, first))
        for channel in channels:
            channel.ring()
        assert reactor._pump(lambda: bool(handled), None, None)
        assert len(handled) == 1
        assert not taken_for_dead.is_set()


def test_the_reactor_asks_no_actor_that_is_not_complete(caplog):
    """The reactor's thread goes round all the time while actors are made; an error of it would be logged."""
    stop, interval = threading.Event(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ea.spawn(Counter, backend="inline") as first:
        reactor = first._supervisor.reactor

        def go_round():
            while not stop.is_set():
                reactor.post(lambda: None)

        poster = threading.Thread(target=go_round)
        poster.start()
        try:
            for _ in range(200):
                with ea.spawn(Counter, backend="inline"):
                    pass
        finally:
            sys.setswitchinterval(interval)
            stop.set()
            poster.join(SOON)
    assert not caplog.records
