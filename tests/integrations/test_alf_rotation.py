"""More envs than places: envs that reset wait in a queue."""

from __future__ import annotations

import contextlib
import functools
import os
import signal

import numpy as np
import pytest

import envactors as ea
from envactors.integrations.alf.rotation import Rotation
from envactors.testing import EchoEnv


@pytest.fixture
def make():
    """Makes rotations, and closes their envs after the test."""
    made = []

    def make_one(lengths, places, **kwargs):
        made.append(ea.VectorEnv([functools.partial(EchoEnv, i, n) for i, n in enumerate(lengths)], **kwargs))
        return Rotation(made[-1], places)

    yield make_one
    while made:  # what was closed and still owes results keeps their memory
        made.pop().close()


def shown(obs):
    """``(env, step)`` of each place."""
    return [(int(row[0]), int(row[1])) for row in obs]


def test_an_env_whose_episode_ends_queues_and_its_place_takes_the_front(make):
    rotation = make([2, 9, 9, 9], 2)
    obs, infos = rotation.reset(seed=10)
    assert shown(obs) == [(0, 0), (1, 0)]
    assert [info["seed"] for info in infos] == [10, 11]
    rotation.step([1, 1])
    obs, rewards, terminated, _, _ = rotation.step([5, 6])
    assert (shown(obs), rewards.tolist(), terminated.tolist()) == ([(0, 2), (1, 2)], [5, 6], [True, False])
    assert rotation.env_ids == [0, 1]
    obs, rewards, terminated, _, infos = rotation.step([7, 8])
    assert (shown(obs), rewards.tolist(), terminated.tolist()) == ([(2, 0), (1, 3)], [0, 8], [False, False])
    assert infos[0]["seed"] == 12  # its reset was there from the beginning
    assert rotation.env_ids == [2, 1]
    obs, _ = rotation.reset()
    assert shown(obs) == [(0, 0), (1, 0)]
    assert rotation.env_ids == [0, 1]


def test_one_run_is_like_the_other(make):
    def run():
        rotation = make([1, 2, 3, 5, 7], 3)
        rotation.reset(seed=0)
        return [(rotation.step([n, n, n])[0].tolist(), rotation.env_ids.copy()) for n in range(40)]

    assert run() == run()


def test_wrong_actions_change_nothing(make):
    rotation = make([1, 1, 1], 1)
    rotation.reset()
    rotation.step([1])
    with pytest.raises(ea.SpaceMismatchError):
        rotation.step([1, 2])
    assert rotation.env_ids == [0]
    assert shown(rotation.step([1])[0]) == [(1, 0)]


def test_an_exception_leaves_the_rotation_as_it_was(make):
    rotation = make([3, 9, 9], 2)
    rotation.reset()
    rotation._envs[1].set("episode_length", "odd").result()  # comparing with it raises
    with pytest.raises(ea.VectorStepError) as caught:
        rotation.step([1, 1])
    assert list(caught.value.failures) == [1]
    rotation._envs[1].set("episode_length", 9).result()
    assert shown(rotation.step([1, 1])[0]) == [(0, 2), (1, 2)]
    assert shown(rotation.step([1, 1])[0]) == [(0, 3), (1, 3)]
    assert shown(rotation.step([1, 1])[0]) == [(2, 0), (1, 4)]


@pytest.mark.parametrize("places", [1, 2, 3])
def test_an_env_that_crashed_joins_the_queue_too(make, places):
    rotation = make([99] * 3, places, on_failure="renew")
    rotation.reset()
    rotation.step([1] * places)
    os.kill(rotation._envs[0].pid, signal.SIGKILL)
    *_, truncated, infos = rotation.step([1] * places)
    assert truncated.tolist() == [True, False, False][:places]
    assert isinstance(infos[0]["failure"], ea.ActorDiedError)
    obs, *_ = rotation.step([1] * places)
    assert shown(obs)[0] == (places % 3, 0)


def test_after_a_crash_that_was_raised_a_reset_continues(make):
    rotation = make([99] * 3, 2)
    rotation.reset()
    os.kill(rotation._envs[1].pid, signal.SIGKILL)
    with pytest.raises(ea.VectorStepError):
        rotation.step([1, 1])
    with pytest.raises(ea.VectorInputError, match="needs a reset"):
        rotation.step([1, 1])
    assert shown(rotation.reset()[0]) == [(0, 0), (1, 0)]
    assert shown(rotation.step([1, 1])[0]) == [(0, 1), (1, 1)]


def test_a_spare_env_that_crashed_is_reported_when_it_takes_a_place(make):
    rotation = make([2, 99, 99], 2)
    rotation.reset()
    rotation._envs[2].call("echo", "its reset is done").result()
    os.kill(rotation._envs[2].pid, signal.SIGKILL)
    rotation.step([1, 1])
    rotation.step([1, 1])
    result = rotation.step([1, 1])
    assert shown(result[0]) == [(2, 0), (1, 3)]
    with pytest.raises(ea.VectorStepError) as caught:
        rotation.step([1, 1])
    assert isinstance(caught.value.failures[2], ea.ActorDiedError)


def test_the_rotation_returns_arrays_with_one_row_per_place(make):
    rotation = make([4] * 5, 2, copy=False)
    rotation.reset()
    for _ in range(20):
        obs, rewards, terminated, _, infos = rotation.step(np.array([1, 1]))
        assert (obs.shape, rewards.dtype, terminated.dtype, len(infos)) == ((2, 4), np.float64, np.bool_, 2)


def test_refusals(make):
    for places in (0, 4, -1, True, 1.0):
        with pytest.raises(ea.VectorEnvError, match="expected an int from 1"):
            make([1] * 3, places)
    with pytest.raises(ea.VectorEnvError, match="expected 'next_step'"):
        make([1], 1, autoreset="same_step")


@pytest.mark.parametrize("count", [2, 3])
def test_step_continues_after_an_interrupt_of_a_reset_in_process(make, count):
    class Interrupted(EchoEnv):
        def reset(self, **kwargs):
            if self.steps == 2:
                self.steps = 0
                raise KeyboardInterrupt
            return super().reset(**kwargs)

    envs = ea.VectorEnv([functools.partial(Interrupted, i, 2 if i == 0 else 9) for i in range(count)], backend="inline")
    with envs:
        rotation = Rotation(envs, 2)
        rotation.reset(seed=10)
        rotation.step([1, 1])
        with pytest.raises(KeyboardInterrupt):
            rotation.step([1, 1])
        with pytest.warns(UserWarning, match="interrupted") if count == 2 else contextlib.nullcontext():
            obs, *_ = rotation.step([1, 1])
        # With two envs, the one that was interrupted takes its place again.
        assert shown(obs) == ([(0, 0), (1, 3)] if count == 2 else [(2, 0), (1, 3)])
        assert shown(rotation.step([1, 1])[0]) == ([(0, 1), (1, 4)] if count == 2 else [(2, 1), (1, 4)])
