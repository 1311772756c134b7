"""Vector envs in compiled JAX code: the same trajectories as the plain loop, and no hang after a crash."""

from __future__ import annotations

import functools
import logging

import numpy as np
import pytest

import envactors as ea

gymnasium = pytest.importorskip("gymnasium")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from gymnasium import spaces  # noqa: E402
from jax.experimental import io_callback  # noqa: E402
from trainingfaults import Failing  # noqa: E402

from envactors.integrations.jax import Callbacks, callbacks  # noqa: E402

STEPS = 120
cartpole = functools.partial(gymnasium.make, "CartPole-v1")


class Nested(gymnasium.Env):
    """Observes its last action and its seed, in nested spaces of several dtypes."""

    action_space = spaces.Dict(push=spaces.Box(-9, 9, (2,), np.float32), pick=spaces.Discrete(5))
    observation_space = spaces.Dict(
        pushed=spaces.Box(-9, 9, (2,), np.float32),
        rest=spaces.Tuple([spaces.Discrete(5), spaces.Box(0, 255, (8, 8), np.uint8)]),
        origin=spaces.Box(0, 2**40, (), np.int64),
    )

    def reset(self, *, seed=None, options=None):
        self.seed = -1 if seed is None else seed
        return self.observe(np.zeros(2, np.float32), 0), {}

    def step(self, action):
        return self.observe(action["push"], action["pick"]), 0.1, False, action["pick"] == 4, {}

    def observe(self, push, pick):
        picture = np.full((8, 8), pick, np.uint8)
        return {"pushed": push, "rest": (np.int64(pick), picture), "origin": np.asarray(self.seed, np.int64)}


@pytest.fixture(scope="module", autouse=True)
def threads_of_jax():
    """Has JAX start the threads that it keeps."""
    flag = jax.ShapeDtypeStruct((), np.bool_)
    ask = jax.jit(lambda: io_callback(lambda: np.bool_(True), flag, ordered=True))
    assert jax.block_until_ready(ask())


@pytest.fixture
def make():
    made = []

    def make_one(factories, **options):
        made.append(ea.VectorEnv(factories, **options))
        return made[-1]

    yield make_one
    jax.clear_caches()  # of programs that refer to them
    for envs in made:
        envs.close()


def choose(obs):
    return (obs[:, 2] > 0).astype(np.int32)  # which falls after some 50 steps


def compiled_rollout(envs, steps=STEPS):
    reset, step = callbacks(envs)

    @jax.jit
    def rollout(seed):
        def body(obs, _):
            actions = choose(obs)
            following, *results = step(actions)
            return following, (obs, actions, *results)

        return jax.lax.scan(body, reset(seed), length=steps)

    return rollout


def plain_rollout(envs, seed, steps=STEPS):
    obs, _ = envs.reset(seed=seed)
    rows = []
    for _ in range(steps):
        actions = choose(obs)
        following, *results, _ = envs.step(actions)
        rows.append((obs, actions, *results))
        obs = following
    return obs, tuple(np.stack(column) for column in zip(*rows, strict=True))


def assert_equal(ours, theirs):
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_rollout_in_scan_equals_the_plain_loop(make, autoreset):
    ours, theirs = (make([cartpole] * 3, envs_per_actor=3, autoreset=autoreset) for _ in range(2))
    rollout = compiled_rollout(ours)
    for seed in (5, 6):
        expected = plain_rollout(theirs, seed)
        assert_equal(rollout(seed), expected)
        assert expected[1][3].any()  # episodes ended, and began again


def test_killed_worker_does_not_change_a_replayed_rollout(make):
    healthy = make([cartpole] * 2, envs_per_actor=2)
    killed = make([lambda: Failing(cartpole(), 40, 1), cartpole], on_failure="replay")
    assert_equal(compiled_rollout(killed)(7), plain_rollout(healthy, 7))
    assert [actor.incarnation for actor in killed.actors] == [1, 0]


def test_killed_worker_truncates_an_episode_when_failures_renew(make):
    envs = make([lambda: Failing(cartpole(), 4, 1), cartpole], on_failure="renew")
    _, (obs, _, rewards, terminated, truncated) = compiled_rollout(envs, 6)(7)
    assert truncated[:, 0].tolist() == [False] * 3 + [True] + [False] * 2
    assert rewards[:, 0].tolist() == [1, 1, 1, 0, 0, 1]
    assert not truncated[:, 1].any()
    assert not terminated.any()
    assert envs.actors[0].incarnation == 1
    assert np.abs(obs[5, 0]).max() < 0.05  # of the reset on the new process


def test_failure_that_the_vector_raises_ends_the_program_and_the_next_one_runs(make, monkeypatch):
    # Its record has the traceback, and pytest keeps records longer than the test.
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)
    envs = make([lambda: Failing(cartpole(), 4, 1), cartpole])
    rollout = compiled_rollout(envs, 6)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"VectorStepError(.|\n)*SIGKILL"):
        jax.block_until_ready(rollout(7))
    _, (_, _, rewards, _, _) = rollout(7)
    assert rewards.tolist() == [[1, 1]] * 6


def test_nested_values_have_the_structure_of_the_spaces(make):
    envs = make([Nested] * 2, envs_per_actor=2)
    reset, step = callbacks(envs)
    obs = jax.jit(reset)(3)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), obs) == {
        "pushed": ((2, 2), "float32"),
        "rest": (((2,), "int32"), ((2, 8, 8), "uint8")),
        "origin": ((2,), "int32"),  # 64 bits are off
    }
    assert obs["origin"].tolist() == [3, 4]
    actions = {"push": jnp.array([[1, 2], [3, 4]], np.float32), "pick": jnp.array([2, 4])}
    obs, rewards, terminated, truncated = jax.jit(step)(actions)
    assert obs["pushed"].tolist() == [[1, 2], [3, 4]]
    assert obs["rest"][1][:, 0, 0].tolist() == [2, 4]
    assert (rewards.dtype, terminated.tolist(), truncated.tolist()) == (np.float32, [False] * 2, [False, True])


def test_seeds_are_one_integer_or_one_per_env_or_none(make):
    reset = jax.jit(callbacks(make([Nested] * 3, envs_per_actor=3)).reset)
    assert reset(np.uint32(2**31))["origin"].tolist() == [-(2**31), -(2**31) + 1, -(2**31) + 2]  # cut to 32 bits
    assert reset(jnp.array([9, 1, 5]))["origin"].tolist() == [9, 1, 5]
    assert reset()["origin"].tolist() == [-1] * 3


def test_64_bits_are_kept_if_jax_has_them(make):
    envs = make([Nested] * 2, envs_per_actor=2)
    with jax.enable_x64(True):
        reset, step = callbacks(envs)
        assert jax.jit(reset)(2**33)["origin"].tolist() == [2**33, 2**33 + 1]
        _, rewards, _, _ = jax.jit(step)({"push": np.zeros((2, 2), np.float32), "pick": np.zeros(2, int)})
    assert rewards.tolist() == [0.1, 0.1]


def test_callbacks_run_without_jit_and_in_a_loop_of_the_program(make):
    envs = make([cartpole] * 2, envs_per_actor=2, autoreset="disabled")
    calls = callbacks(envs)
    assert isinstance(calls, Callbacks)
    first = calls.reset(1)

    @jax.jit
    def play():
        def go_on(state):
            return ~state[2].any()

        def body(state):
            obs, count, _ = state
            obs, _, terminated, _ = calls.step(choose(obs) * 0)
            return obs, count + 1, terminated

        return jax.lax.while_loop(go_on, body, (calls.reset(1), 0, jnp.zeros(2, bool)))

    _, count, terminated = play()
    np.testing.assert_array_equal(first, envs.reset(seed=1)[0])
    for _ in range(int(count)):
        ended = envs.step([0, 0])[2]
    assert terminated.tolist() == ended.tolist()


def train(envs, updates, steps=64):
    """Trains a softmax policy as PPO does; returns its parameters and the trajectories: a batch per update."""
    reset, step = callbacks(envs)

    def log_probabilities(parameters, obs):
        hidden = jnp.tanh(obs @ parameters["hidden"])
        return jax.nn.log_softmax(hidden @ parameters["out"])

    def loss(parameters, obs, actions, advantages, old):
        new = jnp.take_along_axis(log_probabilities(parameters, obs), actions[..., None], -1)[..., 0]
        ratio = jnp.exp(new - old)
        return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).mean()

    @jax.jit
    def update(parameters, obs, key):
        def act(state, key):
            obs, _ = state
            logits = log_probabilities(parameters, obs)
            actions = jax.random.categorical(key, logits)
            following, rewards, terminated, truncated = step(actions)
            old = jnp.take_along_axis(logits, actions[:, None], -1)[:, 0]
            return (following, terminated), (obs, actions, rewards, terminated | truncated, old)

        keys = jax.random.split(key, steps)
        state = (obs, jnp.zeros(obs.shape[0], bool))
        (obs, _), (seen, actions, rewards, ended, old) = jax.lax.scan(act, state, keys)

        def discount(following, row):
            reward, end = row
            value = reward + 0.98 * following * ~end
            return value, value

        _, returns = jax.lax.scan(discount, jnp.zeros(obs.shape[0]), (rewards, ended), reverse=True)
        advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
        for _ in range(4):
            slope = jax.grad(loss)(parameters, seen, actions, advantages, old)
            parameters = jax.tree.map(lambda value, change: value - 0.3 * change, parameters, slope)
        return parameters, obs, (seen, actions, rewards, ended)

    first, second = jax.random.split(jax.random.key(0))
    parameters = {"hidden": jax.random.normal(first, (4, 16)) * 0.5, "out": jax.random.normal(second, (16, 2)) * 0.01}
    obs, trajectories = jax.jit(reset)(1), []
    for number in range(updates):
        parameters, obs, trajectory = update(parameters, obs, jax.random.key(number))
        trajectories.append(trajectory)
    return parameters, trajectories


def assert_seen_by_the_plain_loop(envs, trajectories):
    obs, _ = envs.reset(seed=1)
    for batch in trajectories:
        for expected_obs, actions, expected_rewards, expected_ended in zip(*batch, strict=True):
            np.testing.assert_array_equal(obs, expected_obs)
            obs, rewards, terminated, truncated, _ = envs.step(np.asarray(actions))
            np.testing.assert_array_equal(rewards, expected_rewards)
            np.testing.assert_array_equal(terminated | truncated, expected_ended)


@pytest.mark.parametrize(
    ("updates", "kills"), [(4, (40, 90, 150, 240)), pytest.param(100, (40, 900, 2500, 5000), marks=pytest.mark.soak)]
)
def test_ppo_with_killed_workers_learns_the_same_from_the_trajectories_of_the_plain_loop(make, updates, kills):
    killed = make(
        [functools.partial(lambda at: Failing(cartpole(), at, 1), at) for at in kills],
        on_failure="replay",
    )
    parameters, trajectories = train(killed, updates)
    assert [actor.incarnation for actor in killed.actors] == [1] * 4
    healthy = make([cartpole] * 4, envs_per_actor=4)
    expected, _ = train(healthy, updates)
    assert_equal(parameters, expected)
    assert_seen_by_the_plain_loop(healthy, trajectories)
    if updates > 20:
        lengths = [1 / max(np.mean(ended), 1 / 64) for *_, ended in trajectories]
        assert lengths[0] < 30  # steps per episode, up to 64, which a rollout has
        assert np.mean(lengths[-10:]) > 55  # it learns


class Wordy(Nested):
    observation_space = spaces.Dict(said=spaces.Text(9))


class Spaceless:
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), 0.0, False, False, {}


def test_envs_whose_values_have_no_shape_are_rejected(make):
    with pytest.raises(ea.SpaceMismatchError, match="without a fixed shape"):
        callbacks(make([Wordy], backend="inline"))
    envs = make([Spaceless], backend="inline")
    with pytest.raises(ea.SpaceMismatchError, match=r"call envs.reset\(\) once"):
        callbacks(envs)
    envs.reset()
    assert callbacks(envs).reset().shape == (1, 3)


def test_large_batches_do_not_wait_for_jax(make):
    """Arguments of callbacks above some size are copied by threads of JAX, which wait for the program."""

    class Large(gymnasium.Env):
        action_space = observation_space = spaces.Box(-1, 1, (200_000,), np.float32)

        def reset(self, *, seed=None, options=None):
            return np.zeros(200_000, np.float32), {}

        def step(self, action):
            return action, 1.0, False, False, {}

    envs = make([Large] * 4, backend="inline")
    reset, step = callbacks(envs)

    @jax.jit
    def play():
        return jax.lax.scan(lambda obs, _: (step(obs + 0.125)[0], obs[:, 0]), reset(0), length=6)

    last, seen = play()
    assert (float(last.min()), float(last.max())) == (0.75, 0.75)
    assert seen[:, 3].tolist() == [0, 0.125, 0.25, 0.375, 0.5, 0.625]
