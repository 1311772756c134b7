"""The vector facade: batches, partial steps, sending and receiving, refusals, failures."""

from __future__ import annotations

import gc
import os
import signal
import time

import numpy as np
import pytest
from helpers import SOON, Echo, TwoArguments, is_gone, promised, wait_until

import envactors as ea


def make(n=3, **options):
    length = options.pop("length", 1000)
    return ea.VectorEnv([lambda i=i: Echo(i, length) for i in range(n)], **options)


@pytest.fixture(scope="module")
def shared():
    with make(4) as envs:
        yield envs


@pytest.fixture
def envs(shared):
    """Four echo envs, freshly reset; shared by the tests that break nothing."""
    while True:
        try:
            shared.recv()
        except ea.NothingPendingError:
            break
        except ea.VectorStepError:
            continue
    shared.reset(seed=0)
    return shared


def test_reset_and_step_give_batches(envs):
    obs, infos = envs.reset(seed=10)
    assert obs.tolist() == [[i, 0, -1] for i in range(4)]
    assert [info["seed"] for info in infos] == [10, 11, 12, 13]
    obs, rewards, terminated, truncated, infos = envs.step([5, 6, 7, 8])
    assert obs.tolist() == [[i, 1, 5 + i] for i in range(4)]
    assert (rewards.dtype, terminated.dtype, truncated.dtype) == (np.float64, np.bool_, np.bool_)
    assert rewards.tolist() == [1.0] * 4
    assert infos == [{"count": 1}] * 4
    assert envs.num_envs == len(envs) == 4


def test_specs_are_learnt_from_the_first_observation_where_there_are_no_spaces():
    with make(1) as envs:
        assert envs.observation_spec is None
        assert envs.action_spec is None
        envs.reset()
        assert envs.observation_spec == ea.ArraySpec((3,), np.float64)
        assert envs.reward_spec == ea.ArraySpec((), np.float64)


def test_some_envs_only_in_the_order_given(envs):
    obs, rewards, *_ = envs.step([1, 2], env_ids=[3, 1])
    assert obs[:, 0].tolist() == [3, 1]
    obs, infos = envs.reset(seed=[7, None], env_ids=np.array([2, 0]))
    assert [info["seed"] for info in infos] == [7, None]
    assert envs.reset(seed=100, env_ids=[3])[1][0]["seed"] == 103, "an int seed counts from env 0"
    obs, rewards, *_ = envs.step([0] * 4)
    assert rewards.tolist() == [1.0, 2.0, 1.0, 1.0]


def test_options_reach_the_env(envs):
    assert envs.reset(options={"level": 3}, env_ids=[1])[1][0]["options"] == {"level": 3}
    infos = envs.reset(options=[{"level": 1}, None], env_ids=[2, 0])[1]
    assert [info["options"] for info in infos] == [{"level": 1}, None]
    with pytest.raises(ea.VectorInputError, match="1 options for 4 envs"):
        envs.reset(options=[{}])


def test_returned_arrays_never_change(envs):
    first = envs.step([1] * 4)[0]
    copy = first.copy()
    for _ in range(5):
        envs.step([2] * 4)
    assert np.array_equal(first, copy)


def test_send_and_recv_in_order_of_completion(envs, tmp_path):
    gate = tmp_path / "gate"
    envs[2].set("wants", ("wait", str(gate))).result(SOON)
    envs.send([1, 2, 3, 4])
    batch = envs.recv(min_envs=3)
    assert isinstance(batch, ea.Batch)
    assert sorted(batch.env_ids.tolist()) == [0, 1, 3]
    assert batch.env_ids.dtype == batch.incarnations.dtype == np.int64
    for env_id, obs in zip(batch.env_ids, batch.obs, strict=True):
        assert obs.tolist() == [env_id, 1, env_id + 1]
    assert envs.recv(timeout=0.01).env_ids.tolist() == [], "it returns what it has"
    assert envs.recv(min_envs=0).env_ids.tolist() == []
    gate.touch()
    assert envs.recv().env_ids.tolist() == [2]
    with pytest.raises(ea.NothingPendingError):
        envs.recv()


def test_recv_returns_no_more_than_requested_and_loses_nothing(envs):
    envs.send([1, 2, 3, 4])
    seen = envs.recv(max_envs=1).env_ids.tolist()
    assert len(seen) == 1
    envs.send([9], env_ids=seen)
    counts = dict.fromkeys(range(4), 0)
    counts[seen[0]] += 1
    while sum(counts.values()) < 5:
        for env_id in envs.recv(min_envs=1, max_envs=2).env_ids.tolist():
            counts[env_id] += 1
    assert sorted(counts.values()) == [1, 1, 1, 2]


def test_submit_gives_futures_of_single_steps_that_never_appear_in_recv(envs):
    futures = envs.submit([1, 2], env_ids=[2, 0])
    envs.send([3], env_ids=[1])
    assert envs.recv().env_ids.tolist() == [1]
    for future in ea.as_completed(futures, SOON):
        step = future.result()
        assert isinstance(step, ea.EnvStep)
        assert step.obs.tolist() == [step.env_id, 1, {2: 1, 0: 2}[step.env_id]]
        assert (step.reward, step.terminated, step.truncated, step.incarnation) == (1.0, False, False, 0)
    assert [future.result().env_id for future in futures] == [2, 0]
    with pytest.raises(ea.NothingPendingError):
        envs.recv()
    envs.step([0] * 4)


def test_a_step_that_waits_too_long_loses_nothing(envs, tmp_path):
    gate = tmp_path / "gate"
    envs[1].set("wants", ("wait", str(gate))).result(SOON)
    with pytest.raises(ea.VectorTimeoutError) as caught:
        envs.step([1, 2, 3, 4], timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert "[1]" in str(caught.value)
    with pytest.raises(ea.AlreadyPendingError):
        envs.step([5, 6, 7, 8])
    gate.touch()
    batch = envs.recv()
    assert sorted(batch.env_ids.tolist()) == [0, 1, 2, 3]
    for env_id, obs in zip(batch.env_ids, batch.obs, strict=True):
        assert obs.tolist() == [env_id, 1, env_id + 1]
    assert envs.step([5, 6, 7, 8])[0][:, 2].tolist() == [5, 6, 7, 8], "no later step sees an old result"


def test_a_reset_that_waits_too_long_comes_with_reward_zero(envs):
    envs[0].set("wants", ("sleep in reset", 0.3)).result(SOON)
    with pytest.raises(ea.VectorTimeoutError):
        envs.reset(timeout=0.02)
    envs.recv(min_envs=3)
    batch = envs.recv()
    assert batch.rewards.tolist() == [0.0]
    assert not batch.terminated.any()
    envs[0].set("wants", None).result(SOON)


def test_an_env_is_pending_until_its_result_is_received(envs):
    envs.send([1, 2], env_ids=[0, 1])
    for refused in (
        lambda: envs.send([1], env_ids=[1]),
        lambda: envs.step([1, 1, 1, 1]),
        lambda: envs.submit([1], env_ids=[0]),
    ):
        with pytest.raises(ea.AlreadyPendingError, match="have results pending"):
            refused()
    envs.step([3, 3], env_ids=[2, 3])
    assert sorted(envs.recv().env_ids.tolist()) == [0, 1]
    (future,) = envs.submit([1], env_ids=[0])
    future.result(SOON)
    envs.step([1] * 4)


def test_a_reset_drops_results_that_were_not_received(envs):
    envs.send([1, 2, 3], env_ids=[0, 1, 2])
    assert envs.reset(env_ids=[0, 1], timeout=SOON)[0][:, 1].tolist() == [0, 0]
    assert envs.recv().env_ids.tolist() == [2]


def test_call_get_set_render_and_handles(envs):
    assert envs.render() == [f"frame {i}" for i in range(4)]
    assert envs.get_attr("index", env_ids=[2, 0]) == [2, 0]
    envs.set_attr("length", [10, 20, 30, 40])
    assert envs.get_attr("length") == [10, 20, 30, 40]
    envs.set_attr("length", 1000)
    assert envs.get_attr("length") == [1000] * 4
    with pytest.raises(ValueError, match="3 values for 4 envs"):
        envs.set_attr("length", [1, 2, 3])
    with pytest.raises(AttributeError, match="nothing"):
        envs.get_attr("nothing")
    assert [envs[i].get("index").result(SOON) for i in (0, 3, -1)] == [0, 3, 3]
    assert envs[1].pid == envs.actors[1].pid
    with pytest.raises(IndexError):
        envs[4]
    stats = envs.stats()
    assert len(stats.steps) == len(stats.episodes) == len(stats.actors) == 4


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda e: e.step([1, 2, 3]), "3 actions for 4 envs"),
        (lambda e: e.step([1, 2, 3, 4, 5]), "5 actions for 4 envs"),
        (lambda e: e.step(3), "one per env"),
        (lambda e: e.step([1], env_ids=[4]), "env_ids has 4: expected ids from 0 to 3"),
        (lambda e: e.step([1], env_ids=[-1]), "env_ids has -1"),
        (lambda e: e.step([1, 1], env_ids=[2, 2]), "expected each id once"),
        (lambda e: e.step([1], env_ids=["0"]), "expected ints"),
        (lambda e: e.step([1] * 4, timeout=-1), "expected seconds"),
        (lambda e: e.reset(seed=[1, 2]), "2 seeds for 4 envs"),
        (lambda e: e.reset(seed="x"), "seed is 'x'"),
        (lambda e: e.reset(seed=-1), "seed is -1"),
        (lambda e: e.reset(seed=[1.5, 1, 1, 1]), "seed has 1.5"),
        (lambda e: e.reset(seed=np.array(5.0)), r"seed is array\(5.\)"),
        (lambda e: e.step([1], env_ids=1), "env_ids is 1"),
        (lambda e: e.recv(min_envs=-1), "min_envs=-1"),
        (lambda e: e.recv(min_envs=3, max_envs=2), "min_envs <= max_envs"),
    ],
)
def test_invalid_input_raises_before_anything_is_sent(envs, call, what):
    with pytest.raises(ValueError, match=what):
        call(envs)
    assert envs.step([1] * 4)[1].tolist() == [1.0] * 4, "nothing was sent"


def test_constructor_refusals():
    with pytest.raises(ValueError, match="no factories"):
        ea.VectorEnv([])
    with pytest.raises(ValueError, match="autoreset is 'maybe'"):
        make(1, autoreset="maybe")
    with pytest.raises(ValueError, match="on_failure"):
        make(1, on_failure="ignore")
    with pytest.raises(ValueError, match="2 mappings for 1 actors"):
        make(1, env_vars=[{}, {}])


def test_a_step_before_a_reset_and_use_after_close_are_rejected():
    with make(2) as envs:
        with pytest.raises(ea.VectorEnvError, match=r"env 0 needs a reset first"):
            envs.step([1, 1])
        envs.reset(env_ids=[0])
        with pytest.raises(ea.VectorEnvError, match=r"env 1 needs a reset first"):
            envs.step([1, 1])
        envs.step([1], env_ids=[0])
    envs.close()
    for refused in (envs.reset, envs.recv, envs.render, lambda: envs.step([1, 1]), lambda: envs.send([1, 1])):
        with pytest.raises(ea.ActorClosedError, match="closed"):
            refused()


@pytest.mark.parametrize("method", ["step", "send", "submit", "reset"])
def test_a_call_that_begins_while_the_vector_closes_raises(method):
    envs = make(2)
    envs.reset()

    def ids():  # simulates a thread that closes it after the call has found it open
        envs.close()
        yield from (0, 1)

    arguments = [] if method == "reset" else [[1, 1]]
    with pytest.raises(ea.ActorClosedError, match="closed"):
        getattr(envs, method)(*arguments, env_ids=ids())


def test_close_in_the_middle_of_a_step():
    envs = make(2)
    envs.reset()
    envs[0].set("wants", ("sleep", 60)).result(SOON)
    envs.send([1, 1])
    begun = time.monotonic()
    envs.close(0.3)
    assert time.monotonic() - begun < promised(1.3)


def test_a_factory_that_raises_is_the_constructors_error():
    def broken():
        raise LookupError("no such level")

    with pytest.raises(ea.ActorStartError, match="no such level") as caught:
        ea.VectorEnv([Echo, broken], restart=ea.RestartPolicy(max_restarts=0))
    assert isinstance(caught.value.__cause__, LookupError)
    assert caught.value.index == 1


def test_envs_whose_values_do_not_go_together_are_rejected():
    gymnasium = pytest.importorskip("gymnasium")
    with pytest.raises(ea.SpaceMismatchError, match="env 1"):
        ea.VectorEnv([lambda: gymnasium.make("CartPole-v1"), lambda: gymnasium.make("Pendulum-v1")])


@pytest.mark.parametrize("result", [None, (1, 2, 3, 4), ([0] * 5, 0.0, False, False, {})])
def test_an_env_that_returns_an_invalid_result_raises(envs, result):
    envs[1].set("wants", ("return", result)).result(SOON)
    with pytest.raises(ea.VectorStepError, match="expected") as caught:
        envs.step([1] * 4)
    assert list(caught.value.failures) == [1]


def test_the_same_step_autoreset_and_the_next_step_one_and_none():
    for autoreset, rows in {
        "next_step": [(1, 1, False), (2, 2, True), (0, 0, False), (1, 1, False)],
        "same_step": [(1, 1, False), (0, 2, True), (1, 1, False), (0, 2, True)],
    }.items():
        with make(1, length=2, autoreset=autoreset) as envs:
            envs.reset(seed=5)
            for count, reward, ended in rows:
                obs, rewards, terminated, _, infos = envs.step([7])
                assert (obs[0, 1], rewards[0], terminated[0]) == (count, reward, ended)
                if autoreset == "same_step" and ended:
                    assert infos[0]["final_obs"].tolist() == [0, 2, 7]
                    assert infos[0]["final_info"] == {"count": 2}
                    assert infos[0]["seed"] is None
    with make(1, length=2, autoreset="disabled") as envs:
        envs.reset()
        envs.step([0])
        assert envs.step([0])[2].all()
        with pytest.raises(ea.VectorEnvError, match="needs a reset"):
            envs.step([0])
        envs.reset(env_ids=[0])
        envs.step([0])


def test_a_failure_in_step_comes_after_the_others_results(envs):
    envs[1].set("wants", ("raise", (TwoArguments, 3, "broken"))).result(SOON)
    with pytest.raises(ea.VectorStepError) as caught:
        envs.step([1, 2, 3, 4])
    error = caught.value
    assert list(error.failures) == [1]
    assert isinstance(error.failures[1], TwoArguments)
    assert error.__cause__ is error.failures[1]
    assert error.batch.env_ids.tolist() == [0, 2, 3]
    assert error.batch.obs[:, 2].tolist() == [1, 3, 4]
    assert envs.step([1] * 4)[1].tolist() == [2.0, 1.0, 2.0, 2.0], "after an exception no reset is needed"


def test_a_failure_in_recv_comes_at_once_with_what_is_ready(envs, tmp_path):
    gate = tmp_path / "gate"
    envs[0].set("wants", ("wait", str(gate))).result(SOON)
    envs[3].set("wants", ("raise", (KeyError, "k"))).result(SOON)
    envs.send([1, 2, 3, 4])
    with pytest.raises(ea.VectorStepError) as caught:
        envs.recv()
    assert list(caught.value.failures) == [3]
    handed_out = caught.value.batch.env_ids.tolist()
    gate.touch()
    while len(handed_out) < 3:
        handed_out += envs.recv(min_envs=1).env_ids.tolist()
    assert sorted(handed_out) == [0, 1, 2]


def test_a_failure_in_submit_is_its_futures(envs):
    envs[2].set("wants", ("raise", (KeyError, "k"))).result(SOON)
    futures = envs.submit([1] * 4)
    with pytest.raises(KeyError):
        futures[2].result(SOON)
    assert [futures[i].result(SOON).reward for i in (0, 1, 3)] == [1.0] * 3


@pytest.mark.parametrize("death", ["in a step", "by a deadline", "while idle"])
def test_after_a_crash_the_env_needs_a_reset(death):
    restart = ea.RestartPolicy(max_restarts=3, backoff=0.0)
    with make(3, restart=restart, deadlines=ea.Deadlines(step=0.5)) as envs:
        envs.reset(seed=50)
        envs.step([1] * 3)
        expected = ea.ActorTimeoutError if death == "by a deadline" else ea.ActorDiedError
        if death == "while idle":
            os.kill(envs[1].pid, signal.SIGKILL)
        else:
            wants = ("die", None) if death == "in a step" else ("sleep", 60)
            envs[1].set("wants", wants).result(SOON)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([2] * 3)
        (failure,) = caught.value.failures.values()
        assert isinstance(failure, expected)
        assert failure.index == 1
        assert caught.value.batch.rewards.tolist() == [2.0, 2.0]
        with pytest.raises(ea.VectorEnvError, match=r"env 1 needs a reset"):
            envs.step([3] * 3)
        _, infos = envs.reset(env_ids=[1])
        assert infos[0]["seed"] == int(np.random.SeedSequence(51, spawn_key=(1,)).generate_state(1)[0])
        assert envs.reset(env_ids=[1])[1][0]["seed"] is None, "only the first unseeded reset of an incarnation"
        envs.send([3] * 3)
        batch = envs.recv()
        assert dict(zip(batch.env_ids.tolist(), batch.incarnations.tolist(), strict=True)) == {0: 0, 1: 1, 2: 0}


def test_the_specs_hold_in_every_incarnation():
    gymnasium = pytest.importorskip("gymnasium")

    class Env(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        value = np.zeros(4)
        reward: object = 1.0

        def reset(self, *, seed=None, options=None):
            return self.value, {}

        def step(self, action):
            return self.value, self.reward, False, False, {}

    with ea.VectorEnv([Env] * 2, restart=ea.RestartPolicy(backoff=0.0)) as envs:
        for _ in range(2):
            assert envs.reset()[0].dtype == np.float32
            (future,) = envs.submit([0], env_ids=[1])
            assert future.result(SOON).obs.dtype == np.float32
            envs[1].set("value", np.zeros(1)).result(SOON)
            with pytest.raises(ea.VectorStepError, match=r"shape \(1,\): expected \(4,\)"):
                envs.step([0, 0])
            envs[1].renew().result(SOON)
        envs.reset()
        for reward in (None, np.ones(2), "much"):
            envs[1].set("reward", reward).result(SOON)
            with pytest.raises(ea.VectorStepError, match="the reward of env 1") as caught:
                envs.step([0, 0])
            assert caught.value.batch.env_ids.tolist() == [0]
        envs[1].set("reward", np.array([2.5])).result(SOON)
        assert envs.step([0, 0])[1].tolist() == [1.0, 2.5]


def test_a_crash_in_a_reset():
    with make(2, restart=ea.RestartPolicy(backoff=0.0), deadlines=ea.Deadlines(reset=0.5)) as envs:
        envs[1].set("wants", ("sleep in reset", 60)).result(SOON)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.reset(seed=1)
        assert isinstance(caught.value.failures[1], ea.ActorTimeoutError)
        assert caught.value.failures[1].method == "reset"
        _, infos = envs.reset(seed=1)
        assert [info["seed"] for info in infos] == [1, 2]


def test_a_reset_by_autoreset_has_the_reset_deadline():
    """In the same step too: it may take longer than a step, and no longer than a reset."""

    class SlowReset(Echo):
        pause = 0.0

        def reset(self, **kwargs):
            time.sleep(self.pause)
            return super().reset(**kwargs)

    for autoreset in ("same_step", "next_step"):
        deadlines = ea.Deadlines(step=0.4, reset=0.9)
        with ea.VectorEnv([lambda: SlowReset(0, 2)], autoreset=autoreset, deadlines=deadlines) as envs:
            envs.reset()
            envs.set_attr("pause", 0.6)
            for _ in range(4):
                envs.step([1])
            envs.set_attr("pause", 60)
            with pytest.raises(ea.VectorStepError) as caught:
                for _ in range(4):
                    envs.step([1])
            assert caught.value.failures[0].timeout == 0.9


def test_aborting_a_submitted_step():
    with make(1) as envs:
        envs.reset(seed=0)
        envs[0].set("wants", ("sleep", 60)).result(SOON)
        (future,) = envs.submit([1])
        wait_until(future.running)
        assert future.abort()
        with pytest.raises(ea.ActorDiedError) as caught:
            future.result(SOON)
        assert caught.value.aborted
        with pytest.raises(ea.VectorEnvError, match="needs a reset"):
            envs.step([1])
        envs.reset()
        envs.step([1])


@pytest.mark.fresh_processes
def test_env_vars_one_mapping_an_actor():
    class Env(Echo):
        def gpu(self):
            return os.environ["GPU"]

    with ea.VectorEnv([Env, Env], env_vars=[{"GPU": "0"}, {"GPU": "1"}]) as envs:
        assert envs.call("gpu") == ["0", "1"]


def test_the_index_in_the_context_is_the_envs():
    class Env(Echo):
        def me(self):
            return ea.current_actor()

    with ea.VectorEnv([Env, Env]) as envs:
        assert [(one.name, one.index) for one in envs.call("me")] == [("env-0", 0), ("env-1", 1)]


def test_a_vector_that_is_dropped_ends_its_processes():
    envs = make(2)
    envs.reset()
    pids = [actor.pid for actor in envs.actors]
    del envs
    gc.collect()
    wait_until(lambda: all(is_gone(pid) for pid in pids))


class Plain:
    def reset(self, seed=None, options=None):
        return np.zeros(2), {}

    def step(self, action):
        return np.zeros(2), 0.0, False, False, {}


@pytest.mark.parametrize(
    "call",
    [
        lambda envs: envs.reset(seed=[1.5]),
        lambda envs: envs.reset(seed=[[1]]),
        lambda envs: envs.reset(env_ids=5),
    ],
)
def test_wrong_input_is_a_vector_input_error(call):
    with ea.VectorEnv([Plain]) as envs, pytest.raises(ea.VectorInputError):
        call(envs)


def test_a_number_of_envs_may_be_numpys():
    with ea.VectorEnv([Plain]) as envs:
        envs.reset()
        envs.send([0])
        assert len(envs.recv(min_envs=np.int64(1)).env_ids) == 1
