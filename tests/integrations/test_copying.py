"""Vectors, pools, handles, and drop-ins belong to the process that made them."""

from __future__ import annotations

import copy
import gc
import pickle

import cloudpickle
import gymnasium
import pytest

import envactors as ea
from envactors.integrations.gymnasium import ActorVectorEnv
from envactors.remote import LocalNodes

MAKERS = {
    "VectorEnv": lambda: ea.VectorEnv([make] * 2),
    "inline": lambda: ea.VectorEnv([make] * 2, backend="inline"),
    "ActorPool": lambda: ea.ActorPool(make, 2),
    "SessionPool": lambda: ea.SessionPool(make, 2),
    "ActorHandle": lambda: ea.spawn(make),
    "gymnasium": lambda: ActorVectorEnv([make] * 2),
}

DUPLICATIONS = pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps, cloudpickle.dumps])


def make():
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize("name", MAKERS)
@DUPLICATIONS
def test_it_can_be_neither_pickled_nor_copied(name, duplicate, capfd):
    made = MAKERS[name]()
    try:
        with pytest.raises(TypeError, match="belongs to the process that made it; send its results instead"):
            duplicate(made)
        gc.collect()
        assert capfd.readouterr().err == ""
    finally:
        made.close()


@DUPLICATIONS
def test_a_remote_backend_can_be_neither_pickled_nor_copied(duplicate):
    with pytest.raises(TypeError, match="RemoteBackend cannot be pickled or copied"):
        duplicate(ea.RemoteBackend(LocalNodes()))


@DUPLICATIONS
def test_a_future_can_be_neither_pickled_nor_copied(duplicate):
    with ea.spawn(make) as actor, pytest.raises(TypeError, match="ActorFuture cannot be pickled or copied"):
        duplicate(actor.reset())


@pytest.mark.parametrize(
    ("package", "module", "name"),
    [
        ("stable_baselines3", "sb3", "ActorVecEnv"),
        ("tianshou", "tianshou", "ActorVectorEnv"),
        ("torchrl", "torchrl", "ActorEnv"),
        ("mlagents_envs", "mlagents", "ActorEnvManager"),
        ("openenv", "openenv.environment", "ActorEnvironment"),
        ("pettingzoo", "pettingzoo", "ActorParallelEnv"),
        ("ray", "rllib.multi_agent", "ActorVectorMultiAgentEnv"),
        ("ding", "ding", "AsyncActorEnvManager"),
        ("alf", "alf", "ActorParallelEnvironment"),
    ],
)
def test_other_drop_ins_refuse_in_the_same_way(package, module, name):
    pytest.importorskip(package)
    drop_in = getattr(pytest.importorskip(f"envactors.integrations.{module}"), name)
    with pytest.raises(TypeError, match=f"{name} cannot be pickled or copied"):
        drop_in.__reduce__(drop_in.__new__(drop_in))
