"""Doorbells of workers that have ended: once their descriptors are closed, nobody writes or reads there."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from helpers import FORK_SERVER, SOON, wait_until

import envactors as ea
from envactors.actor.wait_set import WaitSet
from envactors.backends.local import ThreadWorker
from envactors.mailbox.control_page import ASLEEP, FINISHED
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
        core = envs.actors[0]._supervisor.core
        actions = np.zeros((1, *envs.action_spec.shape), envs.action_spec.dtype)
        core.reactor.unwatch_channel(core.process.worker.channel.fileno())
        call = envs[0].call("save")
        running = core.table.running.call_id
        (step,) = envs.submit(actions)
        wait_until(lambda: core.process.page.counters[FINISHED] == running)
        os.kill(core.pid, signal.SIGKILL)
        wait_until(lambda: core.incarnation == 1)
        assert call.result(SOON) == 7
        assert step.result(SOON).incarnation == 1


def test_a_step_posted_to_a_thread_that_has_ended_rings_for_nobody():
    worker = ThreadWorker("ended", None, 1)
    worker.kill()
    wait_until(lambda: worker.page.to_worker._closed)
    try:
        worker.page.post_step(1, ASLEEP, False)
    finally:
        worker.reap()


def test_a_portable_doorbell_that_is_closed_is_not_read():
    """A thread that has heard it may look it up just before another one closes it."""
    poller, bell = Poller(), Doorbell()
    bell.register(poller)
    bell.close()
    try:
        bell.answer(poller)
    finally:
        poller.close()


def test_a_thread_hears_a_doorbell_that_an_interrupt_has_kept_it_from_watching(monkeypatch):
    watch, watched = WaitSet.watch_doorbell, []

    def watch_interrupted(wait_set, bell):
        watched.append(bell)
        if len(watched) == 1:
            raise KeyboardInterrupt
        watch(wait_set, bell)

    monkeypatch.setattr(WaitSet, "watch_doorbell", watch_interrupted)
    with ea.VectorEnv([EchoEnv], backend="thread") as envs:
        with pytest.raises(KeyboardInterrupt):
            envs.reset(seed=1)
        envs.reset(seed=1, timeout=SOON)
        assert watched == [envs.actors[0]._supervisor.core.process.page.to_parent] * 2
