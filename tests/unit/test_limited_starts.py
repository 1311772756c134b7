"""A limited number of workers start at a time."""

from __future__ import annotations

import threading

from helpers import SOON, wait_until

import envactors as ea
from envactors.backends.local import ThreadBackend
from envactors.testing import EchoEnv


class OneByOne(ThreadBackend):
    """Starts one worker at a time; the launch of the first one takes as long as a test wants."""

    max_starting = 1

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.workers = []

    def launch(self, *args, **options):
        if not self.begun.is_set():
            self.begun.set()
            assert self.may_end.wait(SOON)
        elif self.workers:
            assert self.workers[0].is_reaped, "the one before has not ended"
        worker = super().launch(*args, **options)
        worker.is_reaped, reap = False, worker.reap

        def note_reap():
            worker.is_reaped = True
            return reap()

        worker.reap = note_reap
        self.workers.append(worker)
        return worker


def test_an_actor_that_is_killed_while_its_worker_is_launched_counts_until_that_has_ended():
    backend = OneByOne()
    first = ea.spawn(EchoEnv, backend=backend)
    assert backend.begun.wait(SOON)
    second = ea.spawn(EchoEnv, backend=backend)
    first.kill()
    backend.may_end.set()
    assert second.get("steps").result(SOON) == 0
    wait_until(lambda: first.state is ea.ActorState.CLOSED)
    second.close()
