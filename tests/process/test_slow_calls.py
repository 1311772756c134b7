"""Warnings about slow calls: which function of the env is running, once per call, and nothing is ended."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import threading
import time

import pytest
from helpers import SOON, wait_until

import envactors as ea
from envactors.testing import EchoEnv

SLOW = ea.Deadlines(slow=0.2)
BACKENDS = ["process", "thread", "inline"]


class Hanging(EchoEnv):
    """Hangs in a step, a reset, or a call until a file exists; it uses a core until there is another one."""

    def __init__(self, path, hangs_in="step"):
        super().__init__()
        self.path, self.hangs_in = path, hangs_in

    def _hang(self, method):
        while method == self.hangs_in and not self.path.exists():
            if self.path.with_suffix(".sleep").exists():
                time.sleep(0.01)
                continue
            for _ in range(200_000):
                pass  # a worker that sleeps shows no stacks

    def step(self, action):
        self._hang("step")
        return super().step(action)

    def reset(self, *, seed=None, options=None):
        self._hang("reset")
        return super().reset(seed=seed, options=options)

    def work(self):
        self._hang("work")
        return "done"


@pytest.fixture
def warnings(caplog):
    """Returns the warnings that were logged so far."""
    caplog.set_level(logging.WARNING, "envactors")
    return lambda: [record for record in list(caplog.records) if "has been running" in record.getMessage()]


def frames(record):
    return [line for line in record.getMessage().splitlines() if line.startswith("  File ")]


def run_until(done, path, function):
    """Runs a function that hangs, and lets it end once a condition holds."""
    thread = threading.Thread(target=lambda: (wait_until(done), path.touch()))
    thread.start()
    result = function()
    thread.join()
    return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hangs_in", ["step", "reset"])
def test_a_slow_step_or_reset_is_reported_with_the_frame_of_the_env_on_top(backend, hangs_in, tmp_path, warnings):
    path = tmp_path / "go"
    factories = [EchoEnv, lambda: Hanging(path, hangs_in)]
    with ea.VectorEnv(factories, envs_per_actor=2, backend=backend, deadlines=SLOW) as envs:
        if hangs_in == "reset":
            run_until(warnings, path, lambda: envs.reset(seed=0))
        else:
            envs.reset(seed=0)
            obs = run_until(warnings, path, lambda: envs.step([3, 4]))[0]
            assert len(obs) == 2, "nothing was ended"
        (record,) = warnings()
        assert record.getMessage().startswith(f"{hangs_in} of env 1 of actor ")
        assert (record.name, record.levelno, record.env_id) == ("envactors", logging.WARNING, 1)
        top = next(frame for frame in frames(record) if "sleep" not in frame and "pathlib" not in frame)
        assert top.endswith("in _hang")
        assert not [frame for frame in frames(record) if f"{os.sep}worker{os.sep}" in frame]
        assert envs.actors[0].incarnation == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slow_call_is_reported_once_and_the_next_one_again(backend, tmp_path, warnings):
    path = tmp_path / "go"
    with ea.spawn(lambda: Hanging(path, "work"), backend=backend, deadlines=SLOW) as actor:
        for count in (1, 2):
            begin = time.monotonic()

            def reported_and_looked_at_again(count=count, begin=begin):
                if len(warnings()) < count:
                    return False
                path.with_suffix(".sleep").touch()
                return time.monotonic() > begin + 3.5 * SLOW.slow

            future = run_until(reported_and_looked_at_again, path, actor.work)
            assert future.result(SOON) == "done"
            assert len(warnings()) == count
            assert warnings()[-1].getMessage().startswith("work of env 0 of actor ")
            path.unlink()
            path.with_suffix(".sleep").unlink()


class Sleeper(EchoEnv):
    """Sleeps in C code, which does not expect signals."""

    def sleep(self, seconds):
        began = time.monotonic()
        ctypes.CDLL(None).sleep(seconds)
        return time.monotonic() - began


def test_the_warning_interrupts_no_system_call(warnings):
    with ea.spawn(Sleeper, deadlines=SLOW) as actor:
        assert actor.sleep(2).result(SOON) > 1.9
        wait_until(warnings)
        (record,) = warnings()
        assert f"process {actor.pid} sleeps in a system call" in record.getMessage()
        assert "stacks() of its handle may interrupt that" in record.getMessage()
        # On request, it is interrupted; the first requests may come before it sleeps.
        future, stacks = actor.sleep(60), []
        wait_until(lambda: stacks.append(actor.stacks()) or future.done())
        assert future.result(SOON) < 59
        assert any("in sleep" in one for one in stacks)


def test_a_worker_that_cannot_give_its_stacks_is_reported_all_the_same(tmp_path, warnings):
    with ea.spawn(EchoEnv, deadlines=SLOW) as actor:
        actor.reset(seed=0).result(SOON)
        os.kill(actor.pid, signal.SIGSTOP)
        future = actor.step(3)
        wait_until(warnings)
        assert "no stacks came within 1 s" in warnings()[0].getMessage()
        os.kill(actor.pid, signal.SIGCONT)
        future.result(SOON)


def test_a_call_with_a_deadline_is_reported_and_then_ended(tmp_path, warnings):
    with ea.spawn(lambda: Hanging(tmp_path / "go"), deadlines=ea.Deadlines(step=1.0, slow=0.3)) as actor:
        step = actor.step(3)
        wait_until(warnings)
        (tmp_path / "go.sleep").touch()
        with pytest.raises(ea.ActorTimeoutError):
            step.result(SOON)
        assert len(warnings()) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_reported_without_slow(backend, tmp_path, warnings):
    path, hung = tmp_path / "go", tmp_path / "go.sleep"

    class Telling(Hanging):
        def work(self):
            hung.touch()
            return super().work()

    with ea.spawn(lambda: Telling(path, "work"), backend=backend, deadlines=ea.Deadlines(slow=None)) as actor:
        begin = time.monotonic()
        future = run_until(lambda: hung.exists() and time.monotonic() > begin + 0.5, path, actor.work)
        assert future.result(SOON) == "done"
        assert not warnings()


def test_an_idle_actor_is_not_checked(tmp_path):
    with ea.spawn(EchoEnv, deadlines=SLOW) as actor:
        actor.reset(seed=0).result(SOON)
        wait_until(lambda: actor._actor.deadline_watch.next_check_at == math.inf)
