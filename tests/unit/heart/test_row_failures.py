"""Crashes, deadlines, and exceptions in steps and resets: who is blamed, and what the user sees."""

from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest
from budget import LONG
from fakes import (
    CUT,
    END,
    HUGE,
    HUGE_SIZE,
    INFO,
    LARGE,
    LEAVE,
    RAISE,
    SOON,
    TRAP,
    PlayedEnv,
    RowError,
    Trap,
    wait_until,
)

import envactors as ea
from envactors.actor.states import ActorState, Phase
from envactors.mailbox.control_page import METHOD, METHOD_RESET
from envactors.mailbox.info_codec import FAILED as FAILED_INFO
from envactors.mailbox.info_codec import INLINE_INFO, PLAIN
from envactors.mailbox.messages import episode_seed, renewed_seed
from envactors.mailbox.pickling import loads
from envactors.vector.episodes import EPISODE_LOST, NEEDS_RESET, NEW_PROCESS, NO_EPISODE, RETIRING
from envactors.vector.rows import Rows
from envactors.vector.table import DONE, FAILED, IDLE, POSTED, QUEUED

# The worker ends at each line with this distance.
STRIDE = 8 if LONG else 12
ON_FAILURE = pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
AUTORESET = pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
RENEWING = pytest.mark.parametrize("on_failure", ["renew", "replay"])


def failures_of(infos):
    return [index for index, info in enumerate(infos) if "failure" in info]


# A crash before, in, and after the row of one env ---------------------------------------------------------


@AUTORESET
@ON_FAILURE
def test_a_crash_in_a_row_is_that_envs_failure(stages, on_failure, autoreset):
    stage = stages(2, on_failure=on_failure, autoreset=autoreset)
    stage.step([1, 1])
    stage.start([2, 2])
    stage.worker(0).begin_row(0)
    stage.crash()
    stage.run()
    stage.check()
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError) as caught:
            stage.finish()
        error = caught.value.failures[0]
        assert isinstance(error, ea.ActorDiedError)
        assert (error.method, error.index) == ("step", 0)
        assert caught.value.batch.env_ids.tolist() == [1]
        assert stage.episodes.flags[0] & NEEDS_RESET
    elif on_failure == "renew":
        batch = stage.finish()
        assert failures_of(batch.infos) == [0]
        assert isinstance(batch.infos[0]["failure"], ea.ActorDiedError)
        assert (batch.truncated.tolist(), batch.rewards.tolist()) == ([True, False], [0.0, 2.0])
        assert batch.incarnations.tolist() == [1, 0]
        assert batch.obs[0].tolist() == ([0, -1, renewed_seed(0, 1)] if autoreset == "same_step" else [1, 1, 0])
    else:
        batch = stage.finish()
        assert failures_of(batch.infos) == []
        assert batch.obs.tolist() == [[2, 2, 0], [2, 2, 1]]
    assert stage.actor().stats().restarts == 1
    assert stage.actor(1).stats().restarts == 0
    stage.check()


@AUTORESET
@ON_FAILURE
def test_a_crash_before_a_row_loses_the_episode_but_blames_nobody(stages, on_failure, autoreset):
    stage = stages(2, on_failure=on_failure, autoreset=autoreset)
    stage.step([1, 1])
    stage.start([2, 2])
    stage.crash()
    stage.run()
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError) as caught:
            stage.finish()
        assert list(caught.value.failures) == [0]
        assert "while idle" in str(caught.value.failures[0])
    else:
        batch = stage.finish()
        assert failures_of(batch.infos) == ([0] if on_failure == "renew" else [])
        assert batch.obs[1].tolist() == [2, 2, 1]
        if on_failure == "replay":
            assert batch.obs[0].tolist() == [2, 2, 0]
    stage.check()


@AUTORESET
@ON_FAILURE
def test_a_crash_after_a_row_returns_its_result(stages, on_failure, autoreset):
    stage = stages(2, on_failure=on_failure, autoreset=autoreset)
    stage.start([2, 2])
    stage.worker(0).run_row(0)
    stage.worker(1).play()
    stage.crash()
    assert stage.table.status[0] == DONE
    stage.run()
    assert stage.finish().obs.tolist() == [[1, 2, 0], [1, 2, 1]]
    stage.start([3, 3])
    stage.run()
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError) as caught:
            stage.finish()
        assert list(caught.value.failures) == [0]
    elif on_failure == "renew":
        assert failures_of(stage.finish().infos) == [0]
    else:
        assert stage.finish().obs.tolist() == [[2, 3, 0], [2, 3, 1]]
    stage.check()


@AUTORESET
@pytest.mark.parametrize("on_failure", ["raise", "renew"])
def test_after_a_failure_the_next_steps_or_a_reset_work(stages, on_failure, autoreset):
    stage = stages(2, on_failure=on_failure, autoreset=autoreset)
    stage.start([2, 2])
    stage.worker(0).begin_row(0)
    stage.crash()
    stage.run()
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError):
            stage.finish()
    else:
        stage.finish()
    if on_failure == "raise" or autoreset == "disabled":
        with pytest.raises(ea.VectorInputError, match="env 0 needs a reset first"):
            stage.start([1, 1])
        stage.reset(env_ids=[0], seed=[5])
    elif autoreset == "next_step":
        assert stage.step([1, 1])[0][0].tolist() == [0, -1, renewed_seed(0, 1)]
    before = stage.table.slab.observations[0][stage.table.last_rows.buffers(0), 0, 0]
    assert stage.step([7, 7])[0][0].tolist()[:2] == [before + 1, 7]
    stage.check()


@pytest.mark.parametrize("on_failure", ["raise", "renew"])
def test_a_crash_in_a_reset_repeats_it_with_the_same_seed_once(stages, on_failure):
    stage = stages(1, on_failure=on_failure)
    stage.access.start_reset([0], [8], [{"o": 1}])
    stage.worker().begin_row(0)
    stage.crash()
    stage.run()
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError):
            stage.finish()
        return
    batch = stage.finish()
    assert stage.env().resets == [(8, {"o": 1})]
    assert isinstance(batch.infos[0]["failure"], ea.ActorDiedError)


def test_a_reset_that_crashes_twice_gets_a_derived_seed(stages):
    stage = stages(1, on_failure="renew")
    stage.access.start_reset([0], [8], [None])
    for _ in range(2):
        stage.settle()
        while stage.table.status[0] != POSTED:  # until the process has started and was posted the row
            stage.worker().play()
            stage.settle()
        stage.worker().begin_row(0)
        stage.crash()
    stage.run()
    stage.finish()
    assert stage.env().resets == [(renewed_seed(8, 2), None)]


def test_a_reset_before_which_the_process_has_ended_is_not_noticed(stages):
    stage = stages(1)
    stage.access.start_reset([0], [8], [None])
    stage.crash()
    stage.run()
    assert stage.finish().obs.tolist() == [[0, -1, 8]]


def test_an_idle_crash_is_reported_by_the_next_step(stages):
    stage = stages(2, on_failure="renew")
    stage.step([1, 1])
    stage.crash()
    stage.run()
    assert stage.episodes.flags[0] & EPISODE_LOST
    assert stage.table.are_all(IDLE)
    _, _, _, truncated, infos = stage.step([2, 2])
    assert truncated.tolist() == [True, False]
    assert "while idle" in str(infos[0]["failure"])


def test_an_idle_crash_is_not_noticed_by_a_reset(stages):
    stage = stages(2)
    stage.step([1, 1])
    stage.crash()
    stage.run()
    assert stage.reset(seed=3)[0].tolist() == [[0, -1, 3], [0, -1, 4]]


@ON_FAILURE
def test_a_future_of_a_row_that_crashes_gets_the_failure(stages, on_failure):
    stage = stages(1, on_failure=on_failure)
    stage.step([1])
    (future,) = stage.envs.submit([2])
    stage.worker().begin_row(0)
    stage.crash()
    stage.run()
    if on_failure == "raise":
        with pytest.raises(ea.ActorDiedError, match="in step"):
            future.result(SOON)
    elif on_failure == "renew":
        step = future.result(SOON)
        assert (step.obs.tolist(), step.truncated) == ([1, 1, 0], True)
        assert isinstance(step.info["failure"], ea.ActorDiedError)
    else:
        assert future.result(SOON).obs.tolist() == [2, 2, 0]
    assert list(stage.table.status) == [IDLE]
    stage.check()


# Several envs per actor ----------------------------------------------------------------------------------


def test_a_crash_of_a_packed_actor_blames_the_env_that_ran(stages):
    stage = stages(3, envs_per_actor=3, on_failure="renew")
    stage.step([1, 1, 1])
    stage.start([2, 2, 2])
    worker = stage.worker()
    worker.run_row(0)
    worker.begin_row(1)
    stage.crash()
    assert list(stage.table.status) == [DONE, DONE, DONE]
    stage.run()
    batch = stage.finish()
    assert failures_of(batch.infos) == [1, 2]
    assert batch.obs.tolist() == [[2, 2, 0], [1, 1, 1], [1, 1, 2]]
    assert "env 1" in str(batch.infos[1]["failure"])
    assert "while step of env 1 was running" in str(batch.infos[2]["failure"])
    assert failures_of(stage.step([3, 3, 3])[4]) == [0], "its episode was lost with the process"
    stage.check()


def test_a_crash_of_a_packed_actor_under_replay_is_not_noticed(stages):
    stage = stages(3, envs_per_actor=3, on_failure="replay")
    stage.step([1, 1, 1])
    stage.start([2, 2, 2])
    stage.worker().run_row(0)
    stage.worker().begin_row(1)
    stage.crash()
    stage.run()
    assert stage.finish().obs.tolist() == [[2, 2, 0], [2, 2, 1], [2, 2, 2]]
    assert stage.actor().stats().replays == 3
    assert stage.step([3, 3, 3])[0].tolist() == [[3, 3, 0], [3, 3, 1], [3, 3, 2]]
    stage.check()


def test_a_crash_between_the_rows_of_a_packed_actor_blames_nobody(stages):
    stage = stages(2, envs_per_actor=2)
    stage.start([2, 2])
    stage.worker().run_row(0)
    stage.crash()
    stage.run()
    with pytest.raises(ea.VectorStepError) as caught:
        stage.finish()
    assert list(caught.value.failures) == [1]
    assert "while idle" in str(caught.value.failures[1])
    assert caught.value.batch.env_ids.tolist() == [0]


def test_a_row_that_raised_before_the_crash_keeps_its_exception(stages):
    stage = stages(2, envs_per_actor=2)
    stage.start([RAISE, 1])
    stage.worker().run_row(0)
    stage.worker().begin_row(1)
    stage.crash()
    stage.run()
    with pytest.raises(ea.VectorStepError) as caught:
        stage.finish()
    assert isinstance(caught.value.failures[0], RowError)
    assert isinstance(caught.value.failures[1], ea.ActorDiedError)


def test_a_raised_row_that_is_read_after_the_exit_runs_after_all_replays(stages):
    stage = stages(2, envs_per_actor=2, on_failure="replay")
    stage.step([1, 1])
    stage.start([1, RAISE])
    worker = stage.worker()
    worker.run_row(0)
    worker.run_row(1)
    stage.crash()
    stage.worker().play()  # the start
    stage.settle()
    batch = stage.finish()  # reads the failure, while the replays wait
    assert batch.obs[0].tolist() == [2, 1, 0]
    assert isinstance(batch.infos[1]["failure"], RowError)
    stage.check()


def test_a_step_of_a_lost_episode_that_is_recorded_only_for_crash_bundles_waits_for_no_replay(stages):
    slow = ea.RestartPolicy(max_restarts=9, backoff=0.5)
    stage = stages(2, seed=None, envs_per_actor=2, on_failure="renew", restart=slow)
    stage.table.journals.is_recorded = True  # as with ``crash_dir``
    stage.reset(seed=0)
    stage.start([1], [0])
    stage.worker().begin_row(0)
    stage.crash()
    stage.start([1], [1])
    assert stage.table.status[1] == DONE
    assert failures_of(stage.finish().infos) == [0, 1]
    stage.check()


# Exceptions ----------------------------------------------------------------------------------------------


@AUTORESET
@ON_FAILURE
@pytest.mark.parametrize("action", [RAISE, LEAVE])
def test_an_env_that_raises(stages, on_failure, autoreset, action):
    stage = stages(2, on_failure=on_failure, autoreset=autoreset)
    stage.step([1, 1])
    stage.start([action, 2])
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError) as caught:
            stage.finish()
        assert type(caught.value.failures[0]) is (RowError if action == RAISE else SystemExit)
        assert not stage.episodes.flags[0] & NEEDS_RESET, "the episode continues"
        assert stage.step([3, 3])[0].tolist() == [[3, 3, 0], [3, 3, 1]]
        assert stage.envs.actors[0].incarnation == 0
    else:
        batch = stage.finish()
        assert failures_of(batch.infos) == [0]
        assert batch.truncated.tolist() == [True, False]
        stage.run()
        assert stage.envs.actors[0].incarnation == (2 if on_failure == "replay" else 1)
    stage.check()


@ON_FAILURE
def test_an_env_that_raises_in_a_reset(stages, on_failure):
    stage = stages(2, on_failure=on_failure)
    stage.env(0).fails_reset = True
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError) as caught:
            stage.reset(seed=4)
        assert list(caught.value.failures) == [0]
        assert stage.episodes.flags[0] & NEEDS_RESET
    else:
        obs, infos = stage.reset(seed=4)
        assert failures_of(infos) == ([0] if on_failure == "renew" else [])
        assert obs[0].tolist() == [0, -1, 4]
    stage.check()


@ON_FAILURE
@pytest.mark.parametrize("plain", [True, False])
def test_a_result_that_cannot_be_unpickled_fails_only_its_env(stages, on_failure, plain):
    stage = stages(2, on_failure=on_failure)
    if not plain:
        stage.envs.submit([1], env_ids=[0])
        stage.run()
    stage.start([TRAP, 2])
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError) as caught:
            stage.finish()
        assert list(caught.value.failures) == [0]
        assert caught.value.batch.rewards.tolist() == [2.0]
    else:
        batch = stage.finish()
        assert failures_of(batch.infos) == [0]
        assert batch.rewards.tolist()[1] == 2.0
        stage.run()
        replaced = str(stage.envs.actors[0].stats().last_failure)
        assert "was replaced since the result of step cannot be unpickled" in replaced
    stage.check()


@ON_FAILURE
def test_a_result_that_cannot_be_unpickled_fails_only_its_future(stages, on_failure):
    stage = stages(1, on_failure=on_failure)
    (future,) = stage.envs.submit([TRAP])
    stage.run()
    assert stage.step([2])[0].tolist() == [[2, 2, 0]]
    with pytest.raises(ea.SerializationError):
        future.result(SOON)
    assert stage.step([3])[0].tolist() == [[3, 3, 0]]
    assert stage.envs.actors[0].incarnation == 0


def test_a_reported_result_that_cannot_be_unpickled_is_the_last_one(stages):
    policy = ea.SnapshotPolicy(get=lambda env: env.steps, set=lambda env, steps: setattr(env, "steps", steps))
    stage = stages(1, snapshot=policy)
    stage.step([1])
    with pytest.raises(ea.VectorStepError):
        stage.step([TRAP])
    (snapshot,) = stage.play(stage.envs.snapshot)
    assert loads(snapshot.state) == 2
    assert (snapshot.last.obs.tolist(), snapshot.last.reward) == ([2, TRAP, 0], TRAP)
    assert not snapshot.is_start
    assert stage.step([3])[0].tolist() == [[3, 3, 0]]


class TrappedEnv(PlayedEnv):
    """The info of its second reset cannot be unpickled."""

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"trap": Trap()} if len(self.resets) == 2 else {}


class TrappedEnd(PlayedEnv):
    def step(self, action):
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, action == TRAP, truncated, info


@pytest.mark.parametrize(
    ("env", "action", "autoreset"),
    [(TrappedEnd, TRAP, "next_step"), (TrappedEnd, TRAP, "disabled"), (TrappedEnv, END, "same_step")],
)
def test_an_episode_whose_last_result_cannot_be_unpickled_does_not_end_unnoticed(stages, env, action, autoreset):
    stage = stages(1, env=env, autoreset=autoreset)
    stage.step([1])
    with pytest.raises(ea.VectorStepError):
        stage.step([action])
    with pytest.raises(ea.VectorInputError, match="needs a reset"):
        stage.step([2])
    stage.reset(seed=4)
    assert stage.step([3])[0].tolist() == [[1, 3, 4]]
    stage.check()


def crash_after_a_trap(stage):
    """Return a last result that cannot be unpickled, and crash in the step after it."""
    (future,) = stage.envs.submit([TRAP])
    stage.run()
    assert isinstance(future.exception(SOON), ea.SerializationError)
    stage.start([2])
    stage.worker().begin_row(0)
    stage.crash()
    stage.run()


def test_a_crash_after_an_unreadable_info_returns_the_last_observation(stages):
    stage = stages(1, on_failure="renew")
    crash_after_a_trap(stage)
    batch = stage.finish()
    assert batch.obs.tolist() == [[1, TRAP, 0]]
    assert failures_of(batch.infos) == [0]
    assert stage.step([3])[0][0, :2].tolist() == [0, -1]


class ObjectEnv(PlayedEnv):
    observation_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return "first", {}

    def step(self, action):
        return str(action), *super().step(action)[1:]


def test_a_crash_after_an_unreadable_observation_raises_once(stages):
    stage = stages(1, on_failure="renew", env=ObjectEnv)
    crash_after_a_trap(stage)
    with pytest.raises(ea.VectorStepError) as caught:
        stage.finish()
    assert isinstance(caught.value.failures[0], ea.SerializationError)
    assert stage.step([3])[0] == ["first"]


@pytest.mark.parametrize("encodings", [[PLAIN, INLINE_INFO], [PLAIN, PLAIN]])
def test_objects_whose_encoding_env_code_overwrites_are_missing_from_one_result(stages, encodings):
    stage = stages(2, env=ObjectEnv)
    stage.start([1, 2])
    for index, encoding in enumerate(encodings):
        stage.worker(index).run_row(index)
        stage.table.rows.infos.encodings[index] = encoding
        stage.worker(index).end_rows()
    assert stage.finish().obs == [None, "2" if INLINE_INFO in encodings else None]
    assert stage.step([3, 4])[0] == ["3", "4"]


def test_a_failure_that_env_code_claims_while_its_row_is_accepted_is_one(stages, monkeypatch):
    stage = stages(1)
    stage.start([1])
    stage.worker().play()
    is_complete = Rows.is_complete

    def claim_failure(rows, index):
        found = is_complete(rows, index)
        rows.infos.encodings[index] = FAILED_INFO
        return found

    monkeypatch.setattr(Rows, "is_complete", claim_failure)
    group = stage.engine.groups[0]
    with stage.table.lock, stage.table.lock.change(group.actor):
        group.collect_completed()
    monkeypatch.undo()
    with pytest.raises(ea.VectorStepError, match="cannot be read"):
        stage.finish()


def test_a_step_before_any_reset_which_a_crash_has_not_begun_runs_again(stages):
    stage = stages(2, seed=None, envs_per_actor=2)
    stage.access.disable_reset_checks()
    stage.start([1, 2])
    stage.worker().begin_row(0)
    stage.crash()
    stage.run()
    with pytest.raises(ea.VectorStepError) as caught:
        stage.finish()
    assert list(caught.value.failures) == [0]
    assert caught.value.batch.rewards.tolist() == [2.0]


def test_neighbors_of_an_env_that_raised_lose_their_episodes_in_the_next_step(stages):
    stage = stages(3, envs_per_actor=3, on_failure="renew")
    stage.step([1, 1, 1])
    assert failures_of(stage.step([RAISE, 2, 2])[4]) == [0]
    stage.run()
    _, _, _, truncated, infos = stage.step([3, 3, 3])
    assert failures_of(infos) == [1, 2]
    assert truncated.tolist() == [False, True, True]
    stage.check()


def test_recv_raises_at_once_when_an_env_has_failed(stages):
    stage = stages(3)
    stage.envs.send(np.array([1, RAISE, 3]))
    stage.worker(1).run_row(1)
    stage.worker(2).run_row(2)
    with pytest.raises(ea.VectorStepError) as caught:
        stage.envs.recv()
    assert list(caught.value.failures) == [1]
    assert caught.value.batch.env_ids.tolist() == [2]
    stage.run()
    assert stage.envs.recv().env_ids.tolist() == [0]


@RENEWING
def test_recv_waits_on_although_an_env_has_raised(stages, on_failure):
    stage = stages(2, on_failure=on_failure)
    stage.envs.send(np.array([RAISE, 3]))
    stage.worker(0).run_row(0)
    batch = stage.play(stage.envs.recv)
    assert sorted(batch.env_ids.tolist()) == [0, 1]


# The worker ends between any two lines -------------------------------------------------------------------


@pytest.mark.parametrize("action", [1, RAISE, LARGE, END])
@pytest.mark.parametrize("on_failure", ["raise", "replay"])
def test_a_crash_at_any_line_of_a_step(stages, on_failure, action):
    check_each_line(stages, lambda stage: stage.start([action, 2]), on_failure=on_failure)


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_a_crash_at_any_line_of_a_reset_within_a_step(stages, on_failure):
    check_each_line(stages, lambda stage: stage.start([END, 2]), on_failure=on_failure, autoreset="same_step")


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_a_crash_at_any_line_of_a_reset(stages, on_failure):
    check_each_line(stages, lambda stage: stage.access.start_reset([0, 1], [5, 6], [{"a": 1}, None]), on_failure)


def check_each_line(stages, start, on_failure, autoreset="next_step"):
    """Whatever line a crash comes at, each env has the right result or a failure, and the vector works again."""
    stage = stages(2, envs_per_actor=2, on_failure=on_failure, autoreset=autoreset)
    for line in itertools.count(1, STRIDE):
        stage.reset(seed=0)
        stage.step([1, 1])
        start(stage)
        ended = stage.worker().run_until_line(line)
        stage.run()
        stage.check()
        failures = []
        try:
            batch = stage.finish()
        except ea.VectorStepError as error:
            batch, failures = error.batch, list(error.failures)
        assert not failures or on_failure == "raise"
        assert sorted([*failures, *batch.env_ids.tolist()]) == [0, 1]
        for index, obs, info in zip(batch.env_ids.tolist(), batch.obs.tolist(), batch.infos, strict=True):
            if on_failure == "replay" and "failure" not in info and index == 1:
                assert obs in ([2, 2, 1], [0, -1, 6])
        stage.run()
        stage.check()
        assert not stage.table.rows.overdue
        if not ended:
            break


# Deadlines -----------------------------------------------------------------------------------------------


@ON_FAILURE
def test_a_step_that_misses_its_deadline(stages, on_failure):
    stage = stages(2, on_failure=on_failure, deadlines=ea.Deadlines(step=0.05))
    stage.start([1, 1])
    stage.worker(1).play()
    worker = stage.worker(0)
    worker.begin_row(0)
    wait_until(lambda: worker.was_killed)
    stage.run()
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError) as caught:
            stage.finish()
        assert isinstance(caught.value.failures[0], ea.ActorTimeoutError)
    else:
        batch = stage.finish()
        assert failures_of(batch.infos) == ([0] if on_failure == "renew" else [])
    assert not stage.table.rows.overdue
    stage.check()


def test_a_result_after_the_deadline_does_not_count(stages):
    stage = stages(2, envs_per_actor=2, deadlines=ea.Deadlines(step=0.05))
    stage.start([1, 1])
    worker = stage.worker()
    worker.begin_row(0)
    wait_until(lambda: stage.actor().phase is Phase.STOPPING)
    assert stage.table.rows.overdue == {0}
    worker.run_row(0)  # too late
    worker.begin_row(1)
    assert not stage.table.rows.is_complete(0)
    wait_until(lambda: worker.was_killed)
    stage.run()
    with pytest.raises(ea.VectorStepError) as caught:
        stage.finish()
    assert isinstance(caught.value.failures[0], ea.ActorTimeoutError)
    assert sorted(caught.value.failures) == [0, 1]
    stage.check()


def test_a_step_that_runs_when_a_late_neighbor_ends_its_process_is_tried_twice_itself(stages):
    stage = stages(2, envs_per_actor=2, on_failure="replay", deadlines=ea.Deadlines(step=0.05))
    stage.start([1, 1])
    worker = stage.worker()
    worker.begin_row(0)
    wait_until(lambda: stage.actor().phase is Phase.STOPPING)
    worker.run_row(0)  # too late
    worker.begin_row(1)
    wait_until(lambda: worker.was_killed)
    begin_when_posted(stage, 1)
    stage.crash()
    stage.run()
    assert failures_of(stage.finish().infos) == []
    stage.check()


def test_each_env_of_a_packed_actor_has_its_own_time(stages):
    stage = stages(2, envs_per_actor=2, deadlines=ea.Deadlines(step=0.2))
    stage.start([1, 1])
    worker = stage.worker()
    worker.run_row(0)
    worker.begin_row(1)
    step = stage.engine.groups[0].rows_job.activity()
    assert (step.method, step.index) == ("step", 1)
    assert step.started_at == worker.page.progress().since
    stage.worker().run_row(1)
    assert stage.engine.groups[0].rows_job.activity() is None
    worker.end_rows()
    stage.finish()


def test_a_worker_that_claims_to_have_finished_is_killed(stages):
    stage = stages(1)
    stage.start([1])
    worker = stage.worker()
    worker.end_rows()
    assert "not complete" in stage.engine.groups[0].check_memory(stage.table.rows.posted_ids[0])
    results = []
    try:
        stage.finish(timeout=SOON)
    except ea.VectorStepError as error:
        results.append(error)
    assert worker.was_killed
    assert "corrupt" in str(results[0]) or "not complete" in str(results[0])


def overflow(stage):
    """Have the worker complete a row whose info takes several reads of the channel."""
    worker = stage.worker()
    worker.run_row(0)
    worker.end_rows()


def test_a_worker_whose_large_info_has_not_been_read_is_no_liar(stages):
    stage = stages(1)
    stage.start([HUGE])
    actor, worker = stage.actor(), stage.worker()
    with actor.lock:  # the loop reads nothing meanwhile
        overflow(stage)
        with actor.lock.change(actor):
            actor.collect_and_verify()
    assert not worker.was_killed
    assert stage.finish().infos[0] == {"text": "x" * HUGE_SIZE}


def test_a_worker_that_finishes_while_its_frames_are_read_is_no_liar(stages, monkeypatch):
    stage = stages(1)
    stage.start([HUGE])
    actor, worker = stage.actor(), stage.worker()
    drain = worker.drain

    def drain_too_early():
        frames = drain()
        overflow(stage)
        return frames

    with actor.lock:
        monkeypatch.setattr(worker, "drain", drain_too_early)
        with actor.lock.change(actor):
            actor.collect_and_verify()
        monkeypatch.undo()
    assert not worker.was_killed
    assert stage.finish().infos[0] == {"text": "x" * HUGE_SIZE}


def test_a_large_info_that_was_sent_before_the_crash_counts(stages):
    stage = stages(1)
    stage.start([HUGE])
    actor = stage.actor()
    with actor.lock:  # the loop reads nothing before the exit
        overflow(stage)
        actor.on_exit(actor.process.worker)
    assert stage.finish().infos[0] == {"text": "x" * HUGE_SIZE}


# Replays and poison --------------------------------------------------------------------------------------


def begin_when_posted(stage, index=0):
    """Have an env begin its request once its process was posted it, after the replays."""
    stage.settle()
    while stage.table.status[index] != POSTED:
        assert stage.worker().play()
        stage.settle()
    stage.worker().begin_row(index)


def test_the_same_step_is_not_tried_a_third_time(stages):
    stage = stages(1, on_failure="replay")
    stage.step([1])
    stage.start([5])
    for _ in range(2):
        begin_when_posted(stage)
        stage.crash()
    stage.run()
    batch = stage.finish()
    failure = batch.infos[0]["failure"]
    assert isinstance(failure, ea.ActorDiedError)
    assert (batch.truncated.tolist(), batch.obs.tolist()) == ([True], [[1, 1, 0]])
    assert not stage.table.journals.flushed(0).can_replay


def test_another_step_after_an_aborted_retry_is_tried_twice_itself(stages):
    stage = stages(1, on_failure="replay")
    stage.step([1])
    (aborted,) = stage.envs.submit([5])
    stage.worker().begin_row(0)
    stage.crash()
    assert list(stage.table.status) == [QUEUED], "it waits for the replay"
    assert aborted.abort()
    stage.run()
    stage.start([6])
    begin_when_posted(stage)
    stage.crash()
    stage.run()
    batch = stage.finish()
    assert (failures_of(batch.infos), batch.rewards.tolist()) == ([], [6.0])
    stage.check()


def test_a_replay_with_another_checksum_acts_like_renew(stages, monkeypatch):
    stage = stages(1, on_failure="replay")
    stage.step([1])
    stage.start([2])
    stage.worker().begin_row(0)
    stage.crash()
    stage.worker().play()
    stage.env().drift = 0.5
    stage.run()
    batch = stage.finish()
    assert failures_of(batch.infos) == [0]
    assert batch.truncated.tolist() == [True]
    stage.check()


def test_a_replay_that_ends_two_processes_is_given_up(stages):
    stage = stages(1, on_failure="replay")
    stage.step([1])
    stage.start([2])
    stage.worker().begin_row(0)
    stage.crash()
    for _ in range(2):
        stage.worker().play()
        stage.settle()
        worker = stage.worker()
        worker.page.start_request(stage.actor().jobs.running.call_id, 1, 0)  # within the replay
        stage.crash()
    stage.run()
    assert failures_of(stage.finish().infos) == [0]
    stage.check()


def test_an_env_without_a_seed_is_not_replayed(stages):
    stage = stages(1, on_failure="replay", seed=None)
    stage.reset()
    stage.step([1])
    stage.start([2])
    stage.worker().begin_row(0)
    stage.crash()
    stage.run()
    assert failures_of(stage.finish().infos) == [0]


def test_a_full_journal_is_not_replayed(stages):
    stage = stages(1, on_failure="replay", max_journal=2)
    for _ in range(3):
        stage.step([1])
    assert not stage.table.journals.flushed(0).can_replay
    stage.reset(seed=1)
    assert stage.table.journals.flushed(0).can_replay


def test_calls_and_attributes_are_replayed(stages):
    stage = stages(1, on_failure="replay")
    stage.play(stage.envs.set_attr, "mark", 7)
    stage.play(stage.envs.call, "echo", 1)
    stage.step([1])
    stage.crash()
    stage.run()
    assert stage.env().mark == 7
    assert stage.step([2])[0].tolist() == [[2, 2, 0]]


@pytest.mark.parametrize(("on_failure", "failed"), [("renew", 5), ("replay", 0)])
def test_steps_that_crash_are_counted_unless_a_replay_makes_them_good(stages, on_failure, failed):
    stage = stages(2, envs_per_actor=2, on_failure=on_failure)
    for number in range(5):
        stage.start([1, 2])
        stage.worker().begin_row(0)
        stage.crash()
        stage.run()
        stage.finish()
        stage.reset(seed=number)
    assert stage.actor().stats().failed == failed


def test_resets_that_no_process_will_run_count_as_failed(stages):
    stage = stages(1, restart=ea.RestartPolicy(max_restarts=0))
    stage.crash()
    stage.run()
    for _ in range(3):
        with pytest.raises(ea.VectorStepError):
            stage.reset()
    assert stage.actor().stats().failed == 3


def test_a_retry_that_is_aborted_in_the_queue_counts_as_failed(stages):
    stage = stages(1, on_failure="replay", restart=ea.RestartPolicy(max_restarts=1, backoff=SOON))
    (future,) = stage.envs.submit([2])
    stage.worker().begin_row(0)
    stage.crash()
    wait_until(lambda: list(stage.table.status) == [QUEUED])
    assert future.abort()
    assert stage.actor().stats().failed == 1


# The restart policy --------------------------------------------------------------------------------------


@ON_FAILURE
def test_without_restarts_a_crash_ends_the_env(stages, on_failure):
    stage = stages(2, on_failure=on_failure, restart=ea.RestartPolicy(max_restarts=0))
    stage.start([1, 2])
    stage.worker(0).begin_row(0)
    stage.crash()
    stage.run()
    with pytest.raises(ea.VectorStepError) as caught:
        stage.finish()
    assert list(caught.value.failures) == [0]
    assert stage.actor().state is ActorState.DEAD
    with pytest.raises(ea.VectorStepError) as caught:
        stage.reset()
    assert list(caught.value.failures) == [0]
    stage.check()


def test_a_renewal_revives_a_dead_actor(stages):
    stage = stages(1, restart=ea.RestartPolicy(max_restarts=0))
    stage.crash()
    assert stage.actor().state is ActorState.DEAD
    future = stage.envs.actors[0].renew()
    stage.run()
    assert future.result(SOON) == 1
    assert stage.reset(seed=1)[0].tolist() == [[0, -1, 1]]


def test_after_an_abort_of_a_failed_step_that_waits_for_the_next_process_the_next_step_resets(stages):
    stage = stages(1, on_failure="renew", autoreset="same_step", restart=ea.RestartPolicy(max_restarts=9, backoff=0.5))
    (future,) = stage.envs.submit([1])
    stage.worker().begin_row(0)
    stage.crash()
    assert future.abort()
    stage.run()
    assert future.exception(SOON).aborted
    assert stage.step([1])[1:] == ([0], [False], [False], [{}])
    assert stage.step([2])[0][0].tolist()[:2] == [1, 2]
    stage.check()


def test_rows_wait_for_a_process_that_starts_after_a_delay(stages):
    stage = stages(1, restart=ea.RestartPolicy(max_restarts=9, backoff=0.5))
    stage.crash()
    assert stage.actor().phase is Phase.BACKOFF
    stage.access.start_reset([0], [3], [None])
    assert list(stage.table.status) == [QUEUED]
    stage.check()
    assert stage.finish().obs.tolist() == [[0, -1, 3]]


def test_failed_rows_keep_their_status_until_they_are_delivered(stages):
    stage = stages(2)
    stage.start([1, 2])
    stage.worker(0).begin_row(0)
    stage.worker(1).play()
    stage.crash()
    stage.run()
    assert stage.table.status[0] == FAILED
    assert stage.table.has_failed(0)
    with pytest.raises(ea.VectorStepError):
        stage.finish()
    assert stage.table.status[0] == IDLE
    assert stage.episodes.flags[0] & (NO_EPISODE | NEEDS_RESET | NEW_PROCESS)


# Recycling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_a_process_is_recycled_between_two_episodes(stages, autoreset):
    stage = stages(1, autoreset=autoreset, recycle=ea.RecyclePolicy(max_steps=2))
    stage.step([1])
    _, _, terminated, _, _ = stage.step([END])
    assert terminated.tolist() == [True]
    if autoreset == "next_step":
        assert stage.episodes.flags[0] & RETIRING
        assert stage.step([1])[0].tolist() == [[0, -1, renewed_seed(0, 1)]]
    elif autoreset == "disabled":
        assert stage.reset(seed=4)[0].tolist() == [[0, -1, 4]]
    else:  # that takes one more episode, since it was due only after the reset
        stage.step([END])
        stage.run()
    assert stage.envs.actors[0].incarnation == 1
    assert stage.actor().stats().restarts == 0
    assert not stage.episodes.flags[0] & RETIRING
    assert stage.step([7])[0].tolist()[0][:2] == [1, 7]
    stage.check()


def test_same_step_resets_in_the_next_process_within_the_step(stages):
    stage = stages(1, autoreset="same_step", recycle=ea.RecyclePolicy(max_steps=1))
    stage.step([1])
    stage.step([END])
    assert stage.episodes.flags[0] & RETIRING
    stage.step([3])
    obs, rewards, _, _, infos = stage.step([CUT])
    assert obs.tolist() == [[0, -1, renewed_seed(0, 1)]]
    assert infos[0]["final_obs"].tolist()[:2] == [2, CUT]
    assert rewards.tolist() == [float(CUT)]
    assert stage.envs.actors[0].incarnation == 1
    assert stage.engine.counts() == ([4], [2])
    stage.check()


@ON_FAILURE
def test_an_abort_while_the_reset_waits_for_the_next_process_ends_the_episode(stages, on_failure):
    stage = stages(1, on_failure=on_failure, autoreset="same_step", recycle=ea.RecyclePolicy(max_steps=1))
    stage.step([END])
    (future,) = stage.envs.submit([END])
    stage.worker().play()
    stage.settle()
    assert not future.cancel(), "the step has run"
    assert future.abort()
    stage.run()
    assert future.exception(SOON).aborted
    if on_failure == "raise":
        with pytest.raises(ea.VectorInputError, match="needs a reset first"):
            stage.step([1])
        stage.reset()
    else:
        assert stage.step([1])[1:] == ([0], [False], [False], [{}])
    assert stage.step([2])[0][0].tolist()[:2] == [1, 2]
    assert (stage.envs.actors[0].incarnation, stage.envs.stats().episodes) == (1, [2])
    stage.check()


@pytest.mark.parametrize("on_failure", ["raise", "renew"])
def test_a_step_that_is_reset_in_the_next_process_counts_once(stages, on_failure):
    stage = stages(1, on_failure=on_failure, autoreset="same_step", recycle=ea.RecyclePolicy(max_steps=1))
    stage.step([END])
    before = stage.actor().stats().completed
    stage.step([CUT])
    assert stage.envs.actors[0].incarnation == 1
    assert stage.actor().stats().completed == before + 1


def test_after_a_reset_in_the_next_process_the_env_is_back_on_the_fast_path(stages, monkeypatch):
    stage = stages(1, autoreset="same_step", recycle=ea.RecyclePolicy(max_steps=1))
    stage.step([END])
    stage.step([CUT])
    assert stage.envs.actors[0].incarnation == 1
    assert not stage.episodes.flags[0] & NEW_PROCESS
    assert stage.table.are_on_fast_path(stage.engine.all_envs)
    stage.reset()
    assert stage.env().resets == [(renewed_seed(0, 1), None), (None, None)]


def test_memory_recycles_a_process(stages):
    stage = stages(1, recycle=ea.RecyclePolicy(max_rss=1000))
    stage.step([END])
    assert not stage.episodes.flags[0] & RETIRING
    stage.step([1])
    stage.worker().rss = 2000
    stage.step([END])
    assert stage.episodes.flags[0] & RETIRING
    stage.step([1])
    assert stage.envs.actors[0].incarnation == 1


@pytest.mark.parametrize("on_failure", ["raise", "renew"])
def test_recycling_does_not_revive_a_dead_actor(stages, on_failure):
    options = {"on_failure": on_failure, "restart": ea.RestartPolicy(max_restarts=0)}
    stage = stages(1, recycle=ea.RecyclePolicy(max_steps=1), **options)
    stage.step([END])
    assert stage.episodes.flags[0] & RETIRING
    stage.crash()
    for request in (lambda: stage.step([1]), stage.reset, stage.reset):
        with pytest.raises(ea.VectorStepError):
            request()
    assert stage.envs.actors[0].incarnation == 0
    assert stage.actor().phase is Phase.DEAD
    stage.check()


def test_recycling_in_the_queue_does_not_revive_an_actor_that_dies_before_it(stages):
    stage = stages(1, recycle=ea.RecyclePolicy(max_steps=1), restart=ea.RestartPolicy(max_restarts=0))
    stage.step([END])
    call = stage.envs[0].echo(1)
    stage.envs.send([1])
    stage.crash()
    stage.run()
    assert isinstance(call.exception(SOON), ea.ActorDiedError)
    with pytest.raises(ea.VectorStepError):
        stage.envs.recv(timeout=SOON)
    assert stage.actor().phase is Phase.DEAD
    assert stage.envs.actors[0].incarnation == 0
    stage.check()


def test_a_process_that_a_replay_has_filled_is_not_recycled(stages):
    stage = stages(1, on_failure="replay", recycle=ea.RecyclePolicy(max_steps=1))
    stage.step([END])
    stage.crash()
    stage.run()
    assert stage.step([1])[0][0, :2].tolist() == [0, -1]
    assert stage.envs.actors[0].incarnation == 1
    stage.check()


def test_a_process_that_has_replaced_one_between_two_episodes_is_not_recycled(stages):
    stage = stages(1, on_failure="renew", recycle=ea.RecyclePolicy(max_steps=1))
    stage.step([END])
    call = stage.envs[0].echo(1)
    stage.envs.send([1])
    stage.crash()
    stage.run()
    assert isinstance(call.exception(SOON), ea.ActorDiedError) or call.result() == 1
    batch = stage.envs.recv(timeout=SOON)
    assert (failures_of(batch.infos), batch.incarnations.tolist()) == ([], [1])
    stage.check()


@RENEWING
def test_a_process_that_dies_after_the_last_row_of_an_episode_is_replaced_once(stages, on_failure):
    options = {"on_failure": on_failure, "autoreset": "same_step", "recycle": ea.RecyclePolicy(max_steps=1)}
    stage = stages(1, **options)
    stage.step([END])
    stage.start([END])
    stage.worker().run_row(0)
    stage.crash()
    stage.run()
    batch = stage.finish()
    assert batch.obs[0, :2].tolist() == [0, -1]
    assert (batch.infos[0]["final_obs"].tolist()[:2], batch.incarnations.tolist()) == ([1, END], [1])
    stage.check()


@pytest.mark.parametrize("failure", ["an exception", "a crash"])
@RENEWING
def test_the_last_step_is_kept_if_the_reset_in_the_next_process_fails(stages, on_failure, failure):
    options = {"on_failure": on_failure, "autoreset": "same_step", "recycle": ea.RecyclePolicy(max_steps=1)}
    stage = stages(1, seed=None, **options)
    stage.reset()  # without a seed, nothing is replayed
    stage.step([END])
    assert stage.episodes.flags[0] & RETIRING
    (future,) = stage.envs.submit([END])
    stage.worker().play()
    stage.settle()
    while stage.table.status[0] != POSTED or stage.actor().process.incarnation == 0:
        stage.worker().play()
        stage.settle()
    if failure == "an exception":
        stage.env().fails_reset = True
    else:
        stage.worker().begin_row(0)
        stage.crash()
    stage.run()
    result = future.result(SOON)
    assert stage.envs.actors[0].incarnation == 2
    assert result.obs[0] == 0
    assert (result.reward, result.terminated, result.truncated) == (END, True, False)
    assert result.info["final_obs"].tolist()[:2] == [1, END]
    assert result.info["final_info"] == {}
    assert isinstance(result.info["failure"], ea.ActorDiedError if failure == "a crash" else RowError)
    assert stage.engine.counts() == ([2], [2])
    assert stage.table.are_on_fast_path(stage.engine.all_envs)
    stage.check()


def test_a_result_that_reports_a_failure_is_the_last_one_for_the_next_failure(stages):
    stage = stages(1, on_failure="renew", autoreset="same_step")
    stage.step([INFO])
    for final_info in ({"n": 1}, {}):
        stage.start([1])
        stage.worker().begin_row(0)
        stage.crash()
        stage.run()
        assert stage.finish().infos[0]["final_info"] == final_info


def test_the_last_batch_after_a_step_that_was_answered_with_a_reset_is_truncated(stages):
    stage = stages(2, on_failure="renew", autoreset="same_step")
    stage.step([1, 1])
    stage.start([2, 2])
    stage.worker(0).begin_row(0)
    stage.crash()
    stage.run()
    batch, last = stage.finish(), stage.envs.last_batch()
    assert batch.truncated.tolist() == last.truncated.tolist() == [True, False]
    assert batch.obs.tolist() == last.obs.tolist()
    assert batch.rewards.tolist() == last.rewards.tolist()


def test_the_last_batch_after_a_reset_in_the_next_process_is_the_end_of_the_episode(stages):
    stage = stages(1, on_failure="renew", autoreset="same_step", recycle=ea.RecyclePolicy(max_steps=1))
    stage.step([END])
    stage.step([CUT])
    assert stage.envs.actors[0].incarnation == 1
    last = stage.envs.last_batch()
    assert (last.rewards.tolist(), last.terminated.tolist(), last.truncated.tolist()) == ([CUT], [False], [True])
    assert last.obs.tolist() == [[0, -1, renewed_seed(0, 1)]]


class TellingEnv(PlayedEnv):
    """Has an info in each reset, and an object as its reward."""

    reward_space = gymnasium.spaces.Text(9)

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"resets": len(self.resets)}

    def step(self, action):
        obs, _, *others = super().step(action)
        return obs, f"reward {action}", *others


def test_the_last_batch_after_a_reset_in_the_next_process_has_the_info_and_the_reward_of_the_step(stages):
    recycle = ea.RecyclePolicy(max_steps=1)
    stage = stages(1, env=TellingEnv, on_failure="renew", autoreset="same_step", recycle=recycle)
    for action in (1, END, 3):
        stage.step([action])
    stage.start([CUT])
    stage.run()
    batch, last = stage.finish(), stage.envs.last_batch()
    assert stage.envs.actors[0].incarnation == 1
    for result in (batch, last):
        assert result.infos[0]["final_obs"].tolist()[:2] == [2, CUT]
        assert (result.infos[0]["final_info"], result.infos[0]["resets"]) == ({}, 1)
        assert list(result.rewards) == [f"reward {CUT}"]
    assert stage.step([3])[1] == ["reward 3"]


@pytest.mark.parametrize("way", ["step", "a result that is not plain", "submit"])
def test_an_episode_that_ends_above_the_memory_limit_is_the_last_of_its_process(stages, way, monkeypatch):
    stage = stages(1, recycle=ea.RecyclePolicy(max_rss=1000))

    monkeypatch.setattr(stage.worker(), "resident_memory", lambda: 2000)
    if way == "submit":
        (future,) = stage.envs.submit([END])
        stage.run()
        future.result(SOON)
    else:
        stage.start([END])
        if way != "step":
            stage.envs[0].echo(1)
        stage.run()
        stage.finish()
    assert stage.episodes.flags[0] & RETIRING


def test_a_crash_in_an_autoreset_begins_no_episode(stages):
    stage = stages(1, on_failure="renew")
    stage.step([1])
    stage.step([END])
    stage.start([2])
    stage.worker(0).begin_row(0)
    stage.crash()
    stage.run()
    batch = stage.finish()
    assert failures_of(batch.infos) == [0]
    assert not stage.engine.last_obs_is_first(0)


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_an_aborted_step_that_has_not_begun_does_not_run_again(stages, on_failure):
    stage = stages(2, envs_per_actor=2, on_failure=on_failure)
    stage.step([1, 1])
    running, waiting = stage.envs.submit([2, 3])
    stage.worker(0).begin_row(0)
    assert waiting.abort()
    stage.run()
    if on_failure == "raise":
        assert waiting.exception(SOON).aborted
    else:
        assert waiting.result(SOON).info["failure"].aborted
    if on_failure == "replay":
        assert running.result(SOON).info == {}


def test_the_abort_of_a_neighbor_is_no_crash_of_the_step_that_was_running(stages):
    stage = stages(2, envs_per_actor=2, on_failure="replay")
    stage.step([1, 1])
    running, waiting = stage.envs.submit([2, 3])
    stage.worker().begin_row(0)
    assert waiting.abort()
    begin_when_posted(stage)
    stage.crash()
    stage.run()
    assert running.result(SOON).info == {}
    assert running.result().obs.tolist() == [2, 2, 0]


def crash_until_given_up(stage, index=0):
    """Crash in the request of an env until it is not tried any more; return how often it was tried."""
    for tries in range(1, 9):
        while stage.table.status[index] != POSTED or stage.table.rows.is_complete(index):
            if stage.table.has_outcome(index) or not stage.worker().play():
                return tries - 1
            stage.settle()
        if stage.table.posted_request(index).seed != 5:
            return tries - 1
        stage.worker().begin_row(index)
        stage.crash()
    raise AssertionError("it is tried for ever")


def test_a_seeded_autoreset_that_ends_processes_runs_twice_without_a_replay(stages):
    stage = stages(1, on_failure="replay", seed_episodes=True, max_journal=2, seed=1)
    for action in (1, 2, 3, END):
        stage.step([action])
    assert not stage.table.journals.flushed(0).can_replay
    stage.start([4])
    for _ in range(2):
        begin_when_posted(stage)
        assert stage.table.posted_request(0).seed == episode_seed(1, 1)
        stage.crash()
    stage.run()
    assert failures_of(stage.finish().infos) == [0]
    assert stage.step([5])[0].tolist() == [[0, -1, episode_seed(1, 2)]]
    stage.check()


@pytest.mark.parametrize(("on_failure", "crashes"), [("renew", 1), ("replay", 2)])
def test_a_reset_within_a_step_that_ends_processes_uses_up_its_seed(stages, on_failure, crashes):
    stage = stages(1, on_failure=on_failure, seed_episodes=True, autoreset="same_step", seed=1)
    stage.start([END])
    for _ in range(crashes):
        begin_when_posted(stage)
        stage.worker().page.counters[METHOD] = METHOD_RESET
        stage.crash()
    stage.run()
    assert stage.finish().obs.tolist() == [[0, -1, episode_seed(1, 2)]]
    stage.check()


def test_a_seeded_autoreset_that_ends_one_process_is_not_noticed(stages):
    stage = stages(1, on_failure="replay", seed_episodes=True, max_journal=2, seed=1)
    for action in (1, 2, 3, END):
        stage.step([action])
    stage.start([4])
    stage.worker().begin_row(0)
    stage.crash()
    stage.run()
    batch = stage.finish()
    assert failures_of(batch.infos) == []
    assert batch.obs.tolist() == [[0, -1, episode_seed(1, 1)]]
    stage.check()


def test_a_reset_that_ends_processes_runs_twice_although_the_replay_between_fails(stages):
    stage = stages(1, on_failure="replay", seed=1)
    stage.step([1])
    stage.access.start_reset([0], [5], [None])
    stage.worker().begin_row(0)
    stage.crash()
    stage.worker().play()
    stage.env().drift = 0.5  # so the replay does not reach the same point
    stage.settle()
    assert crash_until_given_up(stage) == 1
    stage.run()
    assert failures_of(stage.finish().infos) == [0]


def test_a_step_that_raises_leaves_the_last_observation_the_first_of_its_episode(stages):
    stage = stages(2)
    assert stage.engine.last_obs_is_first(0)
    for _ in range(2):
        with pytest.raises(ea.VectorStepError):
            stage.step([RAISE, 1])
        assert [stage.engine.last_obs_is_first(index) for index in range(2)] == [True, False]
    stage.step([1], [0])
    assert not stage.engine.last_obs_is_first(0)
    with pytest.raises(ea.VectorStepError):
        stage.step([TRAP], [0])
    assert not stage.engine.last_obs_is_first(0)


@AUTORESET
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_step_that_ends_with_its_process_leaves_the_last_observation_as_it_was(stages, autoreset, has_begun):
    stage = stages(1, autoreset=autoreset)
    for is_first in (True, False):
        assert stage.engine.last_obs_is_first(0) == is_first
        stage.start([2])
        if has_begun:
            stage.worker().begin_row(0)
        stage.crash()
        with pytest.raises(ea.VectorStepError):
            stage.finish()
        assert stage.engine.last_obs_is_first(0) == is_first
        stage.reset()
        stage.step([1])


def test_a_reset_that_fails_leaves_the_last_observation_as_it_was(stages):
    stage = stages(1)
    stage.step([1])
    stage.env().fails_reset = True
    with pytest.raises(ea.VectorStepError):
        stage.reset()
    assert not stage.engine.last_obs_is_first(0)
    last = stage.engine.read_last(0)
    assert (last.obs.tolist(), last.reward, last.truncated) == ([1, 1, 0], 1.0, False)


def test_a_dropped_result_is_the_last_one(stages):
    stage = stages(2, on_failure="renew")
    stage.envs.send([1, INFO])
    stage.run()
    stage.envs[0].echo(1)  # the results are collected before the call
    stage.engine.make_idle(stage.engine.all_envs, None, None)
    last = stage.envs.last_batch()
    assert last.obs.tolist() == [[1, 1, 0], [1, INFO, 1]]
    assert last.infos == [{}, {"n": 1}]


def test_the_result_before_one_that_cannot_be_read_is_the_last_one(stages):
    stage = stages(1, on_failure="renew")
    stage.step([INFO])
    _, _, _, truncated, _ = stage.step([TRAP])
    assert truncated.tolist() == [True]
    last = stage.envs.last_batch()
    assert (last.obs.tolist(), last.infos) == ([[1, INFO, 0]], [{"n": 1}])
    assert not stage.engine.last_obs_is_first(0)


def test_a_truncated_result_names_the_process_that_the_env_continues_in(stages):
    stage = stages(1, on_failure="renew")
    stage.step([1])
    stage.crash()
    stage.crash()  # before the process has made its env
    stage.run()
    assert stage.envs.actors[0].incarnation == 2
    batch = stage.play(stage.envs.recv) if stage.envs.send([1]) else stage.finish()
    assert (failures_of(batch.infos), batch.incarnations.tolist()) == ([0], [2])


def test_an_autoreset_that_cannot_be_read_uses_up_one_seed(stages):
    stage = stages(1, on_failure="renew", seed_episodes=True, env=TrappedEnv, seed=5)
    stage.step([END])
    _, _, _, _, infos = stage.step([1])
    assert failures_of(infos) == [0]
    assert stage.episodes.episode_numbers == [2]


class ListEnv(PlayedEnv):
    """Returns its observations as lists."""

    def step(self, action):
        obs, *others = super().step(action)
        return obs.tolist(), *others


def test_the_last_observation_of_an_episode_is_the_envs_own_also_before_a_replacement(stages):
    stage = stages(1, env=ListEnv, autoreset="same_step", recycle=ea.RecyclePolicy(max_steps=1))
    for incarnation in (0, 1):
        _, _, _, _, infos = stage.step([END])
        assert stage.envs.actors[0].incarnation == incarnation
        assert (type(infos[0]["final_obs"]), infos[0]["final_obs"][:2]) == (list, [1.0, END])
        assert infos[0]["final_info"] == {}


@RENEWING
def test_a_packed_actor_leaves_a_node_that_is_drained_at_a_reset_only(stages, on_failure):
    stage = stages(2, envs_per_actor=2, on_failure=on_failure)
    stage.worker().reason_to_move = "its node is being drained"
    stage.step([END, END])
    futures = stage.envs.submit([1, 1])
    stage.run()
    assert [future.result(SOON).info for future in futures] == [{}, {}]
    assert stage.envs.actors[0].incarnation == 0
    stage.reset()
    assert stage.envs.actors[0].incarnation == 1


def test_a_result_that_a_reset_has_dropped_is_still_the_last_one(stages):
    stage = stages(1, on_failure="renew", env=ObjectEnv)
    stage.step([1])
    stage.start([2])
    stage.run()
    stage.access.discard()
    assert stage.envs.last_batch().obs == ["2"]


def test_a_snapshot_of_an_env_without_an_episode_may_come_from_its_next_process(stages):
    """Until that process began, the snapshot used to fail with the crash that a result had reported before."""
    states = ea.SnapshotPolicy(lambda env: env.steps, lambda env, steps: setattr(env, "steps", steps))
    stage = stages(1, on_failure="renew", snapshot=states)
    stage.start([1])
    stage.crash()
    assert stage.finish().truncated.tolist() == [True]
    stage.crash()
    assert stage.engine.required_incarnation(0) is None
    assert stage.play(stage.envs.snapshot)[0].resets_next
    assert stage.step([1])[0].tolist() == [[0, -1, renewed_seed(0, 2)]]


def test_the_reward_of_a_truncated_answer_has_the_type_of_all_others(stages):
    stage = stages(1, on_failure="renew")
    stage.step([1])
    (future,) = stage.envs.submit([2])
    stage.crash()
    stage.run()
    assert future.result(SOON).truncated
    assert type(future.result(SOON).reward) is float
