"""Every program with actors answers clients of the same user, and no client can disturb it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
from budget import examples
from helpers import SOON, Counter, promised, run_script, wait_for_path, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from monitoring import ask, connect, monitor_threads, program, read_all, take_snapshot

import envactors as ea
from envactors.observe import server, snapshot
from envactors.observe.addresses import is_listening, path_of
from envactors.observe.programs import NotListeningError, ProgramError, running_programs
from envactors.testing import EchoEnv, FaultyEnv

STACKS = {"get": "stacks", "name": None, "timeout": 5.0}
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to be another user")


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


@pytest.fixture
def path(runtime):
    return runtime / f"{os.getpid()}.sock"


@pytest.fixture
def actor(runtime):
    """An actor, so that this process has a monitor."""
    with ea.spawn(Counter, backend="thread") as actor:
        actor.add(1).result(SOON)
        yield actor


# Answers -------------------------------------------------------------------------------------------


def test_a_snapshot_describes_actors_and_vectors(runtime):
    with ea.spawn(Counter, name="lonely") as lonely, ea.VectorEnv([EchoEnv] * 3) as envs:
        lonely.add(1).result(SOON)
        envs.reset(seed=0)
        before = take_snapshot()
        for _ in range(4):
            envs.step([1, 2, 3])
        after = take_snapshot()
        pids = [actor.pid for actor in envs.actors]
    assert after["pid"] == os.getpid()
    (vector,) = after["vectors"]
    assert (vector["envs"], vector["steps"], vector["episodes"]) == (3, 12, 0)
    assert vector["where"].startswith("envs ")
    *of_vector, alone = after["actors"]
    assert [(one["name"], one["pid"], one["steps"], one["vector"]) for one in of_vector] == [
        (f"env-{i}", pid, 4, vector["serial"]) for i, pid in enumerate(pids)
    ]
    assert all(one["p50"] <= one["p99"] for one in of_vector)
    assert (alone["name"], alone["vector"], alone["steps"], alone["p50"]) == ("lonely", None, 1, None)
    assert all(one["state"] == "idle" and one["rss"] > 0 and one["last_failure"] is None for one in after["actors"])
    # The first look starts the clocks.
    assert (before["actors"][0]["steps"], before["actors"][0]["p50"]) == (0, None)
    assert len({one["serial"] for one in after["actors"]}) == 4
    assert [one["serial"] for one in before["actors"]] == [one["serial"] for one in after["actors"]]


def test_vectors_keep_their_serials_in_order(runtime):
    vectors = [ea.VectorEnv([EchoEnv], backend="thread") for _ in range(4)]
    serials = [vector["serial"] for vector in take_snapshot()["vectors"]]
    assert serials == sorted(serials)
    vectors.pop(0).close()
    vectors.append(ea.VectorEnv([EchoEnv], backend="thread"))
    assert [vector["serial"] for vector in take_snapshot()["vectors"]] == [*serials[1:], serials[-1] + 1]
    for envs in vectors:
        envs.close()


def test_stacks_of_the_actors_with_a_name(runtime, tmp_path):
    with ea.spawn(Counter, name="one"), ea.spawn(Counter, name="other") as other:
        running = other.touch_then_wait(str(tmp_path / "begun"), str(tmp_path / "go on"))
        wait_for_path(tmp_path / "begun")
        (found,) = ask(STACKS | {"name": "other"})["actors"]
        assert "in touch_then_wait" in found["stacks"]
        assert (found["name"], found["pid"], found["method"]) == ("other", other.pid, "touch_then_wait")
        assert [actor["name"] for actor in ask(STACKS)["actors"]] == ["one", "other"]
        assert ask(STACKS | {"name": "neither"}) == {"actors": []}
        (tmp_path / "go on").touch()
        running.result(SOON)


def test_stacks_of_stopped_workers_come_in_time_and_change_no_result(runtime, monkeypatch):
    # Two at a time, all of which are stopped: the last ones are waited for only briefly.
    monkeypatch.setattr(snapshot, "_MOST_READ", 2)
    with ea.VectorEnv([EchoEnv] * 5) as envs:
        envs.reset(seed=0)
        for actor in envs.actors:
            os.kill(actor.pid, signal.SIGSTOP)
        begun = time.monotonic()
        found = ask(STACKS | {"timeout": 0.5})["actors"]
        assert time.monotonic() - begun < promised(2.0)
        assert [one["name"] for one in found] == [f"env-{i}" for i in range(5)]
        assert all("is stopped (by SIGSTOP" in one["stacks"] for one in found)
        for actor in envs.actors:
            os.kill(actor.pid, signal.SIGCONT)
        obs, *_ = envs.step([5, 6, 7, 8, 9])
        assert obs[:, 2].tolist() == [5, 6, 7, 8, 9]


def test_the_monitor_answers_while_a_worker_hangs(runtime):
    with ea.VectorEnv([lambda: FaultyEnv(EchoEnv())] * 2, on_failure="renew") as envs:
        envs.reset(seed=0)
        envs[1].arm("hang_in_c").result(SOON)
        envs.send([1, 1])
        wait_until(lambda: "_hang_in_c" in ask(STACKS | {"name": "env-1"})["actors"][0]["stacks"])
        assert take_snapshot()["actors"][1]["method"] == "step"
        envs[1].kill(restart=True)
        assert envs.recv().truncated.tolist() == [False, True]
        assert take_snapshot()["actors"][1]["incarnation"] == 1


# From the first actor to the last -----------------------------------------------------------------------

MONITORED = """
import os, sys, envactors as ea
from envactors.testing import EchoEnv
envs = ea.VectorEnv([EchoEnv] * 2, backend=sys.argv[1])
envs.reset(seed=0)
print(os.getpid(), flush=True)
sys.stdin.read()
envs.close()
"""


def test_every_program_with_actors_answers_unless_monitoring_is_off(runtime, program_server):
    with (
        program(program_server, MONITORED, "process") as (_, one),  # whose workers are no programs
        program(program_server, MONITORED, "thread", ENVACTORS_MONITOR="1") as (_, two),
        program(program_server, MONITORED, "thread", ENVACTORS_MONITOR="0"),
    ):
        assert running_programs() == sorted([int(one), int(two)])
        for pid in map(int, (one, two)):
            found = take_snapshot(pid)
            assert (found["pid"], len(found["actors"])) == (pid, 2)
    assert running_programs() == []
    assert list(runtime.iterdir()) == []


def test_the_socket_comes_with_the_first_actor_and_goes_with_the_last(path):
    for _ in range(3):
        assert not path.exists()
        with ea.spawn(Counter, backend="thread") as one:
            one.add(1).result(SOON)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            with ea.spawn(Counter, backend="thread"):
                pass
            assert path.is_socket()
            assert monitor_threads() == []  # nobody has looked yet
            assert [found["state"] for found in take_snapshot()["actors"]] == ["idle"]
            assert [thread.name for thread in monitor_threads()].count("envactors-monitor") == 1
        wait_until(lambda: monitor_threads() == [])
    with pytest.raises(NotListeningError):
        take_snapshot()


def test_sockets_of_killed_programs_are_removed_by_the_next_program_and_by_a_command(runtime, program_server):
    for remove in (running_programs, lambda: ea.spawn(Counter, backend="thread").close()):
        with program(program_server, MONITORED, "thread") as (process, pid):
            process.kill()
            process.wait(SOON)
        left = runtime / f"{pid}.sock"
        assert left.is_socket()
        remove()
        assert not left.exists()


def test_a_socket_that_another_program_uses_is_not_taken(path):
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:  # in another container a program may have the same process id
        other.bind(str(path))
        other.listen()
        with ea.spawn(Counter, backend="thread") as actor:
            assert actor.add(1).result(SOON) == 1
        assert is_listening(path)
    with ea.spawn(Counter, backend="thread"):  # by now it has ended
        assert take_snapshot()["pid"] == os.getpid()


def test_a_forked_child_has_a_socket_of_its_own_and_leaves_the_parents(runtime, run_warm):
    ended = run_warm(
        """
        import os, warnings
        import envactors as ea
        from envactors.testing import EchoEnv
        from envactors.observe.addresses import is_listening, path_of
        from envactors.observe.programs import ask, running_programs
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        snapshot = {"get": "snapshot"}
        with ea.spawn(EchoEnv, backend="thread") as actor:
            actor.echo(1).result(30)
            child = os.fork()
            if child == 0:
                with ea.spawn(EchoEnv, backend="thread") as own:
                    own.echo(1).result(30)
                    found = [ask(pid, snapshot)["pid"] for pid in running_programs()]
                    assert found == sorted([os.getpid(), os.getppid()]), found
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert running_programs() == [os.getpid()]
            assert ask(os.getpid(), snapshot)["pid"] == os.getpid()
            # One that outlives the monitor holds nothing of it open.
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(writer)
                os.read(reader, 1)
                os._exit(0)
            path = path_of(os.getpid())
            os.link(path, moved := path.with_suffix(".moved"))
        assert running_programs() == []
        assert not path.exists() and not is_listening(moved)
        os.close(writer)
        os.waitpid(child, 0)
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


@pytest.mark.parametrize("place", ["too long", "public", "missing", "without writing"])
def test_a_program_works_without_a_directory_for_the_socket(directory, place, program_server):
    deep, public = directory / ("x" * 100), directory / "public"
    deep.mkdir()
    (public / "envactors").mkdir(parents=True)
    (public / "envactors").chmod(0o755)
    variables = {
        "too long": {"XDG_RUNTIME_DIR": str(deep)},
        "public": {"XDG_RUNTIME_DIR": str(public)},
        "missing": {"XDG_RUNTIME_DIR": "", "TMPDIR": str(directory / "missing")},
        "without writing": {"XDG_RUNTIME_DIR": "", "TMPDIR": "/proc"},
    }[place]
    environment = {name: value for name, value in os.environ.items() if name != "ENVACTORS_MONITOR"} | variables

    def run(**more):
        with program_server.start(NO_PLACE, [], {**environment, **more}) as process:
            output = process.stdout.read()
            process.wait(SOON)
        return output

    assert run(LEVEL="WARNING") == "it goes on\n"
    told = run(ENVACTORS_MONITOR="1")
    assert "WARNING envactors top and envactors stacks cannot show this program: " in told


def test_a_program_works_without_a_descriptor_for_the_socket(monkeypatch, runtime):
    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with ea.spawn(Counter, backend="thread") as actor:
        assert actor.add(3).result(SOON) == 3


def test_a_client_that_waits_does_not_hold_up_the_exit(runtime, program_server):
    with program(program_server, MONITORED, "process") as (process, pid):
        for actor in take_snapshot(int(pid))["actors"]:
            os.kill(actor["pid"], signal.SIGSTOP)
        path = runtime / f"{pid}.sock"
        with socket.socket(socket.AF_UNIX) as client, socket.socket(socket.AF_UNIX) as silent:
            client.connect(str(path))
            silent.connect(str(path))
            client.sendall(json.dumps(STACKS | {"timeout": 10.0}).encode() + b"\n")
            begun = time.monotonic()
            process.stdin.close()
            process.wait(SOON)
            # Closing the actors takes as long as that takes for workers that are stopped.
            assert time.monotonic() - begun < promised(9.0)
            assert read_all(silent) == b""
        assert not path.exists()


# Access -----------------------------------------------------------------------------------------------

STRANGER = """
import os, socket, sys
os.setgroups([])
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(10)
try:
    sock.connect(sys.argv[1])
    sock.sendall(b'{"get": "snapshot"}\\n')
    print(sock.recv(100))
except OSError as error:
    print(type(error).__name__)
sock.close()
"""


@is_root
def test_another_user_gets_nothing_even_where_the_files_let_it_connect(directory, path, actor):
    directory.chmod(0o755)
    ended = run_script(STRANGER, str(path))
    assert (ended.stdout, ended.stderr) == ("PermissionError\n", "")
    path.parent.chmod(0o755)
    path.chmod(0o666)
    ended = run_script(STRANGER, str(path))
    assert ended.stdout in ("b''\n", "BrokenPipeError\n", "ConnectionResetError\n")
    path.parent.chmod(0o700)
    assert take_snapshot()["pid"] == os.getpid()


# Malicious clients ---------------------------------------------------------------------------------

REQUESTS = {
    "garbage": b"\xff\x00\x80 no JSON at all\n",
    "half a line": b'{"get": "snap',
    "a mebibyte without an end": b"x" * (1 << 20),
    "a list": b"[1, 2]\n",
    "null": b"null\n",
    "an unknown wish": b'{"get": "everything"}\n',
    "wishes of a wrong type": b'{"get": {"get": ["snapshot"]}}\n',
    "a name of a wrong type": b'{"get": "stacks", "name": [1], "timeout": 1.0}\n',
    "a timeout of a wrong type": b'{"get": "stacks", "name": null, "timeout": "1"}\n',
    "deep nesting": b"[" * 4000 + b"\n",
    "an endless number": b'{"get": "stacks", "name": null, "timeout": ' + b"9" * 3000 + b"}\n",
    "no number": b'{"get": "stacks", "name": null, "timeout": NaN}\n',
    "nothing": b"",
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_garbage_from_a_client_blocks_nothing(runtime, request_):
    with ea.VectorEnv([EchoEnv] * 2, backend="thread") as envs, connect() as bad, connect() as bad_too:
        envs.reset(seed=0)
        for sock in (bad, bad_too):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(request_)
        for turn in range(5):
            obs, *_ = envs.step([turn, turn])
            assert obs[:, 2].tolist() == [turn, turn]
            assert take_snapshot()["pid"] == os.getpid()
        if request_ not in (REQUESTS["half a line"], REQUESTS["nothing"]):
            assert (read_all(bad) == b"") == (b"9" not in request_ and b"NaN" not in request_)
        begun = time.monotonic()
        envs.close()
        assert time.monotonic() - begun < promised(1.0)
        wait_until(lambda: monitor_threads() == [])
        assert read_all(bad_too) == b"" or b"stacks" in request_


def test_a_client_that_does_not_read_blocks_nothing(runtime, monkeypatch):
    monkeypatch.setattr(server, "_answer", lambda *_: {"long": "x" * (1 << 24)})
    monkeypatch.setattr(server._Client, "timeout", SOON)
    with ea.VectorEnv([EchoEnv] * 2, backend="thread") as envs, connect() as deaf, connect() as deaf_too:
        envs.reset(seed=0)
        for sock in (deaf, deaf_too):
            sock.sendall(b'{"get": "snapshot"}\n')
        assert len(take_snapshot()["long"]) == 1 << 24
        envs.step([1, 1])
        wait_until(lambda: len(monitor_threads()) == 3)
        envs.close()
        wait_until(lambda: monitor_threads() == [])


def test_a_silent_client_is_disconnected_after_a_timeout(actor, monkeypatch):
    monkeypatch.setattr(server._Client, "timeout", 0.1)
    with connect() as silent:
        assert read_all(silent) == b""


def test_too_many_clients_are_turned_away_for_a_while(actor, monkeypatch):
    monkeypatch.setattr(server._Client, "timeout", SOON)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect()) for _ in range(server._MOST_CLIENTS)]
        wait_until(lambda: len(monitor_threads()) == 1 + server._MOST_CLIENTS)
        with pytest.raises(ProgramError, match="does not answer: "):
            take_snapshot()
        for sock in silent:
            sock.close()
        wait_until(lambda: len(monitor_threads()) == 1)
        assert take_snapshot()["pid"] == os.getpid()


def test_without_free_descriptors_a_client_waits(actor, path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connect() as early, socket.socket(socket.AF_UNIX) as late:
        early.sendall(b'{"get": "snapshot"}\n')
        assert read_all(early)
        late.settimeout(SOON)
        try:
            os.close(free := os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            late.connect(str(path))
            late.sendall(b'{"get": "snapshot"}\n')
            time.sleep(0.3)  # it has tried by now, and if it has not the test is no worse
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert json.loads(read_all(late))["pid"] == os.getpid()


@pytest.mark.parametrize("refused", ["envactors-monitor", "process_request_thread"])
def test_without_a_thread_for_it_a_client_is_turned_away(actor, monkeypatch, refused):
    start, seen = threading.Thread.start, []

    def start_unless_refused(thread):
        if refused in thread.name and not seen:
            seen.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_refused)
    with pytest.raises(ProgramError):
        take_snapshot()
    assert seen
    assert take_snapshot()["pid"] == os.getpid()


def test_an_error_while_answering_is_logged_and_no_more(actor, monkeypatch, caplog):
    answer = server._answer
    monkeypatch.setattr(server, "_answer", lambda *_: 1 // 0)
    with pytest.raises(ProgramError):
        take_snapshot()
    wait_until(lambda: "ZeroDivisionError" in caplog.text)
    monkeypatch.setattr(server, "_answer", answer)
    assert take_snapshot()["pid"] == os.getpid()


WORDS = [b'"get"', b'"stacks"', b'"name"', b'"timeout"', b"null", b":", b",", b"{", b"}", b"[", b"]", b"1e999", b"-1"]


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(WORDS), max_size=20).map(b"".join)), st.booleans())
def test_random_requests_get_json_or_nothing(actor, data, ends):
    with connect() as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(data + b"\n" * ends)
            sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    assert answer == b"" or json.loads(answer).keys() == {"actors"}
    assert path_of(os.getpid()).is_socket()
