"""The drop-in for stable-baselines3: the behavior that its users rely on, with its wrappers and algorithms."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import re
import signal
import threading

import numpy as np
import psutil
import pytest
from helpers import clocked, episode_seed, most_at_once

import envactors as ea

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("stable_baselines3")
torch = pytest.importorskip("torch")

from gymenvs import HIGH, Complaint, Mixed, Named, Teller  # noqa: E402
from gymnasium import spaces  # noqa: E402
from stable_baselines3 import DQN, PPO  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    DummyVecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecVideoRecorder,
)

from envactors.integrations.sb3 import ActorVecEnv  # noqa: E402
from envactors.process.starting import DEFAULT  # noqa: E402
from envactors.remote import LocalNodes  # noqa: E402

torch.set_num_threads(1)  # its threads would count as leaked

cartpole = functools.partial(gymnasium.make, "CartPole-v1")


def tellers(count=3, **kwargs):
    return [functools.partial(Teller, i, **kwargs) for i in range(count)]


@pytest.fixture
def make():
    """Makes vector envs, and closes them after the test."""
    made = []

    def make_one(env_fns, *args, **kwargs):
        made.append(ActorVecEnv(env_fns, *args, **kwargs))
        return made[-1]

    yield make_one
    for envs in made:
        envs.close()


def assert_same(ours, theirs):
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert np.array_equal(ours, theirs)


# Behavior that users rely on -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"), [("loky", "loky"), *((name, DEFAULT) for name in ("forkserver", "spawn", "fork"))]
)
def test_start_methods_by_name(make, name, expected, monkeypatch):
    def method(envs):
        return envs.vector.actors[0]._actor.config.backend.start_method

    envs = make(tellers(1), name)
    assert method(envs) == expected
    assert envs.reset().shape == (1, 3)
    monkeypatch.setenv("DEFAULT_START_METHOD", name)
    assert method(make(tellers(1), start_method=None)) == expected


@pytest.mark.fresh_processes
def test_the_import_of_torch_is_done_once_for_the_envs_of_make_vec_env(make):
    def preload(envs):
        return envs.vector.actors[0]._actor.config.backend._preload

    envs = make_vec_env("CartPole-v1", 2, vec_env_cls=ActorVecEnv)
    try:
        assert preload(envs) == ("stable_baselines3.common.monitor",)
        servers = {psutil.Process(actor.pid).ppid() for actor in envs.actors}
        assert len(servers) == 1
        assert not {os.getpid()} & servers
    finally:
        envs.close()
    assert preload(make([cartpole])) == ()


def test_an_unknown_start_method_is_a_value_error(monkeypatch):
    with pytest.raises(ValueError, match="'by magic'"):
        ActorVecEnv(tellers(1), "by magic")
    monkeypatch.setenv("DEFAULT_START_METHOD", "by default")
    with pytest.raises(ValueError, match="'by default'"):
        ActorVecEnv(tellers(1))


def test_a_backend_excludes_a_start_method():
    with pytest.raises(ValueError, match="expected only one"):
        ActorVecEnv([cartpole], "fork", backend="thread")


def test_step_async_returns_at_once_and_step_wait_waits(make, tmp_path):
    envs = make(tellers())
    envs.reset()
    go, gone = tmp_path / "go", tmp_path / "gone"
    envs.set_attr("wants", (go, gone), indices=1)
    with pytest.raises(ea.NothingPendingError):
        envs.step_wait()
    envs.step_async(np.array([7, 8, 9]))
    assert envs.waiting
    assert not gone.exists()
    go.touch()
    obs, rewards, dones, infos = envs.step_wait()
    assert gone.exists()
    assert not envs.waiting
    assert obs.tolist() == [[0, 1, 7], [1, 1, 8], [2, 1, 9]]
    assert (rewards.dtype, rewards.tolist(), dones.tolist()) == (np.float64, [0.5] * 3, [False] * 3)
    assert infos == [{"n": 1, "TimeLimit.truncated": False}] * 3


@pytest.mark.parametrize("terminates", [True, False, "both"])
def test_an_ended_episode_is_reset_in_the_step_that_ends_it(make, terminates):
    envs = make([functools.partial(Teller, 0, 2, terminates), functools.partial(Teller, 1, 3, terminates)])
    envs.reset()
    envs.reset_infos = [{"old": 0}, {"old": 1}]
    envs.step(np.array([1, 1]))
    obs, rewards, dones, infos = envs.step([2, 2])
    assert obs.tolist() == [[0, 0, 0], [1, 2, 2]]
    assert (rewards.tolist(), dones.tolist()) == ([1.0, 1.0], [True, False])
    last = infos[0].pop("terminal_observation")
    assert (last.tolist(), last.dtype) == ([0, 2, 2], np.float32)
    assert infos == [{"n": 2, "TimeLimit.truncated": terminates is False}, {"n": 2, "TimeLimit.truncated": False}]
    assert envs.reset_infos == [{"seed": None, "options": None}, {"old": 1}]


class Counts(gymnasium.Env):
    """Env whose observations are plain numbers."""

    observation_space, action_space = spaces.Discrete(9), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.count, {}

    def step(self, action):
        self.count += 1
        return self.count, 0.0, self.count == 3, False, {}


def test_terminal_observation_is_the_one_that_the_env_returned(make):
    ours, theirs = make([Counts]), DummyVecEnv([Counts])
    for envs in (ours, theirs):
        envs.reset()
        for _ in range(3):
            *_, infos = envs.step([0])
        last = infos[0]["terminal_observation"]
        assert (type(last), last) == (int, 3)


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_the_same_as_in_one_process(make, envs_per_actor):
    ours, theirs = make([cartpole] * 3, envs_per_actor=envs_per_actor), DummyVecEnv([cartpole] * 3)
    ours.seed(11), theirs.seed(11)
    assert_same(ours.reset(), theirs.reset())
    rng = np.random.default_rng(0)
    ended = 0
    for _ in range(150):
        actions = rng.integers(0, 2, 3)
        results = ours.step(actions), theirs.step(actions)
        assert_same(*results)
        assert_same(ours.reset_infos, theirs.reset_infos)
        ended += results[0][2].sum()
    assert ended > 6
    theirs.close()


@pytest.mark.parametrize("seed", [-1, 1.5, "1", [1, 2, 3], True])
def test_a_wrong_seed_is_refused_at_once(make, seed):
    envs = make(tellers())
    envs.seed(5)
    with pytest.raises(ea.VectorInputError, match=re.escape(f"seed is {seed!r}: expected an int >= 0, or None")):
        envs.seed(seed)
    envs.reset()
    assert [info["seed"] for info in envs.reset_infos] == [5, 6, 7]


def test_a_narrow_seed_does_not_overflow(make):
    assert list(make(tellers()).seed(np.uint8(254))) == [254, 255, 256]


def test_seeds_and_options_are_used_once_at_the_next_reset(make):
    envs = make(tellers())
    assert list(envs.seed(5)) == [5, 6, 7]
    envs.set_options({"level": 1})
    envs.reset()
    assert envs.reset_infos == [{"seed": 5 + i, "options": {"level": 1}} for i in range(3)]
    envs.reset()
    assert envs.reset_infos == [{"seed": None, "options": None}] * 3
    assert len(set(envs.seed())) == 3
    envs.set_options([{"level": 3}, {}, {"level": 4}])
    envs.reset()
    assert [info["options"] for info in envs.reset_infos] == [{"level": 3}, None, {"level": 4}]
    assert all(info["seed"] is not None for info in envs.reset_infos)


def test_close_waits_for_a_pending_step(tmp_path):
    envs = ActorVecEnv(tellers(2))
    envs.reset()
    go, gone, closed = tmp_path / "go", tmp_path / "gone", tmp_path / "closed"
    envs.set_attr("wants", (go, gone), indices=[0])
    envs.set_attr("mark", closed, indices=[0])
    envs.step_async([1, 1])
    timer = threading.Timer(0.1, go.touch)
    timer.start()
    envs.close()
    timer.join()
    assert gone.exists()
    assert closed.exists()
    assert envs.closed
    envs.close()
    with pytest.raises(ea.ActorClosedError):
        envs.step_async([1, 1])


def test_a_reset_waits_for_a_pending_step(make):
    envs = make(tellers(2))
    envs.reset()
    envs.set_attr("wants", "raise", indices=0)
    envs.step_async([1, 1])
    assert envs.reset().tolist() == [[0, 0, 0], [1, 0, 0]]
    assert envs.step([2, 2])[0].tolist() == [[0, 1, 2], [1, 1, 2]]


@pytest.mark.parametrize(
    ("indices", "which"),
    [(None, [0, 1, 2]), (1, [1]), (-1, [2]), ([2, 0], [2, 0]), (range(1, 3), [1, 2]), ([0, -1], [0, 2])],
)
@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_indices(make, indices, which, envs_per_actor):
    envs = make(tellers(), envs_per_actor=envs_per_actor)
    assert envs.get_attr("index", indices) == which
    assert envs.env_method("add", 10, indices=indices, times=2) == [i + 20 for i in which]
    assert envs.env_is_wrapped(Named, indices) == [False] * len(which)
    assert envs.set_attr("count", 77, indices) is None
    assert envs.get_attr("count") == [77 if i in which else 0 for i in range(3)]


def test_attributes_and_wrappers(make):
    envs = make([lambda: Named(Teller(0)), lambda: Named(Teller(1))])
    assert envs.get_attr("length") == [5, 5]  # of the env that is wrapped
    assert envs.has_attr("length")
    assert envs.has_attr("lock")  # though its value cannot be sent
    assert not envs.has_attr("width")
    with pytest.raises(AttributeError):
        envs.get_attr("width")
    assert envs.env_is_wrapped(Named) == [True, True]
    assert envs.env_is_wrapped(gymnasium.Wrapper, 0) == [True]
    assert envs.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [False, False]
    envs.set_attr("length", 9)  # of the outermost wrapper, as there
    assert envs.get_attr("length") == [9, 9]
    assert [env.length for env in envs.get_attr("unwrapped")] == [5, 5]


def test_the_envs_own_way_to_write_an_attribute_can_be_called(make):
    envs = make([lambda: Named(Teller(0)), lambda: Named(Teller(1))])
    assert envs.env_method("set_wrapper_attr", "length", 9, indices=1) == [True]  # of the env that has it
    assert [env.length for env in envs.get_attr("unwrapped")] == [5, 9]
    assert envs.env_method("set_wrapper_attr", "width", 2, force=False) == [False, False]
    assert not envs.has_attr("width")


@pytest.mark.fresh_processes
def test_asking_which_wrappers_there_are_imports_nothing(make):
    from stable_baselines3.common.monitor import Monitor

    envs = make(tellers(2))
    assert envs.env_is_wrapped(Monitor) == [False, False]
    assert envs.env_method("has_loaded", "torch") == [False, False]


def test_images_and_render(make):
    envs = make(tellers(4, render_mode="rgb_array"))
    images = envs.get_images()
    assert [image[0, 0, 0] for image in images] == [1, 2, 3, 4]
    assert_same(envs.render(), DummyVecEnv(tellers(4, render_mode="rgb_array")).render())
    assert envs.render("rgb_array").shape == (8, 8, 3)
    assert envs.metadata["render_fps"] == 7
    with pytest.warns(UserWarning, match="something else"):
        assert envs.render("something else") is None
    blind = make(tellers(2))
    with pytest.warns(UserWarning, match="rgb_array"):
        assert blind.get_images() == [None, None]


SPACES = {
    "dict": spaces.Dict(b=spaces.Discrete(5), a=spaces.Box(-HIGH, HIGH, (2, 2), np.float32)),
    "tuple": spaces.Tuple([spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3]), spaces.Box(0, 255, (2,), np.uint8)]),
}


@pytest.mark.parametrize("name", SPACES)
def test_dict_and_tuple_observations_are_stacked_per_leaf(make, name):
    space = SPACES[name]
    factories = [functools.partial(Mixed, space)] * 3
    ours, theirs = make(factories), DummyVecEnv([lambda: Mixed(copy.deepcopy(space))] * 3)
    assert ours.observation_space == space
    ours.seed(3), theirs.seed(3)
    for one, other in ((ours.reset(), theirs.reset()), (ours.step([0] * 3)[0], theirs.step([0] * 3)[0])):
        assert type(one) in (dict, tuple)
        assert_same(one, other)


def test_an_exception_reaches_the_caller_unchanged_and_the_others_continue(make):
    envs = make(tellers())
    envs.reset()
    pids = [envs.vector[i].pid for i in range(3)]
    envs.set_attr("wants", "raise", indices=[1])
    with pytest.raises(Complaint) as caught:
        envs.step([1, 1, 1])
    assert caught.value.index == 1
    assert isinstance(caught.value.__cause__, ea.RemoteTraceback)
    assert envs.step([2, 2, 2])[0].tolist() == [[0, 2, 2], [1, 1, 2], [2, 2, 2]]
    assert [envs.vector[i].pid for i in range(3)] == pids


def test_a_crashed_worker_raises_and_the_next_reset_continues(make):
    envs = make(tellers())
    envs.reset()
    envs.set_attr("wants", "die", indices=1)
    with pytest.raises(ea.ActorDiedError) as caught:
        envs.step([1, 1, 1])
    assert (caught.value.index, caught.value.signal) == (1, signal.SIGKILL)
    envs.reset()
    assert envs.step([2, 2, 2])[0].tolist() == [[0, 1, 2], [1, 1, 2], [2, 1, 2]]


def test_a_renewed_env_ends_its_episode_as_by_a_time_limit(make):
    envs = make(tellers(), on_failure="renew")
    envs.seed(0)
    envs.reset()
    envs.step([1, 1, 1])
    envs.set_attr("wants", "die", indices=1)
    obs, rewards, dones, infos = envs.step([2, 2, 2])
    assert (dones.tolist(), rewards.tolist()) == ([False, True, False], [1.0, 0.0, 1.0])
    assert obs.tolist() == [[0, 2, 2], [1, 0, 0], [2, 2, 2]]
    failure, last = infos[1].pop("failure"), infos[1].pop("terminal_observation")
    assert isinstance(failure, ea.ActorDiedError)
    assert last.tolist() == [1, 1, 1]
    assert infos[1] == {"TimeLimit.truncated": True}
    assert envs.reset_infos[1].keys() == {"seed", "options"}


def test_deadlines_restarts_and_standbys_are_passed_on(make):
    factory = functools.partial(Teller, 0)
    envs = make([factory] * 2, deadlines=ea.Deadlines(step=0.5), restart=ea.RestartPolicy(max_restarts=1), standbys=1)
    envs.reset()
    envs.set_attr("wants", ("/nowhere", "/nowhere"), indices=0)
    with pytest.raises(ea.ActorTimeoutError):
        envs.step([1, 1])
    envs.reset()
    envs.set_attr("wants", "die", indices=0)
    with pytest.raises(ea.ActorDiedError):
        envs.step([1, 1])
    with pytest.raises(ea.RestartsExhaustedError):
        envs.reset()


def test_the_factories_never_run_here(make):
    home = os.getpid()

    def factory():
        assert os.getpid() != home
        return Teller()

    assert make([factory]).observation_space.shape == (3,)


def test_a_constructor_that_fails_leaves_no_process_behind(make):
    with pytest.raises(AssertionError, match="render_mode"):
        make([Teller, functools.partial(Teller, render_mode="rgb_array")])


# Wrappers and algorithms -----------------------------------------------------------------------------------


def in_one_process(env_fns):
    """As DummyVecEnv, but with rewards of float64, as SubprocVecEnv has them: NumPy 1 normalizes float32 in float32."""
    envs = DummyVecEnv(env_fns)
    envs.buf_rews = envs.buf_rews.astype(np.float64)
    return envs


@pytest.mark.parametrize(
    "wrap",
    [
        VecNormalize,
        VecMonitor,
        functools.partial(VecFrameStack, n_stack=3),
        lambda envs: VecMonitor(VecNormalize(envs)),
    ],
    ids=["VecNormalize", "VecMonitor", "VecFrameStack", "both"],
)
def test_wrappers(make, wrap):
    ours, theirs = wrap(make(tellers())), wrap(in_one_process(tellers()))
    ours.seed(0), theirs.seed(0)
    assert_same(ours.reset(), theirs.reset())
    for turn in range(12):
        results = [list(envs.step(np.full(3, turn % 10))) for envs in (ours, theirs)]
        for info in (info for result in results for info in result[3] if "episode" in info):
            del info["episode"]["t"]
        assert_same(*results)


def test_video_recorder(make, tmp_path, monkeypatch):
    pytest.importorskip("moviepy")
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)  # its thread would stay
    envs = VecVideoRecorder(
        make(tellers(2, render_mode="rgb_array")), str(tmp_path), lambda step: step == 0, video_length=4
    )
    envs.reset()
    for _ in range(5):
        envs.step([1, 1])
    assert envs.frames_per_sec == 7
    assert [path.suffix for path in tmp_path.iterdir()] == [".mp4"]


def test_make_vec_env_and_evaluation():
    envs = make_vec_env("CartPole-v1", n_envs=2, seed=0, vec_env_cls=ActorVecEnv, vec_env_kwargs={"envs_per_actor": 2})
    try:
        model = PPO("MlpPolicy", envs, n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
        rewards, lengths = evaluate_policy(model, envs, n_eval_episodes=2, return_episode_rewards=True)
        assert rewards == lengths  # 1.0 per step
    finally:
        envs.close()


class Record(BaseCallback):
    """Keeps what was rolled out."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        buffer = getattr(self.model, "rollout_buffer", None) or self.model.replay_buffer
        self.seen.append([getattr(buffer, name).tobytes() for name in ("observations", "actions", "rewards")])


def ppo(envs, steps, **kwargs):
    model = PPO("MlpPolicy", envs, seed=3, n_epochs=2, device="cpu", **kwargs)
    return learn(model, steps)


def dqn(envs, steps):
    options = {"buffer_size": 1000, "learning_starts": 50, "batch_size": 16, "train_freq": 8, "device": "cpu"}
    return learn(DQN("MlpPolicy", envs, seed=3, **options), steps)


def learn(model, steps):
    record = Record()
    model.learn(steps, callback=record)
    assert record.seen
    return record.seen, [parameter.detach().numpy().tobytes() for parameter in model.policy.parameters()]


@pytest.mark.parametrize("train", [functools.partial(ppo, n_steps=32, batch_size=64), dqn], ids=["PPO", "DQN"])
def test_training_is_bit_for_bit_the_same_as_in_one_process(make, train):
    assert train(make([cartpole] * 4), 256) == train(DummyVecEnv([cartpole] * 4), 256)


@pytest.mark.parametrize("train", [functools.partial(ppo, n_steps=16, batch_size=64), dqn], ids=["PPO", "DQN"])
@pytest.mark.parametrize(
    "wrap",
    [VecNormalize, VecMonitor, functools.partial(VecFrameStack, n_stack=3)],
    ids=["VecNormalize", "VecMonitor", "VecFrameStack"],
)
def test_training_on_wrappers_is_bit_for_bit_the_same(make, wrap, train):
    assert train(wrap(make([cartpole] * 4)), 128) == train(wrap(in_one_process([cartpole] * 4)), 128)


@pytest.mark.parametrize("train", [functools.partial(ppo, n_steps=16, batch_size=48), dqn], ids=["PPO", "DQN"])
def test_training_is_filmed(make, train, tmp_path, monkeypatch):
    pytest.importorskip("moviepy")
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)  # its thread would stay

    def filmed(envs, name):
        return VecVideoRecorder(envs, str(tmp_path / name), lambda step: step == 8, video_length=4)

    films = {"render_mode": "rgb_array"}
    ours = train(filmed(make(tellers(**films)), "ours"), 96)
    assert ours == train(filmed(DummyVecEnv(tellers(**films)), "theirs"), 96)
    videos = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("ours", "theirs")]
    assert videos[0] == videos[1]
    assert len(videos[0]) == 1


class Killer(threading.Thread):
    """Kills one of the workers every so often, until it is left."""

    def __init__(self, envs, pause):
        super().__init__()
        self.envs, self.pause = envs, pause
        self.kills = 0
        self.stop = threading.Event()

    def run(self):
        rng = random.Random(0)
        while not self.stop.wait(self.pause):
            pid = self.envs.vector[rng.randrange(self.envs.num_envs)].pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.kills += 1

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc):
        self.stop.set()
        self.join()


def train_with_kills(make, pause, train):
    restart = ea.RestartPolicy(max_restarts=10_000, backoff=0.01, backoff_max=0.1)
    envs = make([cartpole] * 8, "forkserver", on_failure="replay", restart=restart)
    with Killer(envs, pause) as killer:
        result = train(envs)
    return result, killer.kills


def test_training_through_kills_is_bit_for_bit_the_same(make):
    train = functools.partial(ppo, steps=2048, n_steps=64, batch_size=128)
    result, kills = train_with_kills(make, 0.1, train)
    assert kills > 0
    assert result == train(DummyVecEnv([cartpole] * 8))


@pytest.mark.parametrize("kill", [False, True], ids=["", "one of which is lost"])
def test_training_on_nodes_is_bit_for_bit_the_same(make, kill):
    train = functools.partial(ppo, steps=2048, n_steps=64, batch_size=128)
    nodes = LocalNodes(2)
    backend = ea.RemoteBackend(nodes, lease=2.0, heartbeat=0.2)
    envs = make([cartpole] * 4, backend=backend, on_failure="replay", envs_per_actor=2)
    envs.reset()  # the nodes are there
    if kill:
        threading.Timer(0.1, nodes.agents["local-0"].kill).start()
    result = train(envs)
    assert len(backend.nodes) == 2 - kill
    assert result == train(DummyVecEnv([cartpole] * 4))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_twenty_thousand_steps_are_bit_for_bit_the_same(make):
    train = functools.partial(ppo, steps=20_000, n_steps=128, batch_size=256)
    expected = train(DummyVecEnv([cartpole] * 8))
    assert train(make([cartpole] * 8)) == expected
    result, kills = train_with_kills(make, 0.5, train)
    assert kills > 2
    assert result == expected


def test_no_more_envs_run_at_once_than_allowed(make, tmp_path):
    kind = clocked(Teller, tmp_path / "log")
    envs = make([functools.partial(kind, i, length=3) for i in range(5)], max_running=2)
    envs.reset()
    for _ in range(4):
        envs.step(np.ones(5, np.int64))
    assert most_at_once(tmp_path / "log") == 2


def test_reset_infos_say_the_seeds_of_episodes(make):
    envs = make(tellers(2, length=3), seed_episodes=True)
    envs.seed(10)
    envs.reset()
    seeds = [[info["episode_seed"] for info in envs.reset_infos]]
    for _ in range(9):
        _, _, dones, infos = envs.step(np.array([1, 2]))
        assert not any("episode_seed" in info for info in infos)
        if dones.all():
            seeds.append([info["episode_seed"] for info in envs.reset_infos])
            assert seeds[-1] == [info["seed"] for info in envs.reset_infos]
    assert seeds == [[episode_seed(10 + i, number) for i in range(2)] for number in range(4)]


class Learned(gymnasium.Env):
    """It reports errors of its own in its infos."""

    observation_space = spaces.Box(-9, 9, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1), {"failure": "of the reset"}

    def step(self, action):
        return np.zeros(1), 0.0, True, False, {"failure": "of the step"}


def test_a_failure_that_an_env_puts_into_its_infos_is_its_own(make):
    envs = make([Learned])
    envs.reset()
    (info,) = envs.step(np.zeros(1, np.int64))[3]
    assert (info["failure"], envs.reset_infos[0]["failure"]) == ("of the step", "of the reset")
