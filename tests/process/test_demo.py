"""`envactors demo`: the installed command, run as users run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import envactors as ea
from envactors.cli import main
from envactors.cli.demo import command
from envactors.cli.demo.faults import FAULTS

COMMAND = Path(sys.executable).with_name("envactors")
README = Path(__file__).parents[2] / "README.md"
LEARNING = re.compile(r"^generation .*", re.MULTILINE)

# The demo learns for as long as the machine allows, which may be one that others use too.
pytestmark = pytest.mark.timeout(200)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=190)


def start(*arguments: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen([COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture(scope="module")
def demo():
    """A run with all faults; with this seed, four generations learn enough."""
    return run("demo", "--generations", "4")


def check_that_the_goal_is_met(demo):
    assert (demo.returncode, demo.stderr) == (0, "")
    title, *_, verdict, counts = demo.stdout.splitlines()
    assert title == "CartPole-v1 on 8 actors, seed 0"
    mean = re.match(r"Goal met: mean return ([\d.]+) over 20 evaluation episodes \(wanted: at least 475\)\.", verdict)
    assert float(mean[1]) >= 475
    assert re.match(r"Faults: 4, survived: 4\. Restarts: \d+\. Episodes lost: 0\. [\d,]+ steps in [\d.]+ s\.", counts)


def test_it_meets_its_goal_in_spite_of_faults(demo):
    check_that_the_goal_is_met(demo)
    means = [float(mean) for mean in re.findall(r"^generation +\d: mean return +([\d.]+), ", demo.stdout, re.MULTILINE)]
    assert len(means) == 4
    assert means[0] < 150 < means[-1]


@pytest.mark.slow
def test_it_meets_its_goal_without_a_limit_of_generations():
    check_that_the_goal_is_met(run("demo"))


def test_each_fault_is_announced_and_its_recovery_reported(demo):
    reports = re.findall(
        r"^fault: (.+) in step \d of env (\d)\n"
        r"  actor 'env-\2' \(env \2, pid \d+, incarnation \d\) (.+)\n"
        r"  survived: a new process repeated the step [\d.]+ m?s after the fault\n"
        r"generation ",
        demo.stdout,
        re.MULTILINE,
    )
    assert [fault for fault, _, _ in reports] == [*FAULTS]
    expected = (
        "was killed by signal 9",
        "passed its deadline of 1.0 s",
        "was killed by signal 11",
        "was replaced since",
    )
    for (_, _, error), text in zip(reports, expected, strict=True):
        assert error.startswith(text)


def test_faults_and_the_number_of_envs_make_no_difference(demo):
    undisturbed = run("demo", "--generations", "2", "--num-envs", "5", "--no-faults")
    assert LEARNING.findall(undisturbed.stdout) == LEARNING.findall(demo.stdout)[:2]
    assert "Faults: 0, survived: 0. Restarts: 0. Episodes lost: 0." in undisturbed.stdout
    # Two generations are too few.
    assert (undisturbed.returncode, undisturbed.stderr) == (1, "")
    assert "Goal missed: " in undisturbed.stdout


def test_the_readme_shows_what_the_command_prints(demo):
    (quoted,) = re.findall(r"```text\n(fault: .*?)```", README.read_text(), re.DOTALL)

    def shapes(text):
        return {re.sub(r" *\d[\d.,]*( m?s\b)?", " N", line) for line in text.splitlines()}

    assert shapes(quoted) <= shapes(demo.stdout)


def test_a_fault_that_is_not_survived_is_exit_status_1(monkeypatch, capsys):
    make = ea.VectorEnv
    monkeypatch.setattr(ea, "VectorEnv", lambda *args, **options: make(*args, **{**options, "on_failure": "renew"}))
    monkeypatch.setattr(command, "_GOAL", 0.0)
    assert main(["demo", "--generations", "1", "--num-envs", "2"]) == 1
    printed = capsys.readouterr().out
    assert "not survived" in printed
    assert "Goal met: " in printed
    assert "Faults: 1, survived: 0. Restarts: 1. Episodes lost: 1." in printed


def test_ctrl_c_closes_the_actors():
    # A new session, so that the signal reaches the same processes as from a terminal, but not pytest.
    with start("demo", "--num-envs", "4", start_new_session=True) as process:
        while not process.stdout.readline().startswith("fault: hang in C"):
            pass
        time.sleep(0.5)
        workers = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (130, "envactors: interrupted\n")
    _, left = psutil.wait_procs(workers, timeout=2)
    assert left == []


def test_demo_ends_quietly_when_its_output_is_closed():
    with start("demo", "--num-envs", "2", "--no-faults") as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (141, "")


def test_a_missing_extra_is_named_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert main(["demo"]) == 2
    assert capsys.readouterr() == ("", "envactors demo needs gymnasium: pip install 'envactors[demo]'\n")


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
    for text in ("--num-envs", "--seed", "--generations", "--no-faults", "exit status", "CartPole"):
        assert text in described


def test_no_envs_are_exit_status_2():
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--num-envs", "0"])
    assert ended.value.code == 2
