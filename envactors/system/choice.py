"""The choice between the system calls of Linux and those that every Unix has."""

from __future__ import annotations

import os
import select
import sys
from typing import Final, Literal, TypeAlias, get_args

SystemName: TypeAlias = Literal["linux", "portable"]
# This environment variable also tells workers what their caller has chosen.
VARIABLE: Final = "ENVACTORS_SYSTEM"


def choose() -> SystemName:
    """Return the value of the environment variable or, if it is not set, "linux" where Linux's calls work.

    Raises:
        ImportError: The platform is Windows, or the variable has another value.
    """
    if sys.platform == "win32":
        raise ImportError(
            "envactors does not run on Windows itself: run it in WSL, the Windows Subsystem for Linux "
            "(`wsl --install` sets it up)"
        )
    wanted = os.environ.get(VARIABLE)
    if wanted:
        if wanted not in get_args(SystemName):
            raise ImportError(f"{VARIABLE} is {wanted!r}: expected one of {get_args(SystemName)}, or nothing")
        return "portable" if wanted == "portable" else "linux"
    return "linux" if has_linux_calls() else "portable"


def has_linux_calls() -> bool:
    """Return whether Python was built with the calls of Linux, and the kernel has the newest of them."""
    if not all(hasattr(*call) for call in ((select, "epoll"), (os, "eventfd"), (os, "memfd_create"))):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # an old kernel, or a sandbox that imitates one
        return False
    return True


SYSTEM: Final = choose()
PORTABLE: Final = SYSTEM == "portable"
