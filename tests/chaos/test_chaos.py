"""The chaos kit and its command: correct runs pass, and every planted defect is found."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import gymnasium
import numpy as np
import psutil
import pytest
from helpers import FORK_SERVER, is_gone, wait_until

import envactors as ea
from chaos import __main__ as command
from chaos import observers, oracle, process_watch, runner
from chaos import run as run_module
from chaos.checker import Limits, ResultChecker
from chaos.faults import ArmedFault, FaultInjectingEnv, FaultKind, FaultTable, LargeEcho, Place, head_of
from chaos.history import Delivered, EnvHistory
from chaos.machine_watch import MachineWatch
from chaos.node_keeper import NodeKeeper
from chaos.oracle import ReferenceEnvs
from chaos.plan import plan_faults
from chaos.report import ReportBuilder
from chaos.run import run_chaos
from envactors.crashes.writer import CrashReporter
from envactors.remote import LocalNodes
from envactors.replay import Journal
from envactors.system.cpus import cores
from envactors.testing import EchoEnv

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "tests.chaos")
KINDS = {kind.value for kind in FaultKind}
ALL_KINDS = len(KINDS)
# Processes that oversleep a deadline and may still wake in time: on a busy machine, all of them.
MAY_PASS = 1
DEADLINE = 1.0  # on a busy machine, a step may take half of this

pytestmark = pytest.mark.timeout(120)


def test_equal_seeds_give_equal_plans():
    for seed in range(20):
        plan = plan_faults(100, seed, 8)
        assert plan == plan_faults(100, seed, 8)
        assert len(plan) == 100
        assert {fault.kind for fault in plan} == set(FaultKind)
        assert {fault.env_id for fault in plan} == set(range(8))
        assert {fault.place for fault in plan} == {None, *Place}
    assert plan_faults(100, 1, 8) != plan_faults(100, 2, 8)
    assert {fault.kind for fault in plan_faults(ALL_KINDS, 7, 1)} == set(FaultKind)


@pytest.mark.parametrize("envs_per_actor", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_run_with_all_kinds_of_fault(envs_per_actor):
    report = run_chaos(
        faults=2 * ALL_KINDS,
        seed=1,
        envs_per_actor=envs_per_actor,
        deadline=DEADLINE,
        backend=FORK_SERVER,
        observed=envs_per_actor == 2,
    )
    assert report.ok, "\n".join(report.problems) or report
    assert set(report.faults.values()) == {2}
    # The process that is killed in the factory is one that took the place of another.
    assert report.renewals >= report.injected - MAY_PASS * report.faults["sleep"]
    assert report.failures >= report.injected // 2
    assert report.delivered > 3 * report.injected
    assert DEADLINE < report.longest_stall < DEADLINE + 2.0 + 5.0


class TwiceLost(LargeEcho):
    """An env whose process ends in each reset with seed 5."""

    def reset(self, *, seed=None, options=None):
        if seed == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("told", [True, False])
def test_a_reset_that_was_lost_twice_has_another_seed_if_its_failure_is_reported(told):
    builder = ReportBuilder(1, 0, "renew")
    with ea.VectorEnv([TwiceLost], on_failure="renew", backend=FORK_SERVER) as envs:
        oracle = types.SimpleNamespace(expected_results=ReferenceEnvs([LargeEcho]).run_requests)
        checker, history = (
            ResultChecker(envs, oracle, builder, Limits(9.0, 9.0, 9.0, lambda _: 0.0)),
            EnvHistory(0, envs[0]),
        )
        history.record_request(None)
        history.begin_episode(5)
        obs, infos = envs.reset(seed=[5])
        checker.judge([Delivered(history, obs[0], 0.0, False, False, infos[0] if told else {}, None, 5)])
        history.record_request(3)
        obs, rewards, *_ = envs.step([3])
        checker.judge([Delivered(history, obs[0], rewards[0], False, False, {}, None)])
    assert builder.report().mixed_up == (not told)


def test_a_run_over_a_users_env():
    report = run_chaos(
        lambda: gymnasium.make("CartPole-v1"),
        faults=ALL_KINDS,
        seed=3,
        num_envs=4,
        deadline=DEADLINE,
        backend=FORK_SERVER,
    )
    assert report.ok, "\n".join(report.problems) or report
    assert report.compared
    assert set(report.faults.values()) == {1}


@pytest.mark.parametrize("factory", [None, lambda: gymnasium.make("CartPole-v1")], ids=["echo", "CartPole"])
def test_faults_do_not_change_a_run_with_replay(factory):
    report = run_chaos(
        factory,
        faults=ALL_KINDS,
        seed=4,
        envs_per_actor=2 if factory else 1,
        on_failure="replay",
        deadline=DEADLINE,
        backend=FORK_SERVER,
    )
    assert report.ok, "\n".join(report.problems) or report
    assert report.failures == 0
    assert report.renewals >= ALL_KINDS - MAY_PASS


@pytest.mark.parametrize(("on_failure", "envs_per_actor"), [("renew", 2), ("replay", 1)])
def test_a_run_with_rollouts(on_failure, envs_per_actor):
    report = run_chaos(
        faults=14,
        seed=3,
        num_envs=4,
        envs_per_actor=envs_per_actor,
        on_failure=on_failure,
        rollouts=True,
        backend=FORK_SERVER,
    )
    assert report.ok, report


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("faults", "options"),
    [
        (ALL_KINDS, {"on_failure": "replay"}),
        pytest.param(200, {}, marks=pytest.mark.slow),
        pytest.param(60, {"envs_per_actor": 2}, marks=pytest.mark.slow),
        pytest.param(60, {"rollouts": True}, marks=pytest.mark.slow),
    ],
)
def test_the_bundles_of_a_run_end_as_its_faults_did(faults, options):
    report = run_chaos(faults=faults, seed=2, bundles=True, deadline=DEADLINE, backend=FORK_SERVER, **options)
    assert report.ok, "\n".join(report.problems) or report
    assert report.reproduced >= faults - MAY_PASS * report.faults["sleep"]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("on_failure", ["renew", "replay"])
@pytest.mark.parametrize("seed", range(10))
def test_long_runs(seed, on_failure):
    report = run_chaos(
        faults=300,
        seed=seed,
        on_failure=on_failure,
        envs_per_actor=(1, 2, 4)[seed % 3],
        backend=ea.ProcessBackend(spin=seed % 2 == 0),
    )
    assert report.ok, "\n".join(report.problems) or report


# Faults, one by one --------------------------------------------------------------------------------------


@pytest.fixture
def fault_table():
    fault_table = FaultTable.make(1)
    yield fault_table
    fault_table.remove()


@pytest.mark.parametrize(
    "kind",
    [
        # Another thread has to run while the array is copied.
        pytest.param(FaultKind.KILL_WRITING, marks=pytest.mark.skipif(cores() < 2, reason="takes two cores")),
        FaultKind.BUS_WRITING,
    ],
)
def test_a_fault_can_crash_a_worker_in_the_middle_of_writing(fault_table, kind):
    with ea.VectorEnv(
        [lambda path=fault_table.path: FaultInjectingEnv(LargeEcho, path, 1, 0)],
        on_failure="renew",
        restart=ea.RestartPolicy(max_restarts=400, backoff=0.0),
        copy=False,
    ) as envs:
        envs.reset(seed=0)
        for action in range(300):
            # It may have crashed just after its last result was complete, which the next step tells.
            while True:
                (before, *_, infos), (obs, *_, later) = envs.step([action]), envs.step([action])
                if not infos[0] and not later[0]:
                    break
            complete = obs.copy()
            fault_table.arm(0, Place.STEP, ArmedFault(kind))
            last, _, _, _, infos = envs.step([100])
            assert head_of(last[0]) is not None
            if "failure" in infos[0]:
                assert (last == complete).all()
                assert infos[0]["failure"].signal == (
                    signal.SIGKILL if kind is FaultKind.KILL_WRITING else signal.SIGBUS
                )
            # Observations have two places in memory, which steps write in turn.
            if head_of(before[0]) is None:
                return
    pytest.fail("never in the middle")


@pytest.mark.parametrize(
    "obs",
    [
        np.arange(3, dtype=np.float32),
        {"a": "text", "b": np.ones((200, 100), np.uint8)},
        (1, np.arange(1, dtype=np.int8)),
    ],
    ids=["small", "dict", "one byte"],
)
def test_memory_ends_within_any_array(obs):
    script = (
        "import sys, pickle; from chaos.faults import _half_there; import numpy as np\n"
        "half = _half_there(pickle.loads(bytes.fromhex(sys.argv[1])))\n"
        "array = half if isinstance(half, np.ndarray) else half['b'] if isinstance(half, dict) else half[1]\n"
        "print(array.shape, array.dtype, flush=True)\n"
        "array.copy()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, pickle.dumps(obs).hex()], cwd=ROOT / "tests", capture_output=True, text=True
    )
    array = obs if isinstance(obs, np.ndarray) else obs["b"] if isinstance(obs, dict) else obs[1]
    assert done.stdout == f"{array.shape} {array.dtype}\n"
    assert done.returncode == -signal.SIGBUS


def test_an_armed_fault_occurs_once_even_if_the_process_exits(fault_table):
    fault_table.arm(0, Place.STEP, ArmedFault(FaultKind.EXIT))
    with ea.spawn(
        lambda path=fault_table.path: FaultInjectingEnv(EchoEnv, path, 1, 0), restart=ea.RestartPolicy()
    ) as actor:
        actor.reset().result()
        with pytest.raises(ea.ActorDiedError, match="exit code 3"):
            actor.step(1).result()
        assert not fault_table.is_armed(0, Place.STEP)
        assert actor.step(1).result()[0][1] == 1


def test_a_child_is_left_running_until_its_worker_has_ended(fault_table):
    fault_table.arm(0, Place.STEP, ArmedFault(FaultKind.CHILD))
    with ea.spawn(lambda path=fault_table.path: FaultInjectingEnv(EchoEnv, path, 1, 0)) as actor:
        actor.reset().result()
        with pytest.raises(ea.ActorDiedError):
            actor.step(1).result()
        pid = fault_table.take_child(0)
        assert pid > 0
        wait_until(lambda: is_gone(pid), 5)
        assert fault_table.take_child(0) == 0


# What a run reports ---------------------------------------------------------------------------------------


def tampered(monkeypatch, tamper):
    """Let ``tamper`` change a batch that `recv` returns, from the fifth on, until it returns a changed one."""
    recv, calls = ea.VectorEnv.recv, []

    def broken(self, *args, **kwargs):
        batch = recv(self, *args, **kwargs)
        calls.append(None)
        if len(calls) < 5 or calls[-1] == "done":
            return batch
        plain = [i for i, info in enumerate(batch.infos) if "failure" not in info and batch.obs[i][1] > 1]
        if not plain:
            return batch
        changed = tamper(batch, plain)
        if changed is None:
            return batch
        calls[-1] = "done"
        monkeypatch.setattr(ea.VectorEnv, "recv", recv)
        return changed

    monkeypatch.setattr(ea.VectorEnv, "recv", broken)


def small_run(**options):
    return run_chaos(**{"faults": 2, "seed": 5, "num_envs": 3, "deadline": DEADLINE, "backend": FORK_SERVER, **options})


def only(report, **wrong):
    assert not report.ok
    assert {name: number for name, number in report.wrong.items() if number} == wrong, report
    return True


def rows(batch, order):
    return ea.Batch(*([column[i] for i in order] if isinstance(column, list) else column[order] for column in batch))


def test_the_checker_detects_a_duplicate_result(monkeypatch):
    tampered(monkeypatch, lambda batch, plain: rows(batch, [*range(len(batch.infos)), plain[0]]))
    report = small_run()
    assert only(report, duplicated=1)
    assert "nobody asked for" in report.problems[0]


def test_the_checker_detects_a_bundle_without_a_step_and_a_fault_without_a_bundle(monkeypatch):
    monkeypatch.setattr(Journal, "record_steps", lambda *_: None)
    assert small_run(bundles=True, num_envs=1, seed=1).wrong["wrong bundles"]
    monkeypatch.setattr(CrashReporter, "report", lambda *_: None)
    report = small_run(bundles=True)
    assert only(report, **{"wrong bundles": 2})
    assert "has left no bundle" in report.problems[0]


def test_the_checker_detects_a_result_of_another_env(monkeypatch):
    def swap(batch, plain):
        batch.obs[plain[0], 0] += 1
        batch.obs[plain[0]] = relabelled(batch.obs[plain[0]])
        return batch

    tampered(monkeypatch, swap)
    assert only(small_run(), **{"mixed up": 1})


def relabelled(obs):
    """The observation with the mark that belongs to what it begins with."""
    echo = LargeEcho()
    echo.env_id, echo.steps, echo.last_action, echo.checksum = obs[:4].tolist()
    return echo._observe()


@pytest.mark.parametrize(("change", "what"), [(1, "duplicated"), (-1, "lost")], ids=["twice", "left out"])
def test_the_checker_detects_a_repeated_or_skipped_step(monkeypatch, change, what):
    def miscount(batch, plain):
        batch.obs[plain[0], 1] += change
        batch.obs[plain[0]] = relabelled(batch.obs[plain[0]])
        return batch

    tampered(monkeypatch, miscount)
    assert only(small_run(), **{what: 1})


def test_the_checker_detects_a_torn_observation(monkeypatch):
    def tear(batch, plain):
        batch.obs[plain[0], LargeEcho.SIZE // 2 :] = 0
        return batch

    tampered(monkeypatch, tear)
    assert only(small_run(), torn=1)


def test_the_checker_detects_a_reward_of_another_step(monkeypatch):
    def change(batch, plain):
        batch.rewards[plain[0]] += 1
        return batch

    tampered(monkeypatch, change)
    assert only(small_run(), **{"mixed up": 1})


def test_the_checker_detects_a_missing_result(monkeypatch):
    monkeypatch.setattr(runner, "_PATIENCE", 0.5)
    tampered(monkeypatch, lambda batch, plain: rows(batch, [i for i in range(len(batch.infos)) if i != plain[0]]))
    report = small_run()
    assert report.lost == 1
    assert "have results pending" in report.problems[-1]


@pytest.mark.parametrize("is_late", [False, True], ids=["on a machine in time", "on a late machine"])
def test_the_checker_detects_a_stall_that_the_machine_does_not_explain(monkeypatch, is_late):
    monkeypatch.setattr(run_module, "STALL_MARGIN", 0.0)
    seconds = 4 * DEADLINE  # most of which the machine is not late, however busy it is

    def wait(batch, plain):
        (probe,) = [child for child in psutil.Process().children() if "machine_probe" in " ".join(child.cmdline())]
        if is_late:
            probe.suspend()  # as if nothing ran meanwhile
        time.sleep(seconds)
        probe.resume()
        return batch

    tampered(monkeypatch, wait)
    report = small_run(faults=1)
    assert report.longest_stall >= seconds
    assert report.stalls == 0 if is_late else report.stalls >= 1


def test_a_machine_is_as_late_as_a_plain_process_on_it():
    with MachineWatch() as watch:
        begun = watch.last_round
        wait_until(lambda: watch.last_round > begun)
        process = psutil.Process(watch.process.pid)
        process.suspend()
        stopped = time.monotonic()
        wait_until(lambda: watch.lateness(stopped) > 0.3)  # before it runs again
        process.resume()
        wait_until(lambda: watch.last_round > stopped)
        assert 0.3 < watch.lateness(stopped) <= time.monotonic() - stopped
    assert watch.process.poll() is not None


@pytest.mark.parametrize("rollouts", [False, True])
def test_a_run_whose_processes_all_crash_ends(monkeypatch, rollouts):
    class Doomed(LargeEcho):
        def reset(self, **kwargs):
            os._exit(5)

    monkeypatch.setattr(run_module, "LargeEcho", Doomed)
    monkeypatch.setattr(run_module, "_SPARE_RESTARTS", 3)
    report = small_run(faults=1, num_envs=1, rollouts=rollouts)
    assert report.lost >= 1
    assert "exit code 5" in report.problems[0]


def test_a_node_that_is_lost_on_a_busy_machine_is_replaced():
    lease, lateness = 1.0, [9.0]
    launcher = LocalNodes(1)
    backend = ea.RemoteBackend(launcher, lease=lease, heartbeat=lease / 5)
    keeper = NodeKeeper(launcher, backend, lease, lambda since: lateness[-1])
    restart = ea.RestartPolicy(max_restarts=9, backoff=0.0)
    with ea.spawn(EchoEnv, backend=backend, restart=restart) as actor, keeper:

        def silence_node():
            incarnation = actor.incarnation
            wait_until(lambda: actor.node in keeper.known)
            os.kill(launcher.agents[actor.node].pid, signal.SIGSTOP)
            wait_until(lambda: actor.incarnation > incarnation)
            actor.reset().result()

        silence_node()
        assert (len(keeper.replaced) > 0, keeper.unexplained) == (True, [])
        lateness.append(0.0)
        silence_node()
        assert len(keeper.unexplained) > 0
    report = ReportBuilder(1, 0, "renew")
    report.count_lost_nodes(keeper.replaced, keeper.unexplained)
    assert (report.replaced_nodes, report.unexplained) == (len(keeper.replaced), len(keeper.unexplained))


def test_the_checker_detects_counts_that_do_not_add_up(monkeypatch):
    stats = ea.VectorEnv.stats

    def count_one_more(envs):
        counted = stats(envs)
        counted.steps[1] += 1
        return counted

    monkeypatch.setattr(ea.VectorEnv, "stats", count_one_more)
    report = small_run()
    assert report.miscounted == 1
    assert "env 1 has delivered" in report.problems[-1]


def test_the_checker_detects_observers_that_fail(monkeypatch):
    monkeypatch.setattr(observers, "ask", lambda *_: {"actors": []})
    report = small_run(observed=True)
    assert report.miscounted >= 1
    assert "the monitor knows only" in report.problems[0]


def test_the_checker_detects_a_process_that_crashed_without_a_fault(monkeypatch):
    (spared, *_) = {0, 1, 2} - {fault.env_id for fault in plan_faults(2, 5, 3)}

    class Frail(LargeEcho):
        def step(self, action):
            me = ea.current_actor()
            if me is not None and (me.index, me.incarnation) == (spared, 0) and action > 4:
                os._exit(5)
            return super().step(action)

    for module in (run_module, oracle):
        monkeypatch.setattr(module, "LargeEcho", Frail)
    report = small_run(deadline=2 * DEADLINE)  # long enough for a busy machine
    assert report.unexplained == 1
    assert "exit code 5" in report.problems[-1]


def test_the_checker_detects_failures_of_rollouts_without_faults(monkeypatch):
    (spared, *_) = {0, 1, 2} - {fault.env_id for fault in plan_faults(2, 5, 3)}

    class Frail(LargeEcho):
        def step(self, action):
            me = ea.current_actor()
            if me is not None and me.index == spared and me.incarnation < 3:
                raise ValueError("too frail")
            return super().step(action)

    monkeypatch.setattr(run_module, "LargeEcho", Frail)
    report = small_run(rollouts=True, deadline=2 * DEADLINE)  # long enough for a busy machine
    assert report.unexplained == 1
    assert f"env {spared}: 3 failures after 0 faults" in report.problems[0]


def test_the_checker_detects_an_env_that_differs_in_another_process():
    class Env(EchoEnv):
        def step(self, action):
            obs, *rest = super().step(action)
            obs[0] = ea.current_actor().incarnation
            return obs, *rest

    report = run_chaos(
        lambda: Env(episode_length=9), faults=4, seed=2, num_envs=2, deadline=DEADLINE, backend=FORK_SERVER
    )
    assert report.compared
    assert report.mixed_up >= 1
    assert not report.ok


def test_the_checker_detects_a_failure_that_is_not_replayed():
    class Env(EchoEnv):
        def step(self, action):
            obs, *rest = super().step(action)
            obs[0] = ea.current_actor().incarnation
            return obs, *rest

    report = run_chaos(
        lambda: Env(episode_length=9),
        faults=4,
        seed=2,
        num_envs=2,
        on_failure="replay",
        deadline=DEADLINE,
        backend=FORK_SERVER,
    )
    assert report.not_replayed >= 1
    assert not report.ok


def test_envs_that_are_not_deterministic_are_not_compared():
    class Env(EchoEnv):
        def step(self, action):
            obs, *rest = super().step(action)
            obs[3] = time.monotonic_ns()
            return obs, *rest

    report = run_chaos(
        lambda: Env(episode_length=9), faults=6, seed=2, num_envs=3, deadline=DEADLINE, backend=FORK_SERVER
    )
    assert not report.compared
    assert report.ok, "\n".join(report.problems) or report


def test_the_checker_detects_leaked_resources(monkeypatch):
    left = []
    over = threading.Event()

    def leave(batch, plain):
        left.append(Path(os.devnull).open())  # noqa: SIM115 # that is the point
        left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]))
        left.append(threading.Thread(target=over.wait, name="left behind"))
        left[-1].start()
        return batch

    tampered(monkeypatch, leave)
    for module in (run_module, process_watch):
        monkeypatch.setattr(module, "CHILD_PATIENCE", 0.5)
    report = small_run()
    file, process, thread = left
    file.close()
    process.kill()
    process.wait()
    over.set()
    thread.join()
    assert only(report, leaks=3)
    assert any("left behind" in leak for leak in report.leaks)
    assert any(str(process.pid) in leak for leak in report.leaks)


def test_the_checker_detects_a_child_that_outlives_its_worker(monkeypatch):
    class Escaping(FaultInjectingEnv):
        """Leaves a process running that cannot be traced to it."""

        def _leave_a_child(self):
            script = (
                "import resource, subprocess, sys\n"
                "resource.setrlimit(10, resource.getrlimit(10)[1:] * 2)\n"  # RLIMIT_LOCKS marks what a worker starts
                "print(subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(1000)', sys.argv[1]],\n"
                "      env={}, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)\n"
            )
            command = [sys.executable, "-S", "-c", script, self._fault_table.path]
            done = subprocess.run(command, stdout=subprocess.PIPE, env={}, check=True)
            self._fault_table.record_child(self._env_id, int(done.stdout))

    (fault,) = [fault for fault in plan_faults(ALL_KINDS, 5, 3) if fault.kind is FaultKind.CHILD]
    monkeypatch.setattr(run_module, "plan_faults", lambda *_: [fault])
    monkeypatch.setattr(run_module, "FaultInjectingEnv", Escaping)
    for module in (run_module, process_watch):
        monkeypatch.setattr(module, "CHILD_PATIENCE", 0.5)
    report = small_run(faults=1, deadline=5.0)
    assert only(report, leaks=1)
    assert "time.sleep(1000)" in report.leaks[0]
    pid = int(report.leaks[0].split(":")[0].split()[1])
    wait_until(lambda: is_gone(pid))  # the run has ended it


# The command ---------------------------------------------------------------------------------------------


def run(*arguments, **environment):
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        timeout=100,
    )


def test_the_command(tmp_path):
    file = tmp_path / "report.json"
    done = run("--faults", str(ALL_KINDS), "--seed", "1", "--json", str(file))
    assert (done.returncode, done.stderr) == (0, ""), done
    report = json.loads(file.read_text())
    assert report["ok"]
    assert (report["planned"], report["seed"], set(report["faults"])) == (ALL_KINDS, 1, KINDS)
    assert sum(report["faults"].values()) == ALL_KINDS
    title, *_, verdict = done.stdout.splitlines()
    assert title == f"echo: {ALL_KINDS} faults over 8 envs, 1 per actor, on_failure='renew', seed 1"
    assert re.fullmatch(rf"All zeros: {ALL_KINDS} faults in [\d.]+ s, every result accounted for\.", verdict)
    counts = dict(re.findall(r"^([a-z ]+): ([\d,]+)$", done.stdout, re.MULTILINE))
    for name in ("lost", "duplicated", "mixed up", "torn", "stalls", "leaks"):
        assert counts[name] == "0"
    assert int(counts["results delivered"].replace(",", "")) == report["delivered"]
    assert int(counts["renewals"]) == report["renewals"] >= ALL_KINDS - MAY_PASS * report["faults"]["sleep"]


def test_the_command_fails_where_something_is_wrong(monkeypatch, capsys):
    tampered(monkeypatch, lambda batch, plain: rows(batch, [*range(len(batch.infos)), plain[0]]))
    assert command.main(["--faults", "2", "--num-envs", "3"]) == 1
    assert "Wrong: duplicated 1." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--faults", "0"], "0 is less than 1"),
        (["--on-failure", "raise"], "invalid choice: 'raise'"),
        (["--deadline", "-1"], "-1 is not a positive number"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_an_env_without_actions_to_sample(capsys):
    assert command.main(["collections:OrderedDict", "--faults", "1"]) == 2
    assert "OrderedDict without an action_space to sample from" in capsys.readouterr().err


def test_an_env_of_ones_own_by_name(capsys):
    assert command.main(["CartPole-v1", "--faults", "3", "--num-envs", "2"]) == 0
    assert "CartPole-v1: 3 faults over 2 envs" in capsys.readouterr().out


def test_ctrl_c_ends_the_command():
    process = subprocess.Popen(
        [*COMMAND, "--faults", "5000"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert "5000 faults" in process.stdout.readline()
    assert "renewals" in process.stdout.readline()  # in the middle of it
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (130, "python -m tests.chaos: interrupted\n")
    assert psutil.wait_procs(children, 5)[1] == []
