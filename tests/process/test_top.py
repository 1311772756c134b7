"""`envactors top` and `envactors stacks`: the commands, run as users run them, on programs that run meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import psutil
import pytest
from envactors.cli.monitored import Program, ProgramError, find_program, find_programs, printable
from envactors.cli.top import keyboard as keyboards
from envactors.cli.top.keyboard import Keyboard
from envactors.cli.top.rows import ActorRow, Picture, Sampler
from envactors.cli.top.screens import Back, DetailScreen, ListScreen, Quit, TableScreen, View
from envactors.cli.top.view import ORDERS, actor_table, fit_columns, head_lines, report, screen
from envactors.cli.units import duration, rate, size
from envactors.observe.programs import ask
from helpers import SOON, is_gone, promised, wait_until
from rich.console import Console
from rich.text import Text
from warm import warm_interpreter

from envactors.testing.envs import expected_checksum

COMMAND = [sys.executable, "-W", "error", "-m", "envactors.cli"]
# As users run it: the script that the installation has made, and what it imports in order to look at programs.
INSTALLED = Path(sys.executable).with_name("envactors")
IMPORTED = ("envactors.cli.monitored", "envactors.cli.top.view", "rich.console", "psutil")
# The limit that a user may expect, and the start time of an interpreter on a busy machine.
AT_ONCE = 2.0
START = 3.0

PROGRAM = """
import ctypes, os, sys, time
import numpy as np
import envactors as ea
from envactors.testing import EchoEnv, FaultyEnv

def step_until(path):
    while not os.path.exists(path):
        envs.step([1] * 4)
        time.sleep(0.002)  # the processor is for others, too

envs = ea.VectorEnv([lambda i=i: FaultyEnv(EchoEnv(i)) for i in range(4)], envs_per_actor=2, on_failure="renew")
envs.reset(seed=0)
print(os.getpid(), *[actor.pid for actor in envs.actors], flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
envs.close()
"""


class Running:
    """A program with four envs in two actors that follows commands."""

    def __init__(self, process):
        self.process = process
        self.pid, *self.workers = map(int, process.stdout.readline().split())
        self.actions = []

    def begin(self, code):
        self.process.stdin.write(f"{code}\n")
        self.process.stdin.flush()

    def end(self):
        lines = []
        while (line := self.process.stdout.readline()) != "done\n":
            assert line, "the program has ended"
            lines.append(line.rstrip("\n"))
        return lines

    def do(self, code):
        self.begin(code)
        return self.end()

    def reset(self):
        """Reset the envs after uncounted steps."""
        self.do("envs.reset(seed=0)")
        self.actions.clear()

    def check_steps(self):
        """Makes three steps, and checks the results of all since the reset."""
        for action in range(3):
            (shown,) = self.do(f"print(envs.step([{action}] * 4)[0].tolist())")
            self.actions.append(action)
            wanted = [[i, len(self.actions), action, expected_checksum(i, self.actions)] for i in range(4)]
            assert json.loads(shown) == wanted


@contextlib.contextmanager
def running(server, runtime, **environment):
    with server.start(PROGRAM, (), {**os.environ, "XDG_RUNTIME_DIR": str(runtime), **environment}) as process:
        program = None
        try:
            program = Running(process)
            yield program
            process.stdin.close()
            process.wait(SOON)
        finally:
            for pid in [process.pid, *(program.workers if program else [])]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            process.kill()
            wait_until(lambda: all(map(is_gone, program.workers if program else [])))


@pytest.fixture
def runtime(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="ea") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path)


@pytest.fixture
def program(runtime, program_server):
    with running(program_server, runtime) as program:
        yield program


@pytest.fixture(scope="module")
def standing_program(program_server):
    with tempfile.TemporaryDirectory(prefix="ea") as path, running(program_server, path) as program:
        yield path, program


@pytest.fixture
def standing(standing_program, monkeypatch):
    """A program for tests that leave it as it was."""
    path, program = standing_program
    monkeypatch.setenv("XDG_RUNTIME_DIR", path)
    yield program
    for pid in (program.pid, *program.workers):
        os.kill(pid, signal.SIGCONT)


def without_size():
    """Return the environment without the variables for the size and colors of the terminal."""
    hidden = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def run_afresh(*arguments):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=without_size(),
        timeout=100,
    )


@pytest.fixture(scope="module")
def interpreter(helper_processes):
    with warm_interpreter("-W", "error", modules=IMPORTED) as interpreter:
        yield interpreter


@pytest.fixture
def run(interpreter, tmp_path):
    """Runs a command of which only the output and the status matter, in an interpreter that stands ready."""

    def run(*arguments):
        words = [*map(str, arguments)]
        return interpreter.run(INSTALLED, words, tmp_path, environment=without_size(), keeps_server=False)

    return run


def complaint(ended):
    """Return the error of a command that found nothing to show."""
    assert (ended.returncode, ended.stdout) == (1, ""), ended
    return ended.stderr.rstrip("\n").partition(": ")[2]


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


# A single table --------------------------------------------------------------------------------------------


def test_the_table_lists_what_each_actor_is_doing(standing, run, tmp_path):
    standing.begin(f"step_until({str(tmp_path / 'enough')!r})")
    run("top")
    shown = run_afresh("top", "--once")
    (tmp_path / "enough").touch()
    standing.end()
    standing.reset()
    assert (shown.returncode, shown.stderr) == (0, "")
    first, vector, _, head, _, *rows = shown.stdout.splitlines()
    assert first.startswith(f"program {standing.pid}  {sys.executable} ")
    assert re.match(r"vector 0: 4 envs, [\d,]+ steps, 0 episodes; envs \d+ %, caller \d+ %, ", vector)
    assert " ".join(head.split()) == "actor vector state running steps/s p50 p99 RSS CPU % restarts"
    assert [row.split()[0] for row in rows] == ["envs-0-1", "envs-2-3"]
    for row in rows:
        found = re.search(r" ([\d,.]+) +[\d.]+ [µm]s +[\d.]+ [µm]s +\d+ MB +\d+ +0$", row)
        assert float(found[1].replace(",", "")) > 10


def test_json_needs_no_rich(standing):
    hide = "import sys; sys.modules['rich'] = sys.modules['psutil'] = None; "
    code = f"{hide}from envactors.cli import main; sys.exit(main())"
    shown = subprocess.run([sys.executable, "-c", code, "top", "--json", "-"], capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    (snapshot,) = json.loads(shown.stdout)
    assert snapshot["pid"] == standing.pid
    assert [actor["pid"] for actor in snapshot["actors"]] == standing.workers
    assert snapshot["vectors"][0]["envs"] == 4


@pytest.mark.parametrize("missing", [("rich",), ("psutil",), ("psutil", "rich")], ids=" and ".join)
def test_missing_extras_are_named_in_one_line(missing):
    hide = "".join(f"sys.modules[{name!r}] = None; " for name in missing)
    code = f"import sys; {hide}from envactors.cli import main; sys.exit(main(['top']))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"envactors top needs {' and '.join(missing)}: pip install 'envactors[cli]'\n"


def test_stacks_of_all_and_of_one(standing, run):
    shown = run_afresh("stacks")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.findall(r"^==== (\S+) \(process (\d+)\): idle ====$", shown.stdout, re.MULTILINE) == [
        ("envs-0-1", str(standing.workers[0])),
        ("envs-2-3", str(standing.workers[1])),
    ]
    assert shown.stdout.count("most recent call first") == 2
    shown = run("stacks", standing.pid, "--actor", "envs-2-3", "--timeout", "9")
    assert (shown.stdout.count("===="), "envs-2-3" in shown.stdout) == (2, True)
    shown = run("stacks", "--actor", "envs-9")
    assert complaint(shown) == f"program {standing.pid} has no actor 'envs-9', but envs-0-1, envs-2-3"
    standing.check_steps()


def test_a_program_is_found_by_the_path_of_its_socket(runtime, run, program_server):
    path = runtime / "own.sock"
    with running(program_server, runtime, ENVACTORS_MONITOR="0") as program:
        program.do(f"monitor = ea.monitor({str(path)!r})")
        assert run("top", path).stdout.startswith(f"program {program.pid} ")
        assert run("stacks", path).stdout.count("====") == 4
        program.do("monitor.close()")
        assert "is neither a process id nor the path of a socket" in complaint(run("top", path))
        assert complaint(run("top", program.pid)).startswith(
            f"program {program.pid} cannot be shown: it has no actors now"
        )


def test_several_programs(standing, run, program_server):
    with running(program_server, os.environ["XDG_RUNTIME_DIR"]) as other:
        tables = run("top", "--once")
        assert tables.returncode == 0
        assert re.findall(r"^program (\d+)", tables.stdout, re.MULTILINE) == [
            str(pid) for pid in sorted([standing.pid, other.pid])
        ]
        stacks = run("stacks")
        assert (stacks.returncode, stacks.stdout) == (2, "")
        assert f"\n  {standing.pid:>7}  {sys.executable} " in stacks.stderr
        stop(other.pid)
        tables, listed = run("top"), run("top", "--json", "-")
        os.kill(other.pid, signal.SIGCONT)
        assert (tables.returncode, listed.returncode) == (1, 1)
        assert tables.stdout.startswith(f"program {standing.pid} ")
        assert f"program {other.pid} is stopped" in tables.stderr
        by_pid = {found["pid"]: found for found in json.loads(listed.stdout)}
        assert by_pid[standing.pid]["actors"]
        assert by_pid[other.pid]["error"].startswith(f"program {other.pid} is stopped")


def test_top_and_stacks_report_that_no_program_has_actors(runtime, run):
    for command in ("top", "stacks"):
        assert complaint(run(command)).startswith("no program of this user has actors now, or")
        assert complaint(run(command, "999999999")) == "process 999999999 does not exist"
        assert "neither a process id" in complaint(run(command, "/"))
    assert run("top", "--json", "-").stdout == "[]\n"
    (runtime / "envactors").chmod(0o755)
    assert run("top").returncode == run("stacks").returncode == 2


def test_without_a_command_the_help_is_printed(run):
    shown = run()
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == run("--help").stdout


def test_help_names_keys_and_statuses(run):
    assert "watch the actors of a running program" in run("--help").stdout
    for text in ("Enter", "steps/s, p99", "--once", "--json", "exit status", "ENVACTORS_MONITOR=0"):
        assert text in run("top", "--help").stdout
    assert "--actor" in run("stacks", "--help").stdout
    assert run("stacks", "--timeout", "11").returncode == 2


# Programs that do not answer -------------------------------------------------------------------------------


def refusal(program):
    """Asks a program that does not answer; it must be said soon why not."""
    begun = time.monotonic()
    with pytest.raises(ProgramError) as caught:
        program.ask({"get": "snapshot"})
    assert time.monotonic() - begun < promised(AT_ONCE)
    return str(caught.value)


def test_a_stopped_caller_is_reported_as_stopped(standing, run):
    standing.check_steps()
    stop(standing.pid)
    said = f"program {standing.pid} is stopped (by SIGSTOP, Ctrl-Z or a debugger): kill -CONT {standing.pid}"
    assert refusal(find_program(str(standing.pid))) == said
    for command in (("top",), ("top", "--once"), ("stacks",)):
        begun = time.monotonic()
        assert complaint(run(*command)) == said
        assert time.monotonic() - begun < promised(AT_ONCE)
    os.kill(standing.pid, signal.SIGCONT)
    standing.check_steps()


def test_a_caller_in_c_code_that_holds_the_gil(standing, run):
    standing.check_steps()
    found = find_program(str(standing.pid))
    # It reads a byte of its input, and meanwhile keeps the interpreter's lock, unlike `os.read`.
    standing.begin("ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)")
    with contextlib.suppress(ProgramError):
        while True:
            found.ask({"get": "snapshot"})
    said = f"program {standing.pid} does not answer: perhaps C code holds its GIL"
    assert refusal(found) == said
    begun = time.monotonic()
    assert complaint(run("top", standing.pid)) == said
    assert time.monotonic() - begun < promised(AT_ONCE)
    assert complaint(run("stacks")) == said
    with terminal(standing.pid) as top:
        top.wait_for(said, promised(AT_ONCE + START))
        top.press("q")
        assert top.end() == (0, "")
    standing.begin("")
    standing.end()
    standing.check_steps()
    assert found.ask({"get": "snapshot"})["pid"] == standing.pid


def test_a_program_that_was_killed(program, run):
    found = find_program(str(program.pid))
    program.process.kill()
    program.process.wait(SOON)
    assert refusal(found) == f"program {program.pid} has ended"
    assert complaint(run("top", program.pid)) == f"program {program.pid} has ended"
    assert find_programs() == []


def test_a_worker_that_hangs_in_c(program, run):
    program.do("envs[3].arm('hang_in_c').result()")
    program.do("envs.send([1] * 4)")
    path = find_program(str(program.pid)).path
    wait_until(lambda: ask(path, {"get": "snapshot"}, SOON)["actors"][0]["method"] is None)
    shown = run("top", "--once")
    assert re.search(r"envs-2-3 +0 +busy +step \d", shown.stdout)
    assert re.search(r"envs-0-1 +0 +idle +\d", shown.stdout)
    stacks = run("stacks", "--actor", "envs-2-3")
    assert "_hang_in_c" in stacks.stdout
    assert re.search(r"^==== envs-2-3 \(process \d+\): step for ", stacks.stdout)
    program.do("envs.actors[1].kill(restart=True)")
    assert program.do("print(envs.recv().obs[:2, 2].tolist())") == ["[1, 1]"]


def test_a_stopped_worker_is_reported_as_stopped(standing, run):
    standing.check_steps()
    stop(standing.workers[1])
    standing.do("envs.send([0] * 4)")
    shown = run("top", "--once")
    assert re.search(r"envs-2-3 +0 +busy, stopped +step \d", shown.stdout)
    assert not re.search(r"envs-0-1.*stopped", shown.stdout)
    stacks = run("stacks", "--actor", "envs-2-3", "--timeout", "0.3")
    assert "is stopped (by SIGSTOP" in stacks.stdout
    os.kill(standing.workers[1], signal.SIGCONT)
    standing.do("envs.recv()")
    standing.actions.append(0)
    standing.check_steps()


# Live ------------------------------------------------------------------------------------------------------


class Terminal:
    """A terminal with `envactors top` in it."""

    def __init__(self, ours, process):
        self._ours = ours
        self.process = process
        self.output = b""

    def press(self, keys):
        os.write(self._ours, keys.encode())

    def read(self, seconds=SOON):
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # the last one who had the other end has left
            return False
        self.output += data
        return bool(data)

    def frame(self):
        """The lines of the last picture that is complete."""
        frames = [plain(part) for part in self.output.decode(errors="replace").split("\x1b[H")]
        whole = [part for part in frames if "q quit" in part]
        return whole[-1].splitlines() if whole else []

    def wait_for(self, condition, seconds=SOON):
        """Reads until the picture is as wanted: has a text, or meets a condition; returns its lines."""
        is_met = condition if callable(condition) else lambda lines: condition in "\n".join(lines)
        end = time.monotonic() + seconds
        while not is_met(lines := self.frame()):
            assert time.monotonic() < end, self.output[-5000:].decode(errors="replace")
            self.read(0.1)
        return lines

    def end(self):
        """Reads to the end; returns the status and what is left on the screen."""
        end = time.monotonic() + SOON
        while self.process.poll() is None:
            assert time.monotonic() < end, "it goes on and on"
            self.read(0.1)
        while self.read(0.0):
            pass
        return self.process.returncode, plain(self.output.decode().rpartition("\x1b[?1049l")[2])


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def names(lines):
    return [line.split()[0] for line in lines if line.startswith("envs-")]


@contextlib.contextmanager
def terminal(*arguments, size=(24, 100)):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    before = termios.tcgetattr(theirs)
    environment = {**without_size(), "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    command = [*COMMAND, "top", *map(str, arguments)]
    try:
        with subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        ) as process:
            try:
                yield Terminal(ours, process)
                assert termios.tcgetattr(theirs) == before
            finally:
                process.kill()
    finally:
        os.close(ours)
        os.close(theirs)


def test_keys_sort_select_and_show_stacks(standing):
    with terminal(size=(24, 80)) as top:
        lines = top.wait_for(lambda lines: names(lines) and "steps/s " in "\n".join(lines))
        assert lines[0].startswith(f"program {standing.pid} ")
        assert len(lines) == 24
        assert names(lines) == ["envs-0-1", "envs-2-3"]
        for order in [*ORDERS[1:], ORDERS[0]]:
            top.press("s")
            top.wait_for(f"s sort by {order.name} ")
        top.press("\x1b[B")
        top.press("\r")
        lines = top.wait_for("most recent call first")
        assert lines[0].startswith(f"envs-2-3 (process {standing.workers[1]}): idle")
        top.press("b")
        top.wait_for(lambda lines: len(names(lines)) == 2)
        top.press("kt")
        lines = top.wait_for("most recent call first")
        assert lines[0].startswith(f"envs-0-1 (process {standing.workers[0]}): idle")
        top.press("\x1b")
        top.wait_for(lambda lines: len(names(lines)) == 2)
        top.press("q")
        assert top.end() == (0, "")
    standing.check_steps()


def test_the_busiest_or_slowest_comes_first(standing):
    with terminal() as top:
        top.wait_for(lambda lines: names(lines) == ["envs-0-1", "envs-2-3"])
        stop(standing.workers[1])
        standing.do("envs.send([1] * 4)")
        top.wait_for(lambda lines: any("busy" in line and " step " in line for line in lines))
        top.press("ssss")
        lines = top.wait_for(lambda lines: "sort by age" in lines[-1] and names(lines) == ["envs-2-3", "envs-0-1"])
        assert any("step" in line for line in lines if line.startswith("envs-2-3"))
        top.press("q")
        assert top.end()[0] == 0
    os.kill(standing.workers[1], signal.SIGCONT)
    standing.do("envs.recv()")
    standing.actions.append(1)
    standing.check_steps()


def steps_in(lines):
    found = re.search(r" ([\d,]+) steps, ", "\n".join(lines))
    return int(found[1].replace(",", "")) if found else -1


def test_a_pause_keeps_the_numbers(standing):
    with terminal() as top:
        before = steps_in(top.wait_for(lambda lines: steps_in(lines) >= 0))
        top.press("p")
        top.wait_for("paused")
        standing.check_steps()
        top.output = b""
        end = time.monotonic() + 1.2  # two snapshots
        while time.monotonic() < end:
            top.read(0.1)
        assert steps_in(top.wait_for("paused")) == before
        top.press("p")
        top.wait_for(lambda lines: steps_in(lines) == before + 12)
        top.press("q")
        assert top.end()[0] == 0


def test_a_blocked_program_is_shown_with_its_last_values(standing):
    with terminal() as top:
        top.wait_for(lambda lines: len(names(lines)) == 2)
        stop(standing.pid)
        lines = top.wait_for(f"program {standing.pid} is stopped (by SIGSTOP", promised(AT_ONCE + START))
        assert len(names(lines)) == 2
        top.press("\r")
        top.wait_for(lambda lines: "is stopped" in lines[0])
        top.press("\x1b")
        os.kill(standing.pid, signal.SIGCONT)
        top.wait_for(lambda lines: len(names(lines)) == 2 and "is stopped" not in "\n".join(lines))
        standing.begin("ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)")
        lines = top.wait_for("does not answer: perhaps C code holds its GIL", promised(AT_ONCE + START))
        assert len(names(lines)) == 2
        top.press("s")
        top.wait_for("sort by steps/s")
        standing.begin("")
        standing.end()
        top.wait_for(lambda lines: "does not answer" not in "\n".join(lines))
        standing.check_steps()
        stop(standing.workers[0])
        top.wait_for("idle, stopped", promised(AT_ONCE + START))
        os.kill(standing.workers[0], signal.SIGCONT)
        top.wait_for(lambda lines: "stopped" not in "\n".join(lines))
        standing.check_steps()
        top.press("q")
        assert top.end() == (0, "")


@pytest.mark.parametrize("how", ["killed", "at its end", "in the stacks", "monitored no more"])
def test_a_program_that_ends_while_it_is_watched(program, how):
    with terminal() as top:
        top.wait_for(lambda lines: len(names(lines)) == 2)
        if how == "in the stacks":
            top.press("\r")
            top.wait_for("most recent call first")
        if how == "at its end":
            program.process.stdin.close()
        elif how == "monitored no more":
            program.do(
                "from envactors.observe import listener; [one.release() for one in [*listener._listeners.values()]]"
            )
        else:
            program.process.kill()
        begun = time.monotonic()
        status, left = top.end()
        assert time.monotonic() - begun < promised(AT_ONCE + START)
    assert status == 0
    # At its end a program closes its socket some time before it has ended.
    wanted = {
        "monitored no more": ["no longer has actors"],
        "at its end": ["no longer has actors", "has ended"],
    }
    assert left in [f"program {program.pid} {end}\n" for end in wanted.get(how, ["has ended"])]


def test_one_of_several_is_chosen(runtime, program_server):
    with running(program_server, runtime) as one, running(program_server, runtime) as two, terminal() as top:
        first, second = sorted([one, two], key=lambda program: program.pid)
        lines = top.wait_for(
            lambda lines: all(re.search(rf"\b{p.pid} +1 +2 +0 ", "\n".join(lines)) for p in (one, two))
        )
        assert lines[0].startswith("2 programs have actors")
        top.press("j\r")
        lines = top.wait_for(lambda lines: len(names(lines)) == 2)
        assert lines[0].startswith(f"program {second.pid} ")
        assert "Esc back" in lines[-1]
        top.press("b")
        top.wait_for("2 programs have actors")
        second.process.kill()
        top.wait_for(f"program {second.pid} has ended")
        top.press("\r")
        top.press("k\r")
        lines = top.wait_for(lambda lines: len(names(lines)) == 2)
        assert lines[0].startswith(f"program {first.pid} ")
        top.press("q")
        assert top.end() == (0, "")


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_restores_the_terminal(standing, signum, status):
    with terminal(standing.pid) as top:
        top.wait_for(lambda lines: len(names(lines)) == 2)
        os.killpg(top.process.pid, signum)
        ended, left = top.end()
        assert ended == status
        assert left == ("envactors: interrupted\n" if signum == signal.SIGINT else "")
        # The cursor is shown again.
        assert top.output.rindex(b"\x1b[?25h") > top.output.rindex(b"\x1b[?25l")


def test_the_command_ends_with_its_terminal(standing):
    ours, theirs = pty.openpty()
    environment = {**without_size(), "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    with subprocess.Popen(
        [*COMMAND, "top"], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        assert os.read(ours, 100)
        os.close(ours)
        _, errors = process.communicate(timeout=SOON)
    assert (process.returncode, errors) == (129, b"")
    standing.check_steps()


def test_without_keys_there_is_one_table(standing):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    ended = subprocess.run(
        [*COMMAND, "top"], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=without_size()
    )
    screen = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert ended.returncode == 0
    assert "\x1b[?1049h" not in screen
    assert "envs-0-1" in screen


def test_keys_as_terminals_send_them(monkeypatch):
    ours, theirs = pty.openpty()
    with Keyboard(theirs) as keyboard:
        for sent, wanted in [
            (b"s", ["s"]),
            (b"\x1b[A\x1bOB\x1b[5~", ["up", "down", "page up"]),
            (b"\r", ["enter"]),
            (b"\x1b", ["escape"]),
            (b"jk\x1b[1;5Cq", ["down", "up", "\x1b[1;5C", "q"]),
            ("é".encode(), ["é"]),
        ]:
            os.write(ours, sent)
            assert [keyboard.read(SOON) for _ in wanted] == wanted
        assert keyboard.read(0.0) is None
        with monkeypatch.context() as patch:
            patch.setattr(keyboards, "_PAUSE", SOON)  # a busy machine takes its time for the second half
            os.write(ours, b"\x1b[")
            threading.Timer(0.01, os.write, (ours, b"B")).start()
            assert keyboard.read(SOON) == "down"
        waker = threading.Thread(target=keyboard.wake)
        waker.start()
        assert keyboard.read(SOON) is None
        waker.join()
        os.close(ours)
        with pytest.raises(EOFError):
            keyboard.read(SOON)
    keyboard.wake()
    os.close(theirs)


# Layout ----------------------------------------------------------------------------------------------------


def actor(number, **changes):
    row = ActorRow(
        key=number,
        name=f"env-{number}",
        vector=0,
        state="busy",
        method="step",
        age=0.0182,
        rate=1234.5,
        p50=0.0018,
        p99=0.018,
        rss=123_456_789,
        cpu=97.3,
        restarts=0,
        node=None,
        failure=None,
    )
    return ActorRow(**{**vars(row), **changes})


def picture(count, vectors=1, **changes):
    line = "8 envs, 81,234 steps, 120 episodes; envs 83 %, caller 12 %, envactors 5 %; slowest env 3 (p99 18 ms)"
    rows = [actor(number, **changes) for number in range(count)]
    return Picture(4711, "python train.py", "running", [f"vector {n}: {line}" for n in range(vectors)], 81_234, rows)


def lines_of(renderable, width, height=24):
    console = Console(width=width, height=height, record=True, file=io.StringIO(), color_system=None)
    console.print(renderable(console) if callable(renderable) else renderable)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
def test_a_table_fits_its_terminal(width):
    rows = [
        actor(0, name="env-with-a-very-long-name-indeed", state="renewing, stopped", method="get_wrapper_attr"),
        actor(1, node="node-7.cluster", failure="RuntimeError: " + "very wrong " * 20, restarts=3, cpu=None, rate=None),
        actor(2, vector=None, method=None, p50=None, p99=None, rss=0, name="漢字" * 20),
    ]
    lines = lines_of(actor_table(rows, rows, width), width)
    assert len(lines) == 5, "one line per actor"
    assert all(Text(line).cell_len <= width for line in lines)
    heads = [column.head for column, _ in fit_columns(rows, width)]
    assert {"actor", "state", "steps/s"} <= {*heads}
    assert heads == [head for head in (column.head for column, _ in fit_columns(rows, 300)) if head in heads]


def test_narrow_terminals_omit_less_important_columns_first():
    rows = [actor(0, node="node-7"), actor(1, failure="RuntimeError: very wrong " * 9), actor(2, state="busy, stopped")]
    heads = {width: {column.head for column, _ in fit_columns(rows, width)} for width in (80, 110, 140)}
    assert heads[80] == {"actor", "state", "running", "steps/s", "p50", "p99", "RSS", "restarts"}
    assert heads[110] - heads[80] == {"vector", "last failure"}
    assert heads[140] - heads[110] == {"CPU %", "node"}
    assert "RuntimeError: very w" in lines_of(actor_table(rows, rows, 140), 140)[3]


def test_columns_without_values_are_omitted():
    heads = [column.head for column, _ in fit_columns([actor(0)], 200)]
    assert "node" not in heads
    assert "last failure" not in heads
    assert "node" in [column.head for column, _ in fit_columns([actor(0), actor(1, node="far")], 200)]


@pytest.mark.parametrize("height", [10, 24, 50])
@pytest.mark.parametrize("count", [0, 1, 12, 13, 14, 15, 64])
@pytest.mark.parametrize("vectors", [0, 1, 20])
def test_a_screen_has_its_height_and_shows_the_selected_actor(height, count, vectors):
    shown, foot = picture(count, vectors), Text("the keys")
    for selected in {0, count // 2, max(0, count - 1)}:
        lines = lines_of(
            lambda console, selected=selected: screen(
                shown, console, shown.rows, notes=[Text("a note " * 15)], foot=foot, selected=selected, dimmed=True
            ),
            80,
            height,
        )
        assert len(lines) == height
        assert lines[-1].startswith("the keys")
        seen = [line.split()[0] for line in lines if line.startswith("env-")]
        assert count == 0 or f"env-{selected}" in seen
        if len(seen) < count:
            assert lines[-2].startswith(f"actors {int(seen[0][4:]) + 1} to {int(seen[-1][4:]) + 1} of {count}")


def test_the_head_breaks_lines_between_parts():
    wide = [line.plain for line in head_lines(picture(1), Console(width=140))]
    assert wide == ["program 4711  python train.py  running", picture(1).vectors[0]]
    narrow = [line.plain for line in head_lines(picture(1), Console(width=80))]
    assert narrow[1:] == [
        "vector 0: 8 envs, 81,234 steps, 120 episodes; envs 83 %, caller 12 %,",
        "  envactors 5 %; slowest env 3 (p99 18 ms)",
    ]
    cut = [line.plain for line in head_lines(picture(1, 9), Console(width=140), most=4)]
    assert [line[:8] for line in cut] == ["program ", "vector 0", "vector 1", "and 7 ve"]
    long = Picture(4711, "python " + "x" * 200, "sleeping", [], 0, [])
    (line,) = head_lines(long, Console(width=80))
    assert line.cell_len <= 80
    assert line.plain.endswith("…  sleeping")


def test_a_report_without_actors_shows_that_there_are_none():
    assert lines_of(lambda console: report(picture(0), console), 140)[-1] == "no actors now"


def test_orders():
    rows = [
        actor(10, rate=5.0, p99=None, rss=3, age=0.0, restarts=2),
        actor(2, rate=None, p99=0.2, rss=2, age=9.0, restarts=0),
        actor(1, rate=7.0, p99=0.1, rss=1, age=1.0, restarts=5, vector=1),
        actor(3, name="alone", rate=1.0, p99=0.3, rss=0, age=0.0, restarts=0, vector=None),
    ]
    keys = {order.name: [row.key for row in sorted(rows, key=order.key)] for order in ORDERS}
    assert keys == {
        "name": [2, 10, 1, 3],
        "steps/s": [1, 10, 3, 2],
        "p99": [3, 2, 1, 10],
        "RSS": [10, 2, 1, 3],
        "age": [2, 1, 10, 3],
        "restarts": [1, 10, 2, 3],
    }


class FakeWatch:
    """A program that is stopped."""

    def __init__(self, view):
        self.program = Program(Path("/nowhere"), 4711)
        self.view = view
        self.asked = []

    def inquire(self, key):
        self.asked.append(key)
        return type("Inquiry", (), {"text": "\n".join(["head", *map(str, range(50))])})()


def test_the_selection_stays_with_its_actor_and_within_the_table():
    watch = FakeWatch(View(picture(3), None, is_lost=False))
    table, console = TableScreen(watch), Console(width=80, height=20)
    assert isinstance(table.on_key("enter"), DetailScreen)
    for key in ("down", "down", "down", "up", "page down", "page up", "page down"):
        assert table.on_key(key) is None
    table.on_key("enter")
    assert watch.asked == [0, 2]
    # It has another place now, and then it is gone.
    watch.view = View(Picture(4711, "", "", [], 0, [actor(2), actor(9)]), None, is_lost=False)
    table.frame(console)
    table.on_key("up")
    table.on_key("t")
    watch.view = View(Picture(4711, "", "", [], 0, [actor(7)]), None, is_lost=False)
    table.frame(console)
    table.on_key("t")
    assert watch.asked == [0, 2, 2, 7]
    watch.view = View(picture(0), None, is_lost=False)
    assert "no actors now" in "\n".join(lines_of(table.frame, 80))
    assert table.on_key("t") is table.on_key("down") is None
    assert isinstance(table.on_key("escape"), Back)
    assert isinstance(table.on_key("q"), Quit)


def test_before_the_first_answer_the_table_shows_the_state_of_the_program():
    watch = FakeWatch(View(None, None, is_lost=False))
    table = TableScreen(watch)
    assert lines_of(table.frame, 80)[0] == "asking program 4711"
    watch.view = View(None, "program 4711 is stopped", is_lost=False)
    assert lines_of(table.frame, 80)[0] == "program 4711 is stopped"
    assert table.lost() is None
    listed = lines_of(ListScreen([watch, watch]).frame, 80, 12)
    assert (len(listed), listed[-1].split()[0]) == (12, "up/down")
    assert sum("4711 is stopped" in line for line in listed) == 2
    watch.view = View(None, "program 4711 has ended", is_lost=True)
    assert table.lost() == "program 4711 has ended"
    assert ListScreen([watch, watch]).lost() == "all programs have ended"


def test_stacks_that_are_long_are_scrolled():
    watch = FakeWatch(View(picture(1), None, is_lost=False))
    detail = DetailScreen(watch, 0)
    assert lines_of(detail.frame, 80, 10)[0] == "head"
    for _ in range(20):
        detail.on_key("page down")
        lines = lines_of(detail.frame, 80, 10)
    assert lines[:-1] == [str(number) for number in range(41, 50)]
    detail.on_key("up")
    assert lines_of(detail.frame, 80, 10)[0] == "40"
    detail.on_key("enter")
    assert watch.asked == [0, 0]
    assert isinstance(detail.on_key("b"), Back)


def test_rates_are_computed_from_two_snapshots():
    fields = ("key", "vector", "method", "node", "p50", "p99")
    of_actor = {**dict.fromkeys(fields), "name": "env-\x1b[31m0", "state": "idle", "pid": os.getpid(), "elapsed": 0.0}
    of_actor |= {"rss": 1, "restarts": 0, "last_failure": "actor 'env-0' (env 0, pid 7) died\x07"}

    def snapshot(at, steps, **changes):
        actors = [{**of_actor, "steps": steps, **changes}]
        return {"pid": os.getpid(), "command": ["python", "-c", "a\nb"], "at": at, "vectors": [], "actors": actors}

    sampler = Sampler()
    (row,) = sampler.sample(snapshot(10.0, 100)).rows
    assert (row.rate, row.cpu) == (None, None)
    assert (row.name, row.failure) == ("env-�[31m0", "died�")
    shown = sampler.sample(snapshot(10.5, 350))
    assert shown.rows[0].rate == 500.0
    assert shown.rows[0].cpu >= 0
    assert shown.command == "python -c 'a b'"
    # A new process, whose counts begin again, and one of another machine, of which psutil knows nothing.
    assert sampler.sample(snapshot(11.0, 5)).rows[0].rate == 0
    (far,) = sampler.sample(snapshot(11.5, 15, node="far")).rows
    assert (far.rate, far.cpu) == (20.0, None)


def test_a_few_characters_say_how_much():
    durations = (0.0, 0.000018, 0.00018, 0.0018, 0.018, 0.18, 1.8, 59.94, 61, 3599, 3660, 90_000)
    assert [*map(duration, durations)] == (
        [
            "0 µs",
            "18 µs",
            "0.18 ms",
            "1.8 ms",
            "18 ms",
            "180 ms",
            "1.8 s",
            "59.9 s",
            "1m01s",
            "59m59s",
            "1h01m",
            "1d01h",
        ]
    )
    assert [*map(size, (0, 123_456_789, 1_234_567_890))] == ["0 MB", "123 MB", "1.2 GB"]
    assert [*map(rate, (0, 0.25, 2.5, 25.4, 1234.5))] == ["0", "0.25", "2.5", "25", "1,234"]
    assert printable("a\x1b\r\n\tb") == "a� \n\tb"
