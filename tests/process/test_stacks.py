"""`stacks()`: the current stacks of a worker's threads, whatever the worker is doing."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from helpers import SOON, Counter, promised, wait_for_path, wait_until
from nodes import preloading_backend, standing

import envactors as ea
from envactors.remote import LocalNodes
from envactors.testing import EchoEnv, FaultyEnv


@pytest.fixture(scope="module")
def far(helper_processes):
    """A backend of one node that stays."""
    backend = preloading_backend(LocalNodes(1))
    with standing(backend):
        yield backend


@pytest.fixture(params=["process", "node"])
def backend(request, far):
    return request.param if request.param == "process" else far


def test_stacks_show_the_running_call_which_continues(backend, tmp_path):
    with ea.spawn(Counter, backend=backend) as actor:
        running = actor.touch_then_wait(str(tmp_path / "begun"), str(tmp_path / "go on"))
        wait_for_path(tmp_path / "begun")
        for _ in range(3):
            stacks = actor.stacks(SOON)
            assert "in touch_then_wait" in stacks
            assert stacks.count("most recent call first") == 1, "those of this request alone"
        (tmp_path / "go on").touch()
        running.result(SOON)
        assert "in touch_then_wait" not in actor.stacks(SOON)
        assert actor.add(2).result(SOON) == 2
        assert actor.incarnation == 0


def test_c_code_that_holds_the_gil_hides_nothing(backend):
    with ea.VectorEnv([lambda: FaultyEnv(EchoEnv())] * 2, backend=backend) as envs:
        envs.reset(seed=0)
        envs[1].arm("hang_in_c").result(SOON)
        envs.send([1, 1])
        wait_until(lambda: "_hang_in_c" in envs[1].stacks(SOON))
        envs[1].kill(restart=True)


def test_a_stopped_process_is_reported_as_stopped(backend):
    with ea.spawn(Counter, backend=backend) as actor:
        actor.add(1).result(SOON)
        os.kill(actor.pid, signal.SIGSTOP)
        begun = time.monotonic()
        wait_until(lambda: "is stopped (by SIGSTOP" in actor.stacks())
        assert time.monotonic() - begun < promised(2.0)
        os.kill(actor.pid, signal.SIGCONT)
        assert actor.add(1).result(SOON) == 2


def test_a_node_that_does_not_answer_is_named(far):
    with ea.spawn(Counter, backend=far) as actor:
        actor.add(1).result(SOON)
        agent = far.launcher.agents["local-0"]
        agent.send_signal(signal.SIGSTOP)
        assert actor.stacks(0.3) == "no stacks came within 0.3 s: node 'local-0' does not answer\n"
        agent.send_signal(signal.SIGCONT)
        assert "most recent call first" in actor.stacks(SOON)


def test_stacks_without_a_process_report_the_state():
    actor = ea.spawn(Counter, name="gone")
    actor.add(1).result(SOON)
    actor.close()
    assert actor.stacks() == "actor 'gone' has no process now: it is closed\n"
    with pytest.raises(ValueError, match="stacks"):
        actor.stacks(-1)


def test_those_of_threads_and_of_the_caller_itself(tmp_path):
    with ea.spawn(Counter, backend="thread") as actor:
        running = actor.touch_then_wait(str(tmp_path / "begun"), str(tmp_path / "go on"))
        wait_for_path(tmp_path / "begun")
        assert "in touch_then_wait" in actor.stacks()
        (tmp_path / "go on").touch()
        running.result(SOON)
    with ea.spawn(Counter, backend="inline") as actor:
        actor.add(1)
        assert actor.stacks() == "no env code is running\n"


def test_a_deadline_reports_the_stacks_of_that_moment_only():
    with ea.spawn(Counter, deadlines=ea.Deadlines(call=0.3), restart=ea.RestartPolicy(max_restarts=1)) as actor:
        actor.add(1).result(SOON)
        assert "most recent call first" in actor.stacks(SOON)
        with pytest.raises(ea.ActorTimeoutError) as late:
            actor.sleep(30).result(SOON)
        assert late.value.stacks.count("Current thread") == 1
        assert "in sleep" in late.value.stacks


def test_many_threads_may_ask_while_processes_are_lost():
    """Every request returns stacks, or a line that says why there are none, without disturbing the env."""
    policy = ea.RestartPolicy(max_restarts=100, backoff=0.0)
    with ea.VectorEnv([EchoEnv] * 2, on_failure="renew", restart=policy) as envs:
        envs.reset(seed=0)
        done, said = threading.Event(), []

        def ask():
            while not done.is_set():
                said.append(envs[1].stacks(0.3))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(8):
            incarnation = envs[1].incarnation
            os.kill(envs[1].pid, signal.SIGKILL)
            wait_until(lambda incarnation=incarnation: envs[1].incarnation > incarnation and envs[1].pid is not None)
            for _ in range(10):
                envs.step([turn, turn])
        wait_until(lambda: any("most recent call first" in text for text in said))
        done.set()
        for thread in threads:
            thread.join(SOON)
        obs, *_ = envs.step([5, 6])
        assert obs[:, 2].tolist() == [5, 6]
    known = "most recent call first", "has ended", "has no process now", "does not answer", "cannot be interrupted"
    assert [text for text in said if not any(word in text for word in known)] == []


def test_a_process_that_is_starting_has_stacks_once_it_can():
    for _ in range(2):
        with ea.spawn(Counter, backend=ea.ProcessBackend("loky")) as actor:
            wait_until(lambda actor=actor: actor.pid is not None)
            assert "most recent call first" in actor.stacks(SOON)
            assert actor.add(1).result(SOON) == 1
