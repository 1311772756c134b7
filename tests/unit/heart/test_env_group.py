"""Rows of actors that users kill, renew, abort, and close, and changes that are interrupted."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from budget import LONG
from fakes import LARGE, RAISE, SOON, wait_until
from interrupting import interrupt

import envactors as ea
from envactors.actor.future import ReadyOutcome
from envactors.actor.states import ActorState
from envactors.vector.episodes import NEEDS_RESET
from envactors.vector.table import IDLE, POSTED, QUEUED

ON_FAILURE = pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
# The distance of the lines that are tried.
STRIDE = 7 if LONG else 11


# What users do to actors whose rows are posted or queued -------------------------------------------------


@ON_FAILURE
def test_killing_an_actor_aborts_its_posted_rows(stages, on_failure):
    stage = stages(2, on_failure=on_failure)
    stage.step([1, 1])
    stage.start([2, 2])
    stage.worker(0).begin_row(0)
    stage.envs.actors[0].kill(restart=True)
    stage.run()
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError) as caught:
            stage.finish()
        assert caught.value.failures[0].aborted
    else:
        failure = stage.finish().infos[0]["failure"]
        assert failure.aborted, "an abort is not tried again"
    assert stage.actor().stats().restarts == 0
    stage.check()


@ON_FAILURE
def test_killing_an_actor_with_queued_rows_loses_its_episode(stages, on_failure):
    stage = stages(1, on_failure=on_failure)
    stage.step([1])
    call = stage.envs[0].echo(1)
    stage.start([2])
    assert list(stage.table.status) == [QUEUED]
    stage.envs.actors[0].kill(restart=True)
    stage.run()
    with pytest.raises(ea.ActorDiedError):
        call.result(SOON)
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError):
            stage.finish()
    elif on_failure == "renew":
        assert "failure" in stage.finish().infos[0]
    else:
        assert stage.finish().obs.tolist() == [[2, 2, 0]]
    stage.check()


def test_the_error_of_a_step_that_was_never_posted_has_no_call_id(stages):
    stage = stages(1)
    stage.step([1])
    stage.envs[0].echo(1)
    stage.start([2])
    assert list(stage.table.status) == [QUEUED]
    stage.crash()
    stage.run()
    with pytest.raises(ea.VectorStepError) as caught:
        stage.finish()
    error = caught.value.failures[0]
    assert error.call_id is None
    assert "before its own step had a result" in str(error)


def test_a_step_that_waits_to_run_again_keeps_its_call_id(stages):
    stage = stages(1, on_failure="replay", restart=ea.RestartPolicy(max_restarts=1, backoff=SOON))
    stage.step([1])
    stage.start([2])
    call_id = stage.table.activity(0).call_id
    stage.worker().begin_row(0)
    stage.crash()
    wait_until(lambda: list(stage.table.status) == [QUEUED])
    assert stage.table.activity(0).call_id == call_id > 0


def test_a_queued_reset_survives_a_kill(stages):
    stage = stages(1)
    stage.envs[0].echo(1)
    stage.access.start_reset([0], [5], [None])
    stage.envs.actors[0].kill(restart=True)
    stage.run()
    assert stage.finish().obs.tolist() == [[0, -1, 5]]


@ON_FAILURE
def test_a_renewal_between_steps_loses_the_episode(stages, on_failure):
    stage = stages(2, on_failure=on_failure)
    stage.step([1, 1])
    renewed = stage.envs.actors[0].renew()
    stage.run()
    assert renewed.result(SOON) == 1
    stage.start([2, 2])
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError) as caught:
            stage.finish()
        assert list(caught.value.failures) == [0]
    else:
        assert ["failure" in info for info in stage.finish().infos] == [True, False]
    assert stage.worker(1).envs[0].steps == 2
    stage.check()


def test_rows_before_a_renewal_end_first(stages):
    stage = stages(1)
    stage.start([1])
    renewed = stage.envs.actors[0].renew()
    stage.run()
    assert renewed.result(SOON) == 1
    assert stage.finish().obs.tolist() == [[1, 1, 0]]
    assert stage.backend.all[0].envs[0].closed


def test_rows_behind_a_renewal_run_in_the_next_process(stages):
    stage = stages(1)
    renewed = stage.envs.actors[0].renew()
    stage.access.start_reset([0], [5], [None])
    assert list(stage.table.status) == [QUEUED]
    stage.check()
    stage.run()
    assert renewed.result(SOON) == 1
    batch = stage.finish()
    assert (batch.obs.tolist(), batch.incarnations.tolist()) == ([[0, -1, 5]], [1])


def test_aborting_a_posted_step_replaces_the_process(stages):
    stage = stages(1)
    (future,) = stage.envs.submit([1])
    stage.worker().begin_row(0)
    assert future.abort()
    stage.run()
    with pytest.raises(ea.ActorDiedError, match="on purpose"):
        future.result(SOON)
    assert stage.envs.actors[0].incarnation == 1


def test_aborting_a_queued_step_leaves_the_process_alone(stages):
    stage = stages(1)
    call = stage.envs[0].echo(1)
    (future,) = stage.envs.submit([1])
    assert future.abort()
    assert future.cancelled()
    stage.run()
    assert call.result(SOON) == 1
    assert stage.envs.actors[0].incarnation == 0


def test_aborting_a_complete_step_returns_false_and_ends_nothing(stages):
    stage = stages(2, envs_per_actor=2)
    first, second = stage.envs.submit([1, 2])
    stage.worker().run_row(0)
    assert not first.abort()
    assert first.result(SOON).reward == 1.0
    assert not stage.worker().was_killed
    assert not second.done()
    stage.run()
    assert second.result(SOON).reward == 2.0
    assert stage.envs.actors[0].incarnation == 0


def test_aborting_a_step_that_has_raised_returns_false(stages):
    stage = stages(1)
    (future,) = stage.envs.submit([RAISE])
    stage.worker().run_row(0)
    assert not future.abort()
    assert not stage.worker().was_killed
    stage.run()
    assert isinstance(future.exception(SOON), Exception)


def test_closing_without_restart_fails_posted_and_queued_rows(stages):
    stage = stages(2)
    stage.envs[1].echo(1)
    stage.envs.send(np.array([1, 2]))
    assert list(stage.table.status) == [POSTED, QUEUED]
    for handle in stage.envs.actors:
        handle.kill()
    wait_until(lambda: all(handle._actor.closed.is_set for handle in stage.envs.actors))
    with pytest.raises(ea.VectorStepError) as caught:
        stage.envs.recv()
    assert sorted(caught.value.failures) == [0, 1]
    assert stage.table.requests == {}


def test_a_closed_actor_leaves_the_others_alone(stages):
    stage = stages(2)
    stage.envs.actors[0].kill()
    stage.settle()
    assert stage.actor(0).state is ActorState.CLOSED
    stage.start([1], [1])
    assert stage.finish([1]).obs.tolist() == [[1, 1, 1]]
    with pytest.raises(ea.ActorClosedError):
        stage.start([1, 1])
    assert list(stage.table.status) == [IDLE] * 2
    stage.check()


def test_calls_of_a_handle_of_a_packed_env_reach_that_env(stages):
    stage = stages(3, envs_per_actor=3)
    stage.start([1, 2, 3])
    futures = [stage.envs[index].get("seed") for index in range(3)]
    stage.run()
    assert [future.result(SOON) for future in futures] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("packed", [2, 3])
def test_only_the_vector_steps_envs_if_processes_have_several(stages, packed):
    stage = stages(3, envs_per_actor=packed)
    for handle in (*stage.envs, *stage.envs.actors, stage.envs[2].options(retries=1)):
        for method in ("step", "reset"):
            with pytest.raises(ea.VectorInputError, match=rf"use envs\.{method}\(\.\.\., env_ids="):
                handle.call(method)
    assert stage.step([1, 1, 1])[0][:, 0].tolist() == [1, 1, 1]


def test_an_env_of_a_vector_without_packing_may_be_stepped_by_its_handle(stages):
    stage = stages(2)
    assert stage.envs[1] is stage.envs.actors[1]
    assert stage.play(lambda: stage.envs[1].step(1).result(SOON))[1] == 1.0


def test_attributes_are_set_again_in_the_next_process(stages):
    stage = stages(1, on_failure="replay")
    stage.play(stage.envs.set_attr, "mark", 3)
    renewed = stage.envs.actors[0].renew()
    stage.run()
    assert renewed.result(SOON) == 1
    assert stage.env().mark == 3


# Interrupted changes -------------------------------------------------------------------------------------


def check_works(stage, seed):
    """A reset works, and the next step returns what belongs to its actions."""
    stage.run()
    stage.check()
    obs, _ = stage.reset(seed=seed, timeout=SOON)
    assert obs[:, 2].tolist() == [seed + index for index in range(stage.envs.num_envs)]
    actions = [seed % 80, (seed + 1) % 80][: stage.envs.num_envs]
    assert stage.step(actions)[1].tolist() == [float(action) for action in actions]
    stage.check()


def run_interrupted(stage, function, seeds, start):
    """Raise in the calling thread, while another one plays the workers."""
    for number in itertools.count(start, STRIDE):
        where = ""
        with stage.backend.playing(), contextlib.suppress(ea.EnvActorsError):
            where = interrupt(lambda: function(stage.envs), number)
        check_works(stage, next(seeds))
        if where is None:
            break


def step(envs):
    envs.step([1, 2])


def send_and_receive(envs):
    envs.send([1, 2])
    received = 0
    while received < 2:
        received += len(envs.recv(min_envs=1).env_ids)


def submit(envs):
    for future in envs.submit([1, 2]):
        future.result(SOON)


def step_behind_calls(envs):
    envs[0].echo(1)
    envs.step([1, 2])


def raise_in_a_step(envs):
    envs.step([RAISE, 2])


def cancel(envs):
    envs[0].echo(1)
    (future,) = envs.submit([1], env_ids=[0])
    future.cancel()


def abort(envs):
    (future,) = envs.submit([1], env_ids=[0])
    future.abort()


def kill(envs):
    envs.send([1, 2])
    envs.actors[0].kill(restart=True)


@pytest.mark.parametrize("packed", [1, 2])
@pytest.mark.parametrize(
    "function", [step, send_and_receive, submit, step_behind_calls, raise_in_a_step, cancel, abort, kill]
)
def test_after_an_exception_at_some_lines_a_reset_works(stages, function, packed):
    stage = stages(2, envs_per_actor=packed, on_failure="renew")
    run_interrupted(stage, function, itertools.count(1), packed)


@pytest.mark.parametrize("on_failure", ["raise", "replay"])
def test_after_an_exception_at_some_lines_of_a_step_a_reset_works(stages, on_failure):
    run_interrupted(stages(2, on_failure=on_failure), step, itertools.count(1), 3)


@pytest.mark.parametrize("at", range(36))
def test_an_interrupted_repair_is_made_again(stages, at):
    stage = stages(2, envs_per_actor=2)
    (future,) = stage.envs.submit([1], env_ids=[0])
    stage.start([2], [1])
    lock, actor = stage.table.lock, stage.actor()
    with contextlib.suppress(ZeroDivisionError), lock, lock.change(actor):
        raise ZeroDivisionError
    interrupt(lock.repair_if_interrupted, at, only={"repair", "_fail", "_forget", "_end"})
    lock.repair_if_interrupted()
    with pytest.raises(ea.ActorDiedError, match="an exception interrupted the caller"):
        future.result(SOON)
    assert list(stage.table.status) == [IDLE] * 2
    check_works(stage, 7)


@pytest.mark.parametrize("at", range(8))
def test_an_interrupt_leaves_no_outcome_of_an_idle_env(stages, at):
    stage = stages(1)
    stage.envs.send([1])
    table, lock = stage.table, stage.table.lock

    def record():
        with lock, lock.change(stage.actor()):
            table.record_outcome(0, ReadyOutcome(None, ZeroDivisionError()))

    interrupt(record, at, only={"record_outcome"})
    lock.repair_if_interrupted()
    check_works(stage, 7)
    assert not table.outcomes


@pytest.mark.parametrize("at", range(24))
@pytest.mark.parametrize("end", ["cancel", "abort"])
@pytest.mark.parametrize("is_row", [True, False])
def test_an_interrupt_leaves_no_withdrawn_request_without_an_end(stages, is_row, end, at):
    stage = stages(1)
    stage.envs[0].echo(1)
    (future,) = stage.envs.submit([1]) if is_row else [stage.envs[0].echo(2)]  # it is queued behind the call
    withdrawing = {"_withdraw", "withdraw", "deliver_ids", "set_canceled", "set_exception", "set_outcome", "_notify"}
    interrupt(getattr(future, end), at, only=withdrawing)
    stage.table.lock.repair_if_interrupted()
    stage.run()
    assert future.done()
    check_works(stage, 7)


def test_a_repair_makes_envs_idle_and_fails_futures(stages):
    stage = stages(2)
    futures = stage.envs.submit([1, 2])
    lock = stage.table.lock
    with contextlib.suppress(ZeroDivisionError), lock, lock.change(stage.actor(0)):
        raise ZeroDivisionError
    lock.repair_if_interrupted()
    assert isinstance(futures[0].exception(SOON), ea.ActorDiedError)
    assert list(stage.table.status) == [IDLE, POSTED]
    assert stage.episodes.flags[0] & NEEDS_RESET
    assert not stage.episodes.flags[1] & NEEDS_RESET
    stage.run()
    assert futures[1].result(SOON).reward == 2.0


def test_a_repair_keeps_an_outcome_that_was_there(stages):
    stage = stages(1)
    (future,) = stage.envs.submit([1])
    stage.worker().run_row(0)
    lock = stage.table.lock
    with contextlib.suppress(ZeroDivisionError), lock, lock.change(stage.actor()):
        stage.engine.groups[0].collect_completed()
        raise ZeroDivisionError
    lock.repair_if_interrupted()
    assert future.result(SOON).reward == 1.0


def test_a_bug_in_the_loop_closes_the_actor_and_fails_its_rows(stages, monkeypatch):
    stage = stages(2)
    (future,) = stage.envs.submit([LARGE], env_ids=[0])
    bug = KeyError("a bug")

    def fail(_):
        raise bug

    monkeypatch.setattr(stage.engine.groups[0], "on_overflow", fail)
    stage.worker(0).play()
    wait_until(future.done)
    monkeypatch.undo()
    error = future.exception(SOON)
    assert isinstance(error, ea.ActorClosedError)
    assert error.__cause__ is bug
    bug.__traceback__ = None  # it has the frames of this test
    stage.start([1], [1])
    assert stage.finish([1]).rewards.tolist() == [1.0]
