"""What every test shares: nothing may be left behind."""

from __future__ import annotations

import gc
import multiprocessing.resource_tracker
import os
import select
import threading
import time
from pathlib import Path

import loky.backend.resource_tracker
import psutil
import pytest
from helpers import FORK_SERVER


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


def inventory() -> dict[str, object]:
    """What this process holds: descriptors, threads, children, shared memory."""
    me = psutil.Process()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": sorted(child.pid for child in me.children(recursive=True)),
        "shm": sorted(path.name for path in Path("/dev/shm").iterdir()),
    }


def settled_inventory(wanted: dict[str, object], patience: float = 10.0) -> dict[str, object]:
    """The inventory once it is as wanted, or as it is when patience ends."""
    deadline = time.monotonic() + patience
    while (now := inventory()) != wanted and time.monotonic() < deadline:
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
