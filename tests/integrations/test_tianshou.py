"""The drop-in for tianshou: the interface of its vector envs, partial waits, and failures."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading

import numpy as np
import pytest
from helpers import SOON, clocked, episode_seed, most_at_once

import envactors as ea

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("tianshou")

import torch  # noqa: E402
from gymenvs import Complaint, Named, Teller  # noqa: E402
from tianshou.env import BaseVectorEnv, DummyVectorEnv, VectorEnvNormObs  # noqa: E402

from envactors.integrations.tianshou import ActorEnvWorker, ActorVectorEnv  # noqa: E402
from envactors.remote import LocalNodes  # noqa: E402

torch.set_num_threads(1)  # its threads would count as leaked

cartpole = functools.partial(gymnasium.make, "CartPole-v1")


def tellers(count=3, **kwargs):
    return [functools.partial(Teller, i, **kwargs) for i in range(count)]


def of_workers(env_fns, **kwargs):
    return BaseVectorEnv(env_fns, ActorEnvWorker, **kwargs)


@pytest.fixture
def make():
    """Makes vector envs, and closes them after the test."""
    made = []

    def make_one(env_fns, *args, kind=ActorVectorEnv, **kwargs):
        made.append(kind(env_fns, *args, **kwargs))
        return made[-1]

    yield make_one
    for envs in made:
        if not envs.is_closed:
            envs.close()


@pytest.mark.parametrize("kind", [ActorVectorEnv, of_workers])
def test_the_same_as_in_one_process(make, kind):
    ours, theirs = make([cartpole] * 3, kind=kind), DummyVectorEnv([cartpole] * 3)
    assert len(ours) == 3
    assert np.array_equal(ours.reset(seed=4)[0], theirs.reset(seed=4)[0])
    rng, ended = np.random.default_rng(0), 0
    for _ in range(80):
        actions = rng.integers(0, 2, 3)
        *one, infos = ours.step(actions)
        *other, _ = theirs.step(actions)
        for mine, reference in zip(one, other, strict=True):
            assert np.array_equal(mine, reference)
            assert mine.dtype == reference.dtype
        assert [info["env_id"] for info in infos] == [0, 1, 2]
        over = np.flatnonzero(one[2] | one[3])
        if len(over):
            ended += len(over)
            assert ours.reset(over)[0].shape == theirs.reset(over)[0].shape
            assert np.array_equal(ours.reset(over, seed=ended)[0], theirs.reset(over, seed=ended)[0])
    assert ended > 3


def test_any_backend(make):
    envs = make([cartpole] * 2, backend=ea.RemoteBackend(LocalNodes(2)))
    assert envs.reset(seed=4)[0].shape == (2, 4)
    assert sorted(worker.actor.node for worker in envs.workers) == ["local-0", "local-1"]


def test_seed(make):
    ours, theirs = make([cartpole] * 2), DummyVectorEnv([cartpole] * 2)
    assert ours.seed(5) == [None, None]
    theirs.seed(5)
    assert np.array_equal(ours.step([1, 0])[0], theirs.step([1, 0])[0])
    ours.seed([8, 8])
    obs = ours.step([1, 1])[0]
    assert np.array_equal(obs[0], obs[1])


def test_negative_ids_count_from_the_end(make):
    """`reset` took them, and `step` did not."""
    ours, theirs = make([cartpole] * 3), DummyVectorEnv([cartpole] * 3)
    for envs in (ours, theirs):
        envs.reset([-1, 0], seed=4)
    *values, infos = ours.step([1, 0], [-1, 0])
    *expected, _ = theirs.step([1, 0], [-1, 0])
    for value, reference in zip(values, expected, strict=True):
        assert np.array_equal(value, reference)
    assert [info["env_id"] for info in infos] == [-1, 0]
    with pytest.raises(IndexError):
        ours.step([1], [3])


def test_attributes(make):
    envs = make([lambda: Named(Teller(0)), lambda: Named(Teller(1))])
    assert envs.action_space == [gymnasium.spaces.Discrete(10)] * 2
    assert envs.get_env_attr("length") == [5, 5]
    assert envs.get_env_attr("no such thing") == [None, None]
    envs.set_env_attr("length", 7, [1])
    assert [env.length for env in envs.get_env_attr("unwrapped")] == [5, 7]


def test_an_attribute_that_cannot_be_pickled_is_named():
    class Locked(Teller):
        def __init__(self, number):
            super().__init__(number)
            self.lock = threading.Lock()

    is_named = pytest.raises(ea.SerializationError, match=r"the result of get\('lock'\) cannot be pickled")
    with contextlib.closing(ActorVectorEnv([lambda: Locked(0)])) as envs, is_named:
        envs.get_env_attr("lock")


def test_render(make):
    envs = make(tellers(2, render_mode="rgb_array"))
    assert [frame[0, 0, 0] for frame in envs.render()] == [1, 2]


def test_observations_of_any_kind(make):
    class Ragged(Teller):
        def _obs(self, action):
            return np.zeros(self.index + 1)

    obs, _ = make([lambda i=i: Ragged(i) for i in range(2)]).reset()
    assert (obs.dtype, [len(one) for one in obs]) == (object, [1, 2])


class Scripted(gymnasium.Env):
    """Returns what it is told to: the action is the index of a step."""

    action_space = gymnasium.spaces.Discrete(9)

    def __init__(self, space, *steps):
        self.observation_space, self.steps = space, steps

    def reset(self, *, start=0, **kwargs):
        return self.steps[start][0], {"kwargs": kwargs}

    def step(self, action):
        return *self.steps[action], {"type of the action": type(action)}


TWO, ONES = gymnasium.spaces.Box(-1, 1, (2,), np.float32), np.ones(2, np.float32)
NUMBER, NEST = gymnasium.spaces.Discrete(3), {"a": ONES, "b": np.int64(1)}
STEPS = [
    *[(ONES, reward, False, True) for reward in (1.0, np.float64(1), np.float32(1), 1, True, np.ones(2))],
    *[(np.ones(2), 1.0, False, False), (np.ones(2), 1, np.True_, False), (ONES, 1.0, np.ones(2, bool), False)],
]
SCRIPTS = {
    "array": [(TWO, *STEPS)] * 2,
    "int": [(NUMBER, (2, 0.0, False, False), (np.int64(1), 0.0, True, False))] * 2,
    "dict": [(gymnasium.spaces.Dict(a=TWO, b=NUMBER), (NEST, 0.0, False, False), ({**NEST, "c": 1}, 1, False, True))]
    * 2,
    "different spaces": [(TWO, *STEPS), (gymnasium.spaces.Text(9), *[("text", *one[1:]) for one in STEPS])],
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", [ActorVectorEnv, functools.partial(ActorVectorEnv, timeout=SOON), of_workers])
def test_values_of_any_type_are_those_of_one_process(make, kind, script):
    fns = [functools.partial(Scripted, *script) for script in SCRIPTS[script]]
    ours, theirs = make(fns, kind=kind), DummyVectorEnv(fns)
    for kwargs in ({}, {"start": 1, "seed": 3}, {"options": {"a": 1}}):
        assert repr(ours.reset(**kwargs)) == repr(theirs.reset(**kwargs))
    for index in range(len(SCRIPTS[script][0]) - 1):
        for actions in (np.full(2, index), np.full(2, index, np.int32), torch.full((2,), index)):
            one, other = ours.step(actions), theirs.step(actions)
            assert repr(one) == repr(other)
            assert [part.dtype for part in one] == [part.dtype for part in other]


@pytest.mark.parametrize("kind", [ActorVectorEnv, of_workers])
def test_wait_num_and_timeout(make, tmp_path, kind):
    envs = make(tellers(3), wait_num=2, timeout=0.2, kind=kind)
    envs.reset()
    go = tmp_path / "go"
    envs.set_env_attr("wants", (go, tmp_path / "gone"), 0)
    obs, _, _, _, infos = envs.step([7, 8, 9])
    assert sorted(info["env_id"] for info in infos) == [1, 2]
    with pytest.raises(AssertionError, match="stepping now"):
        envs.step([1], [0])
    assert [info["env_id"] for info in envs.step([3], [2])[4]] == [2]  # after the timeout, what there is
    go.touch()
    obs, _, _, _, infos = envs.step(None)
    assert ([info["env_id"] for info in infos], obs.tolist()) == ([0], [[0, 1, 7]])
    with pytest.raises(AssertionError, match="wait_num"):
        ActorVectorEnv(tellers(2), wait_num=3)


def test_a_result_can_be_received_again(make):
    worker = make([functools.partial(Scripted, *SCRIPTS["array"][0])], kind=of_workers).workers[0]
    worker.reset()
    worker.send(np.int64(6))
    assert repr(worker.recv()) == repr(worker.recv())
    assert worker.recv()[0].dtype == np.float64


def test_wait_gives_all_that_are_ready_in_their_order(make):
    workers = make(tellers(3)).workers
    for worker in workers:
        worker.reset()
    for worker in workers:
        worker.send(1)
    assert ActorEnvWorker.wait(workers, 3) == workers
    assert ActorEnvWorker.wait(workers, 1) == workers
    assert ActorEnvWorker.wait([], 1) == []


def test_an_exception_reaches_the_caller_unchanged_and_the_others_continue(make):
    envs = make(tellers())
    envs.reset()
    envs.set_env_attr("wants", "raise", 1)
    with pytest.raises(Complaint) as caught:
        envs.step([1, 1, 1])
    assert caught.value.index == 1
    assert envs.step([2, 2, 2])[0].tolist() == [[0, 2, 2], [1, 1, 2], [2, 2, 2]]


def test_one_that_fails_while_some_are_waited_for_loses_no_other_result(make):
    envs = make(tellers(), wait_num=2, timeout=SOON)
    envs.reset()
    envs.set_env_attr("wants", "raise", 0)
    seen = {info["env_id"] for info in envs.step([1, 1, 1])[4]}
    while 0 not in envs.ready_id:
        try:
            seen |= {info["env_id"] for info in envs.step(None)[4]}
        except Complaint:
            break
    else:
        raise AssertionError("nothing was raised")
    while seen != {1, 2}:
        seen |= {info["env_id"] for info in envs.step(None)[4]}
    assert envs.reset([0])[0].tolist() == [[0, 0, 0]]
    assert sorted(envs.ready_id) == [0, 1, 2]


@pytest.mark.parametrize("idle", [True, False])
def test_a_crashed_worker_needs_a_reset_and_the_others_continue(make, idle):
    envs = make(tellers(2), restart=ea.RestartPolicy(max_restarts=1, backoff=0.0))
    envs.reset()
    if idle:
        os.kill(envs.workers[1].actor.pid, signal.SIGKILL)
    else:
        envs.set_env_attr("wants", "die", 1)
        with pytest.raises(ea.ActorDiedError) as caught:
            envs.step([1, 1])
        assert caught.value.signal == signal.SIGKILL
    envs.workers[1].actor.get("index").result()  # on the new process
    if idle:
        with pytest.raises(ea.ActorDiedError):
            envs.step([1, 1])
    with pytest.raises(ea.VectorInputError, match=r"needs a reset first: call reset\(\)"):
        envs.step([1, 1])
    assert envs.reset([1])[0].tolist() == [[1, 0, 0]]
    assert envs.step([2], [1])[0].tolist() == [[1, 1, 2]]


def test_deadlines(make):
    envs = make(tellers(2), deadlines=ea.Deadlines(step=0.3))
    envs.reset()
    envs.set_env_attr("wants", ("/nowhere", "/nowhere"), 0)
    with pytest.raises(ea.ActorTimeoutError):
        envs.step([1, 1])


def test_close_waits_for_a_pending_step(make, tmp_path):
    envs = make(tellers(1), wait_num=1, timeout=0.01)
    envs.reset()
    go, gone, closed = (tmp_path / name for name in ("go", "gone", "closed"))
    envs.set_env_attr("wants", (go, gone))
    envs.set_env_attr("mark", closed)
    envs.workers[0].send(1)
    go.touch()
    envs.close()
    assert gone.exists()
    assert closed.exists()
    with pytest.raises(AssertionError, match="after close"):
        envs.reset()


def test_an_env_that_cannot_be_made_is_an_error():
    with pytest.raises(ea.ActorStartError):
        ActorVectorEnv([cartpole, lambda: gymnasium.make("NoSuchEnv-v0")], restart=ea.RestartPolicy(max_restarts=0))


def test_normalised_observations(make):
    envs = VectorEnvNormObs(make([cartpole] * 2))
    obs, infos = envs.reset()
    assert obs.shape == (2, 4)
    assert len(infos) == 2


@pytest.mark.parametrize("wait_num", [None, 2])
def test_no_more_envs_run_at_once_than_allowed(make, tmp_path, wait_num):
    kind = clocked(Teller, tmp_path / "log")
    envs = make([functools.partial(kind, i) for i in range(5)], wait_num, max_running=2)
    envs.reset()
    ids = np.arange(5)
    for _ in range(6):
        ids = np.array([info["env_id"] for info in envs.step(np.ones(len(ids), np.int64), ids)[4]])
    assert most_at_once(tmp_path / "log") == 2
    with pytest.raises(ea.VectorInputError, match="max_running is 0"):
        make(tellers(2), max_running=0)


@pytest.mark.parametrize("kind", [ActorVectorEnv, of_workers])
def test_infos_say_the_seeds_of_episodes(make, kind):
    if kind is not ActorVectorEnv:
        kind = lambda fns, **_: BaseVectorEnv(fns, functools.partial(ActorEnvWorker, seed_episodes=True))  # noqa: E731
    envs = make(tellers(2), kind=kind, seed_episodes=True)
    seeds = []
    for kwargs in ({"seed": 10}, {}, {}, {"seed": 30}, {}):
        _, infos = envs.reset(**kwargs)
        seeds.append([info["episode_seed"] for info in infos])
        assert seeds[-1] == [info["seed"] for info in infos]
    # tianshou gives all envs the one seed.
    numbered = [(10, 0), (10, 1), (10, 2), (30, 0), (30, 1)]
    assert seeds == [[episode_seed(*one)] * 2 for one in numbered]
    envs.seed(10)
    assert [info["episode_seed"] for info in envs.reset()[1]] == [episode_seed(10 + i, 1) for i in range(2)]
    os.kill(envs.workers[1].actor.pid, signal.SIGKILL)
    with pytest.raises((ea.ActorDiedError, ea.VectorInputError)):
        envs.step([1, 1])
    assert [info["episode_seed"] for info in envs.reset()[1]] == [episode_seed(10 + i, 2) for i in range(2)]
