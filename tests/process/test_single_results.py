"""Results of a process with two envs are delivered one by one, although `step` only waits for both."""

from __future__ import annotations

import functools
import os
import signal
import time

import psutil
import pytest
from helpers import FORK_SERVER, SOON, Gated, wait_until
from interleaving import StoppingThread, when_this_thread_sleeps

import envactors as ea
from envactors.integrations.access import VectorAccess
from envactors.remote import LocalNodes

BACKENDS = [FORK_SERVER, ea.ThreadBackend()]


@pytest.fixture
def gates(tmp_path):
    return [tmp_path / "0", tmp_path / "1"]


@pytest.fixture
def make(gates):
    """Makes a vector of two envs in one actor, whose steps wait for the gates."""

    def make_one(backend):
        factories = [functools.partial(Gated, env_id, path) for env_id, path in enumerate(gates)]
        # Nothing else makes the library look at a step that does not end.
        return ea.VectorEnv(factories, envs_per_actor=2, backend=backend, deadlines=ea.Deadlines(slow=None))

    return make_one


class BrokenOffError(Exception):
    """Raised by a signal handler."""


def time_out(envs):
    with pytest.raises(ea.VectorTimeoutError):
        envs.step([3, 4], timeout=0.05)


def interrupt(envs):
    def handle(*_):
        raise BrokenOffError

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        thread = when_this_thread_sleeps(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        with pytest.raises(BrokenOffError):
            envs.step([3, 4])
        assert thread.ends_within(SOON)
    finally:
        signal.signal(signal.SIGUSR1, before)


def start(envs):
    VectorAccess(envs).start_step([3, 4])


def check_results_come_one_by_one(envs, gates, begin, take):
    envs.reset(seed=0)
    begin(envs)
    when_this_thread_sleeps(gates[0].touch)
    began = time.monotonic()
    batch = take(envs)
    assert time.monotonic() - began < SOON / 2, "it has waited for the other env"
    assert (batch.env_ids.tolist(), batch.obs[:, 2].tolist()) == ([0], [3])
    when_this_thread_sleeps(gates[1].touch)
    batch = envs.recv(timeout=SOON)
    assert (batch.env_ids.tolist(), batch.obs[:, 2].tolist()) == ([1], [4])
    assert envs.step([5, 6], timeout=SOON)[0][:, 2].tolist() == [5, 6]


def receive_one(envs):
    return envs.recv(min_envs=1, timeout=SOON)


def gather_first(envs):
    return VectorAccess(envs).gather([0], SOON, "step_wait")


@pytest.mark.parametrize("backend", BACKENDS, ids=["process", "thread"])
@pytest.mark.parametrize("take", [receive_one, gather_first])
@pytest.mark.parametrize("begin", [time_out, interrupt, start])
def test_a_result_comes_although_the_next_env_of_its_process_still_steps(make, gates, begin, take, backend):
    with make(backend) as envs:
        check_results_come_one_by_one(envs, gates, begin, take)


def test_a_result_comes_from_a_node_although_the_next_env_of_its_process_still_steps(make, gates):
    with make(ea.RemoteBackend(LocalNodes(1))) as envs:
        check_results_come_one_by_one(envs, gates, time_out, receive_one)


@pytest.mark.parametrize("begin", ["step", "send"])
def test_a_thread_does_not_wait_for_an_env_of_the_same_process_that_another_thread_has_stepped(make, gates, begin):
    """The worker gets both requests at once."""
    with make(FORK_SERVER) as envs:
        envs.reset(seed=0)
        worker = psutil.Process(envs.actors[0].pid)
        wait_until(lambda: worker.status() == psutil.STATUS_SLEEPING)
        worker.suspend()
        first = StoppingThread(lambda: envs.step([3], env_ids=[0])).start()
        wait_until(lambda: envs._engine.table.waiters.sleepers)
        first.wait_asleep()
        second = StoppingThread(lambda: getattr(envs, begin)([4], env_ids=[1])).start()
        second.wait_asleep()
        worker.resume()
        gates[0].touch()
        assert first.ends_within(SOON / 2), "it waits for the other env"
        assert first.result[0][:, 2].tolist() == [3]
        gates[1].touch()
        assert second.ends_within(SOON)
        if begin == "send":
            assert envs.recv(timeout=SOON).obs[:, 2].tolist() == [4]
        else:
            assert second.result[0][:, 2].tolist() == [4]
