"""`make_vec`, and the names of options."""

from __future__ import annotations

import numpy as np
import pytest

import envactors as ea
from envactors.testing import EchoEnv


def test_an_id_of_gymnasium_makes_its_envs():
    gymnasium = pytest.importorskip("gymnasium")
    with ea.make_vec("CartPole-v1", 3, envs_per_actor=3) as envs:
        obs, _ = envs.reset(seed=7)
        assert len(envs.actors) == 1
        assert envs.get_attr("spec")[0].id == "CartPole-v1"
    env = gymnasium.make("CartPole-v1")
    np.testing.assert_array_equal(obs, [env.reset(seed=7 + i)[0] for i in range(3)])


def test_an_id_with_a_module_has_the_worker_import_it(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    (tmp_path / "registers_envs.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('There-v3', 'gymnasium.envs.classic_control:MountainCarEnv', max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with ea.make_vec("registers_envs:There-v3", 2) as envs:
        assert envs.reset(seed=0)[0].shape == (2, 2)
        assert envs.get_attr("spec")[1].max_episode_steps == 5


@pytest.mark.parametrize("factory", [EchoEnv, "envactors.testing:EchoEnv"])
def test_a_factory_makes_its_envs(factory):
    with ea.make_vec(factory, 2, standbys=1) as envs:
        assert len(envs.reset(seed=0)[0]) == 2


def test_an_unknown_id_is_the_error_of_gymnasium():
    pytest.importorskip("gymnasium")
    with pytest.raises(ea.ActorStartError, match="NoSuchEnv"):
        ea.make_vec("NoSuchEnv-v0", 1)


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_make_vec_rejects_an_invalid_number_of_envs(count):
    with pytest.raises(ea.VectorInputError, match=rf"num_envs is {count}: expected an int >= 1"):
        ea.make_vec(EchoEnv, count)


def test_an_unknown_option_names_the_nearest_one():
    with pytest.raises(TypeError, match=r"VectorEnv got the unknown option 'env_per_actor': did you mean 'envs_per_ac"):
        ea.VectorEnv([EchoEnv], env_per_actor=2)
    with pytest.raises(TypeError, match="unknown option 'colour': expected some of envs_per_actor, autoreset"):
        ea.make_vec(EchoEnv, 1, colour="red")


def test_the_options_are_those_that_have_defaults():
    from envactors.vector.options import OPTIONS

    assert list(ea.VectorOptions.__annotations__) == list(OPTIONS)
