"""Nothing is left behind: what workers have started ends with them, and all of it with the caller (14, 15, 17)."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest
from breeder import AT_MOST, Breeder, assert_gone, is_there, reapers_of
from helpers import SOON, wait_until
from leaks import inventory, settled_inventory

import envactors as ea
from envactors.process import reaper
from envactors.testing import EchoEnv

METHODS = ["loky", "forkserver"]
KINDS = 8  # processes that `Breeder.of_all_kinds` starts, and two more that are hidden
HIDDEN = 2
SHM = Path("/dev/shm")

CALLER = """
import sys
import envactors as ea
from breeder import Breeder

method = sys.argv[1]
backend = ea.ProcessBackend(start_method=method)
idle, hung, breeder, nested = (ea.spawn(Breeder, backend=backend) for _ in range(4))
calls = hung.plain(), breeder.of_all_kinds(), nested.nest(method)
pids = [pid for call in calls for pid in call.result(30)]
memory = idle.share_memory().result(30)
hung.hang_in_c()
starting = [ea.spawn(Breeder, backend=backend) for _ in range(2)]
print(*pids, flush=True)
print(memory, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def running(code: str, *args: str):
    """A caller, and the processes whose ids it prints with all that descend from it."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-W", "error", "-c", code, *args]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as caller:
        try:
            told = {int(pid) for pid in caller.stdout.readline().split()}
            assert told, "the script has failed"
            found = {*psutil.Process(caller.pid).children(recursive=True)}
            for pid in told:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
                    found.add(psutil.Process(pid))
            yield caller, [*found]
        finally:
            caller.kill()


@pytest.mark.parametrize("method", METHODS)
def test_everything_ends_with_a_caller_that_is_killed(method):
    with running(CALLER, method) as (caller, everybody):
        assert len(everybody) > 2 * (KINDS + HIDDEN) + 6
        memory = SHM / caller.stdout.readline().decode().strip()
        assert memory.exists()
        caller.kill()
        assert_gone(everybody)
    wait_until(lambda: not memory.exists(), AT_MOST)


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
def test_what_a_worker_has_started_ends_with_it_and_with_no_other(method):
    backend = ea.ProcessBackend(start_method=method)
    # /proc shows the environment that a fresh interpreter was started with. A forked worker and its copies have the
    # fork server's there; what they execute shows the worker's own.
    hidden = method == "loky"
    restart = ea.RestartPolicy(max_restarts=10, backoff=0.0)
    with (
        ea.spawn(Breeder, backend=backend, restart=restart) as actor,
        ea.spawn(Breeder, backend=backend) as sibling,
    ):
        others = [psutil.Process(pid) for pid in sibling.of_all_kinds(hidden).result(SOON)]
        for way in WAYS if method == "forkserver" else ("killed from outside", "close"):
            children = [psutil.Process(pid) for pid in actor.of_all_kinds(hidden).result(SOON)]
            assert len(children) == KINDS + (HIDDEN if hidden else 0)
            WAYS[way](actor)
            assert_gone(children)
            assert all(map(is_there, others)), way
    assert_gone(others)


WITHOUT_TAGS = """
import os, resource, signal, sys
import psutil
import envactors as ea

resource.setrlimit(10, (100, 100))  # a hard limit of file locks leaves no room for tags
from breeder import Breeder, assert_gone

first, second = ea.spawn(Breeder), ea.spawn(Breeder)
children = [psutil.Process(pid) for pid in first.plain().result(30) + first.copies().result(30)]
os.kill(first.pid, signal.SIGKILL)
assert_gone(children)
print(*second.plain().result(30), *second.copies().result(30), second.pid, flush=True)
sys.stdin.read()
"""


def test_process_groups_end_where_the_system_has_no_tags():
    with running(WITHOUT_TAGS) as (caller, everybody):
        caller.kill()
        assert_gone(everybody)


def test_the_tag_of_another_users_process_is_read_too(monkeypatch):
    limits = 4711, resource.getrlimit(reaper._LOCKS)[1]
    tagged = subprocess.Popen(["sleep", "1000"])
    try:
        resource.prlimit(tagged.pid, reaper._LOCKS, limits)
        assert reaper.read_tag(tagged.pid) == 4711
        # So the kernel says to all but root about a setgid program.
        monkeypatch.setattr(resource, "prlimit", mock.Mock(side_effect=PermissionError))
        assert reaper.read_tag(tagged.pid) == 4711
        assert reaper.read_tag(os.getpid()) == 0
    finally:
        tagged.kill()
        tagged.wait()


def test_an_inner_actors_children_end_with_it_and_with_the_outer_worker():
    backend = ea.ProcessBackend(start_method="forkserver")
    with ea.spawn(Breeder, backend=backend) as outer:
        inner = [psutil.Process(pid) for pid in outer.nest("forkserver", hidden=False).result(SOON)]
        everybody = {*inner, *psutil.Process(outer.pid).children(recursive=True)}
        assert len(reapers_of(outer.pid)) == 1
        os.kill(outer.pid, signal.SIGKILL)
        assert_gone(everybody)


def test_what_resource_trackers_have_to_remove_is_removed():
    with ea.spawn(Breeder, backend=ea.ProcessBackend(start_method="forkserver")) as actor:
        memory = SHM / actor.share_memory().result(SOON)
        assert memory.exists()
        os.kill(actor.pid, signal.SIGKILL)
        wait_until(lambda: not memory.exists(), AT_MOST)


LOSSES = """
import ctypes, os, signal, socket, sys, threading
import psutil
import envactors as ea
from breeder import AT_MOST, Breeder, assert_gone, is_there, reapers_of
from helpers import wait_until

me = psutil.Process()
backend = ea.ProcessBackend(start_method="forkserver")

# An ordinary end leaves none.
ea.spawn(Breeder, backend="inline").close()
wait_until(lambda: threading.active_count() == 1, AT_MOST)
before = os.listdir("/proc/self/fd"), me.children()
with ea.spawn(Breeder, backend=backend) as actor:
    actor.plain().result(30)
    (reaper,) = reapers_of(os.getpid())
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        reaper.send_signal(signum)

    # A forked child has its own, and leaves its parent's alone.
    child = os.fork()
    if child == 0:
        with ea.spawn(Breeder, backend=backend) as mine:
            mine.plain().result(30)
            (other,) = reapers_of(os.getpid())
        os._exit(int(is_there(other) or other == reaper))
    assert os.waitpid(child, 0)[1] == 0
    assert is_there(reaper)
assert not is_there(reaper)
# The threads that wait for actors end a moment after the last of them.
wait_until(lambda: (os.listdir("/proc/self/fd"), me.children()) == before, AT_MOST)

# One that is lost before a death.
actor, second = (ea.spawn(Breeder, backend=backend) for _ in range(2))
children = [psutil.Process(pid) for pid in actor.of_all_kinds(hidden=False).result(30)]
(reaper,) = reapers_of(os.getpid())
reaper.kill()
assert_gone([reaper])
os.kill(actor.pid, signal.SIGKILL)
assert_gone(children)
wait_until(lambda: reapers_of(os.getpid()))
(reaper,) = reapers_of(os.getpid())

# One that is lost before it has heard of a death: the next one is told, with the next worker.
fourth = ea.spawn(Breeder, backend=backend)
children = [psutil.Process(pid) for pid in fourth.daemon().result(30) + fourth.plain().result(30)]
reaper.suspend()
fourth.kill()
reaper.kill()
assert_gone([reaper])
ea.spawn(Breeder, backend=backend).plain().result(30)
assert_gone(children)
wait_until(lambda: reapers_of(os.getpid()))
(reaper,) = reapers_of(os.getpid())

# One that is lost and cannot be replaced: at least the worker's own session ends.
third = ea.spawn(Breeder, backend=backend)
children = [psutil.Process(pid) for pid in third.plain().result(30)]
connect, socket.socketpair = socket.socketpair, lambda: open("")
reaper.kill()
assert_gone([reaper])
third.kill()
assert_gone(children)
socket.socketpair = connect

# One that was lost before the last start and the caller's end, of which a copy knows nothing.
pids = second.of_all_kinds().result(30)
pids += ea.spawn(Breeder, backend=backend).of_all_kinds().result(30)
libc = ctypes.PyDLL(None)  # keeps the GIL: a copy could never take it from a thread that it does not have
if libc.fork() == 0:
    libc.fork() or libc.sleep(int(AT_MOST) + 1)
    libc._exit(0)
os.wait()
print(*pids, flush=True)
sys.stdin.read()
"""


HIDDEN_COPIES = """
import os, signal, sys
import envactors as ea
from breeder import Breeder

backend = ea.ProcessBackend(start_method="forkserver")
actor, sibling = (ea.spawn(Breeder, backend=backend) for _ in range(2))
print(*(pid for each in (actor, sibling) for pid in each.hidden_copies().result(30)), flush=True)
os.kill(actor.pid, signal.SIGKILL)
sys.stdin.readline()
sibling.close()
actor.close()
sys.stdin.read()
"""


def test_hidden_copies_of_a_fork_servers_workers_end_with_the_callers_last_actor():
    with running(HIDDEN_COPIES) as (caller, everybody):
        caller.stdin.write(b"close\n")
        caller.stdin.flush()
        assert_gone([process for process in everybody if process.pid != caller.pid])


def test_reapers_come_and_go():
    with running(LOSSES) as (caller, everybody):
        assert len(reapers_of(caller.pid)) == 1
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
