"""Training with the recipes for CleanRL and skrl, and with a registered id: replayed failures change nothing."""

from __future__ import annotations

import numpy as np
import pytest

import envactors as ea

gymnasium = pytest.importorskip("gymnasium")
torch = pytest.importorskip("torch")

import cleanrlppo  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402

from envactors.integrations.gymnasium import ActorVectorEnv, register  # noqa: E402

FOREVER = ea.RestartPolicy(max_restarts=1000, backoff=0.0)
# How long, how many steps are between the failures of an env, and how many of its processes fail.
SIZES = [(4, 100, 3), pytest.param(30, 900, 4, marks=pytest.mark.soak)]


@pytest.fixture(autouse=True)
def one_thread():
    """More would only spin on so small networks, and count as left behind."""
    torch.set_num_threads(1)


def assert_same_weights(one, other):
    for name, weights in one.state_dict().items():
        torch.testing.assert_close(weights, other.state_dict()[name], rtol=0, atol=0, msg=name)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("iterations", "every", "count"), SIZES)
def test_cleanrl_trains_the_same_agent_as_without_failures(iterations, every, count):
    args = cleanrlppo.Args(num_iterations=iterations)
    agent, returns, replaced = cleanrlppo.train_with_failures(args, every, count)
    factories = [cleanrlppo.make_env(args.env_id, 0, 0)] * args.num_envs
    whole, expected = cleanrlppo.train(args, SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP))
    assert sum(replaced) >= count
    assert returns == expected
    assert_same_weights(agent, whole)
    if iterations > 20:
        assert np.mean(returns[-20:]) > 100 > np.mean(returns[:20])


@pytest.fixture
def failing_id():
    """An id that is registered, whose env takes arguments for its failures."""
    gymnasium.register("FailingCartPole-v0", cleanrlppo.make_failing)
    yield "FailingCartPole-v0"
    del gymnasium.registry["FailingCartPole-v0"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("iterations", "every", "count"), SIZES)
def test_registered_id_trains_the_same_agent_as_without_failures(iterations, every, count, failing_id):
    args = cleanrlppo.Args(num_iterations=iterations)
    register(failing_id, autoreset_mode="SameStep", envs_per_actor=2, on_failure="replay", restart=FOREVER)
    faults = {"every": every, "count": count}
    envs = gymnasium.make_vec(failing_id, args.num_envs, vectorization_mode="vector_entry_point", **faults)
    agent, returns = cleanrlppo.train(args, envs)
    factories = [cleanrlppo.make_env(args.env_id, 0, 0)] * args.num_envs
    whole, expected = cleanrlppo.train(args, SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP))
    assert sum(actor.incarnation for actor in envs.unwrapped.actors) >= count
    assert returns == expected
    assert_same_weights(agent, whole)


@pytest.mark.timeout(600)
def test_cleanrl_continues_when_failures_end_episodes():
    args = cleanrlppo.Args(num_iterations=4)
    _, returns, replaced = cleanrlppo.train_with_failures(args, 100, 3, on_failure="renew")
    assert sum(replaced) >= 3
    assert returns


@pytest.mark.filterwarnings("ignore:`np.bool8`:DeprecationWarning")  # of skrl with NumPy 1.24
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("iterations", "every", "count"), SIZES)
def test_skrl_trains_the_same_policy_as_without_failures(iterations, every, count):
    pytest.importorskip("skrl.agents.torch")
    import skrlppo

    timesteps = 64 * iterations
    factories = [skrlppo.make_env(every // 2 + 7 * i, count) for i in range(4)]
    envs = ActorVectorEnv(factories, envs_per_actor="auto", on_failure="replay", restart=FOREVER)
    policy = skrlppo.train(envs, timesteps)
    whole = skrlppo.train(SyncVectorEnv([skrlppo.make_env(0, 0)] * 4), timesteps)
    assert sum(actor.incarnation for actor in envs.actors) >= count
    assert_same_weights(policy, whole)
