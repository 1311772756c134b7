"""Snapshots of Gymnasium envs: a restored env continues as if nothing had happened, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import socket
import threading
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from budget import examples
from gymnasium import wrappers
from hypothesis import given, settings
from hypothesis import strategies as st
from wrapped import CLASSIC, WRAPPERS, make, run

import envactors as ea
from envactors.state import gymnasium_snapshot

SNAPSHOT = gymnasium_snapshot()


def check(factory, before, after):
    """Checks that an env continues from a snapshot as it continued from that point: the same env, and a new one."""
    env = factory()
    env.reset(seed=1)
    run(env, before, 2)
    state = SNAPSHOT.get(env)
    expected = run(env, after, 3)
    SNAPSHOT.set(env, state)
    assert run(env, after, 3) == expected
    fresh = factory()
    SNAPSHOT.set(fresh, state)
    assert run(fresh, after, 3) == expected


# The options -------------------------------------------------------------------------------------------


def test_a_snapshot_is_two_functions_and_a_number_of_steps():
    snapshot = ea.SnapshotPolicy(get=lambda env: env.x, set=lambda env, x: None)
    assert snapshot.every == 1000
    assert gymnasium_snapshot(every=7).every == 7
    assert pickle.loads(pickle.dumps(SNAPSHOT)) == SNAPSHOT
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.every = 3


@pytest.mark.parametrize("every", [0, -1, 1.0, True, None, "10"])
def test_every_is_an_int_above_0(every):
    with pytest.raises(ValueError, match=rf"^SnapshotPolicy\(every={every!r}\): expected an int > 0$"):
        ea.SnapshotPolicy(SNAPSHOT.get, SNAPSHOT.set, every)
    with pytest.raises(ValueError, match="expected an int > 0"):
        gymnasium_snapshot(every)


def test_get_and_set_are_functions():
    with pytest.raises(TypeError, match=r"^SnapshotPolicy\(get=3\): expected a function$"):
        ea.SnapshotPolicy(3, SNAPSHOT.set)
    with pytest.raises(TypeError, match=r"^SnapshotPolicy\(set=None\): expected a function$"):
        ea.SnapshotPolicy(SNAPSHOT.get, None)


# Envs --------------------------------------------------------------------------------------------------


@settings(max_examples=examples(40))
@given(
    name=st.sampled_from(CLASSIC),
    stack=st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=5, unique=True),  # some do not go around themselves
    before=st.integers(0, 60),
    after=st.integers(1, 60),
)
def test_an_env_with_any_wrappers_continues_bit_for_bit(name, stack, before, after):
    if "frame stack" in stack and "clock" in stack:
        stack.remove("clock")  # they do not fit into one another
    check(lambda: make(name, stack), before, after)


@pytest.mark.parametrize("name", ["Hopper-v5", "Ant-v5", "Humanoid-v5"])
def test_mujoco_continues_bit_for_bit(name):
    pytest.importorskip("mujoco")
    check(lambda: make(name), 55, 300)
    check(lambda: make(name, ["normal observation", "frame stack", "counting"]), 7, 60)


@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_ale_continues_bit_for_bit(sticky):
    ale_py = pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    gymnasium.register_envs(ale_py)

    def factory():
        env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=sticky)
        return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env), 4)

    check(factory, 40, 1000)  # to the end of a game, and beyond


def test_the_action_that_ale_repeats_is_part_of_a_snapshot():
    ale_py = pytest.importorskip("ale_py")
    gymnasium.register_envs(ale_py)
    env, undisturbed, other = (
        gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.5, obs_type="grayscale")
        for _ in range(3)
    )
    for one in (env, undisturbed, other):
        one.reset(seed=1)
    for seed in range(25):  # half of them before a frame that repeats the action of the one before
        run(other, 3, 100 + seed)
        SNAPSHOT.set(other, SNAPSHOT.get(env))
        expected = run(undisturbed, 8, seed)
        assert run(other, 8, seed) == expected
        assert run(env, 8, seed) == expected


def test_a_time_limit_and_statistics_are_those_of_then():
    env = make("Pendulum-v1", ["frame stack", "normal observation", "normal reward"], max_episode_steps=100)
    env.reset(seed=0)
    for _ in range(90):
        env.step(env.action_space.sample())
    state = SNAPSHOT.get(env)
    frames = np.array(env.env.env.obs_queue)
    counts = env.env.obs_rms.count, env.return_rms.count
    for _ in range(500):
        if any(env.step(env.action_space.sample())[2:4]):
            env.reset()
    assert (env.env.obs_rms.count, env.return_rms.count) != counts
    SNAPSHOT.set(env, state)
    assert (env.env.obs_rms.count, env.return_rms.count) == counts
    assert (np.array(env.env.env.obs_queue) == frames).all()
    truncated = []
    for _ in range(10):
        _, _, _, ended, _ = env.step(env.action_space.sample())
        truncated.append(ended)
    assert truncated == [False] * 9 + [True]


# What an env may hold ----------------------------------------------------------------------------------


class Custom(gymnasium.Env):
    """Returns what it is told to look at."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


def restored(env, change):
    """Returns the env after its snapshot was taken, it was changed, and restored."""
    state = SNAPSHOT.get(env)
    change(env)
    SNAPSHOT.set(env, state)
    return env


def test_attributes_that_appeared_later_are_removed():
    def change(env):
        env.late, env.count = 1, 2
        del env.gone

    env = restored(Custom(count=1, gone=[3]), change)
    assert vars(env) == {"count": 1, "gone": [3]}


def test_attributes_that_share_an_object_share_it_after_restoring():
    grid, rng = np.zeros((4, 4)), np.random.default_rng(0)
    env = Custom(grid=grid, row=grid[1], column=grid[:, 2], rng=rng, same=rng, helper={"rng": rng}, me=None)
    env.me = env
    for _ in range(2):  # the second time its arrays are of a pickle
        env = restored(env, lambda env: env.grid.fill(7))
        assert not env.grid.any()
        env.row[2] = 5
        assert env.grid[1, 2] == env.column[1] == 5
        assert env.rng is env.same is env.helper["rng"]
        assert env.me is env
        env.grid.fill(0)
    assert env.column.strides == (32,)


def test_functions_are_kept_and_their_attributes_are_restored():
    def tick():
        tick.calls += 1
        return tick.calls

    tick.calls = 0
    functions = [tick, functools.partial(lambda step, start: start + step, 2)]
    env = Custom(functions=functions, bound=None, patched=None)
    env.bound = env.step
    env.step = lambda action: env.bound(action)  # noqa: PLW0108 # a function in place of a method
    tick()
    env = restored(env, lambda env: tick())
    assert env.functions[0] is tick
    assert tick.calls == 1
    assert env.functions[1](3) == 5
    assert env.step(0)[1] == 0.0
    assert env.bound.__func__ is Custom.step


def test_the_generators_of_spaces_are_restored():
    inner = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(1000), "b": gymnasium.spaces.Box(0, 1, (2,))})
    env = Custom(action_space=gymnasium.spaces.Tuple([inner, gymnasium.spaces.Discrete(1000)]))
    env.action_space.seed(3)
    state = SNAPSHOT.get(env)
    expected = str([env.action_space.sample() for _ in range(5)])
    fresh = Custom(action_space=gymnasium.spaces.Tuple([inner, gymnasium.spaces.Discrete(1000)]))
    for one in (env, fresh):
        SNAPSHOT.set(one, state)
        assert str([one.action_space.sample() for _ in range(5)]) == expected


def test_the_env_keeps_its_windows_and_locks():
    pytest.importorskip("pygame")
    env = make("CartPole-v1", render_mode="rgb_array")
    env.reset(seed=0)
    unrendered = SNAPSHOT.get(env)
    env.render()
    screen = env.unwrapped.screen
    SNAPSHOT.set(env, unrendered)
    assert env.unwrapped.screen is screen
    state = SNAPSHOT.get(env)
    fresh = make("CartPole-v1", render_mode="rgb_array")
    SNAPSHOT.set(fresh, state)
    assert fresh.unwrapped.screen is None
    assert (fresh.render() == env.render()).all()
    lock = threading.Lock()
    state = SNAPSHOT.get(Custom(lock=lock, locks=[lock]))
    env, bare = Custom(lock=(other := threading.Lock()), locks=None), Custom()
    SNAPSHOT.set(env, state)
    assert env.lock is env.locks[0] is other
    SNAPSHOT.set(bare, state)
    assert vars(bare) == {"locks": [None]}


def test_parameters_of_a_mujoco_model_are_restored_and_views_of_it_stay():
    pytest.importorskip("mujoco")
    env = make("Hopper-v5")
    env.reset(seed=0)
    inner = env.unwrapped
    inner.positions, inner.torso = inner.data.qpos, [inner.data.body("torso")]
    masses = inner.model.body_mass.copy()

    def change(env):
        inner.model.body_mass[:] = 1
        inner.model.opt.timestep = 0.001
        run(env, 3, 0)

    x = inner.torso[0].xpos.copy()
    restored(env, change)
    assert (inner.model.body_mass == masses).all()
    assert inner.model.opt.timestep == 0.002
    assert (inner.torso[0].xpos == x).all()
    inner.data.qpos[0] = 12
    assert inner.positions[0] == 12


# What cannot be captured -------------------------------------------------------------------------------


class Slotted(gymnasium.Env):
    __slots__ = ("hidden",)


class Opaque:
    """Is pickled in its own way."""

    def __reduce__(self):
        return list, ((number for number in (1, 2)),)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda: (number for number in (1, 2)), "generator"),
        (lambda: [socket.socket(socket.AF_UNIX)], "socket"),
        (lambda: {"inner": gymnasium.make("CartPole-v1")}, "an env that is not in the chain of wrappers"),
        (Path(__file__).open, "a file that is open for reading has a position"),
        (Opaque, "generator"),
        (lambda: lambda held=(number for number in (1, 2)): held, "generator"),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_error_names_the_attribute_that_cannot_be_captured(value, reason):
    env = wrappers.TimeLimit(Custom(fine=1, held=value()), 10)
    with pytest.raises(TypeError, match=rf"^cannot capture attribute 'held' of Custom \(\w+\): .*{reason}.*") as caught:
        SNAPSHOT.get(env)
    assert str(caught.value).endswith(". Use a SnapshotPolicy with your own get and set")
    close = getattr(env.unwrapped.held, "close", None)
    if close is not None:
        close()


def test_slots_cannot_be_captured():
    with pytest.raises(TypeError, match="cannot capture Slotted: it has __slots__"):
        SNAPSHOT.get(Slotted())


def test_a_snapshot_fits_envs_of_its_factory_only():
    state = SNAPSHOT.get(make("CartPole-v1", ["statistics"]))
    with pytest.raises(ValueError, match=r"from the env RecordEpisodeStatistics<TimeLimit<.*: expected one from Ti"):
        SNAPSHOT.set(make("CartPole-v1"), state)
    state = SNAPSHOT.get(Custom(functions={"a": lambda: 1}))
    for functions in ({}, {"a": lambda: 1}, None):
        with pytest.raises(
            ValueError, match=r"^cannot restore Custom\.functions\.a: the snapshot needs the env.s own function"
        ):
            SNAPSHOT.set(Custom(functions=functions), state)
    state = SNAPSHOT.get(Custom(action_space=gymnasium.spaces.Discrete(3)))
    with pytest.raises(
        ValueError, match=r"cannot restore Custom\.action_space: .* own Discrete there, but the env has Discrete\(2\)"
    ):
        SNAPSHOT.set(Custom(action_space=gymnasium.spaces.Discrete(2)), state)


def test_a_snapshot_of_another_model_is_rejected():
    pytest.importorskip("mujoco")
    state = SNAPSHOT.get(make("Hopper-v5"))
    other = make("Walker2d-v5")
    type(other.unwrapped).__qualname__, name = "HopperEnv", type(other.unwrapped).__qualname__
    try:
        with pytest.raises(ValueError, match="the snapshot"):
            SNAPSHOT.set(other, state)
    finally:
        type(other.unwrapped).__qualname__ = name
