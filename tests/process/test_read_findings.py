"""Defects that a maintainer's read of the first prototype has found."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import gymnasium
import numpy as np
import pytest
from helpers import FORK_SERVER

import envactors as ea

SOON = 20.0
ALWAYS = ea.RestartPolicy(max_restarts=100, backoff=0)


class Mute(Exception):
    """Cannot be described."""

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class Env:
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(9)

    def __init__(self, fails_at=-1, error=ValueError):
        self.fails_at, self.error = fails_at, error

    def reset(self, *, seed=None, options=None):
        return np.zeros(1), {}

    def step(self, action):
        if action == self.fails_at:
            raise self.error("failed")
        if action == 8:
            time.sleep(60)
        return np.full(1, float(action)), float(action), False, False, {}

    def echo(self, value):
        return value


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
@pytest.mark.parametrize("backend", [FORK_SERVER, "inline"], ids=["process", "inline"])
def test_an_exception_without_a_text_loses_no_other_result(on_failure, backend):
    factories = [functools.partial(Env, 3, Mute), Env]
    with ea.VectorEnv(factories, on_failure=on_failure, restart=ALWAYS, backend=backend) as envs:
        envs.reset(seed=0)
        if on_failure == "raise":
            with pytest.raises(ea.VectorStepError, match="Mute") as caught:
                envs.step([3, 4])
            assert list(caught.value.failures) == [0]
            assert caught.value.batch.rewards.tolist() == [4.0]
        else:
            _, rewards, _, truncated, infos = envs.step([3, 4], timeout=SOON)
            assert rewards.tolist() == [0.0, 4.0]
            assert truncated.tolist() == [True, False]
            assert isinstance(infos[0]["failure"], (Mute, ea.ActorDiedError))
        assert envs[1].incarnation == 0, "no other process was replaced"


def test_rollouts_of_other_actors_succeed_in_process():
    with ea.VectorEnv([functools.partial(Env, 0), Env], backend="inline") as envs:
        envs.reset(seed=0)
        envs.set_policy(lambda: lambda obs, context: [0] * len(obs))
        first, second = envs.rollout_each(3)
        with pytest.raises(ea.VectorStepError):
            first.result()
        assert second.result().valid.all()


class Hit(Exception):
    pass


@pytest.fixture
def hit_soon():
    """Have the main thread raise in a moment."""

    def handler(*_):
        raise Hit

    before = signal.signal(signal.SIGUSR1, handler)
    main = threading.main_thread().ident
    yield lambda: threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGUSR1)).start()
    signal.signal(signal.SIGUSR1, before)


def test_a_reset_after_an_interrupted_step_that_hangs_keeps_its_timeout(hit_soon):
    with ea.VectorEnv([Env] * 2, restart=ALWAYS, backend=FORK_SERVER) as envs:
        envs.reset(seed=0)
        hit_soon()
        with pytest.raises(Hit):
            envs.step([8, 1])
        began = time.monotonic()
        with pytest.raises(ea.VectorTimeoutError):
            envs.reset(timeout=0.2)
        assert time.monotonic() - began < 5.0
        envs.actors[0].kill(restart=True)
        assert envs.reset(timeout=SOON)[0].tolist() == [[0.0], [0.0]]


def test_a_reset_drops_results_of_send_and_resolves_futures_of_submit():
    with ea.VectorEnv([Env] * 2, backend=FORK_SERVER) as envs:
        envs.reset(seed=0)
        envs.send([1], env_ids=[0])
        (future,) = envs.submit([2], env_ids=[1])
        assert envs.reset()[0].tolist() == [[0.0], [0.0]]
        assert future.result(SOON).reward == 2.0
        with pytest.raises(ea.NothingPendingError):
            envs.recv()


def test_later_changes_of_arguments_do_not_reach_a_pool():
    with ea.ActorPool(Env, 1, backend=FORK_SERVER) as pool:
        blocker = pool.submit("echo", np.zeros(10**6))
        value = [1]
        future = pool.submit("echo", value)
        value.append(2)
        assert future.result(SOON) == [1]
        blocker.result(SOON)


def test_reading_the_state_in_a_signal_handler_is_allowed():
    with ea.spawn(Env, backend=FORK_SERVER) as actor:
        seen = []
        with actor._actor.lock, actor._actor.lock.change(actor._actor):
            seen += [actor.stats().state, actor.state, repr(actor)]
        assert actor.call("echo", 1).result(SOON) == 1
        assert actor.incarnation == 0
        assert len(seen) == 3


def test_a_timeout_of_one_thread_does_not_wait_for_another():
    with ea.VectorEnv([Env], backend=FORK_SERVER) as envs:
        envs.reset(seed=0)
        envs.send([8])
        futures = [envs[0].echo(i) for i in range(2)]
        other = threading.Thread(target=lambda: futures[0].exception(3))
        other.start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            futures[0].result(0.1)
        assert time.monotonic() - began < 1.0
        envs.actors[0].kill(restart=True)
        other.join(SOON)
        assert not other.is_alive()


@pytest.mark.parametrize("on_failure", ["renew", "replay"])
def test_recv_waits_on_although_an_env_has_raised_before(on_failure):
    with ea.VectorEnv([functools.partial(Env, 3), Slow], on_failure=on_failure, restart=ALWAYS) as envs:
        envs.reset(seed=0)
        envs.send([3, 1])
        assert sorted(envs.recv().env_ids.tolist()) == [0, 1]
        envs.send([1, 1])
        assert sorted(envs.recv(min_envs=2).env_ids.tolist()) == [0, 1]


class Slow(Env):
    def step(self, action):
        time.sleep(0.3)
        return super().step(action)


def test_recv_with_a_timeout_returns_what_an_env_that_raised_has_become():
    with ea.VectorEnv([functools.partial(Env, 3), Env], on_failure="renew", restart=ALWAYS) as envs:
        envs.reset(seed=0)
        envs.send([3, 8])
        ids = []
        while not ids:
            batch = envs.recv(timeout=0.2)
            ids = batch.env_ids.tolist()
        assert (ids, batch.truncated.tolist()) == ([0], [True])
        envs.actors[1].kill(restart=True)


def test_results_that_a_signal_handler_takes_are_delivered_once():
    with ea.VectorEnv([Env] * 2) as envs:
        envs.reset(seed=0)
        envs.send([1, 2])
        taken = []
        can_deliver_rows = envs._engine._can_deliver_rows

        def interrupted(selection):
            answer = can_deliver_rows(selection)
            if answer and not taken:  # a handler runs here: it takes the results, and steps again
                taken.append(None)
                taken[0] = envs.recv()
                envs.send([3, 4])
            return answer

        envs._engine._can_deliver_rows = interrupted
        batch = envs.recv()
        assert sorted(taken[0].obs[:, 0].tolist()) == [1, 2]
        assert sorted(batch.obs[:, 0].tolist()) == [3, 4]
        assert envs.stats().steps == [2, 2]


class DiesInReplay(Env):
    """A step with action 5 ends the first process; any step ends the next ones, so that no replay succeeds."""

    def step(self, action):
        incarnation = ea.current_actor().incarnation
        if incarnation > 0 or action == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_a_replay_that_ends_two_processes_is_not_tried_again():
    with ea.VectorEnv([DiesInReplay], on_failure="replay", restart=ALWAYS) as envs:
        envs.reset(seed=0)
        envs.step([1])
        _, _, _, truncated, infos = envs.step([5])  # replayed in incarnations 1 and 2, where the first step crashes
        assert truncated.tolist() == [True]
        assert isinstance(infos[0]["failure"], ea.ActorDiedError)
        envs.reset()
        assert envs.actors[0].incarnation == 3
