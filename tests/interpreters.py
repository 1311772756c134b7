"""Other interpreters for the tests: found on the path or in pyenv, each in a virtual environment that is kept."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

OWN = sys.version_info[:2]
# The versions of Python that both NumPy 1.26 and NumPy 2 were built for.
WITH_ANY_NUMPY = {(3, 10), (3, 11), (3, 12)}
QUIETLY = ("-q", "--disable-pip-version-check")
# Packages that every virtual environment has.
NEEDED = "cloudpickle>=3"


@functools.cache
def pythons():
    """Returns the Pythons that are found, by their versions; builds without the GIL are left out."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    paths = [Path(sys.executable), *sorted((root / "versions").glob("*/bin/python"), reverse=True)]
    for folder in os.get_exec_path():
        paths += sorted(path for path in Path(folder).glob("python3.*") if re.fullmatch(r"python3\.\d+", path.name))
    found = {}
    question = "import sys; print('%d %d %d' % (sys.version_info[:2] + ('free-threading' in sys.version,)))"
    for path in paths:
        try:
            done = subprocess.run([path, "-c", question], capture_output=True, text=True, timeout=60, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            major, minor, is_free = map(int, done.stdout.split())
            if not is_free:
                found.setdefault((major, minor), path)
    return found


def make_venv(folder, python, *requirements):
    """Returns the interpreter of a virtual environment with these packages, which is made unless there is one."""
    made = folder / "bin/python"
    complete = folder / "complete"
    if not complete.exists():
        for command in (
            [python, "-m", "venv", "--clear", "--without-pip", folder],
            # By the caller's pip, since another one would take seconds. What is imported is compiled then.
            [sys.executable, "-m", "pip", "--python", made, *QUIETLY, "install", "--no-compile", *requirements],
        )[: 1 + bool(requirements)]:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode != 0:
                pytest.skip(f"a virtual environment of {python} could not be made: {done.stderr[-500:]}")
        complete.touch()
    return str(made)


def another(cache, wanted, name, *requirements):
    """Returns the interpreter of a virtual environment of another version than the caller's, or skips."""
    versions = [version for version in wanted if version in pythons()]
    if not versions:
        pytest.skip(f"none of {sorted(wanted)} is found")
    label = f"{name}-{versions[0][0]}.{versions[0][1]}"
    return make_venv(Path(cache.mkdir(label)) / "venv", pythons()[versions[0]], *requirements)
