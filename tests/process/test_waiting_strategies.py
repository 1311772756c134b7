"""How caller and workers wait for each other: with every strategy, each step is made and nothing wastes a core."""

from __future__ import annotations

import contextlib
import os
import time

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from helpers import SOON, wait_always, wait_until
from interleaving import when_this_thread_sleeps

import envactors as ea
from envactors.integrations.access import VectorAccess
from envactors.testing import EchoEnv
from envactors.vector.engine import RowEngine
from envactors.vector.table import POSTED
from envactors.vector.waiting import ResultWaiters


@pytest.mark.parametrize("spin", [True, False])
def test_idle_actors_use_no_cpu_time(spin):
    with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(2)], backend=ea.ProcessBackend(spin=spin)) as envs:
        envs.reset(seed=0)
        for turn in range(500):
            envs.step([turn] * 2)
        processes = [psutil.Process(), *(psutil.Process(actor.pid) for actor in envs.actors)]
        time.sleep(0.5)  # everything that had begun has ended
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(1.0)
        used = [sum(process.cpu_times()[:2]) - one for process, one in zip(processes, before, strict=True)]
        assert max(used) < 0.1, used


def test_idle_sessions_use_no_cpu_time(helper_processes):
    with ea.SessionPool(EchoEnv, 24, idle_timeout=600.0) as pool, contextlib.ExitStack() as leases:
        sessions = [leases.enter_context(pool.session(number)) for number in range(pool.size)]
        assert [session.echo(number).result(SOON) for number, session in enumerate(sessions)] == list(range(pool.size))
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        assert len(processes) > pool.size
        time.sleep(0.5)  # everything that had begun has ended
        before = sum(sum(process.cpu_times()[:2]) for process in processes)
        time.sleep(1.0)
        assert sum(sum(process.cpu_times()[:2]) for process in processes) - before < 0.1


def test_spin_is_checked():
    with pytest.raises(TypeError, match="spin is 3"):
        ea.ProcessBackend(spin=3)


class DiesOnce(gymnasium.Env):
    """Its first process crashes in its first step, once a file exists; the next process waits for another file."""

    observation_space = spaces.Box(0, 1, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, folder):
        self.folder = folder

    def reset(self, *, seed=None, options=None):
        return np.zeros(1), {}

    def step(self, action):
        if not (self.folder / "dead").exists():
            wait_until((self.folder / "waits").exists)
            (self.folder / "dead").touch()
            os._exit(3)
        wait_until((self.folder / "go").exists)
        return np.ones(1), 1.0, False, False, {}


def send_and_receive(envs):
    envs.send([0, 0])
    return envs.recv(timeout=SOON).rewards


@pytest.mark.parametrize(
    "ask",
    [
        lambda envs: envs.step([0, 0], timeout=SOON)[1],
        lambda envs: envs.step([0, 0], env_ids=[1, 0], timeout=SOON)[1],
        send_and_receive,
    ],
    ids=["step", "step of some", "recv"],
)
def test_a_thread_that_slept_through_a_restart_hears_the_new_process(monkeypatch, tmp_path, ask):
    wait = ResultWaiters.wait

    def wait_late(self, count_missing, deadline, **options):
        monkeypatch.undo()
        assert count_missing()
        (tmp_path / "waits").touch()
        wait_until(lambda: envs.actors[0].stats().restarts == 1 and set(envs._engine.table.status) == {POSTED})
        when_this_thread_sleeps((tmp_path / "go").touch)
        return wait(self, count_missing, deadline, **options)

    deadlines = ea.Deadlines(slow=None)  # nothing else wakes the thread
    with ea.VectorEnv(
        [lambda: DiesOnce(tmp_path)] * 2, envs_per_actor=2, on_failure="replay", deadlines=deadlines
    ) as envs:
        envs.reset(seed=0)
        monkeypatch.setattr(ResultWaiters, "wait", wait_late)
        began = time.monotonic()
        assert ask(envs).tolist() == [1, 1]
        assert time.monotonic() - began < SOON


def fall_asleep(envs):
    wait_always(envs, "spin")
    workers = [psutil.Process(actor.pid) for actor in envs.actors]
    wait_until(lambda: all(worker.status() == psutil.STATUS_SLEEPING for worker in workers))


@contextlib.contextmanager
def dozing():
    """A vector whose workers fall asleep between steps."""
    with ea.VectorEnv([EchoEnv] * 4, envs_per_actor=2) as envs:
        envs.reset(seed=0)
        yield envs


@pytest.fixture
def long_pauses(monkeypatch):
    """However long the pause between two steps, the caller expects its workers to spin through it."""
    monkeypatch.setattr("envactors.actor.spinning._SHORT_PAUSE", 1e9)


@pytest.mark.usefixtures("long_pauses")
def test_workers_whose_spin_has_ended_are_woken():
    with dozing() as envs:
        for turn in range(20):
            fall_asleep(envs)
            assert envs.step([turn] * 4)[0][:, 2].tolist() == [turn] * 4


@pytest.mark.usefixtures("long_pauses")
def test_workers_whose_spin_has_ended_are_woken_before_anybody_waits_for_them():
    with dozing() as envs:
        for turn in range(20):
            fall_asleep(envs)
            access = VectorAccess(envs)
            access.start_step(np.full(4, turn))
            slab = envs._engine.table.slab
            wait_until(lambda slab=slab: (slab.written_ids == slab.posted_ids).all())
            assert access.finish_step()[0][:, 2].tolist() == [turn] * 4


class BrokenOffError(Exception):
    @staticmethod
    def raised(*_):
        raise BrokenOffError


@pytest.mark.usefixtures("long_pauses")
@pytest.mark.parametrize("then", ["recv", "call"])
def test_a_step_is_made_whose_caller_is_interrupted_before_it_waits(then, monkeypatch):
    with dozing() as envs:
        for turn in range(5):
            fall_asleep(envs)
            with monkeypatch.context() as patch:
                patch.setattr(RowEngine, "wait_for_results", BrokenOffError.raised)
                with pytest.raises(BrokenOffError):
                    envs.step([turn] * 4)
            if then == "call":
                assert [envs[env].get("steps").result(SOON) for env in (0, 2)] == [turn + 1] * 2
            assert envs.recv(timeout=SOON).obs[:, 2].tolist() == [turn] * 4


@pytest.mark.usefixtures("long_pauses")
def test_a_caller_that_is_held_up_before_it_waits_loses_no_env(monkeypatch):
    """The deadlines pass meanwhile, of steps that have ended in time."""
    with ea.VectorEnv([EchoEnv] * 2, deadlines=ea.Deadlines(step=1.0)) as envs:
        envs.reset(seed=0)
        fall_asleep(envs)
        monkeypatch.setattr("envactors.vector.engine.spin_until_all", lambda *_: time.sleep(2.0))
        assert envs.step([3, 4])[0][:, 2].tolist() == [3, 4]
