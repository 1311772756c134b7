"""Both systems, Linux's and the portable one, have the same names and keep the same guarantees."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from budget import examples
from helpers import SOON, is_gone, run_script, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupting import interrupt

import envactors as ea
from envactors.system import choice
from envactors.system.descriptors import count_descriptors
from envactors.system.memory import map_part

FILES = ["memory", "polling", "processes"]
SYSTEMS = ["linux", "portable"]


def implementation(system, file):
    return importlib.import_module(f"envactors.system.{system}.{file}")


@pytest.fixture(params=SYSTEMS)
def polling(request):
    return implementation(request.param, "polling")


@pytest.fixture(params=SYSTEMS)
def processes(request):
    return implementation(request.param, "processes")


@pytest.fixture(params=SYSTEMS)
def memory(request):
    return implementation(request.param, "memory")


def public(module):
    """The public names of a module, and how its functions and the methods of its classes are called."""
    shown = {}
    for name, value in vars(module).items():
        if name.startswith("_") or inspect.ismodule(value) or getattr(value, "__module__", None) == "typing":
            continue
        function = inspect.unwrap(value) if callable(value) else None
        if inspect.isfunction(function) and function.__module__ == module.__name__:
            required = [one.name for one in inspect.signature(value).parameters.values() if one.default is one.empty]
            shown[name] = required
        elif not callable(value) and name.isupper():
            shown[name] = "constant"
    return shown


@pytest.mark.parametrize("file", FILES)
def test_the_portable_system_has_the_same_names(file):
    ours, theirs = (public(implementation(system, file)) for system in SYSTEMS)
    assert ours == theirs
    assert ours


def test_both_systems_have_the_same_pollers_and_doorbells():
    linux, portable = (implementation(system, "polling") for system in SYSTEMS)
    methods = "add", "watch", "remove", "close", "fileno"
    for name in methods:
        ours, theirs = (inspect.signature(getattr(module.Poller, name)) for module in (linux, portable))
        assert {*theirs.parameters} <= {*ours.parameters}
    assert {name for name in dir(linux.Doorbell) if not name.startswith("_")} <= {*dir(portable.Doorbell)}


# Waiting -------------------------------------------------------------------------------------------------


def heard(poller):
    return {fd for fd, _ in poller.poll(0)}


@given(st.lists(st.sampled_from(["ring", "first", "second", "nested"]), max_size=40))
@settings(max_examples=examples(60))
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_poller_hears_each_ring(system, events):
    """This holds even if another poller has heard the ring; a poller with a registered doorbell is itself readable."""
    polling = implementation(system, "polling")
    with contextlib.ExitStack() as stack:
        first, second, nesting = (stack.enter_context(contextlib.closing(polling.Poller())) for _ in range(3))
        bell = stack.enter_context(contextlib.closing(polling.Doorbell()))
        bell.register(first)
        bell.register(second)
        nesting.add(second.fileno())
        unheard = set()
        for event in events:
            if event == "ring":
                bell.ring()
                unheard = {first, second}
            elif event == "nested":
                assert second not in unheard or heard(nesting) == {second.fileno()}
            else:
                poller = {"first": first, "second": second}[event]
                if poller in unheard:
                    assert heard(poller) == {bell.fileno()}
                unheard.discard(poller)
        for poller in (first, second):
            heard(poller)
        assert [heard(poller) for poller in (first, second)] == [set(), set()]  # and not forever


def test_a_sleeping_poller_is_woken_for_results_that_another_poller_read(polling):
    with contextlib.ExitStack() as stack:
        sleeping, taking = (stack.enter_context(contextlib.closing(polling.Poller())) for _ in range(2))
        bell = stack.enter_context(contextlib.closing(polling.Doorbell()))
        bell.register(sleeping)
        bell.register(taking)
        for _ in range(200):
            woken = []
            thread = threading.Thread(target=lambda woken=woken: woken.append(heard_at_last(sleeping)))
            thread.start()
            bell.ring()
            taking.poll(0)
            thread.join(SOON)
            assert woken == [{bell.fileno()}]


def heard_at_last(poller):
    return {fd for fd, _ in poller.poll(SOON)}


def test_a_doorbell_that_was_unregistered_or_closed_is_not_reported(polling):
    with contextlib.closing(polling.Poller()) as poller, contextlib.closing(polling.Poller()) as other:
        bell = polling.Doorbell()
        for one in (poller, other):
            bell.register(one)
        bell.ring()
        bell.unregister(poller)
        bell.unregister(poller)
        assert heard(poller) == set()
        assert heard(other) == {bell.fileno()}
        bell.ring()
        bell.close()
        bell.ring()
        assert heard(other) == set()


def test_a_doorbell_leaves_no_descriptor_open_if_its_making_or_its_end_is_interrupted(polling):
    before = count_descriptors()
    for number in itertools.count():
        made = interrupt(polling.Doorbell, number, only={"__init__", "<lambda>"})
        assert count_descriptors() == before, made
        bell = polling.Doorbell()
        closed = interrupt(bell.close, number, only={"close"})
        bell.close()
        assert count_descriptors() == before, closed
        if made is closed is None:
            break


def test_rings_that_nobody_hears_do_not_block(polling):
    with contextlib.closing(polling.Doorbell()) as bell, contextlib.closing(polling.Poller()) as poller:
        for _ in range(100_000):
            bell.ring()
        bell.register(poller)
        assert heard(poller) == {bell.fileno()}


def test_a_descriptor_that_is_watched_for_nothing_is_silent(polling):
    reader, writer = os.pipe()
    with contextlib.closing(polling.Poller()) as poller:
        poller.add(reader)
        os.write(writer, b"x")
        assert poller.poll(0) == [(reader, polling.READABLE & poller.poll(0)[0][1])]
        poller.watch(reader, readable=False)
        assert poller.poll(0) == []
        poller.watch(reader)
        assert [fd for fd, _ in poller.poll(0)] == [reader]
        poller.watch(reader, readable=False)
        poller.remove(reader)
        poller.add(writer)
        poller.watch(writer, readable=False, writable=True)
        ((fd, mask),) = poller.poll(0)
        assert (fd, mask & polling.WRITABLE) == (writer, polling.WRITABLE)
    os.close(reader)
    os.close(writer)


# Memory --------------------------------------------------------------------------------------------------


def test_a_reserved_part_of_a_file_is_zeros_and_no_more_is_touched(memory):
    with memory.open_unnamed("test") as file:
        os.ftruncate(file.fileno(), 20_000)
        os.pwrite(file.fileno(), b"before", 4000)
        memory.reserve(file.fileno(), 8192, 4096)
        assert os.pread(file.fileno(), 6, 4000) == b"before"
        assert os.pread(file.fileno(), 4096, 8192) == bytes(4096)
        memory.reserve(file.fileno(), 16384, 3 << 20)
        assert os.fstat(file.fileno()).st_size == 16384 + (3 << 20)


def test_a_mapped_part_is_shared_and_is_freed_with_its_last_view(memory):
    with memory.open_unnamed("test") as file:
        os.ftruncate(file.fileno(), 3 * mmap.PAGESIZE)
        before = count_descriptors()
        part = map_part(file.fileno(), mmap.PAGESIZE, mmap.PAGESIZE)
        assert count_descriptors() == before
        array = np.frombuffer(part, np.uint8)[7:]
        array[0] = 9
        del part
        gc.collect()
        assert os.pread(file.fileno(), 1, mmap.PAGESIZE + 7) == b"\x09"
        assert array[0] == 9
        before = mappings_of(file)
        del array
        gc.collect()
        assert mappings_of(file) == before - 1
        with pytest.raises(OSError, match="Bad file descriptor"):
            map_part(10_000, mmap.PAGESIZE, 0)


def test_a_signal_handler_that_raises_while_a_part_is_freed_keeps_nothing_mapped(memory, monkeypatch):
    raised = []

    def handle():
        raise KeyboardInterrupt

    with memory.open_unnamed("test") as file, monkeypatch.context() as patches:
        os.ftruncate(file.fileno(), mmap.PAGESIZE)
        part = map_part(file.fileno(), mmap.PAGESIZE, 0, frees=True)
        before = mappings_of(file)
        patches.setattr(sys, "unraisablehook", lambda unraisable: raised.append(unraisable.exc_type))
        patches.setattr(os, "getpid", handle)  # a handler may run after any call
        del part
        gc.collect()
        assert raised == [KeyboardInterrupt]
        assert mappings_of(file) == before - 1


def mappings_of(file):
    """How many pieces of this process's memory are parts of a file."""
    inode = str(os.fstat(file.fileno()).st_ino)
    return sum(inode in line.split() for line in Path("/proc/self/maps").read_text().splitlines())


def test_the_file_of_a_text_is_this_users_alone(memory):
    with memory.file_of_text("test", "secret\n") as path:
        assert path.startswith("/proc/self") or Path(path).stat().st_mode & 0o077 == 0
        assert Path(path).read_text() == "secret\n"
    assert not Path(path).exists()


# Processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_the_exit_of_a_child_is_noticed_before_it_is_reaped(processes, how):
    child = subprocess.Popen(["sleep", "0.1" if how == "exit" else "100"])
    sentinel = processes.open_sentinel(child.pid)
    with contextlib.closing(implementation("linux", "polling").Poller()) as poller:
        poller.add(sentinel)
        if how == "kill":
            assert poller.poll(0) == []
            processes.send_signal(child.pid, sentinel, signal.SIGKILL)
        assert [fd for fd, _ in poller.poll(SOON)] == [sentinel]
    processes.send_signal(child.pid, sentinel, signal.SIGKILL)  # it has ended already
    processes.close_sentinel(sentinel)
    assert child.wait() == (0 if how == "exit" else -signal.SIGKILL)


def test_process_facts_from_the_system_are_correct(processes):
    with subprocess.Popen(["sleep", "100"]) as child, contextlib.ExitStack() as stack:
        stack.callback(child.kill)
        wait_until(lambda: processes.command_line(child.pid) == ["sleep", "100"])
        wait_until(lambda: 100_000 < processes.resident_memory(child.pid) < 1 << 30)
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: processes.process_state(child.pid) == "T")
        child.kill()
        wait_until(lambda: processes.process_state(child.pid) in ("Z", "X"))
    assert processes.command_line(child.pid) == []
    assert processes.resident_memory(child.pid) == 0
    assert processes.process_state(child.pid) == "X"


@pytest.mark.parametrize("doing", ["nothing", "a loop in Python", "a loop in C"])
def test_workers_end_with_a_caller_that_is_killed(doing):
    """This includes the processes that they started and those in their group."""
    code = """
        import collections, itertools, os, subprocess, sys
        import envactors as ea

        class Env:
            def pids(self):
                return os.getpid(), subprocess.Popen(["sleep", "100"]).pid

            def work(self, doing):
                while doing == "a loop in Python":
                    pass
                if doing == "a loop in C":
                    collections.deque(itertools.repeat(0), maxlen=0)  # with the GIL

        actors = [ea.spawn(Env, backend=ea.ProcessBackend("loky")) for _ in range(2)]
        print(*(pid for actor in actors for pid in actor.pids().result(50)), flush=True)
        futures = [actor.work(sys.argv[1]) for actor in actors]
        while not all(future.done() or future.running() for future in futures):
            pass
        os.kill(os.getpid(), 9)
    """
    environment = {**os.environ, choice.VARIABLE: "portable"}
    done = run_script(code, doing, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 4
    wait_until(lambda: all(is_gone(pid) for pid in pids))


# The choice ----------------------------------------------------------------------------------------------


def test_the_variable_chooses(monkeypatch):
    for value, chosen in (("portable", "portable"), ("linux", "linux"), ("", "linux")):
        monkeypatch.setenv(choice.VARIABLE, value)
        assert choice.choose() == chosen
    monkeypatch.setenv(choice.VARIABLE, "bsd")
    with pytest.raises(ImportError, match=r"ENVACTORS_SYSTEM is 'bsd': expected one of \('linux', 'portable'\)"):
        choice.choose()


@pytest.mark.parametrize("missing", ["eventfd", "memfd_create", "pidfd_open"])
def test_without_linux_calls_the_portable_system_is_chosen(monkeypatch, missing):
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    assert choice.choose() == "linux"
    monkeypatch.delattr(os, missing)
    assert choice.choose() == "portable"


def test_windows_raises_with_an_alternative(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="does not run on Windows itself: run it in WSL"):
        choice.choose()


def test_the_portable_system_works_and_names_what_it_lacks():
    code = """
        import os, signal
        import envactors as ea
        from envactors.integrations.options import as_start_method
        from envactors.process.starting import DEFAULT
        from envactors.testing import EchoEnv

        assert DEFAULT == as_start_method("forkserver") == "loky"
        try:
            ea.ProcessBackend("forkserver")
        except ValueError as error:
            print(error)
        with ea.VectorEnv([EchoEnv] * 3, on_failure="renew", envs_per_actor=2) as envs:
            envs.reset(seed=0)
            for turn in range(20):
                if turn == 10:
                    os.kill(envs[0].pid, signal.SIGKILL)
                obs, *_ = envs.step([turn] * 3)
            print(obs[:, 2].tolist(), envs[0].stats().restarts)
    """
    done = run_script(code, env={**os.environ, choice.VARIABLE: "portable"})
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "start_method is 'forkserver', which needs Linux: expected 'loky'",
        "[19, 19, 19] 1",
    ]


def test_workers_use_the_system_of_their_caller():
    with ea.spawn(Chosen, env_vars={choice.VARIABLE: ""}) as actor:
        assert actor.system().result(SOON) == choice.SYSTEM


class Chosen:
    def system(self):
        return choice.SYSTEM
