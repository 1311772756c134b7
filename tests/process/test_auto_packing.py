"""``envs_per_actor="auto"``: as many actors as there are cores for, with the envs spread evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import envactors as ea
from envactors.backends.base import Backend
from envactors.testing import EchoEnv
from envactors.vector import inputs


@given(st.integers(1, 100), st.integers(1, 64))
def test_envs_are_spread_evenly_over_the_cores(num_envs, cores):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backend, "count_cores", lambda _: cores)
        groups, _ = inputs.group_envs(list(range(num_envs)), "auto", None, ea.ProcessBackend())
    sizes = [len(group) for group in groups]
    assert [env for group in groups for env in group] == list(range(num_envs))
    assert len(sizes) == min(num_envs, cores)
    assert sizes[0] == max(sizes) <= min(sizes) + 1


def test_quotas_of_containers_count(monkeypatch):
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")  # where loky looks beside affinity and cgroups
    with ea.VectorEnv([EchoEnv] * 3, envs_per_actor="auto") as envs:
        assert len(envs.actors) == 1


def test_uneven_actors_step_and_renew(monkeypatch):
    monkeypatch.setattr(Backend, "count_cores", lambda _: 2)
    with ea.VectorEnv([EchoEnv] * 5, envs_per_actor="auto", on_failure="renew", standbys=1) as envs:
        assert len(envs.actors) == 2
        envs.reset(seed=0)
        envs.actors[1].kill(restart=True)
        obs = envs.reset(seed=0)[0]
        assert len(obs) == 5


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "many", None])
def test_other_values_of_envs_per_actor_are_rejected(value):
    with pytest.raises(ea.VectorInputError, match=r"envs_per_actor is .*: expected an int >= 1, or 'auto'"):
        ea.VectorEnv([EchoEnv], envs_per_actor=value)


def test_recycling_needs_an_actor_per_env(monkeypatch):
    monkeypatch.setattr(Backend, "count_cores", lambda _: 2)
    with pytest.raises(ea.VectorInputError, match="recycle with 2 envs per actor"):
        ea.VectorEnv([EchoEnv] * 4, envs_per_actor="auto", recycle=ea.RecyclePolicy(max_steps=5))
