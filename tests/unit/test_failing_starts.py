"""Workers that have started, and for which this process then lacks a resource: they end, and the start fails."""

from __future__ import annotations

import errno
import itertools
import signal
import threading

import pytest
from helpers import SOON

import envactors as ea
from envactors.backends.local import ThreadBackend
from envactors.backends.process import ProcessWorker
from envactors.process.descriptor_limit import DESCRIPTOR_LIMIT
from envactors.process.reaping import REAPER
from envactors.system.polling import Poller
from envactors.testing import EchoEnv


class Noting(ThreadBackend):
    """Notes its workers, and which of them were reaped."""

    def __init__(self):
        self.workers, self.reaped = [], []

    def launch(self, *args, **options):
        worker = super().launch(*args, **options)
        self.workers.append(worker)
        reap = worker.reap

        def note_reap():
            self.reaped.append(worker)
            return reap()

        worker.reap = note_reap
        return worker


@pytest.fixture(params=[(1,), (2,), (1, 3)], ids=["channel", "end", "channel, then end"])
def refusals(request, monkeypatch):
    """Returns a function that has the system refuse to watch some of the next descriptors; returns how many."""

    def refuse():
        original, numbers = Poller.add, itertools.count(1)

        def add(poller, *args):
            is_launcher = threading.current_thread().name == "envactors-launcher"  # a worker watches its own doorbell
            if is_launcher and next(numbers) in request.param:
                raise OSError(errno.ENOSPC, "No space left on device")
            original(poller, *args)

        monkeypatch.setattr(Poller, "add", add)
        return len(request.param)

    return refuse


@pytest.fixture
def other():
    """An actor that runs all the time."""
    with ea.spawn(EchoEnv, backend="thread") as actor:
        assert actor.get("steps").result(SOON) == 0
        yield actor
        assert actor.get("steps").result(SOON) == 0


def test_a_worker_that_cannot_be_watched_is_ended_and_its_start_fails(other, refusals):
    backend = Noting()
    refusals()
    with ea.spawn(EchoEnv, backend=backend) as actor, pytest.raises(ea.ActorStartError, match="No space left"):
        actor.get("steps").result(SOON)
    assert backend.reaped == backend.workers
    assert len(backend.workers) == 1


def test_a_start_whose_worker_cannot_be_watched_is_tried_again(other, refusals):
    count, restart = refusals(), ea.RestartPolicy(max_restarts=3, backoff=0.01)
    with ea.spawn(EchoEnv, backend="thread", restart=restart) as actor:
        assert actor.get("steps").result(SOON) == 0
        assert actor.stats().restarts == count


class Started:
    """A process that a worker was told has started."""

    pid = 1

    def __init__(self):
        self.fate = []

    def fileno(self):
        return 0

    def send_signal(self, signum):
        self.fate.append(signum)

    def reap(self):
        self.fate.append("reaped")
        return -9


@pytest.mark.parametrize("lacks", [(REAPER, "_report"), (DESCRIPTOR_LIMIT, "give_back")])
def test_a_process_that_cannot_be_reported_is_killed_and_reaped(monkeypatch, lacks):
    process = Started()
    monkeypatch.setattr(REAPER, "_report", lambda line: True)

    def fail(*_):
        monkeypatch.setattr(REAPER, "_report", lambda line: True)
        raise MemoryError

    monkeypatch.setattr(*lacks, fail)
    with pytest.raises(MemoryError):
        ProcessWorker(5, None, 1, lambda descriptors: process)
    assert process.fate == [signal.SIGKILL, "reaped"]
    assert 5 not in REAPER._workers
