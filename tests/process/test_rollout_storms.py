"""Long rollouts whose workers are killed all the while: the same as a loop of steps that nobody disturbs."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
from storms import COUNT, checksum_of_loop, checksum_of_rollouts

import envactors as ea
from envactors.state import gymnasium_snapshot

STEPS = 128


def make_balancer():
    def policy(obs, context):
        noise = context.rng.normal(size=len(obs))
        return (obs[:, 2] + 0.1 * noise > 0).astype(np.int64), {"noise": noise}

    return policy


def make_hopper_policy():
    def policy(obs, context):
        noise = context.rng.normal(size=(len(obs), 3))
        return np.tanh(obs[:, :3] + 0.5 * noise).astype(np.float32), {"noise": noise}

    return policy


def compare(make, make_policy, total, seconds, **options):
    """Compare and return the longest replay, and the restarts."""
    rollouts = -(-total // (COUNT * STEPS))
    loop = checksum_of_loop(make, make_policy, rollouts, STEPS, **options)
    undisturbed, _, restarts = checksum_of_rollouts(make, make_policy, rollouts, STEPS, **options)
    assert restarts == 0
    assert undisturbed == loop
    disturbed, longest, restarts = checksum_of_rollouts(make, make_policy, rollouts, STEPS, seconds, **options)
    assert disturbed == undisturbed
    return longest, restarts


@pytest.mark.parametrize(
    ("total", "seconds", "least"),
    [
        (4_000, 0.1, 0),
        pytest.param(60_000, 0.2, 1, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(1_000_000, 0.5, 10, marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_many_rollouts_with_kills_give_the_observations_of_a_loop(total, seconds, least):
    """Each episode has a seed of its own: at most one is replayed, and the rest of a rollout."""
    make = functools.partial(gymnasium.make, "CartPole-v1")
    longest, restarts = compare(make, make_balancer, total, seconds, seed_episodes=True, max_journal=1000)
    assert restarts >= least
    assert longest <= 500 + STEPS


@pytest.mark.parametrize(
    "total",
    [
        pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_many_rollouts_of_an_engine_with_kills_give_the_observations_of_a_loop(total):
    """Seeded once: what brings them back is their snapshots."""
    pytest.importorskip("mujoco")
    make = functools.partial(gymnasium.make, "Hopper-v5")
    # A fork server that has imported the engine starts a process in a quarter of the time between two kills.
    backend = ea.ProcessBackend(preload=("gymnasium", "mujoco"))
    options = {"snapshot": gymnasium_snapshot(every=STEPS), "max_journal": 1000, "backend": backend}
    longest, restarts = compare(make, make_hopper_policy, total, 0.5, **options)
    assert restarts >= 5
    assert longest <= 3 * STEPS
