"""`envactors top` and `envactors stacks`, on programs that run meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
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
import time
from pathlib import Path

import psutil
import pytest
from helpers import SOON, is_gone, promised, wait_until
from rich.console import Console

from envactors.cli import main
from envactors.cli.top import draw
from envactors.cli.units import duration, rate, size
from envactors.observe.programs import ask
from envactors.testing import expected_checksum

COMMAND = [sys.executable, "-W", "error", "-m", "envactors.cli"]
# The limit that a user may expect, and the start time of an interpreter on a busy machine.
AT_ONCE = 2.0
START = 3.0

PROGRAM = """
import ctypes, os, sys, time
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
# It reads a byte of its input, and meanwhile keeps the interpreter's lock, unlike `os.read`.
HOLD_GIL = "ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)"


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
def running(server, runtime):
    with server.start(PROGRAM, (), {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}) as process:
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


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command, and returns its status, output, and errors."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments):
        status = main([*map(str, arguments)])
        return status, *capsys.readouterr()

    return run


def complaint(ended):
    """Return the error of a command that found nothing to show."""
    status, output, errors = ended
    assert (status, output) == (1, "")
    return errors.rstrip("\n").partition(": ")[2]


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


# Without a terminal ----------------------------------------------------------------------------------------


def test_top_prints_one_plain_table_without_a_terminal(standing, run, tmp_path):
    standing.begin(f"step_until({str(tmp_path / 'enough')!r})")
    run("top")
    (status, output, errors), by_steps = run("top", "--once"), run("top", "--sort", "steps")
    (tmp_path / "enough").touch()
    standing.end()
    standing.reset()
    assert (status, errors) == (0, "")
    first, vector, _, head, _, *rows = output.splitlines()
    assert first.startswith(f"program {standing.pid}  {sys.executable} ")
    assert re.match(r"vector 0: 4 envs, [\d,]+ steps, 0 episodes; envs \d+ %, caller \d+ %, ", vector)
    assert " ".join(head.split()) == "actor vector state running steps/s p50 p99 RSS restarts"
    assert [row.split()[0] for row in rows] == ["envs-0-1", "envs-2-3"]
    for row in rows:
        found = re.search(r" ([\d,.]+) +[\d.]+ [µm]s +[\d.]+ [µm]s +\d+ MB +0 *$", row)
        assert float(found[1].replace(",", "")) > 10
    assert by_steps[1].count("envs-") == 2


def test_stacks_are_printed_of_all_actors_and_of_one(standing, run):
    status, output, errors = run("stacks")
    assert (status, errors) == (0, "")
    assert re.findall(r"^==== (\S+) \(process (\d+)\): idle ====$", output, re.MULTILINE) == [
        ("envs-0-1", str(standing.workers[0])),
        ("envs-2-3", str(standing.workers[1])),
    ]
    assert output.count("most recent call first") == 2
    _, output, _ = run("stacks", standing.pid, "--actor", "envs-2-3", "--timeout", "9")
    assert (output.count("===="), "envs-2-3" in output) == (2, True)
    said = complaint(run("stacks", "--actor", "envs-9"))
    assert said == f"program {standing.pid} has no actor 'envs-9', but envs-0-1, envs-2-3"
    standing.check_steps()


def test_one_of_several_programs_is_chosen_by_its_process_id(standing, run, program_server):
    with running(program_server, os.environ["XDG_RUNTIME_DIR"]) as other:
        for command in ("top", "stacks"):
            said = complaint(run(command))
            assert said.startswith("2 programs have actors: choose one by its PID\n")
            assert f"\n  {standing.pid:>7}  {sys.executable} " in said
        for pid in (standing.pid, other.pid):
            assert run("top", pid)[1].startswith(f"program {pid} ")


def test_top_and_stacks_say_that_there_is_no_program(runtime, run, capsys):
    for command in ("top", "stacks"):
        assert complaint(run(command)).startswith("no program of this user has actors now, or")
        assert complaint(run(command, "999999999")) == "process 999999999 does not exist"
        said = complaint(run(command, os.getppid()))
        assert said.startswith(f"program {os.getppid()} cannot be shown: it has no actors now, belongs to ")
        with pytest.raises(SystemExit, match="2"):
            run(command, "/")
        capsys.readouterr()
    (runtime / "envactors").chmod(0o755)
    assert "is not a directory of this user alone" in complaint(run("top"))


def test_help_lists_the_commands_without_importing_them():
    code = "import sys; from envactors.cli import main; main([]); print('rich' in sys.modules, 'numpy' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "watch the actors of a running program" in shown
    assert shown.endswith("False False\n")


def test_a_missing_extra_is_named_in_one_line():
    code = "import sys; sys.modules['rich'] = None; from envactors.cli import main; sys.exit(main(['top']))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "envactors top: rich is not installed: pip install 'envactors[cli]'\n"


# Programs and workers that do not answer -------------------------------------------------------------------


@pytest.mark.parametrize("command", ["top", "stacks"])
def test_a_stopped_program_is_reported_as_stopped(standing, run, command):
    stop(standing.pid)
    begun = time.monotonic()
    said = f"program {standing.pid} is stopped (by SIGSTOP, Ctrl-Z or a debugger): kill -CONT {standing.pid}"
    assert complaint(run(command)) == said
    assert time.monotonic() - begun < promised(AT_ONCE)
    os.kill(standing.pid, signal.SIGCONT)
    standing.check_steps()


def test_a_program_in_c_code_that_holds_the_gil_is_reported(standing, run):
    standing.begin(HOLD_GIL)
    time.sleep(0.2)
    assert complaint(run("stacks")) == f"program {standing.pid} does not answer: perhaps C code holds its GIL"
    standing.begin("")
    standing.end()
    standing.check_steps()
    assert ask(standing.pid, {"get": "snapshot"}, SOON)["pid"] == standing.pid


def test_a_killed_program_is_reported_once_and_then_forgotten(program, run):
    program.process.kill()
    program.process.wait(SOON)
    assert complaint(run("top", program.pid)) == f"process {program.pid} does not exist"
    assert complaint(run("top")).startswith("no program of this user has actors now")


def test_a_worker_that_hangs_in_c_shows_the_method_and_its_stacks(program, run):
    program.do("envs[3].arm('hang_in_c').result()")
    program.do("envs.send([1] * 4)")
    wait_until(lambda: ask(program.pid, {"get": "snapshot"}, SOON)["actors"][0]["method"] is None)
    _, output, _ = run("top", "--once")
    assert re.search(r"envs-2-3 +0 +busy +step \d", output)
    assert re.search(r"envs-0-1 +0 +idle +\d", output)
    _, output, _ = run("stacks", "--actor", "envs-2-3")
    assert "_hang_in_c" in output
    assert re.search(r"^==== envs-2-3 \(process \d+\): step for ", output)
    program.do("envs.actors[1].kill(restart=True)")
    assert program.do("print(envs.recv().obs[:2, 2].tolist())") == ["[1, 1]"]


def test_a_stopped_worker_is_reported_as_stopped(standing, run):
    standing.check_steps()
    stop(standing.workers[1])
    standing.do("envs.send([0] * 4)")
    wait_until(lambda: re.search(r"envs-2-3 +0 +busy, stopped +step \d", run("top", "--sort", "age")[1]))
    _, output, _ = run("stacks", "--actor", "envs-2-3", "--timeout", "0.3")
    assert "is stopped (by SIGSTOP" in output
    os.kill(standing.workers[1], signal.SIGCONT)
    standing.do("envs.recv()")
    standing.actions.append(0)
    standing.check_steps()


# On a terminal ---------------------------------------------------------------------------------------------


class Terminal:
    """A terminal of some lines with `envactors top` in it."""

    def __init__(self, ours, process, lines):
        self._ours = ours
        self._lines = lines
        self.process = process
        self.output = b""

    def read(self, seconds=SOON):
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # the last one who had the other end has left
            return False
        self.output += data
        return bool(data)

    def wait_for(self, text, seconds=SOON):
        """Reads until a whole picture has a text, and returns that picture; forgets what came before."""
        end = time.monotonic() + seconds
        while not (found := [one for one in self._whole_pictures() if text in one]):
            assert time.monotonic() < end, self.output[-5000:].decode(errors="replace")
            self.read(0.1)
        self.output = b""
        return found[0]

    def _whole_pictures(self):
        return [one for one in plain(self.output.decode(errors="replace")) if one.count("\n") == self._lines - 1]

    def end(self):
        """Reads to the end; returns the status and what is left on the screen."""
        end = time.monotonic() + SOON
        while self.process.poll() is None:
            assert time.monotonic() < end, "it goes on and on"
            self.read(0.1)
        while self.read(0.0):
            pass
        (left,) = plain(self.output.decode().rpartition("\x1b[?1049l")[2])
        return self.process.returncode, left


def plain(text):
    """The pictures in the output of a terminal, which begin with the cursor at home."""
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part).replace("\r", "") for part in text.split("\x1b[H")]


@contextlib.contextmanager
def terminal(*arguments, size=(24, 100)):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    hidden = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"TERM": "xterm-256color", "PYTHONUTF8": "1"}
    command = [*COMMAND, "top", *map(str, arguments)]
    try:
        with subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        ) as process:
            os.close(theirs)
            try:
                yield Terminal(ours, process, size[0])
            finally:
                process.kill()
    finally:
        with contextlib.suppress(OSError):
            os.close(ours)


def test_top_keeps_its_last_table_while_the_program_does_not_answer(standing):
    with terminal() as top:
        assert "envs-2-3" in top.wait_for("envs-0-1")
        stop(standing.pid)
        assert "envs-2-3" in top.wait_for(f"program {standing.pid} is stopped", promised(AT_ONCE + START))
        os.kill(standing.pid, signal.SIGCONT)
        standing.check_steps()
        top.output = b""
        wait_until(lambda: "is stopped" not in top.wait_for("envs-0-1"))
        top.process.send_signal(signal.SIGINT)
        assert top.end() == (0, "")


@pytest.mark.parametrize("how", ["killed", "at its end", "without actors"])
def test_top_ends_with_the_program_and_not_before(program, how):
    with terminal(size=(6, 20)) as top:
        top.wait_for("envs-")
        if how == "without actors":
            program.do("envs.close()")
            top.wait_for("cannot")
        if how == "killed":
            program.process.kill()
        else:
            program.process.stdin.close()
        assert top.end() == (0, f"program {program.pid} has ended\n")


def test_a_signal_restores_the_terminal(standing):
    with terminal(standing.pid) as top:
        top.wait_for("envs-0-1")
        os.killpg(top.process.pid, signal.SIGTERM)
        assert top.end() == (143, "")
        # The cursor is shown again.
        assert top.output.rindex(b"\x1b[?25h") > top.output.rfind(b"\x1b[?25l")


def test_top_ends_with_its_terminal(standing):
    with terminal() as top:
        top.wait_for("envs-0-1")
        os.close(top._ours)
        assert top.process.wait(SOON) in (0, 141)
    standing.check_steps()


# Drawing ---------------------------------------------------------------------------------------------------


def snapshot(actors, vectors=1):
    """A snapshot with rates of many actors, with values of every kind."""
    states = [("busy", "step", 0.3), ("idle", None, 0.0), ("busy, stopped", "reset", 75.0), ("dead", None, 0.0)]
    failures = [None, "actor 'env-1' (index 1, pid 7) was killed by signal 9 (SIGKILL)\tin \x1b[31m[step]"]
    factory = "the factory of actor 'env-3' (env 3, pid 9, incarnation 0) raised OSError()"
    return {
        "pid": 4711,
        "command": ["python", "train.py", "--name", "a b"],
        "vectors": [
            {"serial": i, "envs": 4, "steps": 10**7, "episodes": 12, "where": "envs 90 %, caller 10 %"}
            for i in range(vectors)
        ],
        "actors": [
            {
                "serial": i,
                "name": f"env-{i}",
                "vector": None if i % 5 == 4 else i % 2,
                **dict(zip(("state", "method", "elapsed"), states[i % 4], strict=True)),
                "rate": None if i % 3 else 1000.0 * i,
                "p50": None if i % 3 else 0.01,
                "p99": None if i % 3 else 0.02,
                "rss": i << 20,
                "restarts": i % 2,
                "node": "node-7" if i == 3 else None,
                "last_failure": factory if i == 3 else failures[i % 2],
            }
            for i in range(actors)
        ],
    }


def lines_of(picture, console):
    with console.capture() as captured:
        console.print(picture)
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [1, 10, 39, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [None, 1, 5, 24])
def test_a_picture_fits_its_terminal(width, height):
    console = Console(width=width, height=height, color_system=None)
    for actors, vectors in ((0, 0), (1, 1), (50, 9)):
        for trouble in (None, "program 4711 does not answer: perhaps C code holds its GIL"):
            picture = lines_of(draw(snapshot(actors, vectors), "name", console, trouble, height), console)
            assert all(len(line) <= width for line in picture)
            if height == 24 and width >= 40:
                assert len(picture) <= height


def test_a_row_is_one_line_without_control_characters():
    console = Console(width=160, color_system=None)
    *_, first, _, second, third = lines_of(draw(snapshot(4), "name", console), console)
    assert first.split() == ["env-0", "0", "busy", "step", "300", "ms", "0", "10", "ms", "20", "ms", "0"]
    assert second.rstrip().endswith("was killed by signal 9 (SIGKILL) in �[31m[step]")
    assert third.rstrip().endswith(" the factory raised OSError()")


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        ("name", [0, 2, 6, 8, 10, 1, 3, 5, 7, 11, 4, 9]),
        ("steps", [9, 6, 3]),
        ("rss", [11, 10, 9]),
        ("age", [2, 6, 10, 0, 8, 4]),
        ("restarts", [1, 3, 5, 7, 11, 9]),
    ],
)
def test_orders(order, wanted):
    console = Console(width=160, color_system=None)
    lines = lines_of(draw(snapshot(12), order, console), console)
    assert [int(found[1]) for line in lines if (found := re.match(r"env-(\d+)", line))][: len(wanted)] == wanted


def test_a_few_characters_say_how_much():
    assert [duration(seconds) for seconds in (0, 2e-5, 0.0042, 0.5, 3.21, 185, 3700, 90000)] == [
        "0 µs", "20 µs", "4.2 ms", "500 ms", "3.2 s", "3m05s", "1h01m", "1d01h",
    ]  # fmt: skip
    sizes = [size(count) for count in (0, 400, 26_000, 123_000_000, 2_500_000_000)]
    assert sizes == ["0 bytes", "400 bytes", "26 kB", "123 MB", "2.5 GB"]
    assert [rate(value) for value in (0, 0.123, 1.23, 1234.5)] == ["0", "0.12", "1.2", "1,234"]
