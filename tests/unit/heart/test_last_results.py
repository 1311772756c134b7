"""The last result of an env, which `last_batch` and snapshots return again: whole, and the same in both engines."""

from __future__ import annotations

import contextlib

import gymnasium
import numpy as np
import pytest
from fakes import END, RAISE, SOON, PlayedEnv, RowError, wait_until

import envactors as ea
from envactors.vector.table import QUEUED

# Actions whose steps return flags without a truth value, besides one that tells whether the episode has ended.
ENDS_WITH_UNFIT_FLAG = 801
GOES_ON_WITH_UNFIT_FLAG = 802


class UnfitEnv(PlayedEnv):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if action in (ENDS_WITH_UNFIT_FLAG, GOES_ON_WITH_UNFIT_FLAG):
            terminated, truncated = action == ENDS_WITH_UNFIT_FLAG, np.array([1, 2])
        return obs, reward, terminated, truncated, info


class ObjectEnv(UnfitEnv):
    """Its rewards are objects."""

    reward_space = gymnasium.spaces.Text(9)

    def step(self, action):
        obs, reward, *others = super().step(action)
        return obs, str(reward), *others


@pytest.fixture
def in_both_engines(stages):
    """Return a function that calls another one with a vector whose envs have been reset, in workers and in-process."""

    def run(function, env=UnfitEnv, **options):
        stage = stages(2, env=env, **options)
        with stage.backend.playing():
            in_workers = function(stage.envs)
        with ea.VectorEnv([env] * 2, backend="inline", **options) as envs:
            envs.reset(seed=0)
            in_process = function(envs)
        assert in_workers == in_process
        return in_workers

    return run


def values_of(batch):
    """Return everything in a batch except infos, in which only a new result has its failure."""
    columns = [batch.obs, batch.rewards, batch.terminated, batch.truncated, batch.incarnations]
    return [column if isinstance(column, list) else column.tolist() for column in columns]


@pytest.mark.parametrize("env", [UnfitEnv, ObjectEnv])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("action", [RAISE, ENDS_WITH_UNFIT_FLAG, GOES_ON_WITH_UNFIT_FLAG])
def test_the_last_batch_is_what_users_got_for_a_failure(in_both_engines, env, autoreset, action):
    def fail(envs):
        envs.step([1, 1])
        envs.send([2, action])
        batch = envs.recv(min_envs=2)
        assert values_of(envs.last_batch()) == values_of(batch)
        return values_of(batch)

    options = {"on_failure": "renew", "autoreset": autoreset}
    _, rewards, terminated, truncated, incarnations = in_both_engines(fail, env, **options)
    assert rewards == ([2, 0] if env is UnfitEnv else ["2.0", 0])
    assert (terminated, truncated, incarnations) == ([False] * 2, [False, True], [0, 1])


def test_after_a_failed_restore_the_last_result_is_that_of_the_last_step(in_both_engines):
    def fail_to_restore(envs):
        snapshots = envs.snapshot()
        envs.step([1, END])
        before = values_of(envs.last_batch())
        with pytest.raises(RowError):
            envs.restore(snapshots)
        assert values_of(envs.last_batch()) == before
        return before

    def refuse(env, state):
        raise RowError("in a restore")

    policy = ea.SnapshotPolicy(lambda env: 0, refuse)
    _, rewards, terminated, _, _ = in_both_engines(fail_to_restore, on_failure="renew", snapshot=policy)
    assert (rewards, terminated) == ([1, END], [False, True])


@pytest.mark.parametrize("action", [ENDS_WITH_UNFIT_FLAG, GOES_ON_WITH_UNFIT_FLAG])
def test_a_step_that_ends_the_episode_with_an_unfit_flag_needs_a_reset(in_both_engines, action):
    def step(envs):
        with pytest.raises(ea.VectorStepError, match="truth value"):
            envs.step([1, action])
        with contextlib.suppress(ea.VectorInputError):
            return envs.step([2, 2])[0].tolist()

    obs = in_both_engines(step)
    assert obs == (None if action == ENDS_WITH_UNFIT_FLAG else [[2, 2, 0], [2, 2, 1]])


def test_a_late_result_that_is_withdrawn_leaves_the_last_one_whole(stages):
    """Its reward and flags used to be those of the last result, with the observation of the step before."""
    stage = stages(1, on_failure="replay", restart=ea.RestartPolicy(max_restarts=1, backoff=SOON))
    stage.step([1])
    before = values_of(stage.envs.last_batch())
    (future,) = stage.envs.submit([END])
    with stage.table.lock, stage.table.lock.change(stage.actor()):
        stage.table.miss_deadline(0)
    stage.worker().run_row(0)
    stage.crash()
    wait_until(lambda: list(stage.table.status) == [QUEUED])
    assert future.abort()
    assert values_of(stage.envs.last_batch()) == before
