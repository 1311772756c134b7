"""A helper process is killed, or does not answer: its workers end with it, and its actors restart on another one."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from breeder import Breeder, assert_gone, helpers_of, is_there
from helpers import SOON, is_gone, promised, wait_until
from test_left_behind import running

import envactors as ea
from envactors.process import helper
from envactors.system.choice import PORTABLE
from envactors.testing import EchoEnv

pytestmark = [pytest.mark.fresh_processes, pytest.mark.skipif(PORTABLE, reason="workers do not end with their helper")]

ONCE = ea.RestartPolicy(max_restarts=1, backoff=1000.0)


class Child(Breeder):
    """Waits until it has been called twice."""

    def count_up(self, path):
        """Count how often it was called, and wait unless that is the second time."""
        with Path(path).open("a") as file:
            file.write("x")
        while len(Path(path).read_text()) < 2:
            time.sleep(0.01)
        return len(Path(path).read_text())


def helper_of(actor):
    """Return the helper process that has forked the worker of an actor."""
    wait_until(lambda: actor.state is ea.ActorState.IDLE)
    return psutil.Process(actor.pid).parent()


def loky_helpers():
    """Return the helper processes that only watch workers."""
    return [process for process in helpers_of(os.getpid()) if '"preload": null' in " ".join(process.cmdline())]


@pytest.fixture
def warnings(caplog):
    """Returns a function that returns the warnings so far."""
    caplog.set_level(logging.INFO, "envactors")
    return lambda: [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_all_actors_restart_without_counting_it_and_one_warning_says_so(warnings):
    with ea.spawn(Child, restart=ONCE) as first, ea.spawn(Child, restart=ONCE) as second:
        lost, pids = helper_of(first), (first.pid, second.pid)
        assert helper_of(second) == lost
        lost.kill()
        wait_until(lambda: first.incarnation == second.incarnation == 1)
        assert helper_of(first) == helper_of(second) != lost
        assert all(map(is_gone, pids))
        for actor in (first, second):
            assert (actor.stats().restarts, actor.stats().last_failure) == (0, None)
        wait_until(warnings)
        assert warnings() == [
            "the helper process was killed by signal 9 (SIGKILL), and its workers have ended with it: 2 actors restart"
        ]


def test_a_call_that_was_running_fails_and_one_that_may_be_retried_runs_again(tmp_path):
    with ea.spawn(Child, restart=ONCE) as actor, ea.spawn(Child, restart=ONCE) as other:
        lost = helper_of(actor)
        paths = [tmp_path / "again", tmp_path / "fails"]
        again = actor.options(retries=1).count_up(str(paths[0]))
        fails = other.count_up(str(paths[1]))
        wait_until(lambda: all(path.exists() for path in paths))
        lost.kill()
        with pytest.raises(
            ea.ActorDiedError, match="was killed, since its helper process was lost, in count_up"
        ) as info:
            fails.result(SOON)
        assert (info.value.aborted, info.value.signal) == (False, signal.SIGKILL)
        assert again.result(SOON) == 2
        assert paths[1].read_text() == "x"


def test_steps_go_on_however_often_the_helper_is_killed(warnings):
    with ea.VectorEnv([EchoEnv] * 4, envs_per_actor=2, on_failure="renew", restart=ONCE) as envs:
        envs.reset(seed=0)
        envs.step([1] * 4)
        for round_ in range(4):
            lost = helper_of(envs[0])
            pids = [child.pid for child in lost.children()]
            begun = time.monotonic()
            lost.kill()
            wait_until(lambda pids=pids: all(map(is_gone, pids)), promised(1.0))
            while envs.step([1] * 4)[3].any():  # truncated
                pass
            assert time.monotonic() - begun < promised(3.0)
            assert {envs[index].incarnation for index in range(4)} == {round_ + 1}
        assert sum(envs[index].stats().restarts for index in range(4)) == 0
        wait_until(lambda: len(warnings()) == 4)


def test_the_process_groups_of_the_workers_end_with_their_helper():
    with ea.spawn(Child, restart=ONCE) as actor:
        children = [psutil.Process(pid) for pid in actor.of_own_group().result(SOON)]
        helper_of(actor).kill()
        assert_gone(children)
        assert actor.getpid().result(SOON) == actor.pid


def test_a_helper_that_does_not_answer_is_replaced_at_the_next_start(monkeypatch, warnings):
    assert helper._FORK_PATIENCE == 30.0
    monkeypatch.setattr(helper, "_FORK_PATIENCE", 0.5)
    with ea.spawn(Child, restart=ONCE) as actor, ea.spawn(Child, restart=ONCE) as other:
        lost = helper_of(actor)
        assert helper_of(other) == lost
        lost.suspend()
        assert actor.getpid().result(SOON) == actor.pid  # everything else works
        renewal = actor.renew()
        assert renewal.result(SOON) == 1
        wait_until(lambda: is_gone(lost.pid) and other.incarnation == 1)
        assert other.getpid().result(SOON) == other.pid
        assert other.stats().restarts == actor.stats().restarts == 0
        wait_until(warnings)
        (text,) = warnings()
        assert text.startswith("the helper process did not answer for 0.5 s and was killed")
        assert text.endswith(": 1 actor restarts")


def test_crashes_are_noticed_and_closing_works_while_the_helper_is_stopped(monkeypatch):
    monkeypatch.setattr(helper, "_FORK_PATIENCE", 0.5)
    with ea.spawn(Child) as actor, ea.spawn(Child) as other:
        stopped = helper_of(actor)
        stopped.suspend()
        assert helper_of(other) == stopped
        crash = actor.exit_now()
        with pytest.raises(ea.ActorDiedError):
            crash.result(SOON)
        begun = time.monotonic()
        other.close(timeout=1.0)
        assert time.monotonic() - begun < promised(2.0)
    assert is_gone(stopped.pid)


def test_a_helper_that_is_killed_during_a_start_delays_it_only():
    with ea.spawn(Child, restart=ONCE) as actor:
        lost = helper_of(actor)
        lost.suspend()
        renewal = actor.renew()
        wait_until(lambda: actor.pid is None)
        lost.kill()
        assert renewal.result(SOON) == 1
        assert actor.stats().restarts == 0


KILLED = """
import os, sys
import envactors as ea
from breeder import Breeder, helpers_of

actor = ea.spawn(Breeder, backend=ea.ProcessBackend(start_method=sys.argv[1]))
pids = [*actor.of_own_group().result(30), actor.getpid().result(30)]
if sys.argv[1] == "forkserver":
    pids += actor.escape().result(30)
(helper,) = helpers_of(os.getpid())
if sys.argv[2] == "stopped":
    helper.suspend()
else:
    helper.kill()
    helper.wait()
    ea.spawn(Breeder, backend=ea.ProcessBackend(start_method=sys.argv[1])).getpid().result(30)
actor.hang_in_c()
print(*pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("method", "state"), [("forkserver", "stopped"), ("loky", "stopped"), ("loky", "replaced")])
def test_nothing_survives_a_caller_whose_helper_was_stopped_or_replaced(method, state):
    with running(KILLED, method, state) as (caller, everybody):
        caller.kill()
        assert_gone(everybody)


def test_workers_that_loky_has_started_live_on_without_their_helper():
    backend = ea.ProcessBackend("loky")
    restart = ea.RestartPolicy(backoff=0.0)
    with ea.spawn(Child, backend=backend) as actor, ea.spawn(Child, backend=backend, restart=restart) as other:
        pid = actor.getpid().result(SOON)
        children = [psutil.Process(pid) for pid in other.of_own_group().result(SOON)]
        (lost,) = loky_helpers()
        lost.kill()
        os.kill(other.pid, signal.SIGKILL)
        assert_gone(children)
        wait_until(lambda: other.incarnation == 1)
        assert other.getpid().result(SOON) != pid  # its start has waited for the next helper
        assert (actor.getpid().result(SOON), actor.incarnation) == (pid, 0)
        (replaced,) = loky_helpers()
        assert is_there(replaced)
