"""The helpers are supervised: each is replaced when it ends, and while one is missing nothing is left behind."""

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
from breeder import Breeder, assert_gone, helpers_of, is_there
from helpers import SOON

import envactors as ea
from envactors.process.helper import Helper
from envactors.process.reaping import Reaper

# In this order, so that the server is there last: starting it takes longest.
HELPERS = ["reaper", "keeper", "fork_server"]
METHODS = ["forkserver", "loky"]


@contextlib.contextmanager
def running(code, *args, prefix=()):
    """A program, and the processes whose ids it prints with all that descend from it."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [*prefix, sys.executable, "-W", "error", "-c", code, *args]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as caller:
        try:
            told = {int(pid) for pid in caller.stdout.readline().split()}
            assert told, "the script has failed"
            yield caller, [*{*map(psutil.Process, told), *psutil.Process(caller.pid).children(recursive=True)}]
        finally:
            caller.kill()


HUNG = """
import sys
import envactors as ea
from breeder import Breeder

actor, hung = (ea.spawn(Breeder, backend=ea.ProcessBackend(start_method=sys.argv[1])) for _ in range(2))
pids = [*hung.of_all_kinds().result(30), *hung.escape().result(30), hung.pid, actor.call("getpid").result(30)]
hung.hang_in_c()
print(*pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("method", "helper"),
    [*((method, "reaper") for method in METHODS), ("forkserver", "keeper"), ("forkserver", "fork_server")],
)
def test_no_process_survives_a_caller_that_is_killed_right_after_a_helper(method, helper):
    with running(HUNG, method) as (caller, everybody):
        lost = helpers_of(caller.pid, helper)
        assert len(lost) == 1
        lost[0].kill()
        caller.kill()
        assert_gone(everybody)


REPLACED = """
import os, signal, sys
import psutil
import envactors as ea
from breeder import Breeder, assert_gone, helpers_of
from helpers import SOON, wait_until

def lose(*names):
    lost = [process for name in names for process in helpers_of(os.getpid(), name)]
    assert len(lost) == len(names)
    for process in lost:
        process.kill()
    for name in names:
        wait_until(lambda: any(process not in lost for process in helpers_of(os.getpid(), name)))

first, second = (ea.spawn(Breeder, backend=ea.ProcessBackend(start_method="forkserver")) for _ in range(2))
children = [psutil.Process(pid) for pid in first.of_all_kinds().result(30) + first.escape().result(30)]
pids = [*second.of_all_kinds().result(30), *second.escape().result(30), second.pid]
for _ in range(3):
    lose("reaper", "keeper", "fork_server")
    lose("keeper")
assert (second.incarnation, second.call("getpid").result(30)) == (0, second.pid)
os.kill(first.pid, signal.SIGKILL)
assert_gone(children)
second.hang_in_c()
print(*pids, flush=True)
sys.stdin.read()
"""


def test_helpers_are_replaced_and_the_next_ones_know_all_workers():
    with running(REPLACED) as (caller, everybody):
        caller.kill()
        assert_gone(everybody)


@pytest.mark.parametrize("method", METHODS)
def test_processes_that_hide_environment_session_and_parent_end_with_their_worker(method):
    backend = ea.ProcessBackend(start_method=method)
    with ea.spawn(Breeder, backend=backend) as actor, ea.spawn(Breeder, backend=backend) as sibling:
        escaped = [psutil.Process(pid) for pid in actor.escape().result(SOON) + actor.hidden_copies().result(SOON)]
        others = [psutil.Process(pid) for pid in sibling.escape().result(SOON) + sibling.hidden_copies().result(SOON)]
        os.kill(actor.pid, signal.SIGKILL)
        assert_gone(escaped)
        assert all(map(is_there, others))
    assert_gone(others)


ORPHANS = """
import ctypes, os, signal, sys
import psutil
import envactors as ea
from breeder import Breeder, helpers_of, is_zombie
from helpers import SOON, wait_until

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER; process 1 need not ask for it
me, method = psutil.Process(), sys.argv[1]
own = os.spawnlp(os.P_NOWAIT, "true", "true")  # a child of the program's own, which it has not reaped yet
backend = ea.ProcessBackend(start_method=method)

def start_processes(actor):
    pids = [*actor.of_all_kinds().result(30), *actor.escape().result(30)]
    actor.short_lived().result(30)
    return [psutil.Process(pid) for pid in pids]

def are_reaped(processes):
    return not any(process.is_running() for process in processes)  # which zombies are, too

def is_all_gone():
    # In two words: reapers spare trackers at first, by their command line, and a fork has that of this program.
    trackers = [child.pid for child in helpers_of(os.getpid(), "resource_" "tracker")]
    return {child.pid for child in me.children(recursive=True)} <= {own, *trackers}

actors = [ea.spawn(Breeder, backend=backend) for _ in range(3)]
first, second, _ = map(start_processes, actors)
os.kill(actors[0].pid, signal.SIGKILL)
wait_until(lambda: are_reaped(first))
if method == "forkserver":  # what it has not reaped becomes the caller's
    (server,) = helpers_of(os.getpid(), "fork_server")
    server.suspend()
os.kill(actors[1].pid, signal.SIGKILL)
wait_until(lambda: actors[1].state is ea.ActorState.DEAD)
if method == "forkserver":
    wait_until(lambda: all(map(is_zombie, second)))
    server.kill()
wait_until(lambda: are_reaped(second))
os.kill(actors[2].pid, signal.SIGKILL)
wait_until(lambda: all(actor.state is ea.ActorState.DEAD for actor in actors))
if method == "forkserver":
    assert actors[2].stats().last_failure.signal == signal.SIGKILL
for actor in actors:  # at once: the reapers are still searching
    actor.close()
wait_until(is_all_gone)
assert os.waitpid(own, 0) == (own, 0)
print(os.getpid(), flush=True)
"""
OWN_PROCESS_IDS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def run_with_orphans(method, *prefix):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [*prefix, sys.executable, "-W", "error", "-c", ORPHANS, method]
    return int(subprocess.run(command, stdout=subprocess.PIPE, env=environment, timeout=100, check=True).stdout)


@pytest.mark.parametrize("method", METHODS)
def test_no_zombie_stays_if_the_caller_is_the_parent_of_orphans(method):
    assert run_with_orphans(method) > 1


@pytest.mark.parametrize("method", METHODS)
def test_no_zombie_stays_if_the_caller_is_process_1(method):
    try:
        done = subprocess.run([*OWN_PROCESS_IDS, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare program")
    if done.returncode:
        pytest.skip(f"this user may not make a namespace of process ids: {done.stderr.strip()}")
    assert run_with_orphans(method, *OWN_PROCESS_IDS) == 1


def begin_worker(guards):
    """Start a process as a worker of these guards; return it and its tag."""
    tag = guards.enlist()
    worker = subprocess.Popen(["sleep", "60"], start_new_session=True)
    guards.watch(tag, worker.pid)
    return worker, tag


def end_worker(guards, worker, tag):
    worker.kill()
    with guards.dismiss(tag):
        worker.wait()


def test_a_worker_that_starts_while_the_last_actor_ends_the_reaper_lives_on(monkeypatch):
    """The last actor waits for a reaper that is being replaced; meanwhile, another actor begins."""
    guards, begun = Reaper(), []
    guards.retain("first")
    end_worker(guards, *begin_worker(guards))
    current = Helper.current

    def begin_another(self, lost=None):
        if not begun:
            begun.append(None)
            guards.retain("other")
            begun[:] = begin_worker(guards)
        return current(self, lost)

    with monkeypatch.context() as patched:
        patched.setattr(Helper, "current", begin_another)
        guards.release("first")
    try:
        time.sleep(0.5)
        assert begun[0].poll() is None
    finally:
        end_worker(guards, *begun)
        guards.release("other")


UNREAD = """
import select, sys
import envactors as ea
from breeder import Breeder
from envactors.process.helper import HelperProcess
from envactors.process.reaping import REAPER, Guard

Guard.wait = HelperProcess.wait  # the ids of orphans are never read
actor = ea.spawn(Breeder)
pids = [*actor.of_all_kinds().result(30), *actor.escape().result(30), actor.pid]
REAPER.adopt()
assert all(select.select([guard.sock], [], [], 30)[0] for guard in REAPER._guards.values())
print(*pids, flush=True)
sys.stdin.read()
"""


def test_no_process_survives_a_caller_that_has_not_read_which_orphans_have_ended():
    with running(UNREAD) as (caller, everybody):
        caller.kill()
        assert_gone(everybody)
