"""An env that overwrites the memory that its worker shares with the caller, as a wild pointer in C code does.

Workers import this module, so it does not import pytest.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
import time
from pathlib import Path

import numpy as np

from envactors.testing import EchoEnv

PATTERNS = {
    "nan": struct.pack("d", math.nan),
    "huge time": struct.pack("d", 1e300),
    "huge": struct.pack("q", 2**63 - 1),
    "negative": struct.pack("q", -5),
    "ones": struct.pack("q", 1),
    "zeros": bytes(8),
}


def shared_memory(name):
    """The (address, size) of what this worker has mapped under this name."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"memfd:envactors-{name}" in line and "rw-s" in line:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            found.append((begin, end - begin))
    return found


def write_cell(index, value):
    """Writes one counter or time of the control page."""
    ((address, _),) = shared_memory("page")
    ctypes.memmove(address + 8 * index, struct.pack("d" if isinstance(value, float) else "q", value), 8)


def overwrite(name, what, seed):
    """Fills all of the shared memory: with one pattern, or at random."""
    dice = np.random.default_rng(seed)
    for address, size in shared_memory(name):
        content = PATTERNS[what] * (size // 8) if what in PATTERNS else dice.bytes(size)
        ctypes.memmove(address, content, size)


class Vandal(EchoEnv):
    """Does once, in its next step, what it was told: (function, arguments), then what comes after."""

    deed = None

    def prepare(self, function, *arguments, then="return"):
        self.deed = function, arguments, then

    def step(self, action):
        deed, self.deed = self.deed, None
        if deed is not None:
            function, arguments, then = deed
            if then == "go on":  # also while the worker and the caller act on it
                threading.Thread(target=self._repeat, args=(function, arguments), daemon=True).start()
            function(*arguments)
            if then == "hang":
                time.sleep(1000)
        return super().step(action)

    def _repeat(self, function, arguments):
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            function(*arguments)
