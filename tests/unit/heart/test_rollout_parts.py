"""Rollouts with workers that the test plays: crashes, deadlines, exceptions, and interrupts between any two steps."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import signal
import threading
import time

import numpy as np
import pytest
from fakes import END, INFO, LARGE, RAISE, SOON, PlayedEnv, RowError, Stage, wait_until
from interleaving import StoppingThread
from interrupting import interrupt

import envactors as ea
from envactors.backends.local import LocalWorker
from envactors.mailbox import packing
from envactors.mailbox.control_page import FINISHED, METHOD_POLICY, METHOD_STEP
from envactors.mailbox.messages import Frame, Kind
from envactors.mailbox.pickling import dumps
from envactors.rollout import part, policy_runner
from envactors.rollout.messages import RAISED
from envactors.rollout.trajectory import Trajectory
from envactors.vector.episodes import NEEDS_RESET, RETIRING
from envactors.vector.table import IDLE

AUTORESET = pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
PACKED = pytest.mark.parametrize("packed", [1, 2])


class PlayedPolicy:
    """Chooses one action after the other, or what ``actions`` says for a step."""

    actions = {}  # noqa: RUF012 # replaced by tests
    raises_at = -1

    def __call__(self, obs, context):
        if context.step == self.raises_at:
            raise ValueError("no action")
        return np.full(len(obs), self.actions.get(context.step, context.step + 1), np.int64)


class LoadingPolicy(PlayedPolicy):
    def load(self, parameters):
        self.actions = {step: int(parameters) for step in range(99)}


class ExtraPolicy(PlayedPolicy):
    def __call__(self, obs, context):
        return super().__call__(obs, context), {"value": np.full(len(obs), float(context.step))}


@pytest.fixture
def policy():
    """The class of policies, whose settings are those of the workers, too."""
    yield PlayedPolicy
    PlayedPolicy.actions, PlayedPolicy.raises_at = {}, -1


@pytest.fixture
def handle():
    """Return a function that sets the handler of a signal, which it returns."""
    before = signal.getsignal(signal.SIGUSR1)

    def set_handler(function):
        signal.signal(signal.SIGUSR1, lambda *_: function())
        return signal.SIGUSR1

    yield set_handler
    signal.signal(signal.SIGUSR1, before)


def make(stages, *args, policy=PlayedPolicy, **options):
    stage = stages(*args, **options)
    stage.play(stage.envs.set_policy, policy)
    return stage


def rewards(rollout):
    return rollout.rewards.T.tolist()


@PACKED
def test_a_rollout_takes_all_steps(stages, packed):
    stage = make(stages, envs_per_actor=packed)
    future = stage.envs.rollout_async(3)
    stage.run()
    rollout = future.result(SOON)
    assert rewards(rollout) == [[1.0, 2.0, 3.0]] * 2
    assert rollout.valid.all()
    assert rollout.last_obs.tolist() == [[3, 3, 0], [3, 3, 1]]
    assert stage.engine.counts() == ([3, 3], [0, 0])
    assert stage.table.rollouts_in_flight == []
    stage.check()


def test_a_step_after_a_rollout_continues_the_episodes(stages):
    stage = make(stages)
    stage.play(stage.envs.rollout, 2)
    assert stage.step([9, 9])[0].tolist() == [[3, 9, 0], [3, 9, 1]]


@AUTORESET
def test_ends_of_episodes(stages, policy, autoreset):
    policy.actions = {1: END}
    stage = make(stages, 1, autoreset=autoreset)
    rollout = stage.play(stage.envs.rollout, 4)
    assert rollout.terminated[:, 0].tolist() == [False, True, False, False]
    expected = {"next_step": [True, True, False, True], "same_step": [True] * 4, "disabled": [True, True, False, False]}
    assert rollout.valid[:, 0].tolist() == expected[autoreset]
    assert bool(stage.episodes.flags[0] & NEEDS_RESET) == (autoreset == "disabled")
    stage.check()


@pytest.mark.parametrize("action", [INFO, LARGE])
def test_infos_of_all_sizes_arrive(stages, policy, action):
    policy.actions = {1: action}
    stage = make(stages)
    infos = stage.play(stage.envs.rollout, 3).infos
    assert [(step, index) for step, index, _ in infos] == [(1, 0), (1, 1)]


def test_extras_are_learned_with_the_first_step(stages):
    stage = make(stages, policy=ExtraPolicy)
    rollout = stage.play(stage.envs.rollout, 3)
    assert rollout.extras["value"].T.tolist() == [[0.0, 1.0, 2.0]] * 2


def test_parameters_reach_the_policy(stages):
    stage = make(stages, policy=LoadingPolicy)
    assert rewards(stage.play(stage.envs.rollout, 2, np.int64(7))) == [[7.0, 7.0]] * 2
    assert rewards(stage.play(stage.envs.rollout, 2)) == [[7.0, 7.0]] * 2


def test_parameters_without_load_are_refused(stages):
    stage = make(stages)
    with pytest.raises(TypeError, match="load"):
        stage.envs.rollout_async(1, 5)
    assert stage.table.rollouts_in_flight == []


def test_a_start_that_failed_changes_no_parameters_of_a_rollout_in_flight(stages, monkeypatch):
    stage = make(stages, policy=LoadingPolicy)
    first = stage.envs.rollout_async(2, np.array(7))
    memory = stage.envs._memory
    extend = memory.extend

    def refuse_trajectories(size):
        if size > 1000:
            raise OSError("no memory")
        return extend(size)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "extend", refuse_trajectories)
        with pytest.raises(ea.VectorEnvError, match="no memory"):
            stage.envs.rollout_async(500, np.array(8))
    second = stage.envs.rollout_async(2, np.array(9))
    stage.run()
    assert rewards(first.result(SOON)) == [[7.0, 7.0]] * 2
    assert rewards(second.result(SOON)) == [[9.0, 9.0]] * 2


@pytest.mark.parametrize("refusal", ["of parameters", "in the change"])
def test_a_start_that_failed_leaves_its_buffer_to_the_next_one(stages, monkeypatch, refusal):
    stage = make(stages, 1, policy=LoadingPolicy)
    engine, extend, sizes = stage.envs._rollout_engine, stage.envs._memory.extend, []
    for _ in range(3):
        stage.play(stage.envs.rollout, 2, np.array(7))

    def refuse(*_, **__):
        raise ea.VectorEnvError("refused")

    with monkeypatch.context() as patch:
        if refusal == "of parameters":
            patch.setattr(engine._parameters, "write", refuse)
        else:
            pickle = engine._pickle_parameters
            patch.setattr(
                engine,
                "_pickle_parameters",
                lambda value: patch.setattr(engine, "_check_startable", refuse) or pickle(value),
            )
        with pytest.raises(ea.VectorEnvError, match="refused"):
            stage.envs.rollout_async(2, np.array(8))
    monkeypatch.setattr(stage.envs._memory, "extend", lambda size: sizes.append(size) or extend(size))
    assert rewards(stage.play(stage.envs.rollout, 2)) == [[7.0, 7.0]]
    assert sizes == []


def test_the_memory_of_parameters_is_used_again(stages, monkeypatch):
    """Two rollouts in flight need two regions. Then one of them is free."""
    stage = make(stages, 1, policy=LoadingPolicy)
    extend, sizes = stage.envs._memory.extend, []
    monkeypatch.setattr(stage.envs._memory, "extend", lambda size: sizes.append(size) or extend(size))
    for _ in range(3):
        futures = [stage.envs.rollout_async(2, np.array(value)) for value in (7, 8)]
        stage.run()
        assert [rewards(future.result(SOON)) for future in futures] == [[[7.0] * 2], [[8.0] * 2]]
        assert rewards(stage.play(stage.envs.rollout, 2, np.array(9))) == [[9.0] * 2]
    assert [size for size in sizes if size == np.array(9).nbytes] == [8] * 2


def test_two_rollouts_may_be_in_flight_and_no_third(stages):
    stage = make(stages)
    first, second = stage.envs.rollout_async(2), stage.envs.rollout_async(2)
    with pytest.raises(ea.AlreadyPendingError, match="2 rollouts"):
        stage.envs.rollout_async(2)
    stage.run()
    assert first.result(SOON).last_obs[:, 0].tolist() == [2, 2]
    assert second.result(SOON).last_obs[:, 0].tolist() == [4, 4]
    assert stage.table.rollouts_in_flight == []


def test_a_rollout_may_end_while_the_next_one_starts(stages, policy, handle):
    """The next one repeats the last observation of an env that needs a reset, as if both were in flight."""
    policy.actions = {0: END}
    stage = make(stages, 1, autoreset="disabled")
    first, second = stage.envs.rollout_async(2), []
    signum = handle(stage.run)
    assert interrupt(lambda: second.append(stage.envs.rollout_async(2)), 0, only={"_pickle_parameters"}, signum=signum)
    assert first.done()
    stage.run()
    assert not second[0].result(SOON).valid.any()
    with pytest.raises(ea.VectorInputError, match="reset"):
        stage.envs.rollout_async(2)


def test_a_rollout_may_end_between_two_looks_at_those_in_flight(stages):
    class EndingRollouts(list):
        def __len__(self):
            stage.run()
            return super().__len__()

    stage = make(stages, 1)
    stage.envs.rollout_async(2)
    stage.table.rollouts_in_flight = EndingRollouts(stage.table.rollouts_in_flight)
    future = stage.envs.rollout_async(2)
    stage.run()
    assert future.result(SOON).valid.all()


@pytest.mark.parametrize("method", ["set_policy", "evaluate", "rollout_async", "step"])
def test_a_caller_that_sees_that_a_rollout_is_done_may_continue(stages, policy, method):
    """The future is done before the change ends that resolves it."""
    policy.actions = dict.fromkeys(range(99), END)
    stage = make(stages, 1)
    future = stage.envs.rollout_async(1)
    (rollout,) = stage.table.rollouts_in_flight
    arguments = {"set_policy": [PlayedPolicy], "evaluate": [1], "rollout_async": [1], "step": [[1]]}
    forget, callers = rollout._forget, []

    def call_before_end(_):
        assert future.done()
        callers.append(StoppingThread(lambda: getattr(stage.envs, method)(*arguments[method])).start())
        callers[0].wait_asleep()
        forget(rollout)

    rollout._forget = call_before_end
    with stage.backend.playing():
        future.result(SOON)
        wait_until(lambda: callers)
        assert callers[0].ends_within(SOON)
    assert callers[0].error is None


def test_steps_during_a_rollout_are_refused(stages):
    stage = make(stages)
    future = stage.envs.rollout_async(2)
    with pytest.raises(ea.AlreadyPendingError, match="rollouts"):
        stage.envs.send([1, 1])
    stage.run()
    assert future.result(SOON).valid.all()


def test_a_rollout_with_results_pending_is_refused(stages):
    stage = make(stages)
    stage.envs.send([1, 1])
    with pytest.raises(ea.AlreadyPendingError, match="pending"):
        stage.envs.rollout_async(2)


def test_a_reset_waits_for_rollouts_in_flight(stages):
    stage = make(stages)
    futures = [stage.envs.rollout_async(2), stage.envs.rollout_async(2)]
    with pytest.raises(ea.VectorTimeoutError, match="rollouts in flight"):
        stage.envs.reset(timeout=0.01)
    assert stage.reset(seed=5)[0].tolist() == [[0, -1, 5], [0, -1, 6]]
    assert all(future.done() for future in futures)


def test_each_actor_has_its_own_future(stages):
    stage = make(stages)
    first, second = stage.envs.rollout_each(2)
    while stage.worker(1).play():
        stage.settle()
    assert second.result(SOON).env_ids.tolist() == [1]
    assert not first.done()
    stage.run()
    assert first.result(SOON).valid.all()


def test_a_thread_that_waits_for_the_part_of_one_actor_reads_its_reply(stages, monkeypatch):
    waiting, wait = [], LocalWorker.wait_for_reply

    def wait_for_reply(worker, until, *, spins):
        waiting.append(threading.current_thread())
        return wait(worker, until, spins=spins)

    stage = make(stages)
    monkeypatch.setattr(LocalWorker, "wait_for_reply", wait_for_reply)
    future = stage.envs.rollout_each(2)[1]
    thread = threading.Thread(target=future.result, args=[SOON])
    thread.start()
    wait_until(lambda: waiting)
    stage.run()
    thread.join()
    assert set(waiting) == {thread}
    assert future.result().valid.all()


def test_a_call_during_a_rollout_runs_after_it(stages):
    stage = make(stages, 1)
    future = stage.envs.rollout_async(2)
    call = stage.envs[0].get("steps")
    stage.run()
    assert future.result(SOON).valid.all()
    assert call.result(SOON) == 2


def test_a_rollout_behind_a_call_runs_after_it(stages):
    stage = make(stages, 1)
    call = stage.envs[0].get("steps")
    future = stage.envs.rollout_async(2)
    stage.run()
    assert call.result(SOON) == 0
    assert future.result(SOON).valid.all()


def test_rollouts_cannot_be_canceled(stages):
    stage = make(stages)
    future = stage.envs.rollout_async(2)
    assert not future.cancel()
    assert not future.abort()
    stage.run()
    assert future.result(SOON).valid.all()


# Failures ------------------------------------------------------------------------------------------------


def test_an_exception_of_the_policy_is_raised(stages, policy):
    policy.raises_at = 1
    stage = make(stages)
    with pytest.raises(ValueError, match="no action"):
        stage.play(stage.envs.rollout, 3)
    policy.raises_at = -1
    stage.reset()
    assert stage.play(stage.envs.rollout, 2).valid.all()


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_an_env_that_raises(stages, policy, on_failure):
    policy.actions = {1: RAISE}
    stage = make(stages, 1, on_failure=on_failure)
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError) as caught:
            stage.play(stage.envs.rollout, 4)
        assert isinstance(caught.value.failures[0], RowError)
        assert caught.value.batch.valid[:, 0].tolist() == [True, False, False, False]
    else:
        rollout = stage.play(stage.envs.rollout, 4)
        assert rollout.truncated[:, 0].tolist() == [False, True, False, False]
        assert [(step, index) for step, index, _ in rollout.failures] == [(1, 0)]
    assert stage.table.rollouts_in_flight == []
    stage.check()
    stage.reset(seed=1)


def test_an_env_that_raises_in_an_order_that_fails_needs_a_reset(stages, policy, monkeypatch):
    policy.actions = {1: RAISE}
    stage = make(stages, 1, autoreset="disabled", on_failure="renew")
    monkeypatch.setattr(policy_runner, "OrderReply", lambda **_: pytest.fail("no reply"))
    with pytest.raises(pytest.fail.Exception):
        stage.play(stage.envs.rollout, 4)
    assert stage.episodes.flags[0] & NEEDS_RESET


def test_another_machine_gets_the_observations_of_envs_that_are_ahead(stages, monkeypatch):
    """Env 1 has taken step 6, and lost its episode in step 7, while the next process runs step 5 of env 0."""
    stage = make(stages, envs_per_actor=2)
    stage.envs.rollout_async(9)
    part = stage.actor().jobs.running
    trajectory, sent = part.envs.trajectory, []
    monkeypatch.setattr(stage.worker(), "mirror", lambda _, content: sent.append(content))
    trajectory.observations[0][7, 1] = 7
    trajectory.truncated[6, 1] = True
    trajectory.steps_complete[:] = [5, 7]
    with monkeypatch.context() as patch:
        patch.setattr(part.envs, "accepted_steps", {0: 5, 1: 7})
        part._mirror_steps()
    trajectory.steps_complete[:] = 0
    received = Trajectory(trajectory.layout, [bytearray(size) for size in trajectory.sizes])
    received.unpack(range(2), sent[0])
    assert received.observations[0][7, 1].tolist() == [7] * 3
    assert received.truncated[6].tolist() == [False, True]
    stage.run()


@PACKED
@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_a_crash_before_the_worker_begins(stages, packed, on_failure):
    stage = make(stages, envs_per_actor=packed, on_failure=on_failure)
    future = stage.envs.rollout_async(2)
    stage.crash()
    stage.run()
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError):
            future.result(SOON)
    else:
        rollout = future.result(SOON)
        lost = packed if on_failure == "renew" else 0
        assert [(step, index) for step, index, _ in rollout.failures] == [(0, index) for index in range(lost)]
        assert on_failure == "renew" or rewards(rollout) == [[1.0, 2.0]] * 2
    assert stage.table.rollouts_in_flight == []
    assert stage.table.are_all(IDLE)
    stage.check()
    stage.reset(seed=1)
    assert stage.play(stage.envs.rollout, 2).valid.all()


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
@AUTORESET
def test_a_crash_in_the_middle_of_a_step(stages, on_failure, autoreset):
    stage = make(stages, 1, on_failure=on_failure, autoreset=autoreset)
    future = stage.envs.rollout_async(3)
    worker = stage.worker()
    trajectory = stage.actor().jobs.running.envs.trajectory
    worker.page.start_request(stage.actor().jobs.running.call_id, METHOD_STEP, 0)
    trajectory.steps_chosen[0] = 1
    trajectory.actions[0][0, 0] = 1
    stage.crash()
    stage.run()
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError) as caught:
            future.result(SOON)
        assert isinstance(caught.value.failures[0], ea.ActorDiedError)
    else:
        rollout = future.result(SOON)
        assert len(rollout.failures) == (0 if on_failure == "replay" else 1)
        if on_failure == "replay":
            assert rewards(rollout) == [[1.0, 2.0, 3.0]]
    stage.check()
    stage.reset(seed=1)


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_a_crash_after_an_exception_fails_no_second_step(stages, policy, on_failure):
    policy.actions = {1: RAISE}
    stage = make(stages, 1, on_failure=on_failure)
    future = stage.envs.rollout_async(3)
    worker, call_id = stage.worker(), stage.actor().jobs.running.call_id
    with worker.keeping(Kind.RESULT):
        worker.server.run_posted()
    policy.actions = {}
    worker.page.counters[FINISHED] = call_id - 1  # it has not replied
    stage.crash()
    stage.run()
    if on_failure == "raise":
        with pytest.raises(ea.VectorStepError) as caught:
            future.result(SOON)
        assert isinstance(caught.value.failures[0], RowError)
    else:
        assert [(step, type(error)) for step, _, error in future.result(SOON).failures] == [(1, RowError)]
    stage.check()


@pytest.mark.parametrize("method", [METHOD_STEP, METHOD_POLICY])
@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_a_crash_fails_no_env_whose_episode_is_over(stages, policy, on_failure, method):
    policy.actions = {0: END}
    stage = make(stages, 1, on_failure=on_failure, autoreset="disabled")
    first, second = stage.envs.rollout_async(2), stage.envs.rollout_async(2)
    while not first.done():
        stage.worker().play()
        stage.settle()
    part = stage.actor().jobs.running
    part.envs.trajectory.steps_chosen[0] = method == METHOD_STEP
    stage.worker().page.start_request(part.call_id, method, 0)
    stage.crash()
    stage.run()
    assert second.result(SOON).failures == []
    assert not second.result().valid.any()
    stage.check()


@pytest.mark.parametrize("runs_rollout", [False, True])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_the_last_batch_after_a_crash_has_the_incarnation_of_each_result(stages, runs_rollout, autoreset):
    """Env 0 has taken the last step, in which the process of both ends. Env 1 continues in the next process."""
    stage = make(stages, envs_per_actor=2, on_failure="renew", autoreset=autoreset)
    if runs_rollout:
        future = stage.envs.rollout_async(1)
        part = stage.actor().jobs.running
        trajectory = part.envs.trajectory
        trajectory.steps_chosen[0] = 1
        trajectory.steps_complete[0] = 1
        stage.worker().page.start_request(part.call_id, METHOD_STEP, 1)
        stage.crash()
        stage.run()
        assert future.result(SOON).truncated.tolist() == [[False, True]]
    else:
        stage.start([1, 1])
        stage.worker().run_row(0)
        stage.worker().begin_row(1)
        stage.crash()
        assert stage.finish().truncated.tolist() == [False, True]
    assert stage.envs.last_batch().incarnations.tolist() == [0, 1]


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_a_crash_at_any_line_of_the_worker(stages, on_failure):
    stage = make(stages, envs_per_actor=2, on_failure=on_failure)
    for line in itertools.count(1, 31):
        stage.reset(seed=0)
        stage.play(stage.envs.set_policy, PlayedPolicy)  # the last process may have ended
        future = stage.envs.rollout_async(2)
        stage.settle()
        ended = stage.worker().run_until_line(line)
        stage.run()
        stage.check()
        assert future.done()
        try:
            rollout = future.result()
        except ea.VectorStepError:
            assert on_failure == "raise"
        else:
            assert on_failure != "replay" or rewards(rollout) == [[1.0, 2.0]] * 2
        assert stage.table.rollouts_in_flight == []
        if not ended:
            break


def test_a_step_that_misses_its_deadline(stages):
    stage = make(stages, 1, deadlines=ea.Deadlines(step=0.05))
    future = stage.envs.rollout_async(3)
    worker = stage.worker()
    worker.page.start_request(stage.actor().jobs.running.call_id, METHOD_STEP, 0)
    wait_until(lambda: worker.was_killed)
    stage.run()
    with pytest.raises(ea.VectorStepError) as caught:
        future.result(SOON)
    assert isinstance(caught.value.failures[0], ea.ActorTimeoutError)
    stage.reset()


def test_an_exception_after_a_missed_deadline_is_dropped(stages, monkeypatch):
    stage = make(stages, 1)
    future = stage.envs.rollout_async(3)
    job = stage.actor().jobs.running
    contents = []
    monkeypatch.setattr(job.envs, "add_large_content", lambda *content: contents.append(content))
    with stage.actor().lock:
        job.on_late(job.activity())
        job.on_reply_piece(Frame(Kind.OVERFLOW, 0, job.call_id, packing.pack([(RAISED, dumps((0, 0)))])))
    stage.crash()
    stage.run()
    assert isinstance(future.exception(SOON), ea.VectorStepError)
    assert contents == []


def test_without_restarts_a_crash_ends_the_rollout(stages):
    stage = make(stages, restart=ea.RestartPolicy(max_restarts=0))
    future = stage.envs.rollout_async(2)
    stage.crash()
    stage.run()
    with pytest.raises(ea.VectorStepError) as caught:
        future.result(SOON)
    assert list(caught.value.failures) == [0]
    assert stage.table.rollouts_in_flight == []


def test_closing_ends_rollouts(stages):
    stage = make(stages, envs_per_actor=2)
    futures = [stage.envs.rollout_async(2), stage.envs.rollout_async(2)]
    for handle in stage.envs.actors:
        handle.kill()
    for future in futures:
        with pytest.raises(ea.VectorStepError) as caught:
            future.result(SOON)
        assert list(caught.value.failures) == [0, 1]
        assert caught.value.batch.failures == [(0, *failure) for failure in caught.value.failures.items()]


def test_killing_an_actor_in_a_rollout_fails_its_envs(stages):
    stage = make(stages)
    future = stage.envs.rollout_async(2)
    stage.envs.actors[0].kill(restart=True)
    stage.run()
    with pytest.raises(ea.VectorStepError) as caught:
        future.result(SOON)
    assert list(caught.value.failures) == [0]


def test_the_next_process_makes_the_policy_again(stages):
    stage = make(stages, 1, on_failure="replay")
    stage.crash()
    stage.run()
    assert stage.play(stage.envs.rollout, 2).valid.all()
    assert stage.envs.actors[0].incarnation == 1


def test_making_the_policy_has_no_deadline_without_one_for_starts(stages):
    stage = stages(1, deadlines=ea.Deadlines(start=None, call=SOON))
    thread = StoppingThread(lambda: stage.envs.set_policy(PlayedPolicy)).start()
    wait_until(lambda: stage.worker().has_request)
    activity = stage.actor().jobs.running.activity()
    stage.run()
    assert thread.ends_within(SOON)
    assert (activity.method, activity.late_at) == ("set_policy", math.inf)


@pytest.mark.parametrize("on_failure", ["renew", "replay"])
def test_the_process_after_an_exception_asks_for_the_policy(stages, policy, on_failure, monkeypatch):
    policy.actions = {1: RAISE}
    stage = make(stages, 1, on_failure=on_failure)
    orders = []
    monkeypatch.setattr(part, "dumps", lambda message: orders.append(part.Order(*message[1])) or dumps(message))
    assert len(stage.play(stage.envs.rollout, 4).failures) == 1
    incarnation = stage.envs.actors[0].incarnation
    assert [order.recipe is not None for order in orders] == [False] + [False, True] * incarnation


def test_a_process_is_recycled_between_rollouts(stages, policy):
    policy.actions = {1: END}
    stage = make(stages, 1, recycle=ea.RecyclePolicy(max_steps=2))
    stage.play(stage.envs.rollout, 2)
    assert stage.episodes.flags[0] & RETIRING
    rollout = stage.play(stage.envs.rollout, 2)
    assert stage.envs.actors[0].incarnation == 1
    assert not rollout.failures
    assert not stage.episodes.flags[0] & RETIRING


def test_the_log_says_why_a_process_is_recycled_after_several_episodes_of_a_rollout(stages, policy, caplog):
    caplog.set_level(logging.INFO, "envactors")
    policy.actions = {0: END}
    stage = make(stages, 1, autoreset="same_step", recycle=ea.RecyclePolicy(max_memory=1000))
    stage.worker().rss = 2000
    stage.play(stage.envs.rollout, 1)
    stage.worker().rss = 500
    stage.play(stage.envs.rollout, 1)
    stage.step([END])
    assert stage.envs.actors[0].incarnation == 1
    wait_until(lambda: any("gets a new process: RSS" in message for message in caplog.messages))


def test_a_lost_env_of_a_second_rollout_fails_it_at_its_start(stages):
    stage = make(stages)
    first, second = stage.envs.rollout_async(2), stage.envs.rollout_async(2)
    stage.crash()
    stage.run()
    for future in (first, second):
        with pytest.raises(ea.VectorStepError) as caught:
            future.result(SOON)
        assert list(caught.value.failures) == [0]
    stage.reset()


def test_an_error_of_an_earlier_rollout_does_not_fail_a_later_one(stages):
    """Env 0 fails in the first rollout. In the third it has no episode, but not for this reason."""
    restart = ea.RestartPolicy(max_restarts=1, backoff=0.0, window=0.2)
    stage = make(stages, 1, on_failure="renew", autoreset="disabled", restart=restart)
    stage.crash()
    stage.reset(seed=0)
    first = stage.envs.rollout_async(2)
    stage.worker().page.start_request(stage.actor().jobs.running.call_id, METHOD_STEP, 0)
    stage.actor().jobs.running.envs.trajectory.steps_chosen[0] = 1
    stage.crash()
    with pytest.raises(ea.VectorStepError):
        first.result(SOON)
    time.sleep(0.3)  # the policy allows a restart again
    stage.play(stage.envs.actors[0].renew().result, SOON)
    stage.reset(seed=0)
    second, third = stage.envs.rollout_async(2), stage.envs.rollout_async(2)
    stage.crash()
    stage.run()
    assert second.result(SOON).truncated[:, 0].tolist() == [True, False]
    assert not third.result(SOON).valid.any()


# Interrupts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("each", [False, True])
def test_an_exception_at_some_lines_of_starting_a_rollout(stages, loses, each):
    """With a lost episode the first part ends in the change that starts it."""
    stage = make(stages)
    for number in itertools.count(0, 13):
        stage.reset(seed=0)
        if loses:
            lose(stage)
        futures = []

        def start(futures=futures):
            futures += stage.envs.rollout_each(2) if each else [stage.envs.rollout_async(2)]

        where = interrupt(start, number)
        check_ended(stage, futures)
        if where is None:
            break


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_handler_at_any_line_of_starting_a_rollout_steps_or_starts_others(stages, handle, count):
    """Whoever comes first succeeds, up to two rollouts, each of which has its own buffer and random numbers."""
    stage = make(stages)
    started = []

    def act():
        with contextlib.suppress(ea.AlreadyPendingError, RuntimeError):  # the latter within a change
            if not count:
                stage.envs.send([1, 1])
                started.append("steps")
            start(count)

    def start(count=1):
        with contextlib.suppress(ea.AlreadyPendingError):
            started.extend(stage.envs.rollout_async(2) for _ in range(count))

    signum = handle(act)
    for number in itertools.count():
        stage.reset(seed=0)
        for _ in range(3):
            stage.play(stage.envs.rollout, 2)  # so that one buffer is free
        started.clear()
        where = interrupt(start, number, only={"start", "_check_startable", "check_free"}, signum=signum)
        in_flight = stage.table.rollouts_in_flight
        assert len(started) in (1, 2), where
        assert started == ["steps"] or len(in_flight) == len(started), where
        assert len({rollout.terms.rollout_index for rollout in in_flight}) == len(in_flight), where
        assert len({id(rollout.terms.buffer) for rollout in in_flight}) == len(in_flight), where
        if where is None:
            break
    assert number > 10


def test_a_handler_at_any_line_of_starting_a_rollout_keeps_its_parameters(stages, handle):
    """Each rollout has the parameters that it was started with, also if a handler starts two others."""
    stage = make(stages, 1, policy=LoadingPolicy)
    started = {}

    def start(*values):
        with contextlib.suppress(ea.AlreadyPendingError, RuntimeError):
            for value in values:
                started[value] = stage.envs.rollout_async(1, np.array(value))

    signum = handle(lambda: start(7, 8))
    names = {"start", "begin", "take", "write", "_take_region"}
    for number in itertools.count():
        stage.play(stage.envs.rollout, 1, np.array(5))
        started.clear()
        where = interrupt(lambda: start(6), number, only=names, signum=signum)
        stage.run()
        assert {value: rewards(future.result(SOON)) for value, future in started.items()} == {
            value: [[value]] for value in started
        }, where
        if where is None:
            break
    assert number > 20


def lose(stage):
    """Lose the episode of an env, whose next process has the policy already."""
    stage.crash()
    stage.run()
    stage.play(stage.envs.set_policy, PlayedPolicy)


NAMES = {"_end_if_finished", "_end", "deliver", "forget", "_end_parts", "fail", "repair"}


@pytest.mark.parametrize("twice", [False, True])
def test_an_exception_at_every_line_of_the_end_of_a_part(stages, twice):
    """Also if the repair is interrupted again."""
    stage = make(stages, 2)
    for number in itertools.count():
        stage.reset(seed=0)
        lose(stage)
        futures = []
        where = interrupt(lambda futures=futures: futures.append(stage.envs.rollout_async(2)), number, only=NAMES)
        if where is not None and twice:
            interrupt(stage.table.lock.repair_if_interrupted, number % 7, only=NAMES)
        check_ended(stage, futures)
        if where is None:
            break
    assert number > 5


@pytest.mark.parametrize("each", [False, True])
def test_an_exception_at_every_line_of_the_failure_of_a_part_loses_no_result(stages, each):
    """As when the user kills an actor while its part waits or runs."""
    stage = make(stages)
    for number in itertools.count():
        stage.reset(seed=0)
        futures = stage.envs.rollout_each(2) if each else [stage.envs.rollout_async(2)]

        def fail_parts():
            actors = [stage.actor(0), stage.actor(1)]
            with stage.table.lock, stage.table.lock.change(*actors):
                for actor in actors:
                    actor.jobs.running.fail(lambda activity, actor=actor: actor.errors.process_gone(activity, 0, None))

        if interrupt(fail_parts, number, only=NAMES) is None:
            break
        check_ended(stage, futures)
    assert number > 5


@pytest.mark.parametrize("action", [INFO, LARGE])
def test_steps_that_are_complete_but_not_accepted_before_an_interrupt_did_not_run(stages, policy, action):
    policy.actions = {0: action}
    stage = make(stages, 1)
    future = stage.envs.rollout_async(2)
    stage.settle()
    with stage.worker().keeping():  # its reply, and the large info, are on their way
        stage.worker().server.run_posted()
    with pytest.raises(KeyboardInterrupt), stage.table.lock, stage.table.lock.change(stage.actor()):
        raise KeyboardInterrupt
    stage.run()
    with pytest.raises(ea.VectorStepError) as caught:
        future.result(SOON)
    rollout = caught.value.batch
    assert [(step, index) for step, index, _ in rollout.failures] == [(0, 0)]
    assert (rollout.valid.any(), rollout.infos, rewards(rollout)) == (False, [], [[0.0, 0.0]])
    assert rollout.actions.T.tolist() == [[action, 0]]


def check_ended(stage: Stage, futures):
    """Everything ends, and a reset works."""
    stage.run()
    stage.reset(seed=3, timeout=SOON)
    assert stage.table.rollouts_in_flight == []
    for future in futures:
        assert future.done()
        future.exception()
    stage.check()
    assert stage.step([1, 1])[0].tolist() == [[1, 1, 3], [1, 1, 4]]


def test_the_part_keeps_its_result_if_its_end_is_interrupted(stages):
    stage = make(stages, 1)
    future = stage.envs.rollout_async(2)
    job = stage.actor().jobs.running
    stage.run()
    assert job.has_ended
    rollout = future.result(SOON)
    with stage.table.lock, stage.table.lock.change(stage.actor()):
        job.fail(lambda _: pytest.fail("it has ended"))
    assert not job.envs.errors_to_raise
    assert rollout.valid.all()


class ObjectEnv(PlayedEnv):
    """Its observations have no place in shared memory."""

    observation_space = None

    def reset(self, *, seed=None, options=None):
        return [seed], {}


def test_rollouts_need_an_observation_space(stages):
    stage = stages(1, env=ObjectEnv, seed=None)
    with pytest.raises(ea.VectorInputError, match="observation space"):
        stage.envs.set_policy(PlayedPolicy)
