"""Promise `output`: what workers print is passed on line by line under the actor's name, and kept for errors."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

import pytest
from helpers import SOON, Counter, promised, run_script

import envactors as ea

METHODS = ["loky", "forkserver"]
# As most callers have it: Python holds back what is printed into a pipe.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

TALKING = """
import os, sys, time
import envactors as ea

class Env:
    def talk(self, gate):
        print("printed")
        sys.stderr.write("complained\\n")
        os.write(1, b"half a ")
        while not os.path.exists(gate):
            time.sleep(0.005)
        os.write(1, b"line\\n\\n")
        os.write(1, b"not \\xff UTF-8\\r\\n")
        print("unencodable \\udc80")

    def die(self):
        print("last words", end="", flush=True)
        os.write(2, b"one\\ntwo \\xff\\nno end")
        os._exit(3)

sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)  # not the one that Python began with
sys.stdout.write("the caller's own\\n")
actor = ea.spawn(Env, name="parrot", backend=ea.ProcessBackend(start_method=sys.argv[1]))
actor.talk(sys.argv[2]).result(30)
error = actor.die().exception(30)
assert error.stderr_tail == "complained\\none\\ntwo \\ufffd\\nno end", error.stderr_tail
actor.close()
"""


@pytest.mark.parametrize("method", METHODS)
def test_every_line_comes_at_once_and_whole(method, tmp_path):
    gate = tmp_path / "gate"
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", TALKING, method, str(gate)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**BUFFERED, "PYTHONIOENCODING": "utf-8"},
    ) as caller:
        # While the call is still running. What Python writes into a pipe comes in blocks, but for these.
        seen = [caller.stdout.readline() for _ in range(2)]
        gate.touch()
        out, err = caller.communicate(timeout=100)
    assert seen == [b"the caller's own\n", b"[parrot] printed\n"]
    assert out.decode().split("\n") == [
        "[parrot] half a line",
        "[parrot] ",
        "[parrot] not \ufffd UTF-8\r",
        "[parrot] unencodable \\udc80",
        "[parrot] last words",
        "",
    ]
    assert err.decode().split("\n") == [
        "[parrot] complained",
        "[parrot] one",
        "[parrot] two \ufffd",
        "[parrot] no end",
        "",
    ]


def test_a_line_without_an_end_is_passed_on_in_pieces(capfd):
    class Env(Counter):
        def drone(self):
            os.write(1, "€".encode() * 200_000)
            print("!\nshort")

    with ea.spawn(Env, name="x") as actor:
        actor.drone().result(SOON)
    lines = capfd.readouterr().out.splitlines()
    assert lines.pop() == "[x] short"
    assert len(lines) > 2
    assert "".join(line.removeprefix("[x] ") for line in lines) == "€" * 200_000 + "!", "no character was torn"


class Stuck:
    """A caller's stream that takes nothing before it may."""

    def __init__(self):
        self.go = threading.Event()
        self.parts = []

    def write(self, text):
        assert self.go.wait(3 * SOON)
        self.parts.append(text)

    def flush(self):
        pass


@contextlib.contextmanager
def stuck_stdout():
    stream = Stuck()
    with contextlib.redirect_stdout(stream):
        try:
            yield stream
        finally:
            stream.go.set()


def test_a_stream_that_blocks_does_not_block_workers():
    class Env(Counter):
        def flood(self, megabytes):
            for _ in range(megabytes):
                os.write(1, (b"x" * 9_999 + b"\n") * 100)
            print("the end")

    with stuck_stdout() as stuck, ea.spawn(Env, name="e") as actor:
        actor.flood(60).result(SOON)
        assert actor.add().result(SOON) == 1
        stuck.go.set()
    lines = "".join(stuck.parts).splitlines()
    notes = [line for line in lines if "left out" in line]
    left_out = sum(int(note.removeprefix("[e] (").partition(" lines left out")[0]) for note in notes)
    passed_on = sum(line == "[e] " + "x" * 9_999 for line in lines) + ("[e] the end" in lines)
    assert (passed_on + len(notes), passed_on + left_out) == (len(lines), 6001), "told, and none of them torn"
    assert 1000 < passed_on < 4000, "what waits is bounded"


def test_a_worker_that_never_stops_printing_blocks_nothing():
    class Env(Counter):
        def babble(self, fd):
            while True:
                os.write(fd, b"x\n" * 30_000)

    restart = ea.RestartPolicy(max_restarts=5, backoff=0.0)
    with stuck_stdout(), ea.spawn(Env, restart=restart) as actor, ea.spawn(Counter) as other:
        assert [actor.add().result(SOON), other.add().result(SOON)] == [1, 1]
        error = actor.options(deadline=0.5).babble(1).exception(SOON)
        assert isinstance(error, ea.ActorTimeoutError)
        assert error.elapsed < promised(1.5)
        assert other.add().result(SOON) == 2
        assert actor.add().result(SOON) == 1


def test_a_child_that_never_stops_printing_hides_no_crash():
    class Env(Counter):
        def leave_a_babbler(self):
            if os.fork() == 0:
                while True:
                    os.write(1, b"x\n" * 30_000)
            os._exit(3)

    with stuck_stdout(), ea.spawn(Env) as actor:
        error = actor.leave_a_babbler().exception(SOON)
    assert isinstance(error, ea.ActorDiedError)
    assert error.elapsed < promised(1.5)


def test_a_caller_without_the_right_streams_loses_no_actor():
    done = run_script(
        """
        import sys, time
        import envactors as ea

        class Env:
            def talk(self, text):
                print(text)
                print(text, file=sys.stderr)
                return "talked"

        told, write = [], sys.stdout.write
        sys.stdout.write = lambda text: told.append(text) or write(text)

        with ea.spawn(Env, name="a") as actor, ea.spawn(Env, name="b") as other:
            actor.talk("caf\xe9").result(20)
            other.talk("seen").result(20)
            actor.close()
            # Lines are printed a moment after the call that has written them, and one that cannot be encoded twice.
            while not {"[a] caf\\\\xe9\\n", "[b] seen\\n"} <= set(told):
                time.sleep(0.01)
            stdout, sys.stdout = sys.stdout, None
            assert other.talk("unseen").result(20) == "talked"
        sys.stdout = stdout
        sys.stdout.write("still here")
        """,
        env={**BUFFERED, "PYTHONIOENCODING": "ascii"},
    )
    assert sorted(done.stdout.splitlines()) == ["[a] caf\\xe9", "[b] seen", "still here"]
    assert sorted(done.stderr.splitlines()) == ["[a] caf\\xe9", "[b] seen", "[b] unseen"]


def test_only_the_last_fifty_lines_are_kept():
    class Env(Counter):
        def complain_and_die(self):
            for i in range(80):
                print(f"line {i}", file=sys.stderr)
            os._exit(1)

    with ea.spawn(Env) as actor:
        error = actor.complain_and_die().exception(SOON)
    assert error.stderr_tail.splitlines() == [f"line {i}" for i in range(30, 80)]
    assert str(error).endswith("line 78\nline 79")
