"""``envactors doctor``: show resources and limits of this machine, and warn of problems."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import envactors as ea
from envactors.cli.units import duration, size
from envactors.observe.addresses import socket_directory
from envactors.system.choice import PORTABLE
from envactors.system.cpus import usable_cores
from envactors.system.linux.memory_limits import find_tightest

_SHM = Path("/dev/shm")  # noqa: S108 # only looked at
# Below these, something may go wrong: descriptors, and bytes.
_FEW_DESCRIPTORS, _LITTLE_MEMORY, _LITTLE_SHM = 1024, 1 << 30, 1 << 28
# How long a worker may take to start, in seconds.
_PATIENCE = 20.0


class Finding(NamedTuple):
    """One thing about the machine.

    Attributes:
        name: Its name.
        value: What was found.
        problem: What is wrong and what to do; empty if nothing is.
    """

    name: str
    value: str
    problem: str = ""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        description="Shows the cores, memory, and limits that envactors finds on this machine, starts a worker with "
        "each start method, and says what to do about problems. Attach the output to bug reports.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit status is always 0, since a problem is not a failure."""
    del arguments
    for finding in examine():
        print(f"{finding.name}: {finding.value}", flush=True)
        if finding.problem:
            print(f"  warning: {finding.problem}")
    return 0


def examine() -> Iterator[Finding]:
    """Yield what is found."""
    yield Finding("versions", f"envactors {ea.__version__}, Python {platform.python_version()}, {platform.platform()}")
    yield _check_system()
    yield _check_cores()
    yield _check_memory()
    yield _check_shared_memory()
    yield _check_descriptors()
    yield _check_start("forkserver")
    yield _check_start("loky")
    yield _check_sockets()


def _check_system() -> Finding:
    if not PORTABLE:
        return Finding("system calls", "Linux (pidfd, eventfd, memfd)")
    why = "steps are slower, and the end of a worker is noticed later; see the guide on platforms"
    return Finding("system calls", "portable", f"pidfd, eventfd, or memfd cannot be used: {why}.")


def _check_cores() -> Finding:
    usable, machine = usable_cores(), os.cpu_count() or 1
    problem = ""
    if usable == 1:
        problem = "With one core, processes cannot make steps faster: use envs_per_actor='auto'."
    elif usable < machine:
        problem = "Affinity or a container's quota hides cores; envs_per_actor='auto' counts the usable ones."
    return Finding("cores", f"{usable} of {machine} usable", problem)


def _check_memory() -> Finding:
    room = find_tightest()
    if room is None:
        return Finding("memory", "unknown")
    problem = "Add memory, or put several envs into a process: each process takes 30 MB or more."
    is_short = room.free < _LITTLE_MEMORY
    return Finding("memory", f"{size(room.free)} of {size(room.limit)} free in {room.whose}", problem * is_short)


def _check_shared_memory() -> Finding:
    if not _SHM.is_dir():
        return Finding(str(_SHM), "missing")
    free = shutil.disk_usage(_SHM).free
    problem = "Give the container more, as with docker run --shm-size=1g."
    is_short = PORTABLE and free < _LITTLE_SHM
    return Finding(str(_SHM), size(free) + " free" + ", not needed" * (not PORTABLE), problem * is_short)


def _check_descriptors() -> Finding:
    soft, hard = ("no limit" if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    is_short = isinstance(hard, int) and hard < _FEW_DESCRIPTORS
    problem = f"{hard} open files are enough for few actors: raise the limit, as with ulimit -Hn 65536."
    return Finding("open files", f"{soft}, at most {hard}", problem * is_short)


def _check_start(method: Literal["forkserver", "loky"]) -> Finding:
    begun = time.monotonic()
    deadlines = ea.Deadlines(start=_PATIENCE, call=_PATIENCE)
    try:
        with ea.spawn("builtins:dict", backend=ea.ProcessBackend(method), deadlines=deadlines) as actor:
            actor.call("copy").result()
    except (ea.EnvActorsError, OSError) as error:
        return Finding(f"start method {method}", "fails", str(error))
    return Finding(f"start method {method}", f"a worker answered after {duration(time.monotonic() - begun)}")


def _check_sockets() -> Finding:
    try:
        return Finding("sockets of top and stacks", str(socket_directory()))
    except OSError as error:
        problem = f"{error}. Set XDG_RUNTIME_DIR to a directory of your own."
        return Finding("sockets of top and stacks", "none", problem)
