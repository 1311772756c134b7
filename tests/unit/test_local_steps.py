"""Steps in threads and in-process: nothing is shared, and a thread is replaced once it has ended."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from typing import ClassVar

import numpy as np
import pytest
from helpers import SOON, wait_until

import envactors as ea
from envactors.backends.thread import ThreadWorker
from envactors.testing import EchoEnv


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


def test_a_thread_is_replaced_once_it_has_ended():
    Waits.started.clear()
    Waits.go_on.clear()
    with ea.VectorEnv([Waits] * 2, envs_per_actor=2, backend="thread", on_failure="renew") as envs:
        envs.reset(seed=0)
        # Env 0 fails, for which the worker is to be replaced, while env 1 is in the middle of its step.
        envs.send(np.array([[1, 1], [2, 2]], np.float32))
        assert Waits.started.wait(SOON)
        assert len(envs.recv(timeout=0.2).env_ids) < 2
        assert len(worker_threads()) == 1
        Waits.go_on.set()
        wait_until(lambda: envs.actors[0].incarnation == 1)
        wait_until(worker_threads)
        assert len(worker_threads()) == 1
        while envs._engine.busy():
            envs.recv(timeout=SOON)
        # Env 0 begins anew. Env 1 has lost its episode, and its last observation comes again.
        obs, _, _, truncated, infos = envs.step(np.zeros((2, 2), np.float32))
        assert (obs.tolist(), truncated.tolist()) == ([[0] * 3, [1] * 3], [False, True])
        assert isinstance(infos[1]["failure"], ea.ActorDiedError)


def test_a_thread_that_hangs_when_its_actor_closes_is_left_running():
    Waits.started.clear()
    Waits.go_on.clear()
    envs = ea.VectorEnv([Waits], backend="thread")
    envs.reset(seed=0)
    (future,) = envs.submit(np.full((1, 2), 2, np.float32))
    assert Waits.started.wait(SOON)
    envs.close(0.2)
    assert isinstance(future.exception(SOON), ea.ActorDiedError)
    assert len(worker_threads()) == 1
    Waits.go_on.set()
    wait_until(lambda: not worker_threads())


@LOCAL
def test_a_deadline_that_is_not_enforced_is_warned_of_once_and_before_the_first_step(backend):
    deadlines = ea.Deadlines(step=5.0, reset=5.0)
    with pytest.warns(UserWarning, match="deadlines are not enforced") as caught:
        envs = ea.VectorEnv([Sharing] * 2, backend=backend, deadlines=deadlines)
    assert [one.filename for one in caught] == [__file__]
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


def test_descriptors_are_closed_once_parent_and_thread_are_done_with_them():
    worker = ThreadWorker("reaped", None, 1)
    fd = worker.page.to_parent.fileno()
    worker.reap()
    os.fstat(fd)  # the thread may still ring
    worker.kill()
    wait_until(lambda: not worker_threads())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


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


class Growing(EchoEnv):
    """Declares no spaces; its observations have as many elements as the action says, and two or more after a reset."""

    observation_space = action_space = None

    def __init__(self, first=2):
        super().__init__()
        self.first = first

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.first), {}

    def step(self, action):
        return np.zeros(action), 0.0, False, False, {}


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_without_a_space_the_error_says_that_a_first_reset_has_fixed_the_shape(backend):
    fixed = (
        "expected (2,), dtype float64. Shape and dtype were fixed by the first reset of env {}, since no "
        "observation_space is declared: declare one that fits all observations"
    )
    with ea.VectorEnv([Growing] * 2, backend=backend) as envs:
        envs.reset()
        envs.step([2, 2])
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([2, 3])
    (error,) = caught.value.failures.values()
    assert isinstance(error, ea.SpaceMismatchError)
    assert str(error) == f"the observation of env 1 has shape (3,): {fixed.format(1)}"
    with (
        ea.VectorEnv([Growing, lambda: Growing(3)], backend=backend) as envs,
        pytest.raises(ea.VectorStepError) as caught,
    ):
        envs.reset()
    (error,) = caught.value.failures.values()
    assert str(error) == f"the observation of env 1 has shape (3,): {fixed.format(0)}"


class Shaped:
    """An env without spaces whose observations have a shape."""

    def __init__(self, shape):
        self.shape = shape

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.shape), {}

    def step(self, action):
        return np.ones(self.shape), 1.0, False, False, {}


@LOCAL
def test_last_batch_raises_the_error_of_the_step_that_it_repeats(backend):
    """It used to leave out the env whose observation has another shape."""
    factories = [functools.partial(Shaped, 3), functools.partial(Shaped, 4)]
    with ea.VectorEnv(factories, backend=backend, on_failure="renew") as envs:
        for ask in (envs.reset, lambda: envs.step([0, 0]), envs.last_batch):
            with pytest.raises(ea.VectorStepError, match="the observation of env 1") as raised:
                ask()
            assert [*map(type, raised.value.failures.values())] == [ea.SpaceMismatchError]
            assert raised.value.batch.env_ids.tolist() == [0]


@LOCAL
def test_a_reset_whose_options_are_refused_leaves_the_results_that_were_sent(backend):
    """They used to be dropped before the options were copied."""
    with ea.VectorEnv([EchoEnv] * 2, backend=backend) as envs:
        envs.reset(seed=0)
        envs.send([1, 1])
        with pytest.raises((ea.SerializationError, TypeError), match="cannot pickle"):
            envs.reset(options={"x": threading.Lock()})
        assert envs.recv(timeout=SOON).obs[:, 1].tolist() == [1, 1]


class Unready(EchoEnv):
    """Its resets raise, but for the first ``good`` ones."""

    tries: ClassVar[list] = []

    def __init__(self, good=0):
        super().__init__()
        self.good = good

    def reset(self, **arguments):
        Unready.tries.append(1)
        if len(Unready.tries) > self.good:
            raise OSError("not yet")
        return super().reset(**arguments)

    def step(self, action):
        if self.good:
            raise OSError("not any more")
        return super().step(action)


@LOCAL
@pytest.mark.parametrize("restarts", [3, 10**6])
@pytest.mark.parametrize("request_kind", ["reset", "step", "rollout"])
def test_a_reset_that_always_raises_is_repeated_equally_often_on_all_backends(backend, request_kind, restarts):
    restart = ea.RestartPolicy(max_restarts=restarts, backoff=0)
    Unready.tries.clear()
    factory = functools.partial(Unready, 0 if request_kind == "reset" else 1)
    with ea.VectorEnv([factory], backend=backend, on_failure="renew", autoreset="same_step", restart=restart) as envs:
        if request_kind != "reset":
            envs.reset()
            envs.set_policy(lambda: lambda obs, context: np.zeros(len(obs), np.int64))
        run = {"reset": envs.reset, "step": lambda: envs.step([0]), "rollout": lambda: envs.rollout(2)}[request_kind]
        with pytest.raises(ea.VectorStepError):
            run()
    # One reset before that, or one more: the first one is in place of a step that has raised.
    assert len(Unready.tries) == min(restarts, 10) + 1
