"""Where no process can be lost, ``on_failure="replay"`` does as ``"renew"``."""

from __future__ import annotations

import operator
from typing import ClassVar

import pytest
from helpers import Echo

import envactors as ea
from envactors.testing import EchoEnv


class Saves:
    """The envs whose states were saved. Functions are pickled by reference."""

    envs: ClassVar[list[object]] = []


def note_save(env):
    Saves.envs.append(env)


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_no_states_are_saved_for_replays_that_never_come(backend):
    Saves.envs.clear()
    snapshot = ea.SnapshotPolicy(get=note_save, set=lambda env, state: None, every=2)
    with ea.VectorEnv([EchoEnv] * 2, backend=backend, on_failure="replay", snapshot=snapshot) as envs:
        envs.reset(seed=1)
        for _ in range(6):
            envs.step([1, 1])
        envs.call("reset")  # after all that was queued
    assert Saves.envs == []


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_an_env_that_raises_continues_with_a_new_episode(backend):
    with ea.VectorEnv([Echo] * 2, backend=backend, on_failure="replay") as envs:
        envs.reset(seed=1)
        envs.set_attr("wants", [("raise", (LookupError, "lost")), None])
        _, rewards, _, truncated, infos = envs.step([5, 5])
        assert (rewards.tolist(), truncated.tolist()) == ([0.0, 1.0], [True, False])
        assert isinstance(infos[0]["failure"], LookupError)
        assert envs.step([5, 5])[1].tolist() == [0.0, 2.0]
        assert envs.step([5, 5])[1].tolist() == [1.0, 3.0]


class ListsInfos(Echo):
    """An env whose infos are no dicts."""

    def step(self, action):
        return *super().step(action)[:4], [action]


@pytest.mark.parametrize("backend", ["thread", "inline"])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_an_env_whose_infos_are_no_dicts_continues_after_a_failure(backend, autoreset):
    with ea.VectorEnv([ListsInfos] * 2, backend=backend, autoreset=autoreset, on_failure="renew") as envs:
        envs.reset(seed=1)
        assert envs.step([5, 6])[4] == [[5], [6]]
        envs.set_attr("wants", [("raise", (LookupError, "lost")), None])
        *_, truncated, infos = envs.step([5, 6])
        assert truncated.tolist() == [True, False]
        assert isinstance(infos[0]["failure"], LookupError)
        assert infos[1] == [6]
        envs.reset(seed=1)
        assert envs.step([7, 8])[4] == [[7], [8]]


class Unloadable:
    """A function that a worker cannot unpickle."""

    def __call__(self, *_args):
        pass

    def __reduce__(self):
        return operator.truediv, (1, 0)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_snapshot_function_that_cannot_be_unpickled_is_not_blamed_on_the_factory(backend):
    snapshot = ea.SnapshotPolicy(Unloadable(), Unloadable())
    with pytest.raises(ea.ActorStartError, match=r"the snapshot function of .* raised ZeroDivisionError") as caught:
        ea.VectorEnv([EchoEnv] * 2, envs_per_actor=2, backend=backend, on_failure="replay", snapshot=snapshot)
    assert caught.value.index == 1
