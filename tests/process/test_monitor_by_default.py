"""Every program with actors has a monitor, which costs nothing until a client connects."""

from __future__ import annotations

import os
import signal
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
from envactors.observe import monitor
from envactors.observe.programs import running_programs
from helpers import SOON, Counter, promised
from monitoring import ask, connect, monitor_threads, program, read_all
from warm import warm_interpreter

import envactors as ea
from envactors.testing import EchoEnv

SNAPSHOT = {"get": "snapshot"}

MONITORED = """
import os, sys, envactors as ea
from envactors.testing import EchoEnv
envs = ea.VectorEnv([EchoEnv] * 2, backend=sys.argv[1])
envs.reset(seed=0)
print(os.getpid(), flush=True)
sys.stdin.read()
envs.close()
"""


@pytest.fixture
def directory():
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ea") as path:
        yield Path(path)


@pytest.fixture
def runtime(directory, monkeypatch):
    """The directory in which the sockets of programs are."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return directory / "envactors"


def test_every_program_with_actors_answers_unless_monitoring_is_off(runtime, program_server):
    with (
        program(program_server, MONITORED, "process") as (_, one),  # whose workers are no programs
        program(program_server, MONITORED, "thread", ENVACTORS_MONITOR="1") as (_, two),
        program(program_server, MONITORED, "thread", ENVACTORS_MONITOR="0"),
    ):
        assert running_programs() == sorted([int(one), int(two)])
        for pid in (one, two):
            snapshot = ask(runtime / f"{pid}.sock", SNAPSHOT)
            assert (snapshot["pid"], len(snapshot["actors"])) == (int(pid), 2)
    assert running_programs() == []
    assert list(runtime.iterdir()) == []


def test_the_socket_comes_with_the_first_actor_and_goes_with_the_last(runtime):
    path = runtime / f"{os.getpid()}.sock"
    for _ in range(3):
        assert not path.exists()
        with ea.spawn(Counter, backend="thread") as one:
            one.add(1).result(SOON)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with ea.spawn(Counter, backend="thread"):
                pass
            assert path.is_socket()
    assert not path.exists()


def test_no_thread_waits_for_a_client_that_never_comes(runtime):
    with ea.VectorEnv([EchoEnv] * 2) as envs:
        envs.reset(seed=0)
        assert monitor_threads() == []
        (actor, _) = ask(runtime / f"{os.getpid()}.sock", SNAPSHOT)["actors"]
        assert (actor["steps"], actor["p50"]) == (0, None)  # timing has just begun
        envs.step([0, 1])
        assert ask(runtime / f"{os.getpid()}.sock", SNAPSHOT)["actors"][0]["steps"] == 1
        assert [thread.name for thread in monitor_threads()].count("envactors-monitor") == 1
    assert monitor_threads() == []


def test_a_monitor_of_the_programs_own_outlives_its_actors(runtime):
    with ea.spawn(Counter, backend="thread"), ea.monitor() as monitor:
        pass
    with ea.monitor() as monitor:
        with ea.spawn(Counter, backend="thread") as actor:
            actor.add(1).result(SOON)
        assert ask(monitor.path, SNAPSHOT)["actors"] == []
    assert not monitor.path.exists()


def test_sockets_of_killed_programs_are_removed_by_the_next_program_and_by_a_command(runtime, program_server):
    for remove in (running_programs, lambda: ea.spawn(Counter, backend="thread").close()):
        with program(program_server, MONITORED, "thread") as (process, pid):
            process.kill()
            process.wait(SOON)
        left = runtime / f"{pid}.sock"
        assert left.is_socket()
        remove()
        assert not left.exists()


def test_a_forked_child_has_a_socket_of_its_own(runtime, run_warm):
    ended = run_warm(
        """
        import os, warnings
        import envactors as ea
        from envactors.testing import EchoEnv
        from envactors.observe.listener import path_of
        from envactors.observe.programs import ask, running_programs
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        with ea.spawn(EchoEnv, backend="thread") as actor:
            actor.echo(1).result(30)
            child = os.fork()
            if child == 0:
                with ea.spawn(EchoEnv, backend="thread") as own:
                    own.echo(1).result(30)
                    found = [ask(path_of(pid), {"get": "snapshot"})["pid"] for pid in running_programs()]
                    assert found == sorted([os.getpid(), os.getppid()]), found
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert running_programs() == [os.getpid()]
            assert ask(path_of(os.getpid()), {"get": "snapshot"})["pid"] == os.getpid()
        assert running_programs() == []
        print("done")
        """,
    )
    assert (ended.stdout, ended.stderr) == ("done\n", "")


NO_PLACE = """
import logging, os, sys
import envactors as ea
from envactors.testing import EchoEnv
if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=os.environ.get("LEVEL", "DEBUG"), format="%(levelname)s %(message)s")
    with ea.VectorEnv([EchoEnv], backend="thread") as envs:
        envs.reset(seed=0)
        print("it goes on")
"""


@pytest.fixture
def nowhere(directory):
    """Ways in which there may be no place for a socket."""
    deep, public = directory / ("x" * 100), directory / "public"
    deep.mkdir()
    (public / "envactors").mkdir(parents=True)
    (public / "envactors").chmod(0o755)
    return {
        "a path that is too long": {"XDG_RUNTIME_DIR": str(deep)},
        "a directory that others may read": {"XDG_RUNTIME_DIR": str(public)},
        "no temporary directory": {"XDG_RUNTIME_DIR": "", "TMPDIR": str(directory / "missing")},
        "a temporary directory without writing": {"XDG_RUNTIME_DIR": "", "TMPDIR": "/proc"},
    }


@pytest.fixture(scope="module")
def interpreter(helper_processes):
    with warm_interpreter("-W", "error") as interpreter:
        yield interpreter


@pytest.mark.parametrize("place", range(4))
def test_a_program_works_without_a_directory_for_the_socket(nowhere, place, interpreter, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(NO_PLACE)
    environment = {**os.environ, **[*nowhere.values()][place]}
    environment.pop("ENVACTORS_MONITOR", None)

    def run(**variables):
        return interpreter.run(script, [], tmp_path, environment={**environment, **variables}, keeps_server=False)

    silent = run(LEVEL="WARNING")
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "it goes on\n", "")
    told = run(ENVACTORS_MONITOR="1")
    assert told.returncode == 0
    assert "WARNING envactors top and envactors stacks cannot show this program: " in told.stdout


def test_a_program_works_without_a_descriptor_for_the_socket(monkeypatch, runtime):
    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with ea.spawn(Counter, backend="thread") as actor:
        assert actor.add(3).result(SOON) == 3


def test_a_client_that_waits_does_not_hold_up_the_exit(runtime, program_server):
    with program(program_server, MONITORED, "process") as (process, pid):
        path = runtime / f"{pid}.sock"
        for actor in ask(path, SNAPSHOT)["actors"]:
            os.kill(actor["pid"], signal.SIGSTOP)
        with connect(path) as client, connect(path) as silent:
            client.sendall(b'{"get": "stacks", "timeout": 10.0}\n')
            begun = time.monotonic()
            process.stdin.close()
            process.wait(SOON)
            # Closing the actors takes as long as that takes for workers that are stopped.
            assert time.monotonic() - begun < promised(9.0)
            assert read_all(client) == read_all(silent) == b""
        assert not path.exists()


def test_a_monitor_that_closes_sends_no_stacks_instead_of_an_empty_list(monkeypatch):
    gate, closing = threading.Event(), threading.Event()

    class Stopped:
        def stacks(self, timeout):
            gate.wait(timeout)

    monkeypatch.setattr(monitor, "find_actors", lambda *_: [Stopped()])
    closing.set()
    assert monitor._answer({"get": "stacks", "timeout": 10.0}, closing) is None
    gate.set()
