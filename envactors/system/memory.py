"""Memory that processes share and that has no name, so that nothing of it is left when they are killed."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from typing import TYPE_CHECKING

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

    def map(self, size: int) -> mmap.mmap:
        """Set the size, and map the file; reserve its memory before you use it."""
        os.ftruncate(self.fileno(), size)
        return mmap.mmap(self.fileno(), size)

    def grow(self, size: int) -> int:
        """Append a part, whose memory is not reserved yet, and return where it starts."""
        start = next_page(os.fstat(self.fileno()).st_size)
        os.ftruncate(self.fileno(), start + size)
        return start

    def reserve(self, start: int, size: int) -> None:
        """Reserve the memory of a part that is not in use yet.

        Raises:
            OSError: There is not enough memory.
        """
        reserve(self.fileno(), start, size)

    def extend(self, size: int) -> tuple[tuple[int, int], Part]:
        """Append a part, reserve its memory, and map it.

        Returns:
            Its start and size, by which other processes map it, and the part.

        Raises:
            OSError: There is not enough memory.
        """
        start = self.grow(size)
        return (start, size), self.add(start, size)

    def add(self, start: int, size: int) -> Part:
        """Add a part that starts at a multiple of a page; otherwise like `extend`."""
        self.reserve(start, size)
        return Part(self.fileno(), size, offset=start)

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        self.close()


def map_part(fd: int, size: int, start: int) -> memoryview:
    """Map a part of a file without another descriptor, which `mmap.mmap` keeps before Python 3.13.

    Raises:
        OSError: There is no such file, or not enough memory.
    """
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(fd, size, offset=start, trackfd=False))
    import numpy as np  # helper processes do without it; workers have imported it

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = *(ctypes.c_void_p, ctypes.c_size_t), *[ctypes.c_int] * 3, ctypes.c_int64
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, start)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"{size} bytes could not be mapped: {os.strerror(error)}")
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    # A chain of references keeps the part mapped while any view of it is in use.
    return np.frombuffer(memoryview(memory), np.uint8).data


def next_page(size: int) -> int:
    """Round a size up to a multiple of a page."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class Part(mmap.mmap):
    """A part of a file whose memory is freed once nothing refers to it, or to arrays in it."""

    def __init__(self, *_args: object, **_options: object) -> None:
        self._owner_pid = os.getpid()

    def __del__(self) -> None:
        if hasattr(mmap, "MADV_REMOVE") and os.getpid() == self._owner_pid:  # a forked child has it, too
            self.madvise(mmap.MADV_REMOVE)
