"""Memory that processes share and that has no name, so that nothing of it is left when they are killed."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from envactors.system.choice import PORTABLE

if TYPE_CHECKING or not PORTABLE:
    from envactors.system.linux.memory import *
else:
    from envactors.system.portable.memory import *


class SharedFile:
    """A file in memory, without a path, that several processes map. Mappings outlive it.

    Args:
        name: The name that debugging tools show.
    """

    def __init__(self, name: str) -> None:
        self._file = open_unnamed(name)
        forbid_shrinking(self.fileno())

    def fileno(self) -> int:
        return self._file.fileno()

    def extend(self, size: int) -> tuple[tuple[int, int], memoryview]:
        """Append a part, reserve its memory, and map it; the memory is freed once nothing refers to it.

        Returns:
            Its start and size, by which other processes map it, and the part.

        Raises:
            OSError: There is not enough memory.
        """
        start = next_page(os.fstat(self.fileno()).st_size)
        return (start, size), self.add(start, size)

    def add(self, start: int, size: int) -> memoryview:
        """Add a part that starts at a multiple of a page; otherwise like `extend`."""
        reserve(self.fileno(), start, size)
        return map_part(self.fileno(), size, start, frees=True)

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        self.close()


def map_part(fd: int, size: int, start: int, *, frees: bool = False) -> memoryview:
    """Map a part of a file without another descriptor, which `mmap.mmap` keeps before Python 3.13.

    Args:
        fd: The file.
        size: The size of the part in bytes.
        start: Where it starts, a multiple of a page.
        frees: Whether its memory is freed once nothing refers to the mapping, or to arrays in it.

    Raises:
        OSError: There is no such file, or not enough memory.
    """
    import numpy as np  # helper processes do without it; workers have imported it

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = *(ctypes.c_void_p, ctypes.c_size_t), *[ctypes.c_int] * 3, ctypes.c_int64
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, start)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"{size} bytes could not be mapped: {os.strerror(error)}")
    memory = (ctypes.c_char * size).from_address(address)
    place = ctypes.c_void_p(address), ctypes.c_size_t(size)
    weakref.finalize(memory, _unmap, libc.madvise, libc.munmap, place, os.getpid() if frees else 0).atexit = False
    # A chain of references keeps the part mapped while any view of it is in use.
    return np.frombuffer(memoryview(memory), np.uint8).data


def _unmap(madvise: Callable[..., int], munmap: Callable[..., int], place: tuple[Any, ...], owner_pid: int) -> None:
    try:
        if os.getpid() == owner_pid and hasattr(mmap, "MADV_REMOVE"):  # a forked child has the mapping, too
            madvise(*place, mmap.MADV_REMOVE)
    finally:  # also if a signal handler raises
        munmap(*place)


def next_page(size: int) -> int:
    """Round a size up to a multiple of a page."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
