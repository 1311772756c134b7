"""Nothing is left behind: what workers have started ends with them, and all of it with the caller (14, 15, 17)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from breeder import Breeder
from helpers import SOON, Counter, wait_until

import envactors as ea
from envactors.worker import reaper

AT_MOST = 5.0  # seconds, promised
METHODS = ["loky", "spawn", "forkserver", "fork"]
KINDS = 8  # processes that `Breeder.of_all_kinds` starts
SHM = Path("/dev/shm")

CALLER = """
import sys
import envactors as ea
from breeder import Breeder

method = sys.argv[1]
backend = ea.ProcessBackend(start_method=method)
idle, hung, breeder, nested = (ea.spawn(Breeder, backend=backend) for _ in range(4))
calls = idle.plain(), hung.plain(), breeder.of_all_kinds(), nested.nest(method)
pids = [pid for call in calls for pid in call.result(30)]
hung.hang_in_c()
starting = [ea.spawn(Breeder, backend=backend) for _ in range(2)]
print(*pids, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def running(code: str, *args: str):
    """A caller, and the processes whose ids it prints with all that descend from it."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-W", "error", "-c", code, *args]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as caller:
        try:
            told = {int(pid) for pid in caller.stdout.readline().split()}
            assert told, "the script has failed"
            yield caller, [*{*map(psutil.Process, told), *psutil.Process(caller.pid).children(recursive=True)}]
        finally:
            caller.kill()


def assert_gone(doomed) -> None:
    """Each process has ended in time; a pid that is used again is another one's to psutil."""
    deadline = time.monotonic() + AT_MOST
    while left := [process for process in doomed if is_there(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def reapers_of(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if reaper.__file__ in child.cmdline():
                found.append(child)
    return found


def names() -> set[str]:
    return {path.name for path in SHM.iterdir()}


@pytest.mark.parametrize("method", METHODS)
def test_everything_ends_with_a_caller_that_is_killed(method):
    with running(CALLER, method) as (caller, everybody):
        assert len(everybody) > 2 * KINDS + 8
        caller.kill()
        assert_gone(everybody)


WAYS = {
    "killed from outside": lambda actor: os.kill(actor.pid, signal.SIGKILL),
    "os._exit": lambda actor: actor.exit_now(),
    "a deadline, in C": lambda actor: actor.options(timeout=0.05).hang_in_c(),
    "kill": lambda actor: actor.kill(restart=True),
    "renew": lambda actor: actor.renew(),
    "close": lambda actor: actor.close(),
}


@pytest.mark.parametrize("method", METHODS)
def test_what_a_worker_has_started_ends_with_it_and_with_no_other(method):
    backend = ea.ProcessBackend(start_method=method)
    restart = ea.RestartPolicy(max_restarts=10, backoff=0.0)
    with (
        ea.spawn(Breeder, backend=backend, restart=restart) as actor,
        ea.spawn(Breeder, backend=backend) as sibling,
    ):
        others = [psutil.Process(pid) for pid in sibling.of_all_kinds().result(SOON)]
        for way, end in WAYS.items():
            children = [psutil.Process(pid) for pid in actor.of_all_kinds().result(SOON)]
            assert len(children) == KINDS
            end(actor)
            assert_gone(children)
            assert all(map(is_there, others)), way
    assert_gone(others)


def test_an_inner_actors_children_end_with_it_and_with_the_outer_worker():
    backend = ea.ProcessBackend(start_method="forkserver")
    with ea.spawn(Breeder, backend=backend) as outer:
        inner = [psutil.Process(pid) for pid in outer.nest("forkserver").result(SOON)]
        everybody = {*inner, *psutil.Process(outer.pid).children(recursive=True)}
        assert len(reapers_of(outer.pid)) == 1
        os.kill(outer.pid, signal.SIGKILL)
        assert_gone(everybody)


def test_what_resource_trackers_have_to_remove_is_removed():
    before = names()
    with ea.spawn(Breeder, backend=ea.ProcessBackend(start_method="forkserver")) as actor:
        name = actor.share_memory().result(SOON)
        assert name in names()
        os.kill(actor.pid, signal.SIGKILL)
        wait_until(lambda: names() <= before, AT_MOST)


