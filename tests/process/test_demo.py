"""`envactors demo`: the installed command, run as users run it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import promised

import envactors as ea
from envactors.cli import main
from envactors.cli.demo.command import make_env
from envactors.cli.demo.faults import Fault, FaultKind, Injector, plan_faults
from envactors.cli.demo.learning import Budget
from envactors.cli.demo.live import curve_lines
from envactors.cli.demo.reports import Generation
from envactors.cli.demo.rollouts import Episode, OutOfTimeError, Rollouts

COMMAND = Path(sys.executable).with_name("envactors")
CURVE = re.compile(r"^generation +(\d+): mean return +([\d.]+), best +([\d.]+), +([\d,]+) steps", re.MULTILINE)
# The seed, among the first ones, that learns fastest.
QUICK_SEED = "5"
# Far above the default limit, since the test checks what the demo learns, not the machine's speed.
PATIENTLY = "--time-limit", "170"
KINDS = {kind.value for kind in FaultKind}


# The demo learns for as long as the machine allows, which may be one that others use too.
pytestmark = pytest.mark.timeout(200)


def run(*arguments: str, timeout: float = 100, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def begun(traced):
    """The first generations, in which the faults are injected."""
    return run("demo", "--seed", QUICK_SEED, "--generations", "2", "--trace", str(traced), timeout=190)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "run.json"


def test_demo_prints_its_progress_as_plain_lines(begun):
    assert (begun.returncode, begun.stderr) == (1, "")
    title, *generations, verdict, work, where, _, reason = begun.stdout.splitlines()
    assert title == f"CartPole-v1 on 8 actors, seed {QUICK_SEED}"
    assert [int(CURVE.match(line)[1]) for line in generations] == [1, 2]
    first, second = (float(CURVE.match(line)[2]) for line in generations)
    assert first < second < 150
    assert re.match(
        r"Goal missed: .* mean return over 20 evaluation episodes is [\d.]+ \(wanted: at least 475\)", verdict
    )
    assert reason == "Learning was ended by the limit of generations, not because the policy was good enough."
    assert re.match(r"8 actors made [\d,]+ steps in [\d.]+ s, [\d,]+ steps/s, for 2 generations", work)
    assert re.match(r"Where the time went: envs \d+ %, caller \d+ %, envactors \d+ %; slowest env \d \(p99 ", where)


def test_it_meets_its_goal():
    learnt = run("demo", "--seed", QUICK_SEED, *PATIENTLY, timeout=190)
    assert (learnt.returncode, learnt.stderr) == (0, "")
    means = [float(mean) for _, mean, *_ in CURVE.findall(learnt.stdout)]
    assert means[0] < 150
    assert max(means) >= 350
    reached = re.search(
        r"^Goal met: .* mean return over 20 evaluation episodes is ([\d.]+) \(wanted: at least 475\)",
        learnt.stdout,
        re.MULTILINE,
    )
    assert float(reached[1]) >= 475


def test_it_learns_through_faults_of_every_kind(begun):
    faults, restarts, lost = troubles(begun.stdout)
    assert set(faults) == KINDS
    assert all(faults.values())
    # All but the slow reset cost a process.
    assert restarts == sum(faults.values()) - faults["slow reset"] >= 3
    assert lost == 0


def test_faults_make_no_difference_to_the_curve(begun):
    untroubled = run("demo", "--seed", QUICK_SEED, "--generations", "2", "--num-envs", "4", "--no-faults", timeout=190)
    assert CURVE.findall(untroubled.stdout) == CURVE.findall(begun.stdout)
    assert troubles(untroubled.stdout) == ({}, 0, 0)


def test_the_demo_writes_a_trace_of_its_run(begun, traced):
    events = json.loads(traced.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks >= {"caller of vector 0", *(f"env-{env}" for env in range(8))}
    restarts = int(re.search(r"Restarts: (\d+)", begun.stdout).group(1))
    assert sum(event["name"] == "renewal" for event in events) == restarts


def test_a_trace_that_cannot_be_written_is_reported_at_once(tmp_path, capsys):
    status = main(["demo", "--trace", str(tmp_path / "nowhere" / "run.json")])
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.startswith("envactors demo: the trace cannot be written: ")


@pytest.mark.soak
def test_it_learns_on_nodes_one_of_which_is_lost(begun):
    far = run("demo", "--seed", QUICK_SEED, "--generations", "2", "--nodes", "2", *PATIENTLY, timeout=190)
    assert CURVE.findall(far.stdout) == CURVE.findall(begun.stdout)
    assert "Nodes lost: 1. Episodes lost: 0." in far.stdout
    assert re.search(r"^Where the time went: envs \d+ %, caller \d+ %, envactors \d+ %; ", far.stdout, re.MULTILINE)
    assert "node local-0, " in far.stderr
    assert "is lost with" in far.stderr


def troubles(output: str) -> tuple[dict[str, int], int, int]:
    line = re.search(
        r"^Faults injected: (?:none|(\d+) \((.*)\))\. Restarts: (\d+)\. Episodes lost: (\d+)\.$",
        output,
        re.MULTILINE,
    )
    faults = {kind: int(number) for kind, number in re.findall(r"([^,]+) (\d+)(?:, )?", line[2] or "")}
    assert sum(faults.values()) == int(line[1] or 0)
    return faults, int(line[3]), int(line[4])


@pytest.mark.parametrize("generations", [1, 3, 60])
def test_every_kind_of_fault_is_planned_however_few_generations_there_are(generations):
    for seed in range(50):
        plan = plan_faults(np.random.default_rng(seed), generations, 24)
        assert set(plan) <= set(range(1, generations + 1))
        assert {fault.kind.value for faults in plan.values() for fault in faults.values()} == KINDS
        assert plan == plan_faults(np.random.default_rng(seed), generations, 24)


def test_an_episode_that_cannot_be_replayed_is_counted_as_lost():
    with ea.VectorEnv([make_env] * 2, autoreset="disabled", on_failure="renew") as envs:
        playing = Rollouts(envs, Injector(envs), lambda done, total: None)
        faults = {1: Fault(FaultKind.SIGKILL, 2)}
        episodes = [Episode(np.ones(4), seed) for seed in range(4)]
        assert len(playing.play(episodes, lambda: False, faults)) == 4
        assert playing.lost == 1


def test_replayed_episodes_have_the_same_returns_and_none_is_lost():
    episodes = [Episode(np.array([0.1, 0.2, 1.0, 1.0]), seed) for seed in range(4)]
    returns = []
    for faults in ({}, {0: Fault(FaultKind.EXCEPTION, 3), 2: Fault(FaultKind.HANG, 5)}):
        with ea.VectorEnv([make_env] * 2, autoreset="disabled", on_failure="replay", deadlines=1.0) as envs:
            playing = Rollouts(envs, Injector(envs), lambda done, total: None)
            returns.append(playing.play(episodes, lambda: False, faults).tolist())
            assert playing.lost == 0
            assert sum(actor.restarts for actor in envs.stats().actors) == len(faults)
    assert returns[0] == returns[1]


def test_envs_can_be_used_again_after_time_has_run_out():
    with ea.VectorEnv([make_env] * 2, autoreset="disabled") as envs:
        playing = Rollouts(envs, Injector(envs), lambda done, total: None)
        episodes = [Episode(np.ones(4), seed) for seed in range(4)]
        with pytest.raises(OutOfTimeError):
            playing.play(episodes, lambda: True)
        assert len(playing.play(episodes, lambda: False)) == 4


def test_a_missed_goal_is_exit_status_1():
    # Rich would take the pipe for a terminal here.
    ended = run("demo", "--generations", "1", "--num-envs", "2", "--no-faults", FORCE_COLOR="1")
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "\x1b" not in ended.stdout
    assert "Goal missed: " in ended.stdout
    assert "ended by the limit of generations" in ended.stdout


def test_the_time_limit_ends_the_learning():
    started = time.monotonic()
    ended = run("demo", "--time-limit", "2.5", "--num-envs", "2", "--no-faults")
    assert time.monotonic() - started < promised(15)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "ended by the time limit" in ended.stdout


def test_envs_that_were_held_up_at_first_do_not_end_the_learning():
    budget = Budget(50.0, 10_000, time.monotonic())
    assert not budget.is_spent(100, 1.2)  # at this rate the rest would take two minutes
    assert Budget(50.0, 10_000, time.monotonic() - 26).is_spent(100, 1.2)
    assert Budget(50.0, 10_000, time.monotonic() - 41).is_spent(10_000, 10.0)
    assert not Budget(50.0, 10_000, time.monotonic() - 26).is_spent(10_000, 10.0)


def test_another_seed_makes_another_curve(begun):
    other = run("demo", "--seed", "2", "--generations", "1", "--num-envs", "2", "--no-faults", *PATIENTLY)
    curve = CURVE.findall(other.stdout)
    assert len(curve) == 1
    assert curve != CURVE.findall(begun.stdout)[:1]


@pytest.mark.parametrize("size", [(0, 0), (24, 60)], ids=str)
def test_the_live_table_in_a_terminal(size):
    status, screen = run_in_terminal(size, "demo", "--generations", "1", "--num-envs", "2", "--no-faults")
    assert status == 1
    for text in (
        "starting the actors",
        "CartPole-v1 on 2 actors",
        "env-0",
        "env-1",
        "idle",
        "steps/s",
        "restarts",
        "█",
        "Goal missed",
    ):
        assert text in screen
    assert "Traceback" not in screen


def test_faults_in_the_live_table():
    status, screen = run_in_terminal((40, 120), "demo", "--generations", "1", "--num-envs", "2")
    assert status == 1
    assert "last failure" in screen
    assert "renewing" in screen
    # Each stays until the next one of the same actor.
    assert re.search("was killed by|exceeded", screen)
    for text in ("SIGKILL 2", "hang in C 1", "exception 2", "slow reset 1", "Episodes lost: 0"):
        assert text in re.sub(r"\s*\r?\n", " ", screen)
    assert "Traceback" not in screen


def run_in_terminal(size: tuple[int, int], *arguments: str) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "PYTHONUTF8": "1"}
    with subprocess.Popen(
        [COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        screen = b""
        # The last one who has the other end leaves: EIO.
        with contextlib.suppress(OSError):
            while data := os.read(ours, 1 << 16):
                screen += data
    os.close(ours)
    return process.returncode, screen.decode()


def test_ctrl_c_closes_the_actors():
    # A new session, so that the signal reaches the same processes as from a terminal, but not pytest.
    with subprocess.Popen(
        [COMMAND, "demo", "--num-envs", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout.readline().startswith("CartPole-v1")
        while len(workers := psutil.Process(process.pid).children(recursive=True)) < 6:  # with reaper and fork server
            time.sleep(0.05)
        # In the middle of the first generations, which is where the faults are.
        time.sleep(1)
        workers = [*{*workers, *psutil.Process(process.pid).children(recursive=True)}]
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert errors == "envactors: interrupted\n"
    _, left = psutil.wait_procs(workers, timeout=2)
    assert left == []


def test_demo_ends_quietly_when_its_output_is_closed():
    with subprocess.Popen(
        [COMMAND, "demo", "--num-envs", "2", "--no-faults"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (141, "")


@pytest.mark.parametrize("missing", [("rich",), ("gymnasium",), ("gymnasium", "rich")], ids=" and ".join)
def test_missing_extras_are_named_in_one_line(missing):
    hide = "".join(f"sys.modules[{name!r}] = None; " for name in missing)
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; {hide}from envactors.cli import main; sys.exit(main(['demo']))"],
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"envactors demo needs {' and '.join(missing)}: pip install 'envactors[demo]'\n"


def test_command_and_module_have_a_version():
    told = run("--version")
    assert re.fullmatch(r"envactors \d+\.\d+\.\d+\S*\n", told.stdout)
    module = subprocess.run([sys.executable, "-m", "envactors.cli", "--version"], capture_output=True, text=True)
    assert module.stdout == told.stdout


def test_the_help_names_commands_and_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "demo" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--help"])
    assert ended.value.code == 0
    described = capsys.readouterr().out
    for text in ("--num-envs", "--seed", "--generations", "--time-limit", "--no-faults", "exit status", "CartPole"):
        assert text in described


def test_no_envs_are_exit_status_2():
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--num-envs", "0"])
    assert ended.value.code == 2


@pytest.mark.parametrize("count", [0, 1, 7, 12, 60])
def test_the_curve_has_its_size_and_shows_the_last_generation(count):
    generations = [Generation(n, 500.0 * n / count, 500.0, 0, None) for n in range(1, count + 1)]
    lines = curve_lines(generations, 500.0, width=30, height=8)
    assert [line.cell_len for line in lines] == [35] * 8
    assert ("█" in lines[0].plain) == (count > 0)
