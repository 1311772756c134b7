"""What a process holds, to be compared before and after."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import psutil

_SHM = Path("/dev/shm")  # noqa: S108 # looked at, never written to


class Inventory(NamedTuple):
    """What this process holds.

    Attributes:
        descriptors: How many.
        threads: Their names.
        children: The process ids of all descendants.
        shm: The entries of /dev/shm.
    """

    descriptors: int
    threads: list[str]
    children: list[int]
    shm: list[str]


def inventory(known_shm: Collection[str] | None = None) -> Inventory:
    """Takes stock.

    Args:
        known_shm: What was in /dev/shm before. Of what is new there only what no stranger uses counts, and what others
            have removed meanwhile counts as if it were still there: the whole machine shares that place.
    """
    shm = {path.name for path in _SHM.iterdir()}
    if known_shm is not None:
        new = shm - {*known_shm}
        shm = {*known_shm, *(new - _used_by_strangers() if new else ())}
    return Inventory(
        len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        sorted(thread.name for thread in threading.enumerate()),
        sorted(child.pid for child in psutil.Process().children(recursive=True)),
        sorted(shm),
    )


def _used_by_strangers() -> set[str]:
    """The entries of /dev/shm that processes have mapped which are none of ours."""
    me = psutil.Process()
    # By their inodes: who makes a semaphore has mapped it under a name that it had for a moment only.
    names = {str(entry.inode()): entry.name for entry in os.scandir(_SHM)}
    used = set()
    for pid in {*psutil.pids()} - {me.pid, *(child.pid for child in me.children(recursive=True))}:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f"{_SHM}/" in line and (name := names.get(line.split()[4])) is not None:
                    used.add(name)
    return used


def settled_inventory(wanted: Inventory, patience: float = 10.0) -> Inventory:
    """The inventory once it is as wanted, or as it is when patience (seconds) ends."""
    deadline = time.monotonic() + patience
    while (now := inventory(wanted.shm)) != wanted and time.monotonic() < deadline:
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
