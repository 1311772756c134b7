"""Rollouts of envs with any spaces, or none, equal the loop of steps with the same policy."""

from __future__ import annotations

import signal
import zlib

import gymnasium
import numpy as np
import pytest
from budget import examples
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import envactors as ea

LEAVES = [
    spaces.Box(-1, 1, (2, 3), np.float32),
    spaces.Box(0, 255, (4, 4, 1), np.uint8),
    spaces.Box(-np.inf, np.inf, (), np.float64),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiBinary(3),
]
TEXT = spaces.Text(12, min_length=1)


def digest(value):
    """Returns a number that says what an observation is."""
    if isinstance(value, dict):
        return digest(tuple(value[key] for key in sorted(value)))
    if isinstance(value, tuple):
        return zlib.crc32(repr([digest(inner) for inner in value]).encode())
    return zlib.crc32(value.encode() if isinstance(value, str) else np.ascontiguousarray(value).tobytes())


def row(batch, position):
    """Returns one env's part of a batch."""
    if isinstance(batch, dict):
        return {key: row(inner, position) for key, inner in batch.items()}
    if isinstance(batch, tuple):
        return tuple(row(inner, position) for inner in batch)
    return batch[position]


class Any(gymnasium.Env):
    """Samples observations; its rewards say which actions it got. Episodes have a few steps."""

    def __init__(self, observation_space, action_space):
        self.observation_space = observation_space
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.left = int(self.np_random.integers(1, 6))
        return self.observation_space.sample(), {}

    def step(self, action):
        self.left -= 1
        cut = bool(self.np_random.integers(8) == 0)
        info = {"left": self.left} if self.left % 2 else {}
        return self.observation_space.sample(), digest(action) / 1e6, self.left <= 0, cut, info


class Chooses:
    """A policy that samples actions, which follow from what it sees and its random numbers."""

    def __init__(self, space):
        self.space = space

    def __call__(self, obs, context):
        noise = context.rng.integers(1000, size=len(context.env_ids))
        actions = []
        for position, env_id in enumerate(context.env_ids):
            seen = digest(row(obs, position)), int(env_id), int(noise[position]), bool(context.starts[position])
            self.space.seed(zlib.crc32(repr(seen).encode()))
            actions.append(self.space.sample())
        return actions


def loop(envs, policy, steps, seed, envs_per_actor=1, autoreset="next_step", **_options):
    """Steps with the policy in the caller; returns what a rollout has, step by step, and the last observation."""
    obs, _ = envs.reset(seed=seed)
    found, count = [], envs.num_envs
    starts, over = np.ones(count, bool), np.zeros(count, bool)
    for step in range(steps):
        actions = []
        for first in range(0, count, envs_per_actor):
            ids = np.arange(first, min(first + envs_per_actor, count))
            rng = np.random.Generator(np.random.Philox(key=7, counter=[0, step, 0, first]))
            context = ea.PolicyContext(ids, starts[ids], step, rng)
            group = [row(obs, position) for position in ids]
            actions += policy(Grouped(group), context)
        after, rewards, terminated, truncated, infos = envs.step(actions)
        found.append((obs, actions, rewards, terminated, truncated, starts, infos))
        was_over, over = over, terminated | truncated
        starts = over if autoreset == "same_step" else was_over
        obs = after
    return found, obs


class Grouped(list):
    """Observations of some envs, as `row` reads them."""


def check(rollout, found, last, count):
    for step, (obs, actions, rewards, terminated, truncated, starts, infos) in enumerate(found):
        for env_id in range(count):
            assert digest(row(row(rollout.obs, step), env_id)) == digest(row(obs, env_id)), (step, env_id)
            if rollout.valid[step, env_id]:
                assert digest(row(row(rollout.actions, step), env_id)) == digest(actions[env_id])
        np.testing.assert_array_equal(rollout.rewards[step], rewards)
        np.testing.assert_array_equal(rollout.terminated[step], terminated)
        np.testing.assert_array_equal(rollout.truncated[step], truncated)
        np.testing.assert_array_equal(rollout.starts[step], starts)
        told = {env_id: info for at, env_id, info in rollout.infos if at == step}
        assert told.keys() == {env_id for env_id, info in enumerate(infos) if info}
        for env_id, info in told.items():
            assert info.keys() == infos[env_id].keys()
            assert info.get("left") == infos[env_id].get("left")
    for env_id in range(count):
        assert digest(row(rollout.last_obs, env_id)) == digest(row(last, env_id))


nests = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: (
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict)
        | st.lists(inner, min_size=1, max_size=3).map(lambda found: spaces.Tuple(tuple(found)))
    ),
    max_leaves=4,
)
observations = nests | st.just(TEXT) | nests.map(lambda inner: spaces.Dict(array=inner, text=TEXT))


@pytest.mark.parametrize("backend", ["inline", "process"])
def test_rollouts_equal_loops_over_all_spaces(backend):
    @settings(max_examples=examples(50 if backend == "process" else 100))
    @given(
        observations, nests, st.sampled_from([1, 2, 3]), st.sampled_from(["next_step", "same_step"]), st.integers(0, 99)
    )
    def compare(observation, action, per_actor, autoreset, seed):
        options = {"envs_per_actor": per_actor, "backend": backend, "autoreset": autoreset}
        factories = [lambda: Any(observation, action)] * 3
        with ea.VectorEnv(factories, **options) as envs:
            found, last = loop(envs, Chooses(action), 12, seed, **options)
        with ea.VectorEnv(factories, **options) as envs:
            envs.set_policy(lambda: Chooses(action), seed=7)
            envs.reset(seed=seed)
            check(envs.rollout(12), found, last, 3)

    compare()


class Bare:
    """An env without spaces: its observations are learnt from the first reset, its actions from the first ones."""

    def __init__(self, kind="array"):
        self.kind = kind

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        return self.observe(), float(np.sum(action)), self.count >= 5, False, {}

    def observe(self):
        where = self.rng.normal(size=3)
        text = f"at {where[0]:.3f}"
        return {"array": where, "text": text, "dict": {"where": where, "name": text}}[self.kind]


def choose_for_bare(obs, context):
    return [digest(row(obs, position)) % 7 + context.env_ids[position] for position in range(len(context.env_ids))]


@pytest.mark.parametrize("kind", ["array", "text", "dict"])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("backend", ["inline", "process"])
def test_a_reset_shows_the_observations_of_envs_without_a_space(backend, autoreset, kind):
    options = {"envs_per_actor": 2, "backend": backend, "autoreset": autoreset}
    steps = 4 if autoreset == "disabled" else 12

    def choose(obs, context):
        batch = obs["where"] if kind == "dict" else obs
        assert type(batch) is list if kind == "text" else batch.shape == (len(context.env_ids), 3)
        return choose_for_bare(obs, context)

    with ea.VectorEnv([lambda: Bare(kind)] * 3, **options) as envs:
        found, last = loop(envs, choose_for_bare, steps, 5, **options)
    with ea.VectorEnv([lambda: Bare(kind)] * 3, **options) as envs:
        with pytest.raises(ea.VectorInputError, match="observation space: give them one, or reset them first"):
            envs.set_policy(lambda: choose, seed=7)
        envs.reset(seed=0)
        envs.set_policy(lambda: choose, seed=7)
        envs.reset(seed=5)
        rollout = envs.rollout(steps)
        check(rollout, found, last, 3)
        batch = rollout.obs["where"] if kind == "dict" else rollout.obs
        assert batch.shape == ((steps, 3) if kind == "text" else (steps, 3, 3))
        assert (batch.dtype == object) == (kind == "text")


def test_an_observation_unlike_that_of_the_reset_fails_its_env():
    class Changing(Bare):
        def observe(self):
            return super().observe()[: 3 - self.count // 2]

    with ea.VectorEnv([Bare, Changing]) as envs:
        envs.reset(seed=0)
        envs.set_policy(lambda: choose_for_bare)
        with pytest.raises(ea.VectorStepError, match="observation of env 1 has shape") as failed:
            envs.rollout(4)
        assert list(failed.value.failures) == [1]
        assert failed.value.batch.obs.shape == (4, 2, 3)


@pytest.mark.parametrize("kind", ["array", "text", "dict"])
def test_a_rollout_that_never_began_has_a_batch_of_full_shape(kind):
    """It waited behind another one, and the vector was closed. It begins with the last observations."""

    class Stopping(Bare):
        stops = False

        def step(self, action):
            while self.stops:
                signal.pause()
            return super().step(action)

    envs = ea.VectorEnv([lambda: Stopping(kind)] * 2)
    envs.reset(seed=0)
    envs.set_policy(lambda: choose_for_bare)
    for _ in range(3):
        envs.rollout(5)  # its memory is used again
    obs, _ = envs.reset(seed=1)
    envs.set_attr("stops", True)
    futures = [envs.rollout_async(5), envs.rollout_async(5)]
    envs.close(0)
    for future in futures:
        batch = future.exception().batch
        for env_id in range(2):
            assert digest(row(row(batch.obs, 0), env_id)) == digest(row(obs, env_id))
        assert batch.starts.tolist() == [[True] * 2] + [[False] * 2] * 4
        assert not (batch.terminated | batch.truncated | batch.valid).any()
