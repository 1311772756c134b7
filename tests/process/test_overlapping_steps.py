"""Batch steps of one actor that overlap: one has been delivered and has not ended, and the next one has begun."""

from __future__ import annotations

import functools
import os
import signal
import time

import pytest
from helpers import SOON, promised, wait_for_path

import envactors as ea
from envactors.mailbox.control_page import ControlPage
from envactors.testing import EchoEnv, expected_checksum

ALWAYS = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)


def make_late_end(seconds):
    """An env in a worker that says late that a batch step has ended, long after the last row is complete."""
    finish = ControlPage.finish_step

    def finish_late(page, call_id):
        time.sleep(seconds)
        finish(page, call_id)

    ControlPage.finish_step = finish_late
    return EchoEnv()


def test_a_step_that_starts_before_its_predecessor_ends_is_lost_once():
    """The same object used to be among the running steps twice, and its second result was that of the step before."""
    with ea.VectorEnv([functools.partial(make_late_end, 0.3)], on_failure="renew", restart=ALWAYS) as envs:
        envs.reset(seed=0)
        envs.send([1])
        envs.recv()
        time.sleep(0.5)
        envs.send([2])
        envs.recv()
        envs.send([3])
        os.kill(envs[0].pid, signal.SIGKILL)
        batch = envs.recv(timeout=SOON)
        assert batch.truncated.tolist() == [True]
        assert isinstance(batch.infos[0]["failure"], ea.ActorDiedError)
        assert batch.obs[0, 1:3].tolist() == [2, 2]
        assert envs.step([0])[0][0, 1] == 0, "the next step resets"


def test_each_step_is_recorded_once_however_late_it_ends():
    """The journal used to read the row of an unfinished step after the row had been reused."""
    with ea.VectorEnv([functools.partial(make_late_end, 0.05)], on_failure="replay", restart=ALWAYS) as envs:
        envs.reset(seed=0)
        for action in range(5):
            envs.send([action])
            envs.recv()
        os.kill(envs[0].pid, signal.SIGKILL)
        obs, *_, infos = envs.step([5])
        assert infos == [{}]
        assert obs[0, 3] == expected_checksum(0, range(6))
        assert envs.stats().actors[0].completed < 11


class Sleeper(EchoEnv):
    """Sleeps as many tenths of a second as the action says."""

    def step(self, action):
        time.sleep(int(action) / 10)
        return super().step(action)


def test_a_step_of_another_env_does_not_put_a_deadline_off():
    with ea.VectorEnv([Sleeper] * 2, envs_per_actor=2, restart=ALWAYS, deadlines=ea.Deadlines(step=2.0)) as envs:
        envs.reset(seed=0)
        begun = time.monotonic()
        envs.send([600], env_ids=[0])
        time.sleep(1.8)
        envs.send([0], env_ids=[1])
        with pytest.raises(ea.VectorStepError) as caught:
            envs.recv()
        assert time.monotonic() - begun < promised(3.3)
        assert isinstance(caught.value.failures[0], ea.ActorTimeoutError)


def test_a_step_that_begins_after_the_deadline_of_the_one_before_is_lost_with_it():
    """The worker is at one, the process is ended for the other: both are to be reported."""
    with ea.VectorEnv(
        [Sleeper] * 2, envs_per_actor=2, on_failure="renew", restart=ALWAYS, deadlines=ea.Deadlines(step=0.5)
    ) as envs:
        envs.reset(seed=0)
        envs.send([6], env_ids=[0])
        envs.send([600], env_ids=[1])
        batch = envs.recv(timeout=SOON)
        assert sorted(batch.env_ids.tolist()) == [0, 1]
        assert batch.truncated.all()


class Slow(EchoEnv):
    """An env whose steps take a while; action 50 waits until there is a file."""

    def __init__(self, env_id, path):
        super().__init__(env_id)
        self.path = path

    def step(self, action):
        if action == 50:
            wait_for_path(self.path)
        else:
            time.sleep(action / 10)
        return super().step(action)


def test_a_step_ends_also_if_a_signal_handler_sends_another_env_of_its_actor_when_it_is_done(tmp_path):
    path = tmp_path / "go"
    with ea.VectorEnv([lambda i=i: Slow(i, path) for i in range(3)], envs_per_actor=2) as envs:
        envs.reset()
        envs.send([50], env_ids=[2])  # its actor is another one, which rings nobody meanwhile

        def handle(*_):
            time.sleep(0.4)  # until the step that is waited for has ended
            envs.send([3], env_ids=[1])

        before = signal.signal(signal.SIGALRM, handle)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            obs, *_ = envs.step([2], env_ids=[0], timeout=SOON)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert obs[0, 1] == 1
        path.touch()
        assert sorted(envs.recv(timeout=SOON).env_ids.tolist()) == [1, 2]
