"""Start workers through loky, start fresh interpreters, and choose the environment that workers start with."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing.process
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from envactors.process.bootstrap import Descriptors, run
from envactors.process.refusal import LaunchRefusedError
from envactors.system.choice import PORTABLE
from envactors.system.processes import SIGKILL, Process, await_exit, interpreter_options, no_fork, open_sentinel
from envactors.system.sockets import sigpipe_blocked

StartMethod = Literal["forkserver", "loky"]
# On other systems, libraries do not survive a fork, and nothing would end the workers of a fork server.
DEFAULT: Final[StartMethod] = "loky" if PORTABLE else "forkserver"


# The variables that limit the threads of numerical libraries, which read them once, when they are imported.
THREAD_CAPS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
# The first code of a fresh interpreter, which may be too old to import this package. It removes the working directory
# from the path: that may contain modules that the caller does not import, and if it was removed, Python 3.13.0 cannot
# import `socket`. It imports this package from its home before it sets the path, so that no other version is found.
# Imports are faster without garbage collection.
_BOOT: Final = """
import sys; sys.path[:] = [entry for entry in sys.path if entry]
sys.version_info >= (3, 10) or sys.exit("it is Python %d.%d: expected 3.10 or newer" % sys.version_info[:2])
import gc; gc.disable()
import importlib, json, typing; boot = json.loads("".join(sys.argv[1:]))
path, sys.path[:], sys.argv[:] = boot.pop("path") or sys.path[:], boot.pop("home") + sys.path, boot.pop("argv")
import envactors; sys.path[:] = path
from {module} import {function}; gc.enable(); {function}(**boot)
"""
# The length of one argument, in bytes, which the kernel limits to 128 KiB.
_LONGEST_ARGUMENT: Final = 100_000
# The processes that multiprocessing reaps; it must not do that for a worker.
_children: set[object] = getattr(multiprocessing.process, "_children", set())


def thread_caps(env_vars: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that limit numerical libraries to one thread each.

    Variables that the caller's environment sets are left out. If ``OMP_NUM_THREADS`` is set there or in ``env_vars``,
    the result is empty.
    """
    if "OMP_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in env_vars:
        return {}
    return {name: "1" for name in THREAD_CAPS if name not in os.environ}


def start_by_loky(name: str, descriptors: Descriptors, environment: dict[str, str]) -> Process:
    """Start a fresh interpreter with loky's process context.

    Raises:
        LaunchRefusedError: The working directory was removed.
    """
    from loky.backend.context import get_context

    if not working_directory():
        raise LaunchRefusedError(
            "the working directory was removed, and start_method='loky' needs one: change to another with os.chdir"
        )
    # Loky passes on no options, and runs a module, which puts the working directory on the path.
    changes = {name: "" for name in environment if name.startswith("PYTHON") and sys.flags.ignore_environment}
    changes |= {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1" if sys.flags.no_user_site else ""}
    restored = {name: environment.get(name) for name in changes}
    # The arguments of the worker, and requests to the trackers, go through pipes.
    with sigpipe_blocked(), _sigint_blocked(), _not_daemonic():
        args = descriptors, os.getpid(), restored
        process = get_context("loky").Process(target=run, name=name, args=args, env={**environment, **changes})
        process.start()
    _children.discard(process)
    return _watched(process.pid)


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT in this thread, and in the worker that it starts until the worker ignores it.

    Ctrl-C also reaches workers that are still starting.
    """
    from multiprocessing import resource_tracker

    from loky.backend import resource_tracker as loky_tracker

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        # The first worker needs these trackers. Their start unblocks SIGINT.
        resource_tracker.ensure_running()
        loky_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _not_daemonic() -> Iterator[None]:
    """Let multiprocessing start a process in a daemonic one: workers end with their parent anyway."""
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    before = config.pop("daemon", None)
    try:
        yield
    finally:
        if before is not None:
            config["daemon"] = before


def start_python(
    module: str, function: str, boot: dict[str, Any], fds: Sequence[int], env: Mapping[str, str], python: str | None
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter with this environment, which runs a function; see `python_command`."""
    command = python_command(module, function, boot, python)
    with no_fork:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=env)  # noqa: S603 # its own code


def python_command(module: str, function: str, boot: dict[str, Any], python: str | None) -> list[str]:
    """Return the command with which an interpreter runs a function of this package.

    Args:
        module: The module of the function.
        function: The name of the function.
        boot: The arguments of the function.
        python: The interpreter; None for a copy of this one with the same path. Another one keeps its own path, since
            the packages there are for its version of Python, and imports only this package from the caller's path.
    """
    path = [place for entry in sys.path if (place := entry or working_directory())]
    home = [str(Path(__file__).parents[2])]
    boot = {**boot, "path": path if python is None else None, "home": home, "argv": sys.argv}
    text = json.dumps(boot)
    arguments = [text[start : start + _LONGEST_ARGUMENT] for start in range(0, len(text), _LONGEST_ARGUMENT)]
    begin = [python] if python is not None else [sys.executable, *interpreter_options()]
    return [*begin, "-c", _BOOT.format(module=module, function=function), *arguments]


def working_directory() -> str:
    """Return the working directory; an empty string if it was removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""


def _watched(pid: int) -> Process:
    """Return a child of this process, which nothing else reaps."""
    try:
        return Process(pid, open_sentinel(pid), functools.partial(await_exit, pid))
    except BaseException:
        os.kill(pid, SIGKILL)
        os.waitpid(pid, 0)
        raise
