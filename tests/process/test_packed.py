"""The promises of single actors hold with three envs per actor, too.

These are the promises `crash`, `deadline`, `stale`, `deliberate`, `own-error`, `pickling`, `refused`, `caller-dies`,
`close`, `rounds`, and `threads`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest
from helpers import FORK_SERVER, SOON, ExplodesOnArrival, FaultyEcho, TwoArguments, is_gone, promised, wait_until

import envactors as ea
from envactors.testing import EchoEnv

FAST = ea.RestartPolicy(max_restarts=20, backoff=0.0)


def packed(count=3, **options):
    options = {"backend": FORK_SERVER, **options}
    return ea.VectorEnv([lambda i=i: FaultyEcho(EchoEnv(i)) for i in range(count)], envs_per_actor=3, **options)


class Verbose(EchoEnv):
    """Returns a large info for action 1, raises for 2, and crashes for 3."""

    def step(self, action):
        if action == 2:
            raise KeyError("raised")
        if action == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return *super().step(action)[:4], {"long": "x" * 100_000}


@pytest.mark.parametrize(("fault", "status"), [("crash", (None, 9)), ("segfault", (None, 11)), ("exit", (3, None))])
def test_a_crash_in_a_step_is_reported_within_a_second(fault, status):
    with packed(4, restart=FAST) as envs:
        envs.reset(seed=0)
        envs[1].arm(fault).result(SOON)
        pid = envs[1].pid
        begun = time.monotonic()
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([1] * 4)
        assert time.monotonic() - begun < promised(1.0)
        failures = caught.value.failures
        assert failures.keys() == {1, 2}
        assert (failures[1].exitcode, failures[1].signal) == status
        assert (failures[1].index, failures[1].pid, failures[1].method) == (1, pid, "step")
        assert "step of env 1 was running" in str(failures[2])
        assert caught.value.batch.env_ids.tolist() == [0, 3], "siblings go on"
        envs.reset(env_ids=[0, 1, 2])
        assert envs.step([1] * 4)[0][:, 1].tolist() == [1, 1, 1, 2]


def test_a_crash_in_a_factory():
    def broken():
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ea.ActorStartError) as caught:
        ea.VectorEnv([FaultyEcho, broken, FaultyEcho], envs_per_actor=3, restart=ea.RestartPolicy(max_restarts=0))
    assert caught.value.signal == signal.SIGKILL


@pytest.mark.parametrize("fault", ["sleep", "hang_in_c", "stop"])
def test_a_deadline_is_enforced_from_outside(fault):
    with packed(restart=FAST, deadlines=ea.Deadlines(step=0.5)) as envs:
        envs.reset(seed=0)
        envs[1].arm(fault).result(SOON)
        begun = time.monotonic()
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([1] * 3)
        assert 0.5 <= time.monotonic() - begun < promised(1.5)
        failures = caught.value.failures
        assert isinstance(failures[1], ea.ActorTimeoutError)
        assert isinstance(failures[2], ea.ActorDiedError)
        assert ("in _" in failures[1].stacks) == (fault != "stop")


def test_a_timeout_does_not_mix_up_results():
    with packed(restart=FAST) as envs:
        envs.reset(seed=0)
        pid = envs[0].pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ea.VectorTimeoutError):
            envs.step([1, 2, 3], timeout=0.1)
        os.kill(pid, signal.SIGCONT)
        assert sorted(envs.recv().obs[:, 2].tolist()) == [1, 2, 3]
        assert envs.step([4, 5, 6])[0][:, 2].tolist() == [4, 5, 6]
        assert envs.stats().actors[0].stale == 0


def test_exceptions_and_unpicklable_values_fail_only_their_own_call():
    with packed(restart=FAST) as envs:
        envs.reset(seed=0)
        with pytest.raises(TwoArguments) as caught:
            envs[1].fail(TwoArguments, 3, "x").result(SOON)
        assert (caught.value.code, caught.value.detail) == (3, "x")
        for call in (envs[1].get_lock, lambda: envs[1].echo(ExplodesOnArrival())):
            with pytest.raises(ea.SerializationError) as lost:
                call().result(SOON)
            assert lost.value.index == 1
        envs[2].arm("raise").result(SOON)
        with pytest.raises(ea.VectorStepError) as failed:
            envs.step([1] * 3)
        assert failed.value.failures.keys() == {2}
        assert failed.value.batch.env_ids.tolist() == [0, 1]
        assert envs.step([2] * 3)[0][:, 2].tolist() == [2, 2, 2], "nothing died, no reset is needed"
        with pytest.raises(ValueError, match="2 actions for 3 envs"):
            envs.step([1, 2])


def test_an_env_is_announced_as_lost_whichever_process_held_its_episode():
    """Two envs ask at once, and the processes that held their episodes were another one each."""
    with packed(2, on_failure="renew", autoreset="same_step", restart=FAST) as envs:
        envs.reset(seed=0)
        envs[1].arm("crash").result(SOON)
        envs.send([1, 1])
        batch = envs.recv()
        assert sorted(zip(batch.env_ids.tolist(), batch.incarnations.tolist(), strict=True)) == [(0, 0), (1, 1)]
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        wait_until(lambda: envs.actors[0].incarnation == 2 and envs.actors[0].state is ea.ActorState.IDLE)
        envs.send([2, 2])
        batch = envs.recv()
        assert batch.incarnations.tolist() == [2, 2]
        assert ["failure" in info for info in batch.infos] == [True, True]
        assert batch.obs[:, 1].tolist() == [0, 0], "both were reset"


def test_an_idle_worker_lives_on_and_deliberate_ends_are_not_counted():
    with packed(deadlines=ea.Deadlines(call=0.2, step=0.2, reset=0.2)) as envs:
        envs.reset(seed=0)
        pid = envs[0].pid
        time.sleep(0.6)
        envs.step([1] * 3)
        assert envs[0].pid == pid
        envs.actors[0].renew().result(SOON)
        envs.actors[0].kill(restart=True)
        envs.reset(seed=0)
        assert envs.stats().actors[0].restarts == 0
        assert is_gone(pid)


@pytest.mark.parametrize("fault", ["none", "sleep", "hang_in_c", "stop", "crash"])
def test_close_returns_in_time(fault):
    envs = packed(deadlines=ea.Deadlines(), restart=FAST)
    envs.reset(seed=0)
    if fault != "none":
        envs[1].arm(fault).result(SOON)
    envs.send([1] * 3)
    begun = time.monotonic()
    envs.close(0.5)
    assert time.monotonic() - begun < promised(1.5)
    envs.close()


def test_every_env_knows_its_index_and_threads_are_capped(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with packed(4, backend="process") as envs:
        assert [context.index for context in envs.call("context")] == [0, 1, 2, 3]
        assert [context.name for context in envs.call("context")] == ["envs-0-2"] * 3 + ["envs-3-3"]
        assert envs.call("environ", "OMP_NUM_THREADS") == ["1"] * 4


def test_rounds_of_create_renew_close_leave_nothing():
    for _ in range(10):
        with packed(6) as envs:
            envs.reset(seed=0)
            for renewal in [actor.renew() for actor in envs.actors]:
                renewal.result(SOON)
            envs.reset()
            envs.step(np.zeros(6, int))


def test_when_the_caller_is_killed_everything_is_gone():
    caller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                """
                import json
                import envactors as ea
                from envactors.testing import FaultyEnv

                envs = ea.VectorEnv([FaultyEnv] * 6, envs_per_actor=3)
                envs.reset(seed=0)
                envs[1].arm("hang_in_c").result()
                envs.send([1] * 6)
                print(json.dumps([actor.pid for actor in envs.actors]), flush=True)
                envs.recv()
                """
            ),
        ],
        stdout=subprocess.PIPE,
    )
    pids = json.loads(caller.stdout.readline())
    os.kill(caller.pid, signal.SIGKILL)
    caller.communicate(timeout=100)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), patience=5.0)


@pytest.mark.parametrize("kind", ["info", "exception"])
def test_what_does_not_fit_into_a_row_is_not_lost_with_a_later_env(kind):
    with ea.VectorEnv([Verbose, Verbose], envs_per_actor=2, restart=FAST, backend=FORK_SERVER) as envs:
        envs.reset(seed=0)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([1 if kind == "info" else 2, 3])
        assert isinstance(caught.value.failures[1], ea.ActorDiedError)
        if kind == "info":
            assert caught.value.failures.keys() == {1}
            assert caught.value.batch.infos == [{"long": "x" * 100_000}]
        else:
            assert isinstance(caught.value.failures[0], KeyError)
