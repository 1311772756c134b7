"""Nothing is left behind: a worker's process group ends with it, and everything ends with the caller."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from breeder import AT_MOST, Breeder, assert_gone, helpers_of, is_there, is_zombie
from helpers import SOON, wait_until
from leaks import inventory, settled_inventory

import envactors as ea
from envactors.testing import EchoEnv

METHODS = ["loky", "forkserver"]
SHM = Path("/dev/shm")
FORKED = ea.ProcessBackend(start_method="forkserver")


@contextlib.contextmanager
def running(code: str, *args: str, prefix: tuple[str, ...] = ()):
    """A caller, and the processes whose ids it prints with all that descend from it."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [*prefix, sys.executable, "-W", "error", "-c", code, *args]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as caller:
        try:
            told = {int(pid) for pid in caller.stdout.readline().split()}
            assert told, "the script has failed"
            found = {*psutil.Process(caller.pid).children(recursive=True)}
            for pid in told if not prefix else ():
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
                    found.add(psutil.Process(pid))
            yield caller, [*found]
        finally:
            caller.kill()


# With its caller -----------------------------------------------------------------------------------------

CALLER = """
import sys
import envactors as ea
from breeder import Breeder

backend = ea.ProcessBackend(start_method=sys.argv[1])
actors = [ea.spawn(Breeder, backend=backend) for _ in range(8)]
calls = [actor.of_own_group() for actor in actors]
if sys.argv[1] == "forkserver":  # workers that loky has started are no descendants of a helper
    calls += actors[0].of_all_kinds(), actors[1].nest("forkserver"), actors[2].escape()
pids = [pid for call in calls for pid in call.result(30)]
memory = actors[3].share_memory().result(30) if len(sys.argv) > 2 else ""
for actor in actors:
    actor.hang_in_c()
starting = [ea.spawn(Breeder, backend=backend) for _ in range(2)]
print(*pids, flush=True)
print(memory, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("method", METHODS)
def test_everything_ends_with_a_caller_that_is_killed(method):
    with running(CALLER, method, "with memory") as (caller, everybody):
        assert len(everybody) > 8 * 6
        memory = SHM / caller.stdout.readline().decode().strip()
        assert memory.exists()
        caller.kill()
        assert_gone(everybody)
    wait_until(lambda: not memory.exists(), AT_MOST)


FORKS = """
import ctypes, os, sys
import envactors as ea
from breeder import Breeder

actor = ea.spawn(Breeder)
pids = actor.of_all_kinds().result(30)
libc = ctypes.PyDLL(None)  # keeps the GIL: a copy could never take it from a thread that it does not have
if libc.fork() == 0:
    libc.fork() or libc.sleep(60)
    libc._exit(0)
os.wait()
print(*pids, actor.pid, flush=True)
sys.stdin.read()
"""


def test_everything_ends_with_a_caller_whose_copies_hold_its_sockets():
    with running(FORKS) as (caller, everybody):
        caller.kill()
        assert_gone(everybody)


# With its worker -----------------------------------------------------------------------------------------

# Each start method has one crash and one deliberate end; the other ways are tested once.
WAYS = {
    "killed from outside": lambda actor: os.kill(actor.pid, signal.SIGKILL),
    "os._exit": lambda actor: actor.exit_now(),
    "a deadline, in C": lambda actor: actor.options(deadline=0.05).hang_in_c(),
    "kill": lambda actor: actor.kill(restart=True),
    "renew": lambda actor: actor.renew(),
    "close": lambda actor: actor.close(),
}


@pytest.mark.parametrize("method", METHODS)
def test_the_process_group_of_a_worker_ends_with_it_and_no_other_does(method):
    backend = ea.ProcessBackend(start_method=method)
    restart = ea.RestartPolicy(max_restarts=10, backoff=0.0)
    with (
        ea.spawn(Breeder, backend=backend, restart=restart) as actor,
        ea.spawn(Breeder, backend=backend) as sibling,
    ):
        others = [psutil.Process(pid) for pid in sibling.of_own_group().result(SOON)]
        for way in WAYS if method == "forkserver" else ("killed from outside", "close"):
            children = [psutil.Process(pid) for pid in actor.of_own_group().result(SOON)]
            WAYS[way](actor)
            assert_gone(children)
            assert all(map(is_there, others)), way
    assert_gone(others)


def test_a_daemon_survives_its_worker_and_ends_with_the_last_actor():
    restart = ea.RestartPolicy(max_restarts=10, backoff=0.0)
    with ea.spawn(Breeder, backend=FORKED) as last:
        with ea.spawn(Breeder, backend=FORKED, restart=restart) as actor:
            daemons = [psutil.Process(pid) for pid in actor.daemon().result(SOON) + actor.escape().result(SOON)]
            daemons += [psutil.Process(pid) for pid in actor.hidden_copies().result(SOON)]
            plain = [psutil.Process(pid) for pid in actor.plain().result(SOON)]
            actor.renew().result(SOON)
            assert_gone(plain)
            os.kill(actor.pid, signal.SIGKILL)
            wait_until(lambda: actor.incarnation == 2)
        last.getpid().result(SOON)
        assert all(map(is_there, daemons))
    assert_gone(daemons)


def test_an_inner_actors_children_end_with_it_and_with_the_outer_worker():
    with ea.spawn(Breeder, backend=FORKED) as outer:
        inner = [psutil.Process(pid) for pid in outer.nest("forkserver", hidden=False).result(SOON)]
        everybody = {*inner, *psutil.Process(outer.pid).children(recursive=True)}
        assert len(helpers_of(outer.pid)) == 1
        os.kill(outer.pid, signal.SIGKILL)
        assert_gone(everybody)


def test_what_resource_trackers_have_to_remove_is_removed():
    with ea.spawn(Breeder, backend=FORKED) as actor:
        memory = SHM / actor.share_memory().result(SOON)
        assert memory.exists()
        os.kill(actor.pid, signal.SIGKILL)
        wait_until(lambda: not memory.exists(), AT_MOST)


# Helper processes and zombies ----------------------------------------------------------------------------

ONE_CHILD = """
import os
import psutil
import envactors as ea
from breeder import Breeder

def children():
    return psutil.Process().children()

with ea.ActorPool(Breeder, 5) as pool, ea.VectorEnv([ea.testing.EchoEnv] * 4) as envs:
    envs.reset(seed=0)
    assert len({actor.getpid().result(30) for actor in pool.actors}) == 5
    assert len(children()) == 1, children()
    child = os.fork()
    if child == 0:  # it has a helper of its own, and leaves its parent's alone
        with ea.spawn(Breeder) as mine:
            mine.getpid().result(30)
            os._exit(len(children()) - 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len({actor.getpid().result(30) for actor in pool.actors}) == 5
assert children() == []
"""


def test_the_only_child_of_the_caller_is_one_helper():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", "import envactors.testing" + ONE_CHILD], env=environment, check=True)


ORPHANS = """
import ctypes, os, signal, sys
import psutil
import envactors as ea
from breeder import Breeder, helpers_of, is_zombie
from helpers import wait_until

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER; process 1 need not ask for it
me = psutil.Process()
own = os.spawnlp(os.P_NOWAIT, "true", "true")  # a child of the program's own, which it has not reaped yet

def start_processes(actor):
    actor.short_lived().result(30)
    pids = actor.of_own_group().result(30)
    return [psutil.Process(pid) for pid in pids]

def are_reaped(processes):
    return not any(process.is_running() for process in processes)  # which zombies are, too

restart = ea.RestartPolicy(max_restarts=0)
actors = [ea.spawn(Breeder, restart=restart) for _ in range(3)]
first, second, third = map(start_processes, actors)
os.kill(actors[0].pid, signal.SIGKILL)
wait_until(lambda: are_reaped(first))
wait_until(lambda: not any(is_zombie(child) for child in me.children(recursive=True) if child.pid != own))
(helper,) = helpers_of(os.getpid())
helper.kill()
wait_until(lambda: actors[1].incarnation == actors[2].incarnation == 1)
wait_until(lambda: are_reaped([*second, *third]))
for actor in actors:
    actor.close()
wait_until(lambda: {child.pid for child in me.children(recursive=True)} == {own})
assert os.waitpid(own, 0) == (own, 0)
print(os.getpid(), flush=True)
"""
OWN_PROCESS_IDS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture
def process_1():
    """Returns the command that runs a program as process 1 of a namespace."""
    try:
        done = subprocess.run([*OWN_PROCESS_IDS, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare program")
    if done.returncode:
        pytest.skip(f"this user may not make a namespace of process ids: {done.stderr.strip()}")
    return OWN_PROCESS_IDS


def run_with_orphans(*prefix):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [*prefix, sys.executable, "-W", "error", "-c", ORPHANS]
    return int(subprocess.run(command, stdout=subprocess.PIPE, env=environment, timeout=100, check=True).stdout)


def test_no_zombie_stays_if_the_caller_is_the_parent_of_orphans():
    assert run_with_orphans() > 1


def test_no_zombie_stays_if_the_caller_is_process_1(process_1):
    assert run_with_orphans(*process_1) == 1


def test_everything_ends_with_process_1(process_1):
    with running(CALLER, "forkserver", prefix=process_1) as (unshare, everybody):
        (caller,) = psutil.Process(unshare.pid).children()
        assert len(everybody) > 8 * 6
        (helper,) = helpers_of(caller.pid)
        assert not any(is_zombie(process) for process in [*caller.children(), *helper.children()])
        caller.kill()
        assert_gone(everybody)


def test_a_closed_vector_keeps_no_descriptors_open():
    def make():
        with ea.VectorEnv([EchoEnv] * 2) as envs:
            envs.reset(seed=0)
            envs.step([1, 1])
        return envs

    make()
    before = inventory()
    held = [make() for _ in range(3)]
    after = settled_inventory(before, 2.0)
    assert after.descriptors == before.descriptors
    assert held
