"""Checks of other interpreters for workers: whether they can run them, and which code they can load."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import numpy as np

from envactors.process.interpreter_check import platform
from envactors.process.refusal import LaunchRefusedError
from envactors.process.starting import python_command

# How long the check of an interpreter may take, in seconds; it imports what workers need.
_PATIENCE = 60.0


@functools.cache
def code_tag(python: str | None, env_vars: frozenset[tuple[str, str]]) -> str | None:
    """Return the tag of the code that an interpreter runs, such as ``cpython-310``.

    Args:
        python: The interpreter; None for the caller's.
        env_vars: Environment variables to run it with.

    Raises:
        LaunchRefusedError: Workers cannot run in it.
    """
    if python is None:
        return sys.implementation.cache_tag
    boot = {"expected": platform(), "numpy": np.__version__}
    command = python_command("envactors.process.interpreter_check", "check", boot, python)
    environment = {**os.environ, **dict(env_vars)}
    run = functools.partial(subprocess.run, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True)
    try:
        done = run(command, text=True, errors="replace", timeout=_PATIENCE, env=environment)
    except subprocess.TimeoutExpired as error:
        raise LaunchRefusedError(f"python={python!r} has not answered within {_PATIENCE} s") from error
    except OSError as error:
        text = f"python={python!r} cannot be run ({error.strerror}): expected a Python interpreter, 3.10 or newer"
        raise LaunchRefusedError(text) from error
    line = (done.stderr if done.returncode else done.stdout).strip().split("\n")[-1]
    if done.returncode:
        raise LaunchRefusedError(f"python={python!r} cannot run workers: {line}")
    if not line.startswith(sys.implementation.name):
        raise LaunchRefusedError(f"python={python!r} is not a Python interpreter: it printed {line!r}")
    return line
