"""`ea.monitor`: it answers clients of the same user, and no client can disturb the program."""

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
from envactors.observe import monitor as server
from envactors.observe.programs import NoAnswerError, NotListeningError, pid_of, running_programs
from helpers import SOON, Counter, promised, run_script, wait_for_path, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from monitoring import ask, connect, monitor_threads, program, read_all

import envactors as ea
from envactors.testing import EchoEnv, FaultyEnv

SNAPSHOT = {"get": "snapshot"}
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
def path(directory):
    return directory / "m.sock"


# Answers -------------------------------------------------------------------------------------------


def test_a_snapshot_of_the_monitor_describes_actors_and_vectors(path):
    with ea.monitor(path), ea.spawn(Counter, name="lonely") as lonely, ea.VectorEnv([EchoEnv] * 3) as envs:
        lonely.add(1).result(SOON)
        envs.reset(seed=0)
        ask(path, SNAPSHOT)
        for _ in range(4):
            envs.step([1, 2, 3])
        snapshot = ask(path, SNAPSHOT)
        pids = [actor.pid for actor in envs.actors]
    assert snapshot["pid"] == os.getpid()
    (vector,) = snapshot["vectors"]
    assert (vector["envs"], vector["steps"], vector["episodes"]) == (3, 12, 0)
    assert vector["where"].startswith("envs ")
    *of_vector, alone = snapshot["actors"]
    assert [(one["name"], one["pid"], one["steps"]) for one in of_vector] == [
        (f"env-{i}", pid, 4) for i, pid in enumerate(pids)
    ]
    assert all(one["p50"] <= one["p99"] for one in of_vector)
    assert (alone["name"], alone["vector"], alone["steps"], alone["p50"]) == ("lonely", None, 1, None)
    assert len({one["key"] for one in snapshot["actors"]}) == 4


def test_vectors_keep_their_numbers(path):
    with ea.monitor(path):
        vectors = [ea.VectorEnv([EchoEnv]) for _ in range(5)]
        for envs in vectors:
            envs.reset(seed=0)
        numbers = {a["pid"]: a["vector"] for a in ask(path, SNAPSHOT)["actors"]}
        in_order = sorted(numbers.values())
        assert [numbers[envs.actors[0].pid] for envs in vectors] == in_order
        vectors.pop(0).close()
        vectors.append(ea.VectorEnv([EchoEnv]))
        vectors[-1].reset(seed=0)
        after = {a["pid"]: a["vector"] for a in ask(path, SNAPSHOT)["actors"]}
        assert [after[envs.actors[0].pid] for envs in vectors] == [*in_order[1:], in_order[-1] + 1]
        for envs in vectors:
            envs.close()


def test_stacks_and_output_of_the_actors_that_are_meant(path, tmp_path):
    with ea.monitor(path), ea.spawn(Counter, name="one") as one, ea.spawn(Counter, name="other") as other:
        one.complain("so so").result(SOON)
        running = other.touch_then_wait(str(tmp_path / "begun"), str(tmp_path / "go on"))
        wait_for_path(tmp_path / "begun")
        (found,) = ask(path, {"get": "stacks", "name": "other", "timeout": 5.0})["actors"]
        assert "in touch_then_wait" in found["stacks"]
        assert (found["name"], found["pid"], found["method"]) == ("other", other.pid, "touch_then_wait")
        both = ask(path, {"get": "stacks"})["actors"]
        key = next(actor["key"] for actor in both if actor["name"] == "one")
        wait_until(lambda: "so so" in ask(path, {"get": "output", "key": key})["actors"][0].get("stderr", ""))
        assert ask(path, {"get": "stacks", "name": "neither"}) == {"actors": []}
        (tmp_path / "go on").touch()
        running.result(SOON)


def test_top_lists_every_one_of_many_actors(path, monkeypatch):
    # Two at a time, all of which are stopped: the last ones are waited for only briefly.
    monkeypatch.setattr(server, "_MOST_ASKED", 2)
    with ea.monitor(path), ea.VectorEnv([EchoEnv] * 5) as envs:
        envs.reset(seed=0)
        for actor in envs.actors:
            os.kill(actor.pid, signal.SIGSTOP)
        begun = time.monotonic()
        found = ask(path, {"get": "stacks", "timeout": 0.5})["actors"]
        assert time.monotonic() - begun < promised(2.0)
        assert [one["name"] for one in found] == [f"env-{i}" for i in range(5)]
        assert all("is stopped (by SIGSTOP" in one["stacks"] for one in found)
        for actor in envs.actors:
            os.kill(actor.pid, signal.SIGCONT)
        obs, *_ = envs.step([5, 6, 7, 8, 9])
        assert obs[:, 2].tolist() == [5, 6, 7, 8, 9]


# Access -----------------------------------------------------------------------------------------------


def test_the_socket_is_this_users_alone(runtime):
    with ea.monitor() as monitor:
        assert monitor.path == runtime / f"{os.getpid()}.sock"
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        assert stat.S_IMODE(monitor.path.stat().st_mode) == 0o600
        assert running_programs() == [os.getpid()]
        assert pid_of(monitor.path) == os.getpid()
    assert not monitor.path.exists()
    assert running_programs() == []


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
def test_another_user_cannot_connect(runtime):
    runtime.parent.chmod(0o755)
    with ea.monitor() as monitor:
        ended = run_script(STRANGER, str(monitor.path))
    assert (ended.stdout, ended.stderr) == ("PermissionError\n", "")


@is_root
def test_another_user_gets_nothing_where_the_file_lets_it_connect(directory, path):
    directory.chmod(0o755)
    with ea.monitor(path):
        path.chmod(0o666)
        ended = run_script(STRANGER, str(path))
        assert ended.stdout in ("b''\n", "BrokenPipeError\n", "ConnectionResetError\n")
        assert ask(path, SNAPSHOT)["pid"] == os.getpid()


def test_a_directory_that_others_may_read_is_rejected(runtime):
    runtime.mkdir(mode=0o755)
    runtime.chmod(0o755)
    with pytest.raises(PermissionError, match="not a directory of this user alone"):
        ea.monitor()


# Malicious clients ---------------------------------------------------------------------------------

REQUESTS = {
    "garbage": b"\xff\x00\x80 no JSON at all\n",
    "half a line": b'{"get": "snap',
    "a mebibyte without an end": b"x" * (1 << 20),
    "a list": b"[1, 2]\n",
    "null": b"null\n",
    "an unknown wish": b'{"get": "everything"}\n',
    "wishes of a wrong type": b'{"get": {"get": ["snapshot"]}}\n',
    "a name of a wrong type": b'{"get": "stacks", "name": [1]}\n',
    "a key of a wrong type": b'{"get": "output", "key": "1"}\n',
    "deep nesting": b"[" * 4000 + b"\n",
    "an endless number": b'{"get": "stacks", "timeout": ' + b"9" * 3000 + b"}\n",
    "no number": b'{"get": "stacks", "timeout": NaN}\n',
    "nothing": b"",
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_garbage_from_a_client_blocks_nothing(path, request_):
    with ea.monitor(path) as monitor, ea.VectorEnv([EchoEnv] * 2) as envs:
        envs.reset(seed=0)
        with connect(path) as bad, connect(path) as bad_too:
            for sock in (bad, bad_too):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    sock.sendall(request_)
            begun = time.monotonic()
            for turn in range(20):
                obs, *_ = envs.step([turn, turn])
                assert obs[:, 2].tolist() == [turn, turn]
                assert ask(path, SNAPSHOT)["pid"] == os.getpid()
            is_unfinished = request_ in (REQUESTS["half a line"], REQUESTS["nothing"])
            if not is_unfinished:
                answer = read_all(bad)
                assert (answer == b"") != (b"timeout" in request_)
            begun = time.monotonic()
            monitor.close()
            assert monitor_threads() == []
            assert time.monotonic() - begun < promised(1.0)
            assert read_all(bad_too) == b"" or b"timeout" in request_


def test_a_client_that_does_not_read_blocks_nothing(path, monkeypatch):
    monkeypatch.setattr(server, "_answer", lambda *_: {"long": "x" * (1 << 24)})
    with ea.monitor(path) as monitor, ea.VectorEnv([EchoEnv] * 2) as envs:
        envs.reset(seed=0)
        with connect(path) as deaf, connect(path) as deaf_too:
            for sock in (deaf, deaf_too):
                sock.sendall(b'{"get": "snapshot"}\n')
            assert len(ask(path, SNAPSHOT)["long"]) == 1 << 24
            envs.step([1, 1])
            wait_until(lambda: len(monitor_threads()) == 3)
            begun = time.monotonic()
            monitor.close()
            assert monitor_threads() == []
            assert time.monotonic() - begun < promised(1.0)


def test_a_silent_client_is_disconnected_after_a_timeout(path, monkeypatch):
    monkeypatch.setattr(server, "_PATIENCE", 0.1)
    with ea.monitor(path), connect(path) as silent:
        assert read_all(silent) == b""


def test_too_many_clients_are_turned_away_for_a_while(path):
    with ea.monitor(path), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(path)) for _ in range(server._MOST_CLIENTS)]
        wait_until(lambda: len(monitor_threads()) == 1 + server._MOST_CLIENTS)
        with pytest.raises(NoAnswerError):
            ask(path, SNAPSHOT)
        for sock in silent:
            sock.close()
        wait_until(lambda: len(monitor_threads()) == 1)
        assert ask(path, SNAPSHOT)["pid"] == os.getpid()


def test_without_free_descriptors_a_client_waits(path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ea.monitor(path), connect(path) as early, socket.socket(socket.AF_UNIX) as late:
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


def test_without_a_thread_for_it_a_client_is_turned_away(path, monkeypatch):
    start, refused = threading.Thread.start, []

    def start_unless_refused(thread):
        if thread.name == "envactors-monitor-client" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_refused)
    with ea.monitor(path):
        with pytest.raises(NoAnswerError):
            ask(path, SNAPSHOT)
        assert ask(path, SNAPSHOT)["pid"] == os.getpid()


def test_an_error_while_answering_is_logged_and_no_more(path, monkeypatch, caplog):
    answer = server._answer
    monkeypatch.setattr(server, "_answer", lambda *_: 1 // 0)
    with ea.monitor(path):
        with pytest.raises(NoAnswerError):
            ask(path, SNAPSHOT)
        wait_until(lambda: "ZeroDivisionError" in caplog.text)
        monkeypatch.setattr(server, "_answer", answer)
        assert ask(path, SNAPSHOT)["pid"] == os.getpid()


def test_closing_waits_for_no_stacks(path):
    with ea.spawn(Counter) as actor:
        actor.add(1).result(SOON)
        os.kill(actor.pid, signal.SIGSTOP)
        with ea.monitor(path) as monitor, connect(path) as client:
            client.sendall(b'{"get": "stacks", "timeout": 2.0}\n')
            wait_until(lambda: any(thread.name == "envactors-monitor-stacks" for thread in monitor_threads()))
            begun = time.monotonic()
            monitor.close()
            assert time.monotonic() - begun < promised(1.0)
            assert read_all(client) == b""
        os.kill(actor.pid, signal.SIGCONT)
        assert actor.add(1).result(SOON) == 2


@pytest.fixture(scope="module")
def fuzzed():
    with tempfile.TemporaryDirectory(prefix="ea") as directory, ea.spawn(Counter) as actor:
        actor.add(1).result(SOON)
        with ea.monitor(Path(directory) / "m.sock") as monitor:
            yield monitor.path, actor


WORDS = [b'"get"', b'"stacks"', b'"name"', b'"key"', b'"timeout"', b":", b",", b"{", b"}", b"[", b"]", b"1e999", b"-1"]


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(WORDS), max_size=20).map(b"".join)), st.booleans())
def test_random_requests_get_json_or_nothing(fuzzed, data, ends):
    path, _ = fuzzed
    with connect(path) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(data + b"\n" * ends)
            sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    assert answer == b"" or json.loads(answer).keys() == {"actors"}


def test_after_random_requests_it_answers_as_before(fuzzed):
    path, actor = fuzzed
    (one,) = ask(path, SNAPSHOT)["actors"]
    assert (one["pid"], one["completed"]) == (actor.pid, 1)


# Missing and stale sockets ----------------------------------------------------------------------------------


def test_the_same_path_twice_shares_the_socket(path):
    first, second = ea.monitor(path), ea.monitor(str(path))
    first.close()
    first.close()
    assert ask(path, SNAPSHOT)["pid"] == os.getpid()
    assert "closed" in repr(first)
    assert "closed" not in repr(second)
    second.close()
    assert not path.exists()
    with pytest.raises(NotListeningError):
        ask(path, SNAPSHOT)


def test_the_socket_of_a_program_that_was_killed_is_replaced(path, program_server):
    code = "import envactors as ea, sys; m = ea.monitor(sys.argv[1]); print(m.path, flush=True); sys.stdin.read()"
    with program(program_server, code, path) as (other, _):
        with pytest.raises(FileExistsError):
            ea.monitor(path)
        assert pid_of(path) == other.pid
        other.kill()
        other.wait(SOON)
        assert path.is_socket()
        with ea.monitor(path):
            assert ask(path, SNAPSHOT)["pid"] == os.getpid()
    assert not path.exists()


def test_a_file_is_never_removed(path):
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="expected no file there"):
        ea.monitor(path)
    assert path.read_text() == "precious"


def test_a_file_that_replaced_the_socket_is_not_removed(path):
    with ea.monitor(path):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_a_relative_path_is_removed_after_a_change_of_directory(directory, path, monkeypatch):
    monkeypatch.chdir(directory)
    with ea.monitor("m.sock"):
        monkeypatch.chdir("/")
        assert ask(path, SNAPSHOT)["pid"] == os.getpid()
    assert not path.exists()


def test_a_path_too_long_for_a_socket_is_rejected(directory):
    with pytest.raises(ValueError, match="too long"):
        ea.monitor(directory / ("x" * 200))


def test_a_fork_neither_answers_nor_removes_the_socket(path, run_warm):
    ended = run_warm(
        """
        import os, sys, time, warnings
        from pathlib import Path
        import envactors as ea
        from envactors.observe.listener import is_listening
        from envactors.observe.programs import NotListeningError, ask
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        path = Path(sys.argv[1])
        monitor = ea.monitor(path)
        for leave in (os._exit, sys.exit, lambda status: (monitor.close(), sys.exit(status))):
            child = os.fork()
            if child == 0:
                leave(0)
            assert os.waitpid(child, 0)[1] == 0
            assert ask(path, {"get": "snapshot"})["pid"] == os.getpid()
        # One that outlives the monitor holds nothing of it open.
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        os.rename(path, moved := path.with_suffix(".moved"))
        monitor.close()
        assert moved.is_socket() and not is_listening(moved)
        moved.unlink()
        os.close(writer)
        os.waitpid(child, 0)
        print("done")
        """,
        str(path),
    )
    assert (ended.stdout, ended.stderr) == ("done\n", "")


def test_the_monitor_answers_while_a_worker_hangs(path):
    with ea.monitor(path), ea.VectorEnv([lambda: FaultyEnv(EchoEnv())] * 2, on_failure="renew") as envs:
        envs.reset(seed=0)
        envs[1].arm("hang_in_c").result(SOON)
        envs.send([1, 1])
        wait_until(lambda: "_hang_in_c" in ask(path, {"get": "stacks", "name": "env-1"})["actors"][0]["stacks"])
        assert ask(path, SNAPSHOT)["actors"][1]["method"] == "step"
        envs[1].kill(restart=True)
        assert envs.recv().truncated.tolist() == [False, True]
        assert ask(path, SNAPSHOT)["actors"][1]["incarnation"] == 1
