"""Snapshots of Gymnasium envs: a restored env continues as if nothing had happened, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
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
    env = Custom(grid=grid, same_grid=[grid], rng=rng, same=rng, helper={"rng": rng}, me=None, bound=None)
    env.me, env.bound = env, env.step
    for _ in range(2):  # the second time its arrays are of a pickle
        env = restored(env, lambda env: env.grid.fill(7))
        assert not env.grid.any()
        assert env.same_grid[0] is env.grid
        assert env.rng is env.same is env.helper["rng"]
        assert env.me is env
        assert (env.bound.__self__, env.bound.__func__) == (env, Custom.step)


def test_parts_of_one_array_that_do_not_overlap_are_copied():
    whole = np.arange(6.0)
    env = restored(Custom(first=whole[:3], rest=whole[3:].reshape(1, 3)), lambda env: env.first.fill(7))
    assert (env.first.tolist(), env.rest.tolist()) == ([0, 1, 2], [[3, 4, 5]])


def test_the_env_keeps_functions_without_variables():
    def double(number):
        return 2 * number

    def triple(number):
        return 3 * number

    env = Custom(double=double, root=math.sqrt, mean=np.mean, partial=functools.partial(np.full, 2))
    state = SNAPSHOT.get(env)
    fresh = Custom(double=(own := double))
    SNAPSHOT.set(fresh, state)
    assert fresh.double is own
    assert (fresh.root, fresh.mean, fresh.partial(3).tolist()) == (math.sqrt, np.mean, [3, 3])
    with pytest.raises(ValueError, match=r"^cannot restore Custom\.double: the snapshot needs the env's own function"):
        SNAPSHOT.set(Custom(double=triple), state)


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
    state = SNAPSHOT.get(Custom(lock=lock, surfaces=[screen, screen]))
    fresh, bare = Custom(lock=(own := threading.Lock()), surfaces=None), Custom()
    SNAPSHOT.set(fresh, state)
    assert vars(fresh) == {"lock": own, "surfaces": None}
    SNAPSHOT.set(bare, state)
    assert vars(bare) == {"lock": None, "surfaces": None}


# What cannot be captured -------------------------------------------------------------------------------


class Slotted(gymnasium.Env):
    __slots__ = ("hidden",)


class Opaque:
    """Is pickled in its own way."""

    def __reduce__(self):
        return list, ((number for number in (1, 2)),)


class Holder:
    def __init__(self, held):
        self.held = held


def closure():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


def function_with_attributes():
    def count():
        count.calls += 1
        return count.calls

    count.calls = 0
    return count


def overlapping():
    grid = np.zeros((4, 4))
    return [grid, grid[1]]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (closure, "a closure, or a function with defaults or attributes, may hold state in them"),
        (function_with_attributes, "a closure, or a function with defaults or attributes, may hold state"),
        (lambda: lambda calls=[]: calls.append(1), "a closure, or a function with defaults or attributes"),
        (lambda: [lambda: 1], "a function that cannot be imported is inside another object"),
        (lambda: functools.partial(closure()), "a closure, or a function with defaults or attributes"),
        (overlapping, "an array shares memory with another one"),
        (lambda: np.lib.stride_tricks.sliding_window_view(np.zeros(4), 2), "the memory of an array belongs to a"),
        (lambda: np.frombuffer(mmap.mmap(-1, 8)), "the memory of an array belongs to a mmap"),
        (lambda: Holder(threading.Lock()), "lock"),
        (lambda: (number for number in (1, 2)), "generator"),
        (lambda: [socket.socket(socket.AF_UNIX)], "socket"),
        (lambda: {"inner": gymnasium.make("CartPole-v1")}, "an env that is not in the chain of wrappers"),
        (Path(__file__).open, "a file that is open for reading has a position"),
        (Opaque, "generator"),
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
    state = SNAPSHOT.get(Custom(function=lambda: 1))
    for attributes in ({}, {"function": lambda: 1}, {"function": None}):
        with pytest.raises(
            ValueError, match=r"^cannot restore Custom\.function: the snapshot needs the env.s own function"
        ):
            SNAPSHOT.set(Custom(**attributes), state)
    state = SNAPSHOT.get(Custom(action_space=gymnasium.spaces.Discrete(3)))
    with pytest.raises(
        ValueError, match=r"cannot restore Custom\.action_space: .* own Discrete there, but the env has Discrete\(2\)"
    ):
        SNAPSHOT.set(Custom(action_space=gymnasium.spaces.Discrete(2)), state)
