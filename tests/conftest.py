"""What every test shares: nothing may be left behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.resource_tracker
import os
import select
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import loky.backend.resource_tracker
import psutil
import pytest
from helpers import FORK_SERVER

import envactors as ea
from envactors import backends

SHM = Path("/dev/shm")


@pytest.fixture(scope="session", autouse=True)
def helper_processes():
    """Starts the processes that stay until the caller ends, so that they count as having been there."""
    loky.backend.resource_tracker.ensure_running()
    multiprocessing.resource_tracker.ensure_running()
    FORK_SERVER.retain()
    # The server ends with the thread that it was started by: that must be this one, and not one of an engine.
    first = FORK_SERVER.launch("first", {}, None)
    first.kill()
    select.select([first.sentinel], [], [])
    first.reap()
    gc.collect()
    gc.freeze()  # what the imports made stays: collecting is quick from here on
    yield
    FORK_SERVER.release()


# Whose point is how processes start, or that run programs of their own.
OF_FRESH_PROCESSES = {"test_backends", "test_bench", "test_demo", "test_docs", "test_notebooks", "test_scripts"}


@pytest.fixture(autouse=True)
def quick_starts(request, monkeypatch):
    """Where it does not matter how processes start, "process" stands for the session's fork server."""
    if request.module.__name__ not in OF_FRESH_PROCESSES and "fresh_processes" not in request.keywords:
        resolve = backends.resolve
        monkeypatch.setattr(backends, "resolve", lambda name: FORK_SERVER if name == "process" else resolve(name))


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.soak)], ids=["shared memory", "channels"])
def both_planes(request, monkeypatch):
    """Runs a test with shared memory, and among the long runs without it too."""
    monkeypatch.setitem(ea.VectorEnv.__init__.__kwdefaults__, "shared_memory", request.param)


def inventory(known_shm: Sequence[str] | None = None) -> dict[str, Any]:
    """What this process holds: descriptors, threads, children, shared memory.

    Args:
        known_shm: What was in /dev/shm before. Of what is new there only what no stranger uses counts, and what others
            have removed meanwhile counts as if it were still there: the whole machine shares that place.
    """
    me = psutil.Process()
    shm = {path.name for path in SHM.iterdir()}
    if known_shm is not None:
        new = shm - {*known_shm}
        shm = {*known_shm, *(new - used_by_strangers() if new else ())}
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": sorted(child.pid for child in me.children(recursive=True)),
        "shm": sorted(shm),
    }


def used_by_strangers() -> set[str]:
    """The entries of /dev/shm that processes have mapped which are none of ours."""
    me = psutil.Process()
    # By their inodes: who makes a semaphore has mapped it under a name that it had for a moment only.
    names = {str(entry.inode()): entry.name for entry in os.scandir(SHM)}
    used = set()
    for pid in {*psutil.pids()} - {me.pid, *(child.pid for child in me.children(recursive=True))}:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if "/dev/shm/" in line:
                    used.add(names.get(line.split()[4]))
    return used


def settled_inventory(wanted: dict[str, Any], patience: float = 10.0) -> dict[str, Any]:
    """The inventory once it is as wanted, or as it is when patience ends."""
    deadline = time.monotonic() + patience
    while (now := inventory(wanted["shm"])) != wanted and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return now


def describe(pid: int) -> str:
    """What a process that should be gone is doing."""
    parts = []
    for name in ("cmdline", "wchan", "status"):
        try:
            parts.append(Path(f"/proc/{pid}/{name}").read_text().replace("\0", " "))
        except OSError as error:
            parts.append(f"{name}: {error}")
    return "\n".join(parts)


@pytest.fixture(autouse=True)
def nothing_left_behind(helper_processes):
    """Every test: as many descriptors, threads, processes and shared memory entries as before."""
    before = inventory()
    yield
    after = settled_inventory(before)
    assert after == before, "\n".join(describe(pid) for pid in {*after["children"]} - {*before["children"]})
