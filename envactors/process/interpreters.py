"""Find out whether other interpreters can run workers, and which code these can load.

`check` runs in the other interpreter, so nothing here imports NumPy, which may be missing there.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys

from envactors.process.refusal import LaunchRefusedError
from envactors.system.choice import has_linux_calls
from envactors.system.interpreters import python_command

# The packages that workers import, and the oldest versions that they run with.
_NEEDED = {"numpy": (1, 24), "cloudpickle": (3, 0)}
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
    boot = {"expected": _platform(), "numpy": importlib.import_module("numpy").__version__}
    command = python_command(__name__, "check", boot, python)
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


def check(expected: str, numpy: str) -> None:
    """Print the tag of this interpreter's code, or exit with a line that says why workers cannot run in it.

    Args:
        expected: The caller's platform.
        numpy: The caller's version of NumPy. Another major version pickles arrays differently.
    """
    if _platform() != expected:
        sys.exit(f"it is {_platform()}, and the caller is {expected}")
    major = numpy.partition(".")[0]
    install = f"run {sys.executable} -m pip install 'numpy=={major}.*' 'cloudpickle>=3.0'"
    for package, oldest in _NEEDED.items():
        try:
            version = importlib.import_module(package).__version__
        except ImportError as error:
            sys.exit(f"it cannot import {package} ({error}): {install}")
        if package == "numpy" and version.partition(".")[0] != major:
            sys.exit(f"its NumPy is {version} and the caller's is {numpy}, of another major version: {install}")
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest:
            sys.exit(f"its {package} is {version}: {install}")
    if not has_linux_calls():
        sys.exit("it was built without epoll, eventfd, memfd_create or pidfd_open: use another build of it")
    print(sys.implementation.cache_tag)


def _platform() -> str:
    """Return what both sides must agree on to share memory and pickles."""
    return f"{sys.implementation.name}, {sys.byteorder}-endian, {sys.maxsize.bit_length() + 1} bit"
