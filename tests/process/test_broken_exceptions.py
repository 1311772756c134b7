"""Exceptions whose class is broken are told like any other, and the envs stay usable."""

from __future__ import annotations

import importlib
import logging

import gymnasium
import numpy as np
import pytest
from alfenvs import AlfEnv
from dingenvs import Bare
from helpers import FORK_SERVER
from pzenvs import Party

import envactors as ea
from envactors.observe.snapshot import take_snapshot

ALWAYS = ea.RestartPolicy(max_restarts=10**6, backoff=0)


class NoStr(Exception):
    def __str__(self):
        return self.response.text


class NoText(NoStr):
    __repr__ = NoStr.__str__


class NoReduction(Exception):
    def __reduce__(self):
        return self.response.text


class NoArgs(Exception):
    @property
    def args(self):
        raise RuntimeError("no args")


class NoCause(NoText):
    @property
    def __cause__(self):
        raise RuntimeError("no cause")


class Exiting(Exception):
    def __str__(self):
        raise SystemExit(3)

    __repr__ = __reduce__ = __str__


class NoAttributes(Exception):
    def __getattribute__(self, name):
        raise RuntimeError(name)


class Text(str):
    __slots__ = ()


class OddRepr(Exception):
    def __repr__(self):
        return Text("odd")


KINDS = [OddRepr, NoStr, NoText, NoReduction, NoArgs, NoCause, Exiting, NoAttributes]


class Raising(gymnasium.Env):
    """Raises an exception of a given class in a given method, once."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(5)
    armed = None, None

    def arm(self, method, kind):
        self.armed = method, kind

    def raise_in(self, method):
        if self.armed[0] == method:
            kind, self.armed = self.armed[1], (None, None)
            raise kind("x")

    def reset(self, *, seed=None, options=None):
        self.raise_in("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.raise_in("step")
        return np.zeros(2, np.float32), 1.0, False, False, {}

    def ask(self):
        self.raise_in("ask")
        return 1


def tells(error, kind):
    """Whether an error is of a kind, or says that its exception cannot be pickled."""
    return type(error) is kind or (type(error) is ea.SerializationError and kind.__name__ in str(error))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
@pytest.mark.parametrize("backend", [FORK_SERVER, "thread", "inline"])
def test_vector_tells_an_exception_of_a_broken_class(backend, on_failure, kind, caplog):
    caplog.set_level(logging.DEBUG)
    with ea.VectorEnv([Raising] * 2, backend=backend, on_failure=on_failure, restart=ALWAYS) as envs:
        for method in ("step", "reset", "ask"):
            envs.reset()
            envs[0].call("arm", method, kind).result()
            request = {"step": lambda: envs.step([0, 1])[4], "reset": lambda: envs.reset()[1]}.get(method)
            if method == "ask":
                with pytest.raises((kind, ea.SerializationError)) as told:
                    envs.call("ask")
                error = told.value
            elif on_failure == "raise":
                with pytest.raises(ea.VectorStepError, match=kind.__name__) as told:
                    request()
                error = told.value.failures[0]
            elif "failure" in (info := request()[0]):
                error = info["failure"]
            else:  # the replayed env does not raise again
                assert on_failure == "replay"
                continue
            assert tells(error, kind), (method, type(error))
            take_snapshot()
            envs.reset()
            envs.step([0, 1])
            assert envs.call("ask") == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium logs errors as warnings
@pytest.mark.parametrize("name", ["gymnasium.ActorVectorEnv", "sb3.ActorVecEnv"])
def test_dropins_tell_an_exception_of_a_broken_class(name, kind):
    package, _, dropin = name.partition(".")
    pytest.importorskip({"sb3": "stable_baselines3"}.get(package, package))
    make = getattr(importlib.import_module(f"envactors.integrations.{package}"), dropin)
    envs = make([Raising] * 2, backend=FORK_SERVER)
    requests = {
        "step": lambda: envs.step(np.array([0, 1])),
        "reset": envs.reset,
        "ask": lambda: envs.call("ask") if package == "gymnasium" else envs.env_method("ask"),
    }
    try:
        for method, request in requests.items():
            envs.reset()
            envs.vector[0].call("arm", method, kind).result()
            with pytest.raises((kind, ea.SerializationError)) as told:
                request()
            assert tells(told.value, kind)
            envs.reset()
            for again in requests.values():
                again()
    finally:
        envs.close()


def test_pettingzoo_tells_an_exception_of_a_broken_class():
    class Env(Party):
        def step(self, actions):
            raise NoText("x")

    module = importlib.import_module("envactors.integrations.pettingzoo")
    with module.ActorParallelEnv([Env] * 2, backend=FORK_SERVER) as envs:
        envs.reset()
        for _ in range(2):
            with pytest.raises(ea.VectorStepError, match="NoText"):
                envs.step([{agent: envs.copies[0].action_space(agent).sample() for agent in envs.agents}] * 2)
            envs.reset()


def test_ding_tells_an_exception_of_a_broken_class(caplog):
    class Env(Bare):
        def seed(self, seed, dynamic_seed=None):
            raise NoText("x")

    module = importlib.import_module("envactors.integrations.ding")
    manager = module.AsyncActorEnvManager([Env] * 2, max_retry=1, backend=FORK_SERVER)
    try:
        manager.seed(3)
        manager.launch()
        assert "NoText" in caplog.text
    finally:
        manager.close()


def test_ding_tells_a_broken_exception_of_a_reset():
    class Env(Bare):
        def reset(self):
            raise NoText("x")

    module = importlib.import_module("envactors.integrations.ding")
    manager = module.AsyncActorEnvManager([Env] * 2, max_retry=2, backend=FORK_SERVER)
    with pytest.raises(RuntimeError, match="NoText"):
        manager.launch()


def test_alf_tells_an_exception_of_a_broken_class():
    class Env(AlfEnv):
        def step(self, action):
            raise NoText("x")

    module = importlib.import_module("envactors.integrations.alf")
    envs = module.ActorParallelEnvironment([Env] * 2)
    try:
        envs.reset()
        with pytest.raises(RuntimeError, match="NoText"):
            envs.step(np.zeros(2, np.int64))
        envs.reset()
    finally:
        envs.close()
