"""Autoresets that raise under ``on_failure="raise"``: the episode has ended, so that the env needs a reset."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import envactors as ea


class Box:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)


class FailingReset:
    """Its episodes have two steps; its second reset raises."""

    def __init__(self):
        self.observation_space, self.action_space = Box((1,), np.float32), Box((), np.int64)
        self.resets = self.steps = 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        self.steps = 0
        if self.resets == 2:
            raise ValueError("no level is left")
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 2, False, {}


@pytest.mark.parametrize("packed", [1, 2])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("backend", ["process", "thread", "inline"])
def test_an_env_whose_autoreset_raises_needs_a_reset(backend, autoreset, packed):
    actions = np.zeros(2, np.int64)
    with ea.VectorEnv(
        [FailingReset] * 2, backend=backend, autoreset=autoreset, envs_per_actor=packed, on_failure="raise"
    ) as envs:
        envs.reset()
        for _ in range(1 if autoreset == "same_step" else 2):
            envs.step(actions)
        with pytest.raises(ea.VectorStepError) as failed:
            envs.step(actions)
        assert {type(error) for error in failed.value.failures.values()} == {ValueError}
        with pytest.raises(ea.VectorInputError, match="needs a reset first"):
            envs.step(actions)
        envs.reset()
        assert envs.step(actions)[0].tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_an_env_whose_autoreset_raises_in_a_rollout_needs_a_reset(autoreset):
    with ea.VectorEnv([FailingReset] * 2, autoreset=autoreset, on_failure="raise") as envs:
        envs.reset()
        envs.set_policy(lambda: lambda obs, context: np.zeros(len(obs), np.int64))
        with pytest.raises(ea.VectorStepError):
            envs.rollout(4)
        with pytest.raises(ea.VectorInputError, match="needs a reset first"):
            envs.step(np.zeros(2, np.int64))


class RaisingStep(FailingReset):
    """Its first step raises."""

    def step(self, action):
        self.steps += 1
        if self.steps == 1:
            raise ValueError("no power")
        return np.full(1, self.steps, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_an_env_whose_step_raises_needs_no_reset(autoreset):
    with ea.VectorEnv([RaisingStep], autoreset=autoreset, on_failure="raise") as envs:
        envs.reset()
        with pytest.raises(ea.VectorStepError):
            envs.step(np.zeros(1, np.int64))
        assert envs.step(np.zeros(1, np.int64))[0].tolist() == [[2.0]]


def test_recv_waits_for_a_reset_that_another_thread_has_found_to_run_again(monkeypatch):
    """The reset has raised, which ends the wait; before `recv` looks, the other thread has it run in a new process."""
    found = []
    # The loop may be the first to see that the reset has raised.
    while True not in found and len(found) < 20:
        with (
            ea.VectorEnv([FailingReset], autoreset="next_step", on_failure="replay") as envs,
            monkeypatch.context() as patched,
        ):
            envs.reset(seed=0)
            envs.step([0])
            envs.step([0])
            engine, is_first = envs._engine, [True]
            waiters = engine.table.waiters

            def wait(count_missing, deadline, engine=engine, waiters=waiters, is_first=is_first, **options):
                in_time = type(waiters).wait(waiters, count_missing, deadline, **options)
                if is_first:
                    is_first.clear()
                    found.append(engine.table.has_failed(0))
                    engine._collect(engine.all_envs)
                return in_time

            patched.setattr(waiters, "wait", wait, raising=False)
            envs.send([0])
            assert envs.recv().env_ids.tolist() == [0]
    assert True in found


class LockedEnd(FailingReset):
    """The info of the second step, which ends the episode, can be neither pickled nor copied."""

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.steps < 2, "the episode is over"
        *others, _ = super().step(action)
        return *others, {"lock": threading.Lock()} if self.steps == 2 else {}


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("backend", ["process", "thread", "inline"])
def test_an_episode_whose_last_result_cannot_be_pickled_does_not_end_unnoticed(backend, autoreset):
    actions = np.zeros(2, np.int64)
    with ea.VectorEnv([LockedEnd, LockedEnd], backend=backend, autoreset=autoreset, on_failure="raise") as envs:
        envs.reset()
        envs.step(actions)
        with pytest.raises(ea.VectorStepError) as failed:
            envs.step(actions)
        assert list(failed.value.failures) == [0, 1]
        with pytest.raises(ea.VectorInputError, match="needs a reset first"):
            envs.step(actions)
        envs.reset()
        assert envs.step(actions)[0].tolist() == [[1], [1]]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("backend", ["process", "inline"])
def test_an_episode_of_a_rollout_whose_last_result_cannot_be_pickled_does_not_end_unnoticed(backend, autoreset):
    with ea.VectorEnv([LockedEnd], backend=backend, autoreset=autoreset, on_failure="raise") as envs:
        envs.reset()
        envs.set_policy(lambda: lambda obs, context: np.zeros(len(obs), np.int64))
        with pytest.raises(ea.VectorStepError):
            envs.rollout(4)
        with pytest.raises(ea.VectorInputError, match="needs a reset first"):
            envs.step([0])
