"""Options of vectors: environment variables by actor, and names."""

from __future__ import annotations

import os

import pytest

import envactors as ea
from envactors.testing import EchoEnv


class Placed(EchoEnv):
    """An env that was made on a device."""

    def device(self):
        return os.environ.get("DEVICE")


def test_a_function_gives_each_actor_its_variables():
    with ea.VectorEnv([Placed] * 5, envs_per_actor=2, env_vars=lambda index: {"DEVICE": str(index % 2)}) as envs:
        assert envs.call("device") == ["0", "0", "1", "1", "0"]
    with ea.VectorEnv([Placed] * 2, env_vars=lambda index: {"DEVICE": "7"} if index else None) as envs:
        assert envs.call("device") == [None, "7"]


def test_a_function_gives_each_actor_of_a_pool_its_variables():
    def place(index):
        return {"DEVICE": f"gpu {index}"}

    with ea.spawn(Placed, env_vars=place) as actor:
        assert actor.device().result() == "gpu 0"
    with ea.ActorPool(Placed, 2, env_vars=place) as pool:
        assert [actor.device().result() for actor in pool.actors] == ["gpu 0", "gpu 1"]
    with ea.Executor(1, env_vars=place) as executor:
        assert executor.submit(os.getenv, "DEVICE").result() == "gpu 0"
    with ea.SessionPool(Placed, 2, env_vars=place) as pool, pool.session() as one, pool.session() as other:
        assert {one.device().result(), other.device().result()} == {"gpu 0", "gpu 1"}


@pytest.mark.parametrize("env_vars", [3, lambda index: [index]])
def test_env_vars_of_another_kind_are_refused(env_vars):
    for make in (lambda: ea.VectorEnv([Placed], env_vars=env_vars), lambda: ea.spawn(Placed, env_vars=env_vars)):
        with pytest.raises(TypeError, match="or a function of the actor's index"):
            make()


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_a_name_is_the_prefix_of_the_actors_names(backend):
    with ea.VectorEnv([Placed] * 3, envs_per_actor=2, name="eval", backend=backend) as envs:
        assert [actor.name for actor in envs.actors] == ["eval-envs-0-1", "eval-envs-2-2"]
    with ea.VectorEnv([Placed], name="train", standbys=int(backend == "process"), backend=backend) as envs:
        assert envs.actors[0].name == "train-env-0"
    with ea.VectorEnv([Placed], name="", backend=backend) as envs:
        assert envs.actors[0].name == "env-0"


def test_a_name_is_a_text():
    with pytest.raises(ea.VectorInputError, match="name is 3: expected a str"):
        ea.VectorEnv([Placed], name=3)
