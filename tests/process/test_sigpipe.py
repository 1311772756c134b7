"""A caller with the default action for SIGPIPE, as command-line tools set it, survives writes to closed connections."""

from __future__ import annotations

import pytest

# Every script begins as a command-line tool does that may write to another one.
HEAD = """
import contextlib, json, os, signal, socket, sys, threading, time
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
from pathlib import Path
import envactors as ea
count, place = int(sys.argv[1]), Path(sys.argv[2])
always = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)

class Env:
    observation_space = action_space = None

    def get_pid(self):
        return os.getpid()

    def echo(self, value):
        return value

    def reset(self, *, seed=None, options=None):
        return 0.0, {}

    def step(self, action):
        return float(action), 0.0, False, False, {}

    def hang_up_after(self, begin, done):
        import stat

        def close_sockets():
            while not begin.exists():
                time.sleep(0.002)
            for fd in range(3, 100):
                with contextlib.suppress(OSError):
                    if stat.S_ISSOCK(os.fstat(fd).st_mode):
                        os.close(fd)
            done.touch()

        threading.Thread(target=close_sockets, daemon=True).start()

def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
"""
CLOSED = """
with ea.spawn(Env, restart=always) as actor:
    begin, done = place / "begin", place / "done"
    actor.hang_up_after(begin, done).result(20)
    begin.touch()  # the process goes on for a moment: the next request finds its channel closed
    wait_until(done.exists)
    with contextlib.suppress(ea.ActorDiedError):
        actor.echo(1).result(20)
"""
KILLED = """
with ea.spawn(Env, restart=always) as actor:
    for number in range(count):
        os.kill(actor.get_pid().result(20), signal.SIGKILL)
        with contextlib.suppress(ea.ActorDiedError):
            assert actor.echo(number).result(20) == number
    for number in range(count):
        os.kill(actor.get_pid().result(20), signal.SIGKILL)
        actor.renew().result(20)
        assert actor.echo(number).result(20) == number
with ea.VectorEnv([Env] * 2, on_failure="renew", restart=always) as envs:
    envs.reset(seed=0)
    for number in range(count):
        with contextlib.suppress(ProcessLookupError, TypeError):  # its next process is still starting
            os.kill(envs[number % 2].pid, signal.SIGKILL)
        assert len(envs.step([number] * 2)[0]) == 2
"""
MONITOR = """
os.environ["XDG_RUNTIME_DIR"] = str(place)
with ea.spawn(Env) as actor:
    for _ in range(count):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(place / "envactors" / f"{os.getpid()}.sock"))
            client.sendall(json.dumps({"get": "snapshot"}).encode() + b"\\n")
    wait_until(lambda: not any(thread.name == "envactors-monitor-client" for thread in threading.enumerate()))
    assert actor.echo(3).result(20) == 3
"""


def survives(run, script, tmp_path, count):
    ended = run(HEAD + script + "\nprint('alive')\n", str(count), str(tmp_path))
    assert (ended.stdout, ended.returncode) == ("alive\n", 0), ended.stderr[-2000:]


@pytest.mark.parametrize("script", [CLOSED, KILLED, MONITOR], ids=["closed", "killed", "monitor"])
def test_writing_to_a_closed_connection_does_not_end_the_caller(script, tmp_path, run_warm):
    survives(run_warm, script, tmp_path, 5)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_three_hundred_kills_between_requests_do_not_end_the_caller(tmp_path, run_warm):
    survives(run_warm, KILLED, tmp_path, 300)
