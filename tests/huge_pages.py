"""Moves the heap of this process to huge pages, which is done by its import: the last one of a fork server.

A fork copies the table of pages of its server, and drops that copy when it ends, which takes as long as the rest of a
start where a server has imported the modules of all tests. The table of huge pages is short. Where the kernel has none,
or is older than Linux 6.1, all stays as it is.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

MADV_COLLAPSE = 25


def collapse():
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        first, end = (int(address, 16) for address in addresses.split("-"))
        if (access, inode) == ("rw-p", "0"):
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_COLLAPSE)


collapse()
