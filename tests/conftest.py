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

SHM = Path("/dev/shm")


@pytest.fixture(scope="session", autouse=True)
def helper_processes():
    """Starts the processes that stay until the caller ends, so that they count as having been there."""
    loky.backend.resource_tracker.ensure_running()
    multiprocessing.resource_tracker.ensure_running()
    FORK_SERVER.retain()
    # The server ends with the thread that it was started by: that must be this one, and not one of an engine.
    first = FORK_SERVER.launch("first", {})
    first.kill()
    select.select([first.sentinel], [], [])
    first.reap()
    gc.collect()
    gc.freeze()  # what the imports made stays: collecting is quick from here on
    yield
    FORK_SERVER.release()


def inventory(known_shm: Sequence[str] = ()) -> dict[str, Any]:
    """What this process holds: descriptors, threads, children, shared memory.

    Args:
        known_shm: Entries of /dev/shm that others may have removed since.
    """
    me = psutil.Process()
    new_shm = {path.name for path in SHM.iterdir()} - {*known_shm}
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": sorted(child.pid for child in me.children(recursive=True)),
        "shm": sorted([*known_shm, *(name for name in new_shm if not is_others(name))]),
    }


def is_others(shm: str) -> bool:
    """Whether an entry of /dev/shm is in use by a process that is none of ours: the whole machine shares that place."""
    me = psutil.Process()
    ours = {me.pid, *(child.pid for child in me.children(recursive=True))}
    try:
        # By its inode: who makes a semaphore maps it under a name that it has for a moment only.
        inode = f" {(SHM / shm).stat().st_ino} "
    except FileNotFoundError:
        return True
    for pid in {*psutil.pids()} - ours:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            if any(inode in line and "/dev/shm/" in line for line in maps):
                return True
    return False


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
