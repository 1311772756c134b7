"""Check, in another interpreter, whether it can run workers; `envactors.process.interpreters` runs this there."""

from __future__ import annotations

import importlib
import re
import sys

# The packages that workers import, and the oldest versions that they run with.
NEEDED = {"numpy": (1, 24), "cloudpickle": (3, 0)}


def platform() -> str:
    """Return what both sides must agree on to share memory and pickles."""
    return f"{sys.implementation.name}, {sys.byteorder}-endian, {sys.maxsize.bit_length() + 1} bit"


def check(expected: str, numpy: str) -> None:
    """Print the tag of this interpreter's code, such as ``cpython-310``, or exit with a line that says what is missing.

    Args:
        expected: The caller's `platform`.
        numpy: The caller's version of NumPy. Another major version pickles arrays differently.
    """
    if platform() != expected:
        sys.exit(f"it is {platform()}, and the caller is {expected}")
    major = numpy.partition(".")[0]
    install = f"run {sys.executable} -m pip install 'numpy=={major}.*' 'cloudpickle>=3.0'"
    for package, oldest in NEEDED.items():
        try:
            version = importlib.import_module(package).__version__
        except ImportError as error:
            sys.exit(f"it cannot import {package} ({error}): {install}")
        if package == "numpy" and version.partition(".")[0] != major:
            sys.exit(f"its NumPy is {version} and the caller's is {numpy}, of another major version: {install}")
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest:
            sys.exit(f"its {package} is {version}: {install}")
    from envactors.system.choice import has_linux_calls

    if not has_linux_calls():
        sys.exit("it was built without epoll, eventfd, memfd_create or pidfd_open: use another build of it")
    print(sys.implementation.cache_tag)
