"""``envactors doctor``: show the resources and limits of this machine, and warn of problems."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from envactors.cli.arguments import STDOUT, add_json, write_json
from envactors.cli.units import size

# By distribution: the libraries that envactors works with, and those of its extras.
_REQUIRED = ("numpy", "cloudpickle", "loky")
_OPTIONAL = (
    *("gymnasium", "stable-baselines3", "tianshou", "torchrl", "pettingzoo", "mlagents-envs", "distributed"),
    *("DI-engine", "alf", "ale-py", "mujoco", "torch", "rich", "psutil", "matplotlib", "openenv-core"),
)
_SHM = Path("/dev/shm")  # noqa: S108 # only looked at
# Below these, something may go wrong: descriptors, processes, and bytes.
_FEW_DESCRIPTORS, _FEW_PROCESSES, _LITTLE_MEMORY, _LITTLE_SHM = 1024, 512, 1 << 30, 1 << 28

_DESCRIPTION = """\
Shows what envactors finds on this machine: cores, limits of containers and users,
memory, start methods, and installed libraries. Warnings name the problem and what to
do about it.
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="show resources and limits of this machine, and warn of problems",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_json(parser, "what is found")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: As `register` describes them.

    Returns:
        The exit status, always 0: a warning is not a failure.
    """
    found = examine()
    warnings = warn(found)
    if arguments.json is not None:
        write_json(arguments.json, {**found, "warnings": warnings})
    if arguments.json != STDOUT:
        print("\n".join(_lines(found, warnings)))
    return 0


def examine() -> dict[str, dict[str, Any]]:
    """Return what is found, by topic and name; None where the system does not tell."""
    return {
        "versions": {
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "system": platform.platform(),
            **{name: _version(name) for name in ("envactors", *_REQUIRED)},
        },
        "libraries": {name: version for name in _OPTIONAL if (version := _version(name)) is not None},
        "cores": _examine_cores(),
        "memory": _examine_memory(),
        "limits": {
            "file descriptors": _limits(resource.RLIMIT_NOFILE),
            "processes": _limits(getattr(resource, "RLIMIT_NPROC", None)),
        },
        "processes": _examine_processes(),
    }


def warn(found: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Return warnings, each with a remedy, about what `examine` has found."""
    warnings = [*_warn_of_shortages(found), *_warn_of_the_system(found)]
    return [{"message": message, "remedy": remedy} for message, remedy in warnings]


def _warn_of_shortages(found: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    cores, memory, limits = found["cores"], found["memory"], found["limits"]
    if cores["usable"] < (cores["machine"] or 1):
        yield (
            f"{cores['usable']} of {cores['machine']} cores can be used, by affinity or the quota of a container.",
            "Give the container or the job more cores. envs_per_actor='auto' counts the usable ones.",
        )
    if cores["usable"] == 1:
        yield (
            "With one core, processes cannot make steps faster.",
            "Use envs_per_actor='auto', or backend='inline' for envs that need no protection.",
        )
    files = limits["file descriptors"]["hard"]
    if _is_below(files, _FEW_DESCRIPTORS):
        yield (
            f"A process may open {files} files, which is enough for about {files // 5} actors.",
            "Raise the hard limit: ulimit -Hn 65536, or LimitNOFILE= of the service.",
        )
    if _is_below(processes := limits["processes"]["soft"], _FEW_PROCESSES):
        yield (
            f"This user may run {processes} processes and threads.",
            "Raise the limit: ulimit -u, or pids_limit of the container.",
        )
    if _is_below(memory["free"], _LITTLE_MEMORY):
        yield (
            f"{size(memory['free'])} of memory are left in {memory['tightest']}.",
            "Add memory, or put several envs into a process: each process takes 30 MB or more.",
        )


def _warn_of_the_system(found: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    shared, processes = found["memory"]["dev_shm"], found["processes"]
    if not processes["memfd"] and _is_below(shared, _LITTLE_SHM):
        yield (
            f"{_SHM} has {size(shared)}, and memfd_create is missing.",
            "Give the container more: docker run --shm-size=1g.",
        )
    if not processes["pidfd"] and sys.platform == "linux":
        yield (
            "The system forbids pidfd_open, so that envactors notices the end of a worker later.",
            "Use a kernel of 5.3 or later, and a seccomp profile that allows pidfd_open.",
        )
    if processes["monitor"] is not None:
        yield (
            f"envactors top and stacks cannot find programs: {processes['monitor']}.",
            "Set XDG_RUNTIME_DIR to a directory of this user.",
        )


def _examine_cores() -> dict[str, Any]:
    from envactors.system.cpus import cores, usable_cores

    return {"machine": os.cpu_count(), "affinity": cores(), "usable": usable_cores()}


def _examine_memory() -> dict[str, Any]:
    from envactors.system.linux.memory_limits import find_tightest

    room = find_tightest()
    return {
        "tightest": None if room is None else room.whose,
        "limit": None if room is None else room.limit,
        "free": None if room is None else room.free,
        "dev_shm": shutil.disk_usage(_SHM).total if _SHM.is_dir() else None,
    }


def _limits(which: int | None) -> dict[str, int | None]:
    values = (None, None) if which is None else resource.getrlimit(which)
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in values)
    return {"soft": soft, "hard": hard}


def _examine_processes() -> dict[str, Any]:
    from envactors.observe.listener import socket_directory
    from envactors.process.starting import DEFAULT, StartMethod
    from envactors.system.choice import PORTABLE

    return {
        "start methods": [*get_args(StartMethod)],
        "default": DEFAULT,
        "portable system": PORTABLE,
        "memfd": _trouble(lambda: os.close(os.memfd_create("envactors"))) is None,
        "pidfd": _trouble(lambda: os.close(os.pidfd_open(os.getpid()))) is None,
        "monitor": _trouble(socket_directory),
    }


def _trouble(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except (OSError, AttributeError) as error:
        return str(error)
    return None


def _is_below(value: int | None, least: int) -> bool:
    return value is not None and value < least


def _version(distribution: str) -> str | None:
    if distribution == "envactors":
        import envactors

        return envactors.__version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(found: dict[str, dict[str, Any]], warnings: list[dict[str, str]]) -> list[str]:
    lines = []
    for topic, values in found.items():
        lines.append(topic)
        lines += [f"  {name}: {_shown(name, value)}" for name, value in values.items()]
    lines.append("")
    for warning in warnings:
        lines += [f"warning: {warning['message']}", f"  {warning['remedy']}"]
    return lines if warnings else [*lines, "no warnings"]


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{inner} {_shown(inner, part)}" for inner, part in value.items())
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in ("limit", "free", "dev_shm") and value is not None:
        return size(value)
    if name == "monitor":
        return "can be used" if value is None else value
    return ("no limit" if name in ("soft", "hard") else "unknown") if value is None else str(value)
