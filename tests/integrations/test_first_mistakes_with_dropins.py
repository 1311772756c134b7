"""Each drop-in refuses a single factory or a string in place of a list, and takes a number as its deadlines."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from helpers import Echo

import envactors as ea

# By module: the name of the drop-in, and of its first argument.
DROPINS = {
    "gymnasium": ("ActorVectorEnv", "env_fns"),
    "pettingzoo": ("ActorParallelEnv", "env_fns"),
    "sb3": ("ActorVecEnv", "env_fns"),
    "tianshou": ("ActorVectorEnv", "env_fns"),
    "torchrl": ("ActorEnv", "env_fns"),
    "alf": ("ActorParallelEnvironment", "env_constructors"),
    "ding": ("ActorEnvManagerV2", "env_fn"),
}


def dropin(module):
    name, argument = DROPINS[module]
    try:
        return getattr(importlib.import_module(f"envactors.integrations.{module}"), name), argument
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("module", DROPINS)
def test_a_single_factory_or_a_string_raises_with_an_example(module):
    kind, argument = dropin(module)
    for given, example in ((Echo, "[make]"), ("CartPole-v1", r"[lambda: gymnasium.make('CartPole-v1')]")):
        with pytest.raises(TypeError) as caught:
            kind(given)
        assert str(caught.value).startswith(f"{argument} is ")
        assert str(caught.value).endswith(f"For 8 envs write {example} * 8")


@pytest.mark.parametrize("module", [module for module in DROPINS if module != "ding"])
def test_deadlines_are_a_number_of_seconds_above_zero(module):
    kind, _ = dropin(module)
    with pytest.raises(ValueError, match=r"^deadlines is 0: expected Deadlines, or a number of seconds > 0"):
        kind([Echo], deadlines=0)


def test_a_number_is_the_deadline_of_each_call():
    gymnasium = pytest.importorskip("gymnasium")
    kind, _ = dropin("gymnasium")
    envs = kind([lambda: gymnasium.make("CartPole-v1")], deadlines=10.0)
    assert envs.reset(seed=1)[0].shape == (1, 4)
    envs.close()


@pytest.mark.parametrize("seed", [-1, [1.9, 2.9], ["1", "2"], 1.5, True, [-1, 2], "12", np.array(1.5)], ids=repr)
def test_a_seed_is_no_other_number_and_no_text(seed):
    gymnasium = pytest.importorskip("gymnasium")
    kind, _ = dropin("gymnasium")
    envs = kind([lambda: gymnasium.make("CartPole-v1")] * 2)
    with pytest.raises(ea.VectorInputError, match=r"^seed (is|has) .*: expected (an int|ints) >= 0"):
        envs.reset(seed=seed)
    assert envs.reset(seed=[None, 1])[0].shape == (2, 4)
    assert (envs.reset(seed=np.array(7))[0] == envs.reset(seed=7)[0]).all()
    envs.close()


@pytest.mark.parametrize("seed", [-1, 1.5], ids=repr)
def test_seeds_are_refused_at_the_reset_that_uses_them(seed):
    gymnasium = pytest.importorskip("gymnasium")
    kind, _ = dropin("sb3")
    envs = kind([lambda: gymnasium.make("CartPole-v1")] * 2)
    envs._seeds = [seed] * 2
    with pytest.raises(ea.VectorInputError, match=r"^seed has .*: expected ints >= 0"):
        envs.reset()
    envs.close()
