"""Crash bundles: each failure leaves the inputs that lead to it again in a fresh process, or says why it does not."""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import functions
import numpy as np
import pytest
from helpers import FORK_SERVER, SOON, wait_until

import envactors as ea
from envactors.cli import main
from envactors.crashes import files, writer
from envactors.testing import EchoEnv, FaultyEnv

DEADLINE = 1.0
CRASHES = {"segfault": "SIGSEGV", "exit": "exit code 3", "crash": "SIGKILL"}
HANGS = dict.fromkeys(("sleep", "stop", "hang_in_c"), f"missed deadline of {DEADLINE} s")
RAISES = {
    "raise": "RuntimeError('raised on command')",
    "unpicklable": "TypeError(\"cannot pickle '_thread.lock' object\")",
}
ENDINGS = {**CRASHES, **HANGS, **RAISES}


@pytest.fixture(autouse=True)
def path_of_command(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds to it


@pytest.fixture
def replay(capfd):
    """Runs the command, and returns its last line and its status."""

    def run(path, *arguments):
        capfd.readouterr()
        status = main(["replay", str(path), *arguments])
        return capfd.readouterr().out.splitlines()[-1], status

    return run


def vector(tmp_path, factories, **options):
    restart = ea.RestartPolicy(max_restarts=100, backoff=0.0)
    given = {"backend": FORK_SERVER, "restart": restart, "crash_dir": tmp_path / "crashes"}
    return ea.VectorEnv(factories, **{**given, **options})


def failure_of(envs, fault, where="step", index=1):
    """Has an env fail in its next step or reset; returns its error."""
    envs[index].arm(fault, where).result()
    with pytest.raises(ea.VectorStepError) as caught:
        envs.step([1] * envs.num_envs) if where == "step" else envs.reset(seed=9)
    return caught.value.failures[index]


def bundles(tmp_path):
    return sorted((tmp_path / "crashes").iterdir())


class Moody(EchoEnv):
    """Raises at 3, exits at 4, and its state tells whether the raising step has run."""

    def step(self, action):
        result = super().step(action)
        if action == 3:
            raise ValueError(f"no 3 in {object()}")
        if action == 4 and self.checksum % 2 == self.parity:
            os._exit(5)
        return result

    parity = 0


# Vectors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "envs_per_actor"), [("step", 1), ("reset", 2)])
@pytest.mark.parametrize("fault", ENDINGS)
def test_a_fault_ends_in_the_same_way_in_a_fresh_process(fault, where, envs_per_actor, tmp_path, replay):
    deadlines = ea.Deadlines(step=DEADLINE, reset=DEADLINE) if fault in HANGS else ea.Deadlines()
    with vector(tmp_path, [FaultyEnv] * 2, envs_per_actor=envs_per_actor, deadlines=deadlines) as envs:
        envs.reset(seed=3)
        for step in range(4):
            envs.step([step, step + 1])
        error = failure_of(envs, fault, where)
        place = "step 5" if where == "step" else "reset"
        expected = f"ends in the same way: {ENDINGS[fault]} in {place}, 1 of 1"
        ea.load_bundle(error.bundle)  # waits until it is written
        assert replay(error.bundle) == (expected, 0)


@pytest.mark.parametrize("on_failure", ["renew", "replay"])
def test_the_report_and_the_log_tell_what_happened(on_failure, tmp_path, replay, caplog):
    with caplog.at_level(logging.INFO, "envactors"), vector(tmp_path, [Moody] * 2, on_failure=on_failure) as envs:
        envs.reset(seed=7)
        envs.step([1, 1])
        error = envs.step([1, 3])[4][1]["failure"]
        bundle = ea.load_bundle(error.bundle)
        wait_until(lambda: error.bundle in caplog.text)
    if sys.version_info >= (3, 11):
        assert error.bundle in error.__notes__[0]
    report = bundle.report
    assert report["format"] == 1
    assert (report["kind"], report["actor"], report["env"], report["method"]) == ("exception", "env-1", 1, "step")
    assert (report["step"], report["seeds"], report["arguments"]) == (2, [8], "np.int64(3)")
    assert report["exception"] == "ValueError('no 3 in <object object at 0x...>')"
    assert "in step" in report["traceback"]
    assert report["versions"]["numpy"] == np.__version__
    assert bundle.last_observation.tolist()[:3] == [0, 1, 1]
    assert replay(error.bundle, "--times", "3")[0].endswith("3 of 3")


def test_a_poison_leaves_a_bundle(tmp_path, replay):
    with vector(tmp_path, [functools.partial(Grim, 2)] * 2, on_failure="replay") as envs:
        envs.reset(seed=0)
        envs.step([0, 0])
        error = envs.step([0, 1])[4][1]["failure"]
        bundle = ea.load_bundle(error.bundle)
    assert bundle.report["kind"] == "poison"
    assert [ea.load_bundle(path).report["kind"] for path in bundles(tmp_path)] == ["died", "poison"]
    assert replay(error.bundle) == ("ends in the same way: exit code 7 in step 2, 1 of 1", 0)


class Grim(EchoEnv):
    """Exits in its step of this number if the action is 1."""

    def __init__(self, last):
        super().__init__()
        self.last = last

    def step(self, action):
        if self.steps + 1 >= self.last and action == 1:
            os._exit(7)
        return super().step(action)


def test_a_kill_from_outside_does_not_end_in_the_same_way(tmp_path, replay):
    with vector(tmp_path, [FaultyEnv] * 2) as envs:
        envs.reset(seed=3)
        envs.send([1, 1])
        envs.recv()
        envs[1].arm("sleep").result()
        envs.send([1, 1])
        wait_until(lambda: "in _sleep" in envs.actors[1].stacks())
        os.kill(envs[1].pid, signal.SIGKILL)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.recv()
        bundle = ea.load_bundle(caught.value.failures[1].bundle)
    report = json.loads((bundles(tmp_path)[0] / "report.json").read_text())
    report["deadlines"]["step"] = DEADLINE
    (bundles(tmp_path)[0] / "report.json").write_text(json.dumps(report))
    line, status = replay(bundle.path)
    assert line.startswith("does not end in the same way: SIGKILL in step 2, 0 of 1; instead: missed deadline")
    assert status == 1


def test_a_crash_while_idle_has_no_request(tmp_path, replay):
    with vector(tmp_path, [FaultyEnv]) as envs:
        envs.reset(seed=3)
        os.kill(envs[0].pid, signal.SIGKILL)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([1])
        bundle = ea.load_bundle(caught.value.failures[0].bundle)
    line, status = replay(bundle.path)
    assert line == "does not end in the same way: SIGKILL while idle, 0 of 1; instead: no failure while idle"
    assert status == 1


def test_a_step_that_has_raised_is_one_of_the_inputs(tmp_path, replay):
    for parity in (0, 1):  # one of which ends the process only if all steps have run
        with vector(tmp_path, [Moody] * 2) as envs:
            envs.set_attr("parity", parity)
            envs.reset(seed=2)
            with pytest.raises(ea.VectorStepError):
                envs.step([1, 3])
            try:
                envs.step([1, 4])
            except ea.VectorStepError as caught:
                error = caught.failures[1]
                ea.load_bundle(error.bundle)
    assert replay(error.bundle) == ("ends in the same way: exit code 5 in step 2, 1 of 1", 0)


def test_a_rerun_runs_at_least_once(tmp_path):
    (tmp_path / "report.json").write_text('{"format": 1}')
    (tmp_path / "inputs.pkl").write_bytes(pickle.dumps({"format": 1, **dict.fromkeys(files.SavedInputs._fields)}))
    for times in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match=f"times is {times}: expected an int >= 1"):
            ea.load_bundle(tmp_path).replay(times)


def test_a_journal_that_is_full_says_so(tmp_path, replay, capfd):
    with vector(tmp_path, [FaultyEnv] * 2, max_journal=3) as envs:
        envs.reset(seed=3)
        for _ in range(5):
            envs.step([1, 2])
        bundle = ea.load_bundle(failure_of(envs, "exit").bundle)
    assert bundle.report["begins_in_the_middle"]
    assert bundle.last_observation.tolist()[:3] == [0, 5, 2]
    assert bundle.report["arguments"] == "np.int64(1)"
    with pytest.raises(ValueError, match="begins in the middle"):
        bundle.replay()
    assert main(["replay", bundle.path]) == 2
    assert "begins in the middle" in capfd.readouterr().err


class Opaque:
    """Arrives as a lock, which cannot be pickled again."""

    def __reduce__(self):
        return threading.Lock, ()


class OpaqueEnv:
    observation_space = None

    def reset(self, *, seed=None, options=None):
        return Opaque(), {}

    def step(self, action):
        os._exit(8)


def test_a_last_observation_that_cannot_be_pickled_costs_only_itself(tmp_path, replay):
    with vector(tmp_path, [OpaqueEnv]) as envs:
        envs.reset(seed=1)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([0])
        bundle = ea.load_bundle(caught.value.failures[0].bundle)
    assert bundle.last_observation is None
    assert replay(bundle.path) == ("ends in the same way: exit code 8 in step 1, 1 of 1", 0)


def test_attributes_and_calls_are_inputs_until_a_new_process(tmp_path, replay):
    with vector(tmp_path, [Moody] * 2, on_failure="renew") as envs:
        envs.set_attr("parity", 2)  # no checksum is equal to it
        envs.reset(seed=2)
        envs.step([4, 4])
        envs.actors[1].kill(restart=True)
        wait_until(lambda: envs.actors[1].state is ea.ActorState.IDLE)
        envs.reset(seed=2)
        failure = None
        while failure is None:
            failure = envs.step([1, 4])[4][1].get("failure")
        bundle = ea.load_bundle(failure.bundle)
    assert replay(bundle.path)[0].startswith("ends in the same way: exit code 5")


class GrimWithoutSpaces(Grim):
    action_space = None


@pytest.mark.parametrize("env", [Grim, GrimWithoutSpaces])
def test_a_fault_in_a_rollout_ends_in_the_same_way(env, tmp_path, replay):
    with vector(tmp_path, [functools.partial(env, 6)] * 2) as envs:
        envs.reset(seed=3)
        envs.set_policy(lambda: lambda obs, context: np.ones(len(obs), np.int64))
        with pytest.raises(ea.VectorStepError) as caught:
            envs.rollout(10)
        error = next(iter(caught.value.failures.values()))
        ea.load_bundle(error.bundle)
    assert replay(error.bundle) == ("ends in the same way: exit code 7 in step 6, 1 of 1", 0)


class LastReward(float):
    """Ends its process once the worker has no use for it any more."""

    def __del__(self):
        os._exit(3)


class ExitsAfterwards(EchoEnv):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return (obs, LastReward(reward) if self.steps == 5 else reward, *rest)


def test_a_crash_after_the_last_step_of_a_rollout_has_no_request(tmp_path, caplog):
    with vector(tmp_path, [ExitsAfterwards]) as envs:
        envs.reset(seed=3)
        envs.set_policy(lambda: lambda obs, context: np.ones(len(obs), np.int64))
        envs.rollout(5)
        wait_until(lambda: [*tmp_path.glob("crashes/[!.]*")])
        bundle = ea.load_bundle(bundles(tmp_path)[0])
    assert "inputs of a crash bundle are missing" not in caplog.text
    assert not bundle.report["begins_in_the_middle"]
    assert str(bundle.replay()).startswith("does not end in the same way: exit code 3")


def exit_in_policy(obs, context):
    os._exit(7)


def test_the_bundle_of_a_crash_in_the_policy_says_that_it_has_no_policy(tmp_path, capfd):
    with vector(tmp_path, [EchoEnv]) as envs:
        envs.reset(seed=3)
        envs.set_policy(lambda: exit_in_policy)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.rollout(5)
    bundle = ea.load_bundle(caught.value.failures[0].bundle)
    with pytest.raises(ValueError, match="ends in the policy of a rollout, which is not part of a bundle"):
        bundle.replay()
    assert main(["replay", bundle.path]) == 2
    assert "ends in the policy" in capfd.readouterr().err


@pytest.mark.slow
def test_two_hundred_faults_end_in_the_same_way(tmp_path):
    choose = random.Random(1)
    for number in range(200):
        fault, where = choose.choice([*CRASHES, *RAISES]), choose.choice(["step", "reset"])
        with vector(tmp_path / str(number), [FaultyEnv] * 2, envs_per_actor=choose.choice([1, 2])) as envs:
            envs.reset(seed=number)
            for _ in range(choose.randrange(150)):
                envs.step([choose.randrange(9), 1])
            bundle = ea.load_bundle(failure_of(envs, fault, where, choose.randrange(2)).bundle)
        assert bundle.replay().is_same, bundle.path


# Actors and executors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "args", "ending"),
    [
        ("_exit", (4,), "exit code 4"),
        ("abort", (), "SIGABRT"),
        ("stat", ("/nowhere",), "FileNotFoundError(2, 'No such file or directory')"),
    ],
)
def test_the_call_of_an_actor_ends_in_the_same_way(method, args, ending, tmp_path, replay):
    with ea.spawn(Os, backend=FORK_SERVER, crash_dir=tmp_path / "crashes") as actor:
        error = actor.run(method, *args).exception(SOON)
        ea.load_bundle(error.bundle)
    assert replay(error.bundle) == (f"ends in the same way: {ending} in run, 1 of 1", 0)


class Os:
    def run(self, name, *args):
        return getattr(os, name)(*args)


def test_a_call_with_a_deadline_ends_in_the_same_way(tmp_path, replay):
    with ea.spawn(lambda: threading, backend=FORK_SERVER, crash_dir=tmp_path / "crashes") as actor:
        error = actor.options(deadline=DEADLINE).Event().exception(SOON)  # a lock cannot be pickled
        assert isinstance(error, ea.SerializationError)
        waiting = ea.spawn(threading.Event, backend=FORK_SERVER, crash_dir=tmp_path / "crashes")
        late = waiting.options(deadline=DEADLINE).wait().exception(SOON)
        waiting.close()
        ea.load_bundle(late.bundle)
    assert replay(late.bundle)[0] == f"ends in the same way: {HANGS['sleep']} in wait, 1 of 1"
    assert replay(error.bundle)[1] == 0


@pytest.mark.parametrize(("code", "ending"), [(lambda: os._exit(6), "exit code 6"), (lambda: 1 // 0, "ZeroDivision")])
def test_a_factory_ends_in_the_same_way(code, ending, tmp_path, replay):
    with ea.spawn(code, backend=FORK_SERVER, crash_dir=tmp_path / "crashes") as actor:
        error = actor.reset().exception(SOON)
        bundle = ea.load_bundle(error.bundle)
    assert bundle.report["kind"] == "start"
    line, status = replay(bundle.path)
    assert line.startswith(f"ends in the same way: {ending}")
    assert line.endswith("in the factory, 1 of 1")
    assert status == 0


def test_the_call_of_an_executor_ends_in_the_same_way(tmp_path, replay):
    with ea.Executor(1, backend=FORK_SERVER, crash_dir=tmp_path / "crashes") as pool:
        divided = pool.submit(functions.divide, 1, 0).exception(SOON)
        died = pool.submit(lambda: os._exit(9)).exception(SOON)
        for error in (divided, died):
            ea.load_bundle(error.bundle)
    assert replay(divided.bundle)[0].startswith("ends in the same way: ZeroDivisionError")
    assert replay(died.bundle)[0].startswith("ends in the same way: exit code 9")


def test_threads_leave_bundles_of_exceptions_and_envs_in_this_process_take_no_directory(tmp_path, replay):
    with vector(tmp_path, [Moody] * 2, backend="thread") as envs:
        envs.reset(seed=1)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([1, 3])
        bundle = ea.load_bundle(caught.value.failures[1].bundle)
    assert replay(bundle.path)[1] == 0
    with pytest.raises(ValueError, match="in your process"):
        ea.spawn(Moody, backend="inline", crash_dir=tmp_path)
    with pytest.raises(TypeError, match="crash_dir is 3"):
        ea.spawn(Moody, backend=FORK_SERVER, crash_dir=3)


# Files ---------------------------------------------------------------------------------------------------------------


def test_an_exception_leaves_one_bundle_per_type_and_line(tmp_path):
    with vector(tmp_path, [FaultyEnv] * 2) as envs:
        envs.reset(seed=3)
        errors = [failure_of(envs, fault) for fault in ("raise", "unpicklable", "raise", "raise")]
        assert errors[0].bundle == errors[2].bundle != errors[1].bundle
        ea.load_bundle(errors[1].bundle)
    assert len(bundles(tmp_path)) == 2


def test_a_run_leaves_at_most_twenty_bundles(tmp_path, caplog):
    with ea.Executor(2, backend=FORK_SERVER, crash_dir=tmp_path / "crashes") as pool:
        errors = [pool.submit(os._exit, 1).exception(SOON) for _ in range(22)]
    assert [error.bundle is not None for error in errors] == [True] * 20 + [False] * 2
    wait_until(lambda: "failures without one so far: 1" in caplog.text)
    assert len(bundles(tmp_path)) == 20


def test_skipped_bundles_are_logged_however_late_the_thread_that_logs_is(tmp_path, caplog):
    directory, submitted = writer.CrashDirectory(str(tmp_path)), []
    paths = [directory.reserve("env-0", "died", None, submitted.append)[0] for _ in range(20 + 11)]
    for log in submitted:
        log()
    assert [record.args[-1] for record in caplog.records] == [1, 10]
    assert len({*paths[:20]}) == 20
    assert {*paths[20:]} == {None}


def test_two_programs_that_use_one_directory_do_not_share_bundles(tmp_path):
    directories = [writer.CrashDirectory(str(tmp_path)) for _ in range(2)]
    first, second = (one.reserve("env-0", "died", None, print)[0] for one in directories)
    assert first != second


def test_a_forked_process_waits_for_no_bundle_of_its_parent(tmp_path, monkeypatch):
    monkeypatch.setitem(writer._pending, str(tmp_path), threading.Event())
    pid = os.fork()
    if pid == 0:
        os._exit(len(writer._pending) + len(writer._directories))
    assert os.waitpid(pid, 0)[1] == 0


def end_with_a_bundle(crash_dir):
    """Has an env crash in a program that ends at once, while the bundle takes longer than its threads may."""
    write = files.write
    files.write = lambda *args: (time.sleep(2.0), write(*args))
    with ea.VectorEnv([FaultyEnv], crash_dir=crash_dir) as envs:
        failure_of(envs, "exit", "reset", 0)


def test_the_end_of_the_program_waits_for_its_bundles(tmp_path):
    run_elsewhere("end_with_a_bundle", tmp_path)
    assert ea.load_bundle(next(tmp_path.iterdir())).report["exitcode"] == 3


def test_a_directory_that_cannot_be_written_costs_only_the_bundle(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with vector(tmp_path, [FaultyEnv] * 2, crash_dir=tmp_path / "file/crashes") as envs:
        envs.reset(seed=3)
        error = failure_of(envs, "exit")
        with pytest.raises(OSError, match="file"):
            ea.load_bundle(error.bundle)
        wait_until(lambda: "could not be written" in caplog.text)
        envs.reset(seed=3)
        envs.step([1, 1])


def fail_and_go_on(crash_dir):
    """Has an env crash twice in a program whose crash_dir cannot be written."""
    logging.basicConfig()
    restart = ea.RestartPolicy(backoff=0.0)
    with ea.VectorEnv([FaultyEnv] * 2, on_failure="renew", restart=restart, crash_dir=crash_dir) as envs:
        envs.reset(seed=3)
        for _ in range(2):
            envs[1].arm("exit").result()
            error = envs.step([1, 1])[4][1]["failure"]
            try:
                ea.load_bundle(error.bundle)
            except OSError as missing:
                print("no bundle:", type(missing).__name__)
            envs.step([1, 1])  # resets the env
            print("goes on:", envs.step([1, 1])[1].tolist())
    print("left:", [*Path(crash_dir).iterdir()])


GOES_ON = [*["no bundle: FileNotFoundError", "goes on: [1.0, 1.0]"] * 2, "left: []"]


def run_elsewhere(function, crash_dir, command=()):
    """Runs a function of this module in a process that the command starts; returns its output and its log."""
    places = [str(Path(place).absolute()) for place in (Path(ea.__file__).parents[1], *sys.path)]
    code = f"import sys; sys.path += {places}; import test_bundles; test_bundles.{function}({str(crash_dir)!r})"
    done = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_directory_that_its_user_may_not_write_costs_only_the_bundles(tmp_path):
    tmp_path.chmod(0o555)
    # Modes do not bind root, unless it has no capabilities.
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []
    if command and shutil.which("setpriv") is None:
        pytest.skip("root may write, and there is no setpriv")
    output, log = run_elsewhere("fail_and_go_on", tmp_path, command)
    assert output == GOES_ON
    assert log.count("could not be written: PermissionError") == 2


def test_a_full_disk_costs_only_the_bundles(tmp_path):
    command = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=4k tmpfs {tmp_path} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces")
    output, log = run_elsewhere("fail_and_go_on", tmp_path, command)
    assert output == GOES_ON
    assert log.count("could not be written: OSError(28") == 2


def test_a_bundle_has_the_variables_that_were_given_and_no_others(tmp_path, monkeypatch, replay):
    monkeypatch.setenv("SECRET_OF_THE_TEST", "s3cr3t")
    with ea.spawn(Leaving, backend=FORK_SERVER, crash_dir=tmp_path / "crashes", env_vars={"EXIT_CODE": "11"}) as actor:
        error = actor.leave().exception(SOON)
        ea.load_bundle(error.bundle)
    for path in bundles(tmp_path)[0].iterdir():
        assert b"s3cr3t" not in path.read_bytes()
    assert replay(error.bundle)[0] == "ends in the same way: exit code 11 in leave, 1 of 1"


class Leaving:
    def leave(self):
        os._exit(int(os.environ["EXIT_CODE"]))


class Mended(Leaving):
    def leave(self):
        return None


def test_another_env_shows_whether_a_fix_helps(tmp_path, replay):
    with ea.spawn(Leaving, backend=FORK_SERVER, crash_dir=tmp_path / "crashes", env_vars={"EXIT_CODE": "2"}) as actor:
        error = actor.leave().exception(SOON)
        bundle = ea.load_bundle(error.bundle)
    rerun = bundle.replay(2, env=Mended)
    assert (rerun.is_same, rerun.endings) == (False, ["no failure in leave"] * 2)
    line, status = replay(bundle.path, "--env", f"{__name__}:Mended")
    assert line == "does not end in the same way: exit code 2 in leave, 0 of 1; instead: no failure in leave"
    assert status == 1


def test_the_debugger_stops_before_the_last_request(tmp_path):
    with vector(tmp_path, [Moody] * 2) as envs:
        envs.reset(seed=1)
        envs.step([1, 2])
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([1, 3])
        bundle = ea.load_bundle(caught.value.failures[1].bundle)
    command = [sys.executable, "-m", "envactors.cli", "replay", bundle.path, "--pdb"]
    stdin = "p 'before', self.steps, int(action)\ncontinue\n"
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=SOON, cwd=tmp_path)
    assert "('before', 1, 3)" in done.stdout
    assert "ValueError: no 3 in" in done.stderr
    assert done.returncode == 0


def test_a_path_without_a_bundle_and_another_format_are_refused(tmp_path, capfd):
    assert main(["replay", str(tmp_path)]) == 2
    assert "report.json" in capfd.readouterr().err
    (tmp_path / "report.json").write_text('{"format": 99}')
    assert main(["replay", str(tmp_path)]) == 2
    assert "has format 99" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [("report.json", b"{"), ("report.json", b"[]"), ("inputs.pkl", b""), ("inputs.pkl", pickle.dumps({}))],
)
def test_a_damaged_bundle_is_refused(tmp_path, capfd, name, content):
    """It used to end in a traceback."""
    inputs = files.SavedInputs("actor", 0, 0, b"", ([], []), False, None, None, False, None, None, {}, [])
    files.write(str(tmp_path / "bundle"), {}, inputs)
    (tmp_path / "bundle" / name).write_bytes(content)
    assert main(["replay", str(tmp_path / "bundle")]) == 2
    assert f"the bundle {tmp_path / 'bundle'} is damaged" in capfd.readouterr().err


def test_only_its_user_can_read_a_bundle(tmp_path):
    """It contains ``env_vars``, and reading it unpickles it."""
    inputs = files.SavedInputs("actor", 0, 0, b"", ([], []), False, None, None, False, None, None, {}, [])
    files.write(str(tmp_path / "crashes" / "one"), {}, inputs)
    assert (tmp_path / "crashes" / "one").stat().st_mode & 0o777 == 0o700
