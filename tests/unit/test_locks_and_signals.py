"""No signal handler runs under the lock of an actor: it may wait for a thread that needs the lock."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import signal
import threading
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import SOON

import envactors as ea
from envactors.actor import core, pool
from envactors.testing import EchoEnv
from envactors.vector import build
from envactors.vector.access import VectorAccess

SNAPSHOT = ea.SnapshotPolicy(lambda env: env.steps, lambda env, steps: setattr(env, "steps", steps))


def handle(*_):
    """A signal handler of the user's."""


class WatchedLock:
    """A reentrant lock that notes where it is taken while handlers may run."""

    taken_at: list[str]

    def __init__(self):
        self._lock = threading.RLock()

    def __enter__(self):
        self._lock.acquire()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGALRM) is handle:
            caller = traceback.extract_stack(limit=2)[0]
            self.taken_at.append(f"{caller.filename}:{caller.lineno}")

    def __exit__(self, *_):
        self._lock.release()


@pytest.fixture
def taken_at(monkeypatch):
    """The places where the lock was taken while handlers may run."""
    WatchedLock.taken_at = []
    for module in (core, build, pool):
        monkeypatch.setattr(module, "threading", SimpleNamespace(RLock=WatchedLock))
    before = signal.signal(signal.SIGALRM, handle)
    yield WatchedLock.taken_at
    signal.signal(signal.SIGALRM, before)


def use_actor(backend):
    with ea.spawn(EchoEnv, backend=backend) as actor:
        assert actor.get("steps").result(SOON) == 0
        future = actor.get("steps")
        with contextlib.suppress(ea.ActorError):  # threads cannot be ended
            future.abort()
        concurrent.futures.wait([future])
        assert isinstance(actor.state, ea.ActorState)
        actor.stats()
        actor.stacks()
        actor.renew().result(SOON)
        actor.kill(restart=True)
        assert actor.get("steps").result(SOON) == 0
        actor.kill()


def use_pool(backend):
    with ea.ActorPool(EchoEnv, 2, backend=backend) as actors:
        assert len(list(actors.map("step", range(4)))) == 4
        future = actors.submit("step", 1)
        future.cancel()
        concurrent.futures.wait([future])


def use_vector(envs, path):
    for _ in range(3):
        envs.reset(seed=0)
        envs.step([1, 2, 3])
        envs.step([1], env_ids=[1])
        envs.send([1, 2, 3])
        envs.recv()
        access = VectorAccess(envs)
        access.start_step([1, 2, 3])
        access.finish_step()
        for future in envs.submit([1, 2, 3]):
            assert future.result(SOON)
        with ea.trace(path / "trace.json"):
            envs.step([1, 2, 3])
        envs.stats()
        envs.get_attr("steps")
        envs.restore(envs.snapshot(env_ids=[0]))
        envs[0].stacks()
        assert isinstance(envs.actors[0].state, ea.ActorState)
        envs.actors[0].renew().result(SOON)


def use_policy(envs):
    envs.set_policy(lambda: lambda obs, context: np.zeros(len(obs), np.int64))
    envs.reset(seed=0)
    envs.rollout(4)
    for future in envs.rollout_each(4):
        future.result(SOON)
    envs.evaluate(2)


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_an_actor_in_use_runs_no_handler_under_its_lock(taken_at, backend):
    use_actor(backend)
    use_pool(backend)
    assert sorted(set(taken_at)) == []


@pytest.mark.parametrize("backend", ["thread", "inline"])
@pytest.mark.parametrize("per_actor", [1, 2])
def test_a_vector_in_use_runs_no_handler_under_its_lock(taken_at, backend, per_actor, tmp_path):
    make = functools.partial(EchoEnv, episode_length=20)
    with ea.VectorEnv([make] * 3, envs_per_actor=per_actor, backend=backend, snapshot=SNAPSHOT) as envs:
        use_vector(envs, tmp_path)
        use_policy(envs)
    assert sorted(set(taken_at)) == []


def test_a_worker_that_an_interrupt_left_inconsistent_is_replaced_without_a_handler_under_the_lock(taken_at):
    with ea.VectorEnv([EchoEnv], backend="thread") as envs:
        envs.reset(seed=0)
        envs.actors[0]._supervisor.core.is_inconsistent = True
        envs._core.pending.is_disturbed = True
        envs.reset(seed=0)
        assert envs.actors[0].incarnation == 1
    assert sorted(set(taken_at)) == []


def test_a_trace_runs_no_handler_under_its_lock(taken_at, monkeypatch, tmp_path):
    with ea.VectorEnv([EchoEnv], backend="thread"):
        recording = ea.trace(tmp_path / "trace.json")
        monkeypatch.setattr(recording, "_lock", WatchedLock())
        with recording:
            pass
    assert sorted(set(taken_at)) == []
