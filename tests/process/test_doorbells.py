"""Doorbells of workers that have ended: once their descriptors are closed, nobody writes or reads there."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from helpers import FORK_SERVER, SOON, wait_until

import envactors as ea
from envactors.backends.thread import ThreadWorker
from envactors.mailbox.control_page import FINISHED, NO_SPIN
from envactors.system.bells import BaseDoorbell
from envactors.system.portable.polling import Doorbell, Poller
from envactors.testing import EchoEnv


class SlowToSave(EchoEnv):
    """Has a call during which a step is queued."""

    def save(self):
        time.sleep(0.3)
        return 7


def test_a_step_behind_the_last_reply_of_a_killed_worker_goes_to_the_next_one():
    """The reply is read only when the end of the process is noticed, and the step is posted after it."""
    restart = ea.RestartPolicy(max_restarts=1, backoff=0.01)
    with ea.VectorEnv([SlowToSave], restart=restart, on_failure="replay", backend=FORK_SERVER) as envs:
        envs.reset(seed=1)
        actor = envs.actors[0]._actor
        worker = actor.process.worker
        actions = np.zeros((1, *envs.action_spec.shape), envs.action_spec.dtype)
        worker.lend()  # to nobody
        call = envs[0].call("save")
        running = actor.jobs.running.call_id
        (step,) = envs.submit(actions)
        wait_until(lambda: worker.page.counters[FINISHED] == running)
        os.kill(actor.pid, signal.SIGKILL)
        wait_until(lambda: envs[0].incarnation == 1)
        assert call.result(SOON) == 7
        assert step.result(SOON).incarnation == 1


def test_the_doorbells_of_a_thread_that_has_ended_stay_open_until_the_parent_is_done_with_them():
    worker = ThreadWorker("ended", None, 1)
    bell = worker.page.to_worker
    worker.kill()
    worker._thread.join(SOON)
    try:
        os.fstat(bell.fileno())
        worker.page.post_step(1, NO_SPIN, False)
    finally:
        worker.reap()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(bell.fileno())
    bell.ring()


def test_a_portable_doorbell_that_is_closed_is_not_read():
    """A thread that has heard it may look it up just before another one closes it."""
    poller, bell = Poller(), Doorbell()
    bell.register(poller)
    bell.close()
    try:
        bell.answer(poller)
    finally:
        poller.close()


class SlowToReset(EchoEnv):
    """The caller sleeps until a reset has ended."""

    def reset(self, **kwargs):
        time.sleep(0.2)
        return super().reset(**kwargs)


def test_a_thread_hears_a_doorbell_that_an_interrupt_has_kept_it_from_watching(monkeypatch):
    register, registered = BaseDoorbell.register, []
    with ea.VectorEnv([SlowToReset], backend="thread") as envs:
        bell = envs.actors[0]._actor.process.worker.page.to_parent

        def register_interrupted(self, poller):
            if self is bell:
                registered.append(poller)
                if len(registered) == 1:
                    raise KeyboardInterrupt
            register(self, poller)

        monkeypatch.setattr(BaseDoorbell, "register", register_interrupted)
        with pytest.raises(KeyboardInterrupt):
            envs.reset(seed=1)
        envs.reset(seed=1, timeout=SOON)
        assert registered == registered[:1] * 2
