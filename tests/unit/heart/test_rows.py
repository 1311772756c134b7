"""Steps and resets of a vector without failures, with workers that the test plays."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from fakes import CUT, END, INFO, LARGE, RAISE, SOON, PlainMemory, PlayedEnv, wait_until

import envactors as ea
from envactors.mailbox.control_page import RING_AT
from envactors.mailbox.messages import Frame, Kind, episode_seed, renewed_seed
from envactors.mailbox.pickling import dumps
from envactors.vector.table import DONE, IDLE, POSTED, QUEUED

PACKED = pytest.mark.parametrize("packed", [1, 3])


# Steps ---------------------------------------------------------------------------------------------------


@PACKED
def test_a_plain_step_of_all_envs_is_copied_at_once(stages, packed, monkeypatch):
    stage = stages(3, envs_per_actor=packed)
    monkeypatch.setattr(stage.engine, "_deliver_each", None)
    stage.start([1, 2, 3])
    assert list(stage.table.status) == [POSTED] * 3
    stage.run()
    batch = stage.finish()
    assert batch.obs.tolist() == [[1, 1, 0], [1, 2, 1], [1, 3, 2]]
    assert (batch.rewards.tolist(), batch.infos) == ([1.0, 2.0, 3.0], [{}, {}, {}])
    assert list(stage.table.status) == [IDLE] * 3
    assert stage.engine.counts() == ([1] * 3, [0] * 3)
    stage.check()


@PACKED
def test_infos_that_fit_into_rows_are_copied_at_once(stages, packed, monkeypatch):
    stage = stages(3, envs_per_actor=packed)
    monkeypatch.setattr(stage.engine, "_deliver_each", None)
    assert stage.step([1, INFO, 2])[4] == [{}, {"n": 1}, {}]


@PACKED
def test_an_info_that_does_not_fit_comes_in_a_frame(stages, packed):
    stage = stages(3, envs_per_actor=packed)
    stage.start([1, LARGE, 2])
    stage.run()
    assert 1 in stage.table.rows.overflow
    assert stage.finish().infos[1] == {"text": "x" * 10_000}


def test_a_row_whose_overflow_has_not_come_is_not_complete(stages):
    stage = stages(1)
    stage.start([LARGE])
    worker = stage.worker()
    with worker.keeping() as frames:
        worker.run_row(0)
    assert stage.table.rows.written_ids[0] == stage.table.rows.posted_ids[0]
    assert not stage.table.rows.is_complete(0)
    worker.send_frames(frames)
    stage.settle()
    assert stage.table.rows.is_complete(0)
    assert len(stage.finish().infos[0]["text"]) == 10_000


def test_an_overflow_of_an_earlier_step_is_not_that_of_the_next(stages):
    stage = stages(1)
    stage.step([LARGE])
    stage.start([LARGE])
    assert stage.table.rows.overflow == {}
    stage.worker().begin_row(0)
    assert not stage.table.rows.is_complete(0)
    stage.run()
    assert len(stage.finish().infos[0]["text"]) == 10_000


def test_steps_of_some_envs_are_in_the_order_of_the_user(stages):
    stage = stages(4, envs_per_actor=2)
    obs, rewards, *_ = stage.step([5, 6], [3, 0])
    assert rewards.tolist() == [5.0, 6.0]
    assert obs.tolist() == [[1, 5, 3], [1, 6, 0]]
    assert stage.engine.counts()[0] == [1, 0, 0, 1]


def test_the_last_observation_stays_readable_while_the_next_is_written(stages):
    stage = stages(1, copy=False)
    obs = stage.step([1])[0]
    stage.start([2])
    stage.worker().run_row(0)
    assert obs[0].tolist() == [1, 1, 0]
    stage.worker().end_rows()
    assert stage.finish().obs[0].tolist() == [2, 2, 0]


def test_a_second_request_of_an_env_is_refused(stages):
    stage = stages(2)
    stage.start([1], [1])
    for ids in (None, [1], [0, 1]):
        with pytest.raises(ea.AlreadyPendingError, match=r"\[1\]"):
            stage.start([1] * (2 if ids is None else len(ids)), ids)
    stage.start([2], [0])
    assert stage.finish().obs[:, 1].tolist() == [2, 1]


def test_actions_outside_of_the_space_change_nothing(stages):
    stage = stages(2)
    for actions in (["a", "b"], [1], [1, 2, 3], [[1], [2]]):
        with pytest.raises((ea.SpaceMismatchError, ea.VectorInputError)):
            stage.envs.step(actions)
    assert list(stage.table.status) == [IDLE] * 2
    assert stage.step([1, 2])[1].tolist() == [1.0, 2.0]


def test_a_step_before_the_first_reset_is_refused(stages):
    stage = stages(2, seed=None)
    with pytest.raises(ea.VectorInputError, match="env 0 needs a reset first"):
        stage.start([1, 2])
    stage.reset(env_ids=[0])
    stage.start([1], [0])
    with pytest.raises(ea.VectorInputError, match="env 1 needs a reset first"):
        stage.start([1], [1])


def test_unchecked_resets_leave_it_to_the_env(stages):
    stage = stages(1, seed=None)
    stage.access.disable_reset_checks()
    assert stage.step([4])[1].tolist() == [4.0]


def test_actions_without_a_check_travel_as_payloads(stages):
    stage = stages(3, envs_per_actor=3)
    stage.access.start_unchecked_steps([0, 2], [7, 8])
    stage.run()
    assert stage.finish([0, 2]).rewards.tolist() == [7.0, 8.0]


def test_rings_of_an_earlier_step_do_not_end_the_next(stages):
    stage = stages(2)
    stage.start([1, 2])
    stage.run()
    stage.finish()
    stage.start([3, 4])
    for position in range(2):
        stage.worker(position).page.to_parent.ring()
    with pytest.raises(ea.VectorTimeoutError):
        stage.access.gather(None, 0.02, "step")
    stage.run()
    assert stage.finish().rewards.tolist() == [3.0, 4.0]


def test_a_ring_that_comes_late_wakes_the_waiter(stages):
    stage = stages(1)
    stage.start([3])
    worker = stage.worker()
    worker.run_row(0)
    results = []
    thread = threading.Thread(target=lambda: results.append(stage.access.gather(None, SOON, "step")))
    thread.start()
    thread.join(SOON)  # the row is complete, and nobody has rung
    assert results[0].rewards.tolist() == [3.0]
    worker.end_rows()
    stage.settle()
    stage.check()


# Ends of episodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [END, CUT])
def test_next_step_resets_in_the_step_after_the_end(stages, end):
    stage = stages(2)
    _, _, terminated, truncated, _ = stage.step([end, 1])
    assert (terminated | truncated).tolist() == [True, False]
    assert list(map(bool, stage.episodes.awaits_autoreset)) == [True, False]
    obs, rewards, terminated, truncated, _ = stage.step([5, 5])
    assert obs[:, 0].tolist() == [0, 2]
    assert rewards.tolist() == [0.0, 5.0]
    assert not (terminated | truncated).any()
    assert stage.engine.counts() == ([1, 2], [1, 0])


def test_same_step_resets_within_the_step(stages):
    stage = stages(2, autoreset="same_step")
    obs, _, terminated, _, infos = stage.step([END, 1])
    assert terminated.tolist() == [True, False]
    assert obs[:, 0].tolist() == [0, 1]
    assert infos[0]["final_obs"].tolist() == [1, END, 0]
    assert infos[0]["final_info"] == {}
    assert stage.engine.counts() == ([1, 1], [1, 0])


def test_disabled_needs_a_reset_by_the_user(stages):
    stage = stages(2, autoreset="disabled")
    stage.step([END, 1])
    with pytest.raises(ea.VectorInputError, match="env 0 needs a reset first"):
        stage.start([1, 1])
    stage.reset(env_ids=[0], seed=[9])
    assert stage.step([1, 1])[0].tolist() == [[1, 1, 9], [2, 1, 1]]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_seeded_episodes_have_a_seed_each(stages, autoreset):
    stage = stages(1, autoreset=autoreset, seed_episodes=True, seed=3)
    for _ in range(4):
        stage.step([END])
    seeds = [seed for seed, _ in stage.env().resets]
    assert seeds[0] == 3
    assert len(set(seeds)) == len(seeds)
    assert seeds[1:] == [episode_seed(stage.episodes.root_seeds[0], number) for number in range(1, len(seeds))]


# Resets --------------------------------------------------------------------------------------------------


def test_a_reset_passes_seeds_and_options(stages):
    stage = stages(2, seed=None)
    obs, infos = stage.reset(seed=[4, None], options=[{"a": 1}, None])
    assert obs[:, 2].tolist() == [4, -1]
    assert infos == [{}, {}]
    assert stage.env(0).resets == [(4, {"a": 1})]
    assert stage.env(1).resets == [(None, None)]


def test_a_seed_of_more_than_64_bits_reaches_the_env(stages):
    stage = stages(1, seed=None)
    stage.reset(seed=1 << 70)
    assert stage.env().resets == [(1 << 70, None)]


def test_a_reset_drops_results_that_were_not_delivered(stages):
    stage = stages(2)
    stage.start([1, 2])
    stage.run()
    assert stage.reset(seed=5)[0].tolist() == [[0, -1, 5], [0, -1, 6]]
    with pytest.raises(ea.NothingPendingError):
        stage.envs.recv()


def test_a_reset_waits_for_rows_that_run(stages):
    stage = stages(2)
    stage.start([1, 2])
    stage.worker(0).begin_row(0)
    results = []
    thread = threading.Thread(target=lambda: results.append(stage.envs.reset(seed=5)))
    thread.start()
    wait_until(lambda: stage.table.waiters.sleepers)
    assert not results
    with stage.backend.playing():
        thread.join(SOON)
    assert results[0][0].tolist() == [[0, -1, 5], [0, -1, 6]]


def test_a_reset_with_a_timeout_starts_nothing_while_rows_run(stages):
    stage = stages(2)
    stage.start([1, 2])
    with pytest.raises(ea.VectorTimeoutError, match="nothing was reset, and nothing is lost") as caught:
        stage.envs.reset(timeout=0.01)
    assert caught.value.env_ids == [0, 1]
    stage.run()
    assert stage.finish().rewards.tolist() == [1.0, 2.0]


def test_a_reset_whose_timeout_passes_while_a_request_runs_again_loses_no_result(stages):
    stage = stages(2, on_failure="renew", autoreset="same_step")
    stage.start([1, RAISE])
    for index in range(2):
        stage.worker(index).run_row(index)
        stage.worker(index).end_rows()
    with pytest.raises(ea.VectorTimeoutError) as caught:
        stage.envs.reset(timeout=0.01)
    assert caught.value.env_ids == [1]
    assert stage.finish().rewards.tolist() == [1.0, 0.0]


def test_a_reset_leaves_other_envs_alone(stages):
    stage = stages(3)
    stage.start([1, 2, 3])
    stage.run()
    assert stage.reset(seed=[7], env_ids=[1])[0].tolist() == [[0, -1, 7]]
    assert stage.finish([0, 2]).rewards.tolist() == [1.0, 3.0]


def test_futures_get_their_results_although_a_reset_follows(stages):
    stage = stages(2)
    futures = stage.envs.submit([1, 2])
    stage.reset()
    assert [future.result(SOON).reward for future in futures] == [1.0, 2.0]


def test_a_reset_returns_after_a_timeout_with_the_results_in_recv(stages):
    stage = stages(1, seed=None)
    with pytest.raises(ea.VectorTimeoutError, match=r"reset waited .* recv will return the results"):
        stage.envs.reset(seed=1, timeout=0.01)
    stage.run()
    batch = stage.play(stage.envs.recv)
    assert (batch.obs.tolist(), batch.rewards.tolist()) == ([[0, -1, 1]], [0.0])


# send and recv -------------------------------------------------------------------------------------------


def test_recv_returns_results_in_the_order_of_their_completion(stages):
    stage = stages(3)
    stage.envs.send(np.array([1, 2, 3]))
    for index in (2, 0, 1):
        stage.worker(index).run_row(index)
    assert stage.envs.recv().env_ids.tolist() == [2, 0, 1]


def test_recv_knows_when_a_result_came_that_the_worker_has_run_together_with_a_step(stages):
    """The worker used to record no times then, so that the result seemed to be older than all others."""
    stage = stages(3, envs_per_actor=3)
    stage.envs.send(np.array([1]), env_ids=[2])
    stage.worker().run_row(2)
    stage.envs.send(np.array([1]), env_ids=[0])
    stage.start([1], [1])
    stage.worker().run_row(0, 1)
    stage.worker().end_rows()
    assert stage.finish([1]).env_ids.tolist() == [1]
    assert stage.envs.recv(min_envs=2).env_ids.tolist() == [2, 0]


@pytest.mark.parametrize(("least", "most", "expected"), [(1, None, [2]), (1, 1, [2]), (0, None, [2]), (0, 0, [])])
def test_recv_returns_what_is_ready(stages, least, most, expected):
    stage = stages(3)
    stage.envs.send(np.array([1, 2, 3]))
    stage.worker(2).run_row(2)
    assert stage.envs.recv(min_envs=least, max_envs=most).env_ids.tolist() == expected
    stage.check()


def test_recv_does_not_wait_if_more_is_ready_than_a_narrow_int_of_numpy_asks_for(stages):
    stage = stages(3)
    stage.envs.send(np.array([1, 2, 3]))
    for index in (2, 0):
        stage.worker(index).run_row(index)
    assert stage.envs.recv(min_envs=np.uint8(1), max_envs=np.uint8(2)).env_ids.tolist() == [2, 0]
    stage.check()


@pytest.mark.parametrize(("least", "most"), [(2, None), (2, 2), (None, None), (9, None)])
def test_recv_waits_for_enough_results(stages, least, most):
    stage = stages(3)
    stage.envs.send(np.array([1, 2, 3]))
    stage.worker(2).run_row(2)
    batch = stage.play(stage.envs.recv, least, most)
    assert len(batch.env_ids) >= min(least or 3, 3)
    assert batch.env_ids[0] == 2
    assert most is None or len(batch.env_ids) <= most


def test_recv_after_its_timeout_returns_what_is_ready_and_loses_nothing(stages):
    stage = stages(2)
    stage.envs.send(np.array([1, 2]))
    assert stage.envs.recv(timeout=0.01).env_ids.tolist() == []
    stage.worker(1).run_row(1)
    assert stage.envs.recv(timeout=0.01).env_ids.tolist() == [1]
    stage.run()
    assert stage.envs.recv().env_ids.tolist() == [0]


def test_recv_without_requests_is_refused(stages):
    stage = stages(1)
    with pytest.raises(ea.NothingPendingError):
        stage.envs.recv()


def test_sending_again_what_has_come(stages):
    stage = stages(2)
    stage.envs.send(np.array([1, 2]))
    rewards = {0: [], 1: []}
    for _ in range(6):
        batch = stage.play(stage.envs.recv, 1)
        for index, reward in zip(batch.env_ids.tolist(), batch.rewards.tolist(), strict=True):
            rewards[index].append(reward)
        stage.envs.send(batch.rewards.astype(int) + 1, env_ids=batch.env_ids)
        stage.check()
    for index, got in rewards.items():
        assert got == [float(index + 1 + k) for k in range(len(got))]


def test_workers_ring_when_enough_results_are_complete(stages):
    stage = stages(3)
    stage.envs.send(np.array([1, 2, 3]))
    results = []
    thread = threading.Thread(target=lambda: results.append(stage.envs.recv(min_envs=2)))
    thread.start()
    wait_until(lambda: stage.worker(0).page.counters[RING_AT] == 2)
    stage.worker(0).run_row(0)
    stage.worker(2).run_row(2)
    thread.join(SOON)
    assert sorted(results[0].env_ids.tolist()) == [0, 2]


# submit --------------------------------------------------------------------------------------------------


@PACKED
def test_futures_resolve_one_by_one(stages, packed):
    stage = stages(3, envs_per_actor=packed)
    futures = stage.envs.submit([1, 2, INFO])
    worker = stage.worker(2 if packed == 1 else 0)
    worker.run_row(2)
    step = futures[2].result(SOON)
    assert (step.env_id, step.obs.tolist(), step.info) == (2, [1, INFO, 2], {"n": 1})
    assert not futures[0].done()
    assert list(stage.table.status) == [POSTED, POSTED, IDLE]
    stage.run()
    assert [future.result(SOON).reward for future in futures] == [1.0, 2.0, float(INFO)]
    stage.check()


def test_recv_does_not_return_results_of_futures(stages):
    stage = stages(2)
    (future,) = stage.envs.submit([1], env_ids=[0])
    stage.envs.send([2], env_ids=[1])
    stage.run()
    assert stage.envs.recv().env_ids.tolist() == [1]
    assert future.result(SOON).reward == 1.0


def test_a_queued_step_can_be_canceled(stages):
    stage = stages(1)
    stage.envs[0].echo(1)
    (future,) = stage.envs.submit([1])
    assert list(stage.table.status) == [QUEUED]
    assert future.cancel()
    assert list(stage.table.status) == [IDLE]
    stage.run()
    assert stage.step([2])[0].tolist() == [[1, 2, 0]]


def test_a_canceled_reset_leaves_the_seed_of_the_env(stages):
    stage = stages(1)
    stage.envs[0].echo(1)
    future = stage.access.submit_reset(0, 7, None)
    assert future.cancel()
    stage.run()
    assert stage.step([2])[0].tolist() == [[1, 2, 0]]
    stage.crash()
    assert stage.reset()[0].tolist() == [[0, -1, renewed_seed(0, 1)]]


def test_a_reset_that_a_dead_actor_refuses_begins_the_seeds_of_its_env(stages):
    stage = stages(1, restart=ea.RestartPolicy(max_restarts=0))
    stage.crash()
    with pytest.raises(ea.VectorStepError):
        stage.envs.reset(seed=7)
    with stage.backend.playing():
        stage.envs.actors[0].renew().result(SOON)
    assert stage.reset()[0].tolist() == [[0, -1, renewed_seed(7, 1)]]


def test_a_posted_step_cannot_be_canceled(stages):
    stage = stages(1)
    (future,) = stage.envs.submit([1])
    assert not future.cancel()
    stage.run()
    assert future.result(SOON).reward == 1.0


# Calls ---------------------------------------------------------------------------------------------------


@PACKED
def test_rows_behind_a_call_are_queued_and_run_after_it(stages, packed):
    stage = stages(3, envs_per_actor=packed)
    call = stage.envs[0].echo(7)
    stage.start([1, 2, 3])
    queued = 3 if packed == 3 else 1
    assert list(stage.table.status) == [QUEUED] * queued + [POSTED] * (3 - queued)
    stage.check()
    stage.run()
    assert call.result(SOON) == 7
    assert stage.finish().rewards.tolist() == [1.0, 2.0, 3.0]


@PACKED
def test_a_call_behind_rows_runs_once_they_are_complete(stages, packed):
    stage = stages(3, envs_per_actor=packed)
    stage.start([1, 2, 3])
    call = stage.envs[0].echo(7)
    assert stage.actor().stats().queued == 1
    stage.check()
    stage.run()
    assert call.result(SOON) == 7
    assert stage.table.status[0] == DONE
    assert stage.finish().rewards.tolist() == [1.0, 2.0, 3.0]


def test_rows_that_end_before_a_call_asks_for_their_end_start_it_all_the_same(stages):
    stage = stages(1)
    stage.envs.send([1])
    stage.worker().play()
    call = stage.envs[0].echo(7)
    stage.run()
    assert call.result(SOON) == 7
    assert stage.envs.recv().rewards.tolist() == [1.0]


def test_rows_calls_and_rows_keep_their_order(stages):
    stage = stages(2, envs_per_actor=2)
    stage.envs.send([1], env_ids=[0])
    calls = [stage.envs[0].get("steps"), stage.envs[1].get("steps")]
    stage.envs.send([2], env_ids=[1])
    calls.append(stage.envs[1].get("steps"))
    stage.run()
    assert [call.result(SOON) for call in calls] == [1, 0, 1]
    assert sorted(stage.envs.recv().env_ids.tolist()) == [0, 1]


def test_rows_of_one_actor_join_rows_that_run(stages):
    stage = stages(2, envs_per_actor=2)
    stage.envs.send([1], env_ids=[0])
    stage.envs.send([2], env_ids=[1])
    assert list(stage.table.status) == [POSTED] * 2
    stage.run()
    assert sorted(stage.envs.recv().rewards.tolist()) == [1.0, 2.0]


def test_queued_rows_of_one_actor_start_together(stages):
    stage = stages(2, envs_per_actor=2)
    stage.envs[0].echo(1)
    stage.envs.send([1], env_ids=[0])
    stage.envs.send([2], env_ids=[1])
    assert list(stage.table.status) == [QUEUED] * 2
    stage.worker().play()
    stage.settle()
    assert list(stage.table.status) == [POSTED] * 2
    stage.run()
    assert sorted(stage.envs.recv().rewards.tolist()) == [1.0, 2.0]


def test_a_reply_to_an_earlier_call_is_dropped(stages):
    stage = stages(1)
    worker, before = stage.worker(), stage.actor().stats().stale
    worker.far.send(Frame(Kind.RESULT, 0, 1, dumps("stale")))
    worker.far.send(Frame(Kind.RESULT, 5, 1, dumps("stale")))
    stage.settle()
    assert stage.actor().stats().stale == before + 2
    assert stage.step([1])[1].tolist() == [1.0]


# Snapshots -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("autoreset", "starts"), [("same_step", True), ("next_step", False)])
def test_a_snapshot_knows_whether_its_last_observation_starts_an_episode(stages, autoreset, starts):
    policy = ea.SnapshotPolicy(get=lambda env: env.steps, set=lambda env, steps: setattr(env, "steps", steps))
    stage = stages(1, autoreset=autoreset, snapshot=policy)
    assert stage.play(stage.envs.snapshot)[0].is_start
    stage.step([1])
    assert not stage.play(stage.envs.snapshot)[0].is_start
    stage.step([END])
    assert stage.play(stage.envs.snapshot)[0].is_start == starts


# Signal handlers that use the vector ----------------------------------------------------------------------


class SteppingActions(list):
    """Makes a request of its own while it is converted, as a signal handler may."""

    stage = None

    def __len__(self):
        if self.stage is not None:
            stage, self.stage = self.stage, None
            stage.start([7])
        return super().__len__()


def test_a_request_that_another_one_overtakes_is_refused(stages):
    stage = stages(1)
    actions = SteppingActions([5])
    actions.stage = stage
    with pytest.raises(ea.AlreadyPendingError):
        stage.access.start_steps(None, actions)
    stage.run()
    assert stage.finish().obs.tolist() == [[1, 7, 0]]
    stage.check()


class Visitor:
    """Runs a function where its copy is unpickled for the first time."""

    visit = None

    def __reduce__(self):
        return _arrive, ()


def _arrive():
    visit, Visitor.visit = Visitor.visit, None
    if visit is not None:
        visit()


class VisitedEnv(PlayedEnv):
    def step(self, action):
        info = {"visitor": Visitor(), "text": "x" * 10_000} if action == 1 else {}
        return *super().step(action)[:4], info


def test_a_result_that_another_call_takes_meanwhile_is_not_returned_again(stages):
    stage = stages(1, env=VisitedEnv)
    rewards = []

    def handle():
        rewards.extend(stage.envs.recv().rewards)
        stage.envs.send([2])
        stage.play(stage.envs[0].echo(3).result, SOON)  # the result of the step is collected before the call

    Visitor.visit = handle
    stage.start([1])
    stage.run()
    rewards.extend(stage.envs.recv().rewards)
    assert rewards == [1.0, 2.0]
    stage.check()


# Closing -------------------------------------------------------------------------------------------------


def test_a_closed_vector_refuses_requests(stages):
    stage = stages(2)
    stage.close()
    with pytest.raises(ea.ActorClosedError):
        stage.envs.step([1, 2])
    assert all(worker.server.closed for worker in stage.backend.all)


def test_closing_lets_queued_rows_run(stages):
    stage = stages(1)
    stage.envs[0].echo(1)
    (future,) = stage.envs.submit([3])
    stage.close()
    assert future.result(SOON).reward == 3.0


@pytest.mark.parametrize("method", ["step", "reset"])
def test_a_closing_actor_names_the_request_that_it_refuses(stages, method):
    stage = stages(1)
    stage.actor().begin_close(SOON)
    request = (lambda: stage.envs.step([1])) if method == "step" else stage.envs.reset
    with pytest.raises(ea.ActorClosedError, match=f"cannot run {method}"):
        request()
    assert stage.table.requests == {}
    stage.check()


def test_the_error_of_a_closed_actor_names_its_own_env(stages):
    stage = stages(3, envs_per_actor=2)
    stage.envs.actors[1].kill()
    stage.settle()
    with pytest.raises(ea.ActorClosedError, match=r"\(env 2, ") as caught:
        stage.start([1, 1, 1])
    assert caught.value.index == 2


@pytest.mark.parametrize("index", [1, 2])  # the latter is alone in its process
def test_the_process_of_a_packed_env_is_left_to_the_handle_of_its_actor(stages, index):
    stage = stages(3, envs_per_actor=2)
    for method in ("renew", "kill", "close"):
        with pytest.raises(ea.VectorInputError, match=rf"use envs\.actors\[i\]\.{method}\(\) of actor 'envs?-"):
            getattr(stage.envs[index], method)()
    assert stage.play(lambda: stage.envs.actors[1].renew().result(SOON)) == 1


@pytest.mark.parametrize("kind", [OSError, MemoryError, ValueError, OverflowError])
def test_a_vector_without_memory_for_its_rows_says_so(stages, monkeypatch, kind):
    def refuse(self, layout):
        raise kind("no room")

    monkeypatch.setattr(PlainMemory, "create", refuse)
    with pytest.raises(ea.VectorEnvError, match=r"cannot allocate \d+ bytes .* \(no room\)"):
        stages(2)


def test_a_snapshot_of_a_lost_episode_speaks_of_the_snapshot(stages):
    policy = ea.SnapshotPolicy(get=lambda env: env.steps, set=lambda env, steps: None)
    stage = stages(1, snapshot=policy)
    stage.step([1])
    stage.crash()
    stage.run()
    with pytest.raises(ea.ActorDiedError, match=r"before its own snapshot had a result") as caught:
        stage.envs.snapshot()
    assert caught.value.method == "snapshot"


def test_the_last_batch_of_envs_in_flight_is_refused(stages):
    stage = stages(2, on_failure="renew")
    stage.step([1, 1])
    stage.envs.send([2, 2])
    stage.run()
    with pytest.raises(ea.AlreadyPendingError):
        stage.envs.last_batch()
    stage.envs.recv()
    assert stage.envs.last_batch().obs[:, 1].tolist() == [2, 2]


def test_a_request_that_runs_again_and_ends_meanwhile_is_not_gone(stages, monkeypatch):
    stage = stages(1, on_failure="replay")
    stage.step([1])
    stage.start([RAISE])
    stage.worker().play()
    collect = stage.engine._collect

    def collect_and_run(envs):
        collect(envs)
        monkeypatch.undo()
        stage.run()

    monkeypatch.setattr(stage.engine, "_collect", collect_and_run)
    assert "failure" in stage.finish().infos[0]
