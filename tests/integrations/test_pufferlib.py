"""The drop-in for PufferLib: its protocol, and the trajectories of its `Serial`."""

from __future__ import annotations

import functools
import random
import warnings

import numpy as np
import pytest

import envactors as ea

gymnasium = pytest.importorskip("gymnasium")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it imports Gym, which warns of itself, and changes the filters
    pytest.importorskip("pufferlib")
    import pufferlib.vector
    from pufferlib.emulation import GymnasiumPufferEnv, PettingZooPufferEnv
    from pufferlib.ocean import sanity

from trainingfaults import Failing  # noqa: E402

from envactors.integrations.pufferlib import ActorVecEnv, make  # noqa: E402


def emulated(env, buf=None, seed=0, **kwargs):
    return GymnasiumPufferEnv(env_creator=env, env_kwargs=kwargs, buf=buf, seed=seed)


def of_agents(env, buf=None, seed=0):
    return PettingZooPufferEnv(env_creator=env, buf=buf, seed=seed)


def cartpole(buf=None, seed=0):
    return emulated(functools.partial(gymnasium.make, "CartPole-v1"), buf, seed)


class Native(pufferlib.PufferEnv):
    """Three agents that sum their actions; ends an episode by itself every fourth step."""

    def __init__(self, buf=None, seed=0):
        self.single_observation_space = gymnasium.spaces.Box(-100, 100, (2,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(5)
        self.num_agents = 3
        super().__init__(buf)
        self.seed = seed

    def reset(self, seed=None):
        self.steps = 0
        self.observations[:] = [self.seed, 0 if seed is None else seed]
        return self.observations, []

    def step(self, actions):
        self.steps += 1
        self.observations[:, 1] += actions
        self.rewards[:] = actions
        self.terminals[:] = self.steps % 4 == 0
        return self.observations, self.rewards, self.terminals, self.truncations, [{"steps": self.steps}]

    def close(self):
        pass


def killed_in_step(at):
    """CartPole whose first process is killed."""
    return Failing(gymnasium.make("CartPole-v1"), at, 1)


@pytest.fixture
def make_one():
    made = []

    def make_env(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    yield make_env
    for envs in made:
        envs.close()


def random_actions(envs, steps=60):
    envs.action_space.seed(3)
    return [envs.action_space.sample().astype(np.int32) for _ in range(steps)]


def rollout(envs, actions, seed=7):
    """Returns what is received, as copies: the arrays, and last the infos."""
    envs.async_reset(seed)
    received = []
    for action in [None, *actions]:
        if action is not None:
            envs.send(action)
        *arrays, infos, _, masks = envs.recv()
        received.append((*map(np.copy, [*arrays, masks]), infos))
    return received


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one[-1] == other[-1]
        for array, expected in zip(one[:-1], other[:-1], strict=True):
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)


def serial(creator, num_envs):
    return pufferlib.vector.make(creator, num_envs=num_envs, backend=pufferlib.vector.Serial)


SAMPLES = {
    "password": functools.partial(emulated, sanity.Password),
    "squared": functools.partial(emulated, sanity.Squared),
    "nested spaces": functools.partial(emulated, sanity.Spaces),
}


def seeded(name, buf=None, seed=0):
    """A sample env. All of a process draw from the same generators, which it seeds."""
    np.random.seed(0)  # noqa: NPY002 # they draw from it
    random.seed(0)
    return SAMPLES[name](buf=buf, seed=seed)


def joined(results):
    """Joins what several vector envs with one env each return in a step."""
    *columns, infos = zip(*results, strict=True)
    return (*map(np.concatenate, columns), [info for own in infos for info in own])


@pytest.mark.parametrize("name", SAMPLES)
def test_trajectories_of_sample_envs_in_processes_are_those_of_serial(name, make_one):
    creator = functools.partial(seeded, name)
    ours = make_one(creator, num_envs=2)
    actions = random_actions(ours)
    each = []
    for env_id in range(2):
        theirs = serial(creator, 1)
        each.append(rollout(theirs, [both[[env_id]] for both in actions], 7 + env_id))
        theirs.close()
    assert_same(rollout(ours, actions), map(joined, zip(*each, strict=True)))


OTHERS = {"agents": functools.partial(of_agents, sanity.Multiagent), "native": Native, "cartpole": cartpole}


@pytest.mark.parametrize("name", OTHERS)
def test_batches_and_their_spaces_are_those_of_serial(name, make_one):
    ours, theirs = make_one(OTHERS[name], num_envs=3, num_workers=1, backend="Serial"), serial(OTHERS[name], 3)
    for attribute in ("single_observation_space", "single_action_space", "observation_space", "action_space"):
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    for attribute in ("num_agents", "agents_per_batch", "num_envs", "emulated"):
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    assert ours.driver_env.num_agents == theirs.driver_env.num_agents
    assert isinstance(ours, ActorVecEnv)
    actions = random_actions(theirs)
    assert_same(rollout(ours, actions), rollout(theirs, actions))
    assert_same([ours.reset(5)], [theirs.reset(5)])
    ours.send(actions[0])
    assert ours.recv()[5].tolist() == list(range(ours.num_agents))
    theirs.close()


def test_killed_worker_does_not_change_a_replayed_run(make_one):
    killed = make_one([killed_in_step, cartpole], [[9], []], [{}, {}], num_envs=2, on_failure="replay")
    whole = serial(cartpole, 2)
    actions = random_actions(whole, 30)
    assert_same(rollout(killed, actions), rollout(whole, actions))
    assert [actor.incarnation for actor in killed.vector.actors] == [1, 0]
    whole.close()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("iterations", "every", "count"), [(4, 100, 3), pytest.param(30, 900, 4, marks=pytest.mark.soak)]
)
def test_training_with_failures_ends_with_the_same_weights_as_with_serial(iterations, every, count, make_one):
    torch = pytest.importorskip("torch")
    import cleanrlppo

    torch.set_num_threads(1)
    args = cleanrlppo.Args(num_iterations=iterations)

    def failing(buf=None, seed=0):
        return emulated(lambda: Failing(gymnasium.make(args.env_id), every, count), buf, seed)

    restart = ea.RestartPolicy(max_restarts=1000, backoff=0.0)
    ours = make_one(failing, num_envs=args.num_envs, num_workers=2, on_failure="replay", restart=restart)
    agent, _ = cleanrlppo.train(args, ours)
    whole, _ = cleanrlppo.train(args, serial(cartpole, args.num_envs))
    assert sum(actor.incarnation for actor in ours.vector.actors) >= count
    for name, weights in agent.state_dict().items():
        assert torch.equal(weights, whole.state_dict()[name]), name


def test_killed_worker_truncates_its_agents_when_failures_renew(make_one):
    envs = make_one(killed_in_step, [3], num_envs=1, on_failure="renew")
    results = rollout(envs, [np.array([1])] * 5)
    assert [bool(one[3][0]) for one in results] == [False, False, False, True, False, False]
    assert [float(one[1][0]) for one in results] == [0, 1, 1, 0, 0, 1]
    assert isinstance(results[3][-1][0]["failure"], ea.ActorDiedError)


def test_failure_is_raised_and_a_reset_continues(make_one):
    envs = make_one(killed_in_step, [1], num_envs=1)
    envs.async_reset(0)
    envs.recv()
    envs.send(np.array([1]))
    with pytest.raises(ea.ActorDiedError):
        envs.recv()
    envs.reset(0)
    assert envs.step(np.array([1]))[1].tolist() == [1.0]


@pytest.mark.parametrize("contiguous", [True, False])
def test_batches_of_a_part_have_the_results_of_their_envs(contiguous, make_one):
    envs = make_one(cartpole, num_envs=4, batch_size=2, backend="thread", zero_copy=contiguous)
    whole = make_one(cartpole, num_envs=4, backend="inline")
    expected = rollout(whole, [np.zeros(4, np.int32)] * 6, 3)
    steps = np.zeros(4, int)
    envs.async_reset(3)
    for _ in range(8):
        obs, rewards, *_, ids, masks = envs.recv()
        assert (obs.shape, rewards.shape, masks.all()) == ((2, 4), (2,), True)
        if contiguous:
            assert ids.tolist() in ([0, 1], [2, 3])
        for row, agent in zip(obs, ids, strict=True):
            if steps[agent] <= 6:
                np.testing.assert_array_equal(row, expected[steps[agent]][0][agent])
        steps[ids] += 1
        envs.send(np.zeros(2, np.int32))
    assert steps.sum() == 16
    envs.async_reset(3)  # while steps are pending, of all envs and of the second half
    assert sorted([*envs.recv()[5], *skipped(envs)]) == [0, 1, 2, 3]
    envs.send(np.zeros(2, np.int32))
    envs.async_reset(3)
    envs.recv()
    envs.async_reset(3)
    whole.async_reset(3)
    whole.recv()
    whole.send(np.zeros(4, np.int32))
    whole.async_reset(3)
    np.testing.assert_array_equal(whole.recv()[0], expected[0][0])


def skipped(envs):
    """The ids of the second batch after a reset, whose first one is not stepped."""
    envs.flag = pufferlib.vector.RECV
    return envs.recv()[5]


def test_the_protocol_is_checked_as_by_pufferlib(make_one):
    envs = make_one(cartpole, backend="inline")
    with pytest.raises(pufferlib.APIUsageError, match="reset"):
        envs.recv()
    envs.async_reset()
    with pytest.raises(pufferlib.APIUsageError):
        envs.send(np.zeros(1, np.int32))
    envs.recv()
    with pytest.raises(pufferlib.APIUsageError, match="action space"):
        envs.send(np.full(1, 9))


def test_bare_envs_are_emulated(make_one):
    bare = make_one(gymnasium.make, ["CartPole-v1"], num_envs=2, num_workers=1, backend="inline")
    whole = serial(cartpole, 2)
    actions = random_actions(whole)
    assert_same(rollout(bare, actions), rollout(whole, actions))
    assert bare.driver_env.initialized  # an attribute that is read in the worker
    whole.close()


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("num_workers=2 does not divide num_envs=3", {"num_envs": 3, "num_workers": 2}),
        ("expected a multiple of 2", {"num_envs": 4, "num_workers": 2, "batch_size": 3}),
        ("expected a divisor, or zero_copy=False", {"num_envs": 3, "batch_size": 2}),
        ("num_envs is 0", {"num_envs": 0}),
        ("backend=PufferEnv", {"backend": pufferlib.PufferEnv}),
        ("num_workers is the number of processes", {"envs_per_actor": 2}),
    ],
)
def test_arguments_that_do_not_fit_are_rejected(message, options):
    with pytest.raises((ValueError, ea.VectorEnvError), match=message):
        make(cartpole, **options)
    with pytest.raises(TypeError, match="did you mean 'deadlines'"):
        make(cartpole, deadline=3)
