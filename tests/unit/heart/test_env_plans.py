"""The rules of episodes in rollouts, which workers follow without `Episodes`."""

from __future__ import annotations

import random

import pytest

from envactors.rollout.env_plan import KIND_REPEAT, KIND_RESET, KIND_STEP, EnvPlan, kind_after_end, next_kind
from envactors.vector.episodes import Episodes
from envactors.vector.options import VectorSettings


@pytest.mark.parametrize("seed_episodes", [False, True])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("checks_resets", [True, False])
def test_a_plan_follows_the_rules_of_episodes(autoreset, seed_episodes, checks_resets):
    """After each step, the worker's plan has the kind and the seed of the next step that `Episodes` has."""
    rng = random.Random(0)
    episodes = Episodes(1, VectorSettings(autoreset=autoreset, seed_episodes=seed_episodes))
    episodes.set_root_seed(0, 5)
    episodes.record(0, ends=False, is_reset=True)
    if not checks_resets:
        episodes.disable_reset_checks()
    root_seed = 5 if seed_episodes else None
    after_end, within_step = kind_after_end(episodes), autoreset == "same_step"
    seed, number = episodes.next_seeds[0], episodes.episode_numbers[0]
    plan = EnvPlan(0, KIND_STEP, after_end, within_step, seed, root_seed, number)
    kinds = set()
    for _ in range(50):
        kinds.add(plan.kind)
        if plan.kind == KIND_REPEAT:
            break
        is_reset = plan.kind == KIND_RESET
        ends = not is_reset and rng.random() < 0.3
        episodes.record(0, ends=ends, is_reset=is_reset)
        if ends or is_reset:
            assert plan.pass_boundary() == (is_reset or within_step)
        assert (plan.kind, plan.seed) == (next_kind(episodes, 0), episodes.next_seeds[0])
    assert kinds == {KIND_STEP, after_end}


def test_a_worker_makes_the_plan_that_was_sent():
    plan = EnvPlan(3, KIND_RESET, KIND_STEP, True, 7, None, 2)
    assert EnvPlan(*plan.fields()).fields() == plan.fields() == (3, KIND_RESET, KIND_STEP, True, 7, None, 2)
