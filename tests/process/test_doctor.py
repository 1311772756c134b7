"""`envactors doctor` describes the machine and warns of problems."""

from __future__ import annotations

import os
import resource

import pytest

import envactors as ea
from envactors.cli import doctor, main
from envactors.system.linux.memory_limits import MemoryRoom


def test_doctor_describes_the_machine_and_starts_a_worker_with_each_method(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f"versions: envactors {ea.__version__}, Python " in shown
    assert f" of {os.cpu_count()} usable" in shown
    for method in ("forkserver", "loky"):
        assert f"start method {method}: a worker answered after " in shown
    for name in ("system calls", "memory", "/dev/shm", "open files", "sockets of top and stacks"):
        assert f"\n{name}: " in shown


def refuse(*_, **__):
    raise OSError("it is read-only")


SHORTAGES = {
    "one core": ("usable_cores", lambda: 1, "_check_cores", "With one core"),
    "memory": ("find_tightest", lambda: MemoryRoom("a cgroup", 1 << 30, 1 << 30, 0), "_check_memory", "Add memory"),
    "portable": ("PORTABLE", True, "_check_system", "cannot be used"),
    "sockets": ("socket_directory", refuse, "_check_sockets", "it is read-only. Set XDG_RUNTIME_DIR"),
}


@pytest.mark.parametrize(("name", "value", "check", "problem"), SHORTAGES.values(), ids=SHORTAGES)
def test_doctor_warns_of_each_shortage(monkeypatch, name, value, check, problem):
    monkeypatch.setattr(doctor, name, value)
    assert problem in getattr(doctor, check)().problem


def test_doctor_warns_of_few_open_files_little_shared_memory_and_start_methods_that_fail(monkeypatch, capsys):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(doctor, "PORTABLE", True)
    monkeypatch.setattr(doctor, "_LITTLE_SHM", 1 << 60)
    monkeypatch.setattr(ea, "spawn", refuse)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for problem in ("256 open files are enough for few actors", "Give the container more", "it is read-only"):
        assert f"  warning: {problem}" in shown
