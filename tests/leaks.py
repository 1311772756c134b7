"""Take inventory of the resources that a process holds, so that a test can find leaks by comparing two inventories."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from envactors.system.descriptors import count_descriptors

_SHM = Path("/dev/shm")  # only read
_CALLBACKS = "envactors-callbacks"  # the name of each thread for callbacks


class Inventory(NamedTuple):
    """Resources that this process holds.

    Attributes:
        descriptors: Number of open descriptors.
        threads: Names of the threads.
        children: Process ids of all descendants.
        shm: Entries of /dev/shm.
    """

    descriptors: int
    threads: list[str]
    children: list[int]
    shm: list[str]


def inventory(earlier: Inventory | None = None) -> Inventory:
    """Return what this process holds now.

    Args:
        earlier: An inventory to compare with. Its descriptors, its children, its entries of /dev/shm, and its threads
            for callbacks are included even if they no longer exist: another thread may have opened a file for a moment,
            a child may have been the ``ps`` that a node's agent runs to measure memory, all programs on the machine
            share /dev/shm, and the actors of the module before may have just been closed. New entries that other
            programs have mapped are ignored.
    """
    descriptors = count_descriptors()
    shm = {*os.listdir(_SHM)} if _SHM.is_dir() else set()  # noqa: PTH208 # likewise
    children = descendants(os.getpid())
    names = [thread.name for thread in threading.enumerate()]
    if earlier is not None:
        names += {*earlier.threads} & {_CALLBACKS}
        descriptors = max(descriptors, earlier.descriptors)
        new = shm - {*earlier.shm}
        shm = {*earlier.shm, *(new - _used_by_strangers() if new else ())}
        children |= {*earlier.children}
    # On a busy machine the pool for callbacks grows, and stays so until the last actor has ended.
    threads = sorted(name for name in names if name != _CALLBACKS) + [_CALLBACKS] * (_CALLBACKS in names)
    return Inventory(descriptors, threads, sorted(children), sorted(shm))


def descendants(pid: int) -> set[int]:
    """Return the process ids of the children of a process, of their children, and so on.

    Raises:
        ImportError: The kernel does not list children, and psutil is not installed.
    """
    if not _kernel_lists_children():
        import psutil

        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    # The kernel lists the children of each thread: reading the lists is a hundred times faster than scanning all
    # processes.
    found: set[int] = set()
    left = [pid]
    while left:
        with contextlib.suppress(OSError):  # the process has exited in between
            tasks = f"/proc/{left.pop()}/task"
            for task in os.listdir(tasks):  # noqa: PTH208 # paths would take as long as the kernel
                with contextlib.suppress(OSError):
                    children = _children(f"{tasks}/{task}/children")
                    left += children - found
                    found |= children
    return found


@functools.cache
def _kernel_lists_children() -> bool:
    return Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").exists()


def _children(listing: str) -> set[int]:
    # A child that exits while the file is read can hide the next one, so read until two readings agree.
    before = None
    while (now := _read(listing)) != before:
        before = now
    return {int(child) for child in now.split()}


def _read(path: str) -> bytes:
    # Not `open`, which takes twice as long: this runs for each thread of each process, twice per test.
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def _used_by_strangers() -> set[str]:
    """Return the entries of /dev/shm that processes other than this one and its descendants have mapped."""
    me = os.getpid()
    # Compare inodes, since the creator of a semaphore maps it under a temporary name.
    names = {str(entry.inode()): entry.name for entry in os.scandir(_SHM)}
    import psutil

    used = set()
    for pid in {*psutil.pids()} - {me, *descendants(me)}:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f"{_SHM}/" in line and (name := names.get(line.split()[4])) is not None:
                    used.add(name)
    return used


def targets() -> list[str]:
    """Return what each open descriptor of this process refers to, for a message about a leak."""
    folder, found = Path("/proc/self/fd"), []
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # it was that of the listing
            found.append(f"{path.name}: {path.readlink()}")
    return found


def settled_inventory(wanted: Inventory, patience: float = 10.0) -> Inventory:
    """Return the inventory as soon as it equals ``wanted``, or the current one after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while (now := inventory(wanted)) != wanted and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return now


def describe(pid: int) -> str:
    """Return the command line, wait channel, and status of a process, for a message about a leak."""
    parts = []
    for name in ("cmdline", "wchan", "status"):
        try:
            parts.append(Path(f"/proc/{pid}/{name}").read_text().replace("\0", " "))
        except OSError as error:
            parts.append(f"{name}: {error}")
    return "\n".join(parts)
