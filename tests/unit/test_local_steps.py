"""Steps of threads and in-line workers: through memory of this process, without pickling, and nothing is shared."""

from __future__ import annotations

import os
import pickle
import threading
import warnings

import numpy as np
import pytest
from helpers import SOON, wait_until

import envactors as ea
from envactors.actor import slots
from envactors.backends.local import InlineWorker, ThreadWorker
from envactors.mailbox import info_codec, pickling
from envactors.testing import EchoEnv
from envactors.worker import host


class Box:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)


class Sharing:
    """Returns the same observation and info again and again, changed."""

    def __init__(self, with_spaces=True):
        if with_spaces:
            self.observation_space, self.action_space = Box((3,), np.float32), Box((2,), np.float32)
        self.obs, self.info, self.actions = np.zeros(3, np.float32), {"steps": [0], "f": lambda: self.obs}, []

    def reset(self, *, seed=None, options=None):
        self.obs[:], self.info["steps"][0] = 0, 0
        return self.obs, self.info

    def step(self, action):
        self.actions.append(action)
        self.obs += 1
        self.info["steps"][0] += 1
        return self.obs, 1.0, False, False, self.info

    def get_actions(self):
        return [action.tolist() for action in self.actions]


def without_spaces():
    return Sharing(with_spaces=False)


LOCAL = pytest.mark.parametrize("backend", ["thread", "inline"])
FACTORIES = pytest.mark.parametrize("factory", [Sharing, without_spaces])


@LOCAL
@FACTORIES
def test_returned_values_never_change_and_change_no_env(backend, factory):
    with ea.VectorEnv([factory] * 3, envs_per_actor=2, backend=backend) as envs:
        results = [envs.reset(seed=0)]
        for _ in range(4):
            obs, _, _, _, infos = envs.step(np.ones((3, 2), np.float32))
            results.append((obs, infos))
        for number, (obs, infos) in enumerate(results):
            assert np.asarray(obs).tolist() == [[number] * 3] * 3
            assert [info["steps"] for info in infos] == [[number]] * 3
            obs[0][0] = 77
            infos[0]["steps"].append("mine")
        obs, _, _, _, infos = envs.step(np.ones((3, 2), np.float32))
        assert np.asarray(obs).tolist() == [[5] * 3] * 3
        assert infos[0]["steps"] == [5]


@LOCAL
@FACTORIES
def test_actions_are_the_envs_own(backend, factory):
    with ea.VectorEnv([factory] * 2, envs_per_actor=2, backend=backend) as envs:
        envs.reset(seed=0)
        actions = np.zeros((2, 2), np.float32)
        for number in range(3):
            actions[:] = number
            envs.send(actions)
            actions[:] = 99
            envs.recv()
        assert envs.call("get_actions") == [[[0, 0], [1, 1], [2, 2]]] * 2


@LOCAL
@FACTORIES
def test_steps_and_resets_pickle_nothing(backend, factory, monkeypatch):
    with ea.VectorEnv([factory] * 2, envs_per_actor=2, backend=backend) as envs:

        def refuse(*_args, **_options):
            raise AssertionError("nothing of a step is pickled")

        for module in (info_codec, pickling, slots):
            monkeypatch.setattr(module, "dumps", refuse)
        monkeypatch.setattr(pickle, "dumps", refuse)
        envs.reset(seed=0)
        _, _, _, _, infos = envs.step(np.ones((2, 2), np.float32))
        envs.send(np.ones((1, 2), np.float32), env_ids=[1])
        assert envs.recv().infos[0]["f"]().tolist() == [2, 2, 2], "the very function that the env has"
        assert infos[0]["steps"] == [1]
        monkeypatch.undo()


class Waits(Sharing):
    """Waits in a step until it may continue; raises where the action says so."""

    started, go_on = threading.Event(), threading.Event()

    def step(self, action):
        if action[0] == 1:
            raise ValueError("no")
        if action[0] == 2:
            type(self).started.set()
            type(self).go_on.wait(SOON)
        return super().step(action)


def worker_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("envactors-worker-")]


@pytest.mark.parametrize("steps_after", [8, 9])
def test_a_thread_that_was_given_up_in_a_step_writes_no_result_over_its_successors(steps_after):
    Waits.started.clear()
    Waits.go_on.clear()
    with ea.VectorEnv([Waits] * 2, envs_per_actor=2, backend="thread", on_failure="renew") as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(np.zeros((2, 2), np.float32))
        # Env 0 fails, for which the worker is given up, while env 1 is in the middle of its fourth step.
        envs.send(np.array([[1, 1], [2, 2]], np.float32))
        assert Waits.started.wait(SOON)
        batch = envs.recv()
        assert {type(info["failure"]) for info in batch.infos} == {ValueError, ea.ActorDiedError}
        for _ in range(steps_after):
            obs, *_ = envs.step(np.zeros((2, 2), np.float32))
        assert len(worker_threads()) == 2
        Waits.go_on.set()
        wait_until(lambda: len(worker_threads()) == 1)
        # Its row holds what it held: the last complete observation is told of when it fails.
        told, *_, infos = envs.step(np.array([[0, 0], [1, 1]], np.float32))
        assert isinstance(infos[1]["failure"], ValueError)
        assert told[1].tolist() == obs[1].tolist()


def test_an_observation_that_was_unpickled_is_written_as_fast_as_others(monkeypatch):
    kept = pickle.loads(pickle.dumps(np.ones(3, np.float32)))

    class Constant(Sharing):
        def step(self, action):
            return kept, 1.0, False, False, {}

    def refuse(*args):
        raise AssertionError("only results that are out of the ordinary are converted")

    assert kept.dtype is not np.dtype(np.float32)
    monkeypatch.setattr(host.HostedEnv, "take", refuse)
    with ea.VectorEnv([Constant] * 2, backend="inline") as envs:
        envs.reset(seed=0)
        assert envs.step(np.zeros((2, 2), np.float32))[0].tolist() == [[1.0] * 3] * 2


def test_copy_false_returns_views_inline():
    with ea.VectorEnv([Sharing] * 2, envs_per_actor=2, backend="inline", copy=False) as envs:
        envs.reset(seed=0)
        actions = np.ones((2, 2), np.float32)
        first = envs.step(actions)[0]
        assert first.tolist() == [[1] * 3] * 2
        envs.step(actions)
        envs.step(actions)
        assert first.tolist() == [[3] * 3] * 2


@LOCAL
def test_a_deadline_that_is_not_enforced_is_warned_of_once_and_before_the_first_step(backend):
    deadlines = ea.Deadlines(step=5.0, reset=5.0)
    with pytest.warns(UserWarning, match="deadlines are not enforced") as caught:
        envs = ea.VectorEnv([Sharing] * 2, backend=backend, deadlines=deadlines)
    assert len(caught) == 1
    with envs, warnings.catch_warnings():
        warnings.simplefilter("error")
        envs.reset(seed=0)
        envs.step(np.ones((2, 2), np.float32))
        envs.step(np.ones((1, 2), np.float32), env_ids=[1])
        for future in envs.submit(np.ones((2, 2), np.float32)):
            future.result()
        envs.send(np.ones((2, 2), np.float32))
        envs.recv()


@LOCAL
def test_a_deadline_of_resets_that_is_not_enforced_is_warned_of(backend):
    with pytest.warns(UserWarning, match="deadlines are not enforced"):
        envs = ea.VectorEnv([Sharing], backend=backend, deadlines=ea.Deadlines(reset=5.0))
    envs.close()


@pytest.mark.parametrize("make", [lambda: ThreadWorker("given up", None, 1), lambda: InlineWorker("given up", None, 1)])
def test_an_abandoned_worker_rings_no_bell_that_is_closed(make):
    """The descriptor's number may be another file's by then."""
    other, worker = os.eventfd(0, os.EFD_NONBLOCK), make()
    fd = worker.page.to_parent.fileno()
    worker.kill()
    worker.reap()
    try:
        os.dup2(other, fd)
        worker.page.finish_step(1)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(fd)
        os.close(other)


def test_a_thread_worker_that_has_ended_runs_in_no_thread():
    """Another thread may get the id of its thread, and wait for the actor before the end was noticed."""
    worker = ThreadWorker("ended", None, 1)
    (thread,) = (each for each in threading.enumerate() if each.name == "envactors-worker-ended")
    worker.kill()
    thread.join(30)
    assert worker.find_thread() is None
    worker.reap()


class ReturnsArrays(EchoEnv):
    """An env whose infos are arrays, whose truth value raises."""

    def step(self, action):
        return *super().step(action)[:4], np.full(2, action)


def make_policy():
    return lambda obs, context: np.ones(len(obs), np.int64)


@LOCAL
def test_an_info_may_be_an_array(backend):
    with ea.VectorEnv([ReturnsArrays] * 2, backend=backend) as envs:
        envs.reset(seed=0)
        assert [info.tolist() for info in envs.step([5, 6])[4]] == [[5, 5], [6, 6]]
        envs.set_policy(make_policy)
        assert [info.tolist() for _, _, info in envs.rollout(1).infos] == [[1, 1], [1, 1]]
