"""Where the kernel places a program's code and heap: at random addresses, or at the same ones in every process."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_NO_RANDOMIZE = 0x0040000
# Libraries from the first third of the address space up. At the addresses that programs without random ones have by
# default, the same work has been seen to take half as long again.
_COMPAT_LAYOUT = 0x0200000
_QUERY = 0xFFFFFFFF  # changes nothing


@contextlib.contextmanager
def fixed_layout() -> Iterator[bool]:
    """Start the programs that this thread starts in the context at one and the same addresses.

    Processors predict branches by address. Interpreters that take turns on a core, each with its code somewhere else,
    evict each other's predictions and step at half the speed. If the kernel refuses (in some containers), layouts stay
    random.

    Yields:
        Whether the layout was random before and is fixed now: started programs then call `restore_random_layout`.
    """
    before = _personality(_QUERY)
    random = before >= 0 and not before & _NO_RANDOMIZE
    changed = random and _personality(before | _NO_RANDOMIZE | _COMPAT_LAYOUT) >= 0
    try:
        yield changed
    finally:
        if changed:
            _personality(before)


def restore_random_layout() -> None:
    """Give the programs that this process starts random layouts again, after `fixed_layout`."""
    now = _personality(_QUERY)
    if now >= 0:
        _personality(now & ~(_NO_RANDOMIZE | _COMPAT_LAYOUT))


def _personality(wanted: int) -> int:
    """Set the kernel's flags for this thread and what it starts; return the flags before, or -1 if it refuses."""
    return int(ctypes.CDLL(None).personality(ctypes.c_ulong(wanted)))
