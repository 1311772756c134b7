"""The functions of the executor workload. Workers import this module, so it imports little."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from _thread import allocate_lock
from typing import Any

_FOREVER = 1_000_000  # seconds


class DeedError(Exception):
    """What a function raises on purpose."""


def work(ledger: str, token: int, fate: str, seconds: float, large: int) -> tuple[int, float]:
    """Write down that a call runs, work for some time, and end in the way that it is told to.

    Args:
        ledger: The file of the calls that have run.
        token: The number of the call.
        fate: How it ends.
        seconds: How long it works.
        large: The size of a large result, in bytes.

    Returns:
        The number of the call, and when it began (`time.monotonic`).
    """
    began = time.monotonic()
    with open(ledger, "a") as file:  # noqa: PTH123 # importing pathlib takes long
        file.write(f"{token}\n")
    time.sleep(seconds)
    result: Any = token, began
    if fate == "raise":
        raise DeedError(token)
    if fate == "hang":
        ctypes.PyDLL(None).sleep(_FOREVER)
    elif fate == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fate == "exit":
        os._exit(7)
    elif fate == "allocate":
        result = token, bytes(large)
    elif fate == "unpicklable":
        result = token, allocate_lock()
    elif fate == "print":
        sys.stdout.write(f"{token} prints\n" * 100)
    elif fate == "child":
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({_FOREVER})"])
        os._exit(7)
    return result  # type: ignore[no-any-return]
