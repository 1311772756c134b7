"""Fresh interpreters, which run a function of this package: helper processes and node agents are started this way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

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
# Held while `subprocess.Popen` starts a process: it waits for the end of a pipe. A child that another thread forks
# meanwhile would have a copy of the pipe, and `Popen` would not return before that child has ended. Reentrant, since a
# signal handler may fork, too.
no_fork: threading.RLock = threading.RLock()
os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)


def start_python(
    module: str, function: str, boot: dict[str, Any], fds: Sequence[int], env: Mapping[str, str], python: str | None
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter with this environment, which runs a function; see `python_command`, `start_blocked`."""
    command = python_command(module, function, boot, python)
    return start_blocked(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=env)


def start_blocked(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process with these options of `subprocess.Popen`.

    It has to unblock signals: until it can handle them, all are blocked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with no_fork:
            return subprocess.Popen(command, **options)  # noqa: S603 # its own code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    begin = [python] if python is not None else [sys.executable, *_interpreter_options()]
    return [*begin, "-c", _BOOT.format(module=module, function=function), *arguments]


def working_directory() -> str:
    """Return the working directory; an empty string if it was removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""


def _interpreter_options() -> list[str]:
    """Return the options that this interpreter was started with, such as ``-I``, ``-P``, and ``-X``.

    Options for warnings (``-W``) are left out: warnings that are errors would end helper processes.
    """
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001
    return [option for option in options if not option.startswith("-W")]
