"""Looking at an actor holds nobody up, and what looks on by itself never fails a `spawn`."""

from __future__ import annotations

import threading

from helpers import SOON, Counter
from interleaving import Lines, StoppingThread

import envactors as ea
from envactors.backends.local import ThreadWorker

MEASURED = threading.Event()


class SlowlyMeasured(ThreadWorker):
    """A worker of a system on which it takes long to say how much memory it has."""

    def resident_memory(self):
        assert MEASURED.wait(SOON)
        return 4711


class SlowBackend(ea.ThreadBackend):
    _worker = SlowlyMeasured


def test_an_actor_works_while_its_memory_is_measured():
    MEASURED.clear()
    with ea.spawn(Counter, backend=SlowBackend()) as actor:
        assert actor.echo(0).result(SOON) == 0
        looking = StoppingThread(actor.stats).start()
        looking.wait_asleep()
        assert StoppingThread(lambda: actor.echo(1).result(SOON)).start().ends_within(SOON / 2)
        assert actor.state in (ea.ActorState.IDLE, ea.ActorState.BUSY)
        assert looking.is_alive()
        MEASURED.set()
        assert looking.ends_within(SOON)
        assert looking.result.rss == 4711


def test_two_threads_may_make_the_first_actor(monkeypatch):
    def use_one():
        with ea.spawn(Counter, backend="inline") as actor:
            return actor.add(3).result(SOON)

    lines = Lines()
    for line in lines:
        monkeypatch.setenv("ENVACTORS_TRACE", "")
        first = StoppingThread(use_one, line, ("actor/engine.py",)).start()
        lines.has_stopped = first.stops()
        second = StoppingThread(use_one).start()
        second.wait_asleep()
        first.go_on()
        assert first.ends_within(SOON)
        assert second.ends_within(SOON)
        assert (first.result, second.result) == (3, 3), (first.error, second.error)
    assert lines.count > 5
