"""Memory that processes share and that has no name: nothing of it is left when they are killed."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from envactors.system.choice import PORTABLE

if TYPE_CHECKING or not PORTABLE:
    from envactors.system.linux.memory import *
else:
    from envactors.system.portable.memory import *


class SharedFile:
    """A file without a path, in memory, to be mapped here and in other processes; mappings outlive it.

    Args:
        name: What debugging tools show.
    """

    def __init__(self, name: str) -> None:
        self._file = open_unnamed(name)

    def fileno(self) -> int:
        return self._file.fileno()

    def map(self, size: int) -> mmap.mmap:
        """Set its size, once, and map it; its memory is to be reserved before it is used."""
        fix_size(self.fileno(), size)
        return map_file(self.fileno(), size)

    def reserve(self, start: int, size: int) -> None:
        """Reserve the memory of a part, which nobody uses yet.

        Raises:
            OSError: There is not enough memory.
        """
        reserve(self.fileno(), start, size)

    def extend(self, size: int) -> tuple[tuple[int, int], Part]:
        """Add a part behind all others, reserve its memory, and map it.

        Returns:
            Where it begins and how long it is, by which other processes map it; the part.

        Raises:
            OSError: There is not enough memory.
        """
        start = next_page(os.fstat(self.fileno()).st_size)
        return (start, size), self.add(start, size)

    def add(self, start: int, size: int) -> Part:
        """Add a part at a multiple of a page; otherwise as `extend`."""
        self.reserve(start, size)
        return Part(self.fileno(), size, offset=start)

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        self.close()


def next_page(size: int) -> int:
    """Return the smallest multiple of a page that is not less."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class Part(mmap.mmap):
    """A part of a file that is given back to the system once nobody refers to it, or to arrays in it, any more."""

    def __init__(self, *_args: object, **_options: object) -> None:
        self._owner_pid = os.getpid()

    def __del__(self) -> None:
        if hasattr(mmap, "MADV_REMOVE") and os.getpid() == self._owner_pid:  # a fork has it, too
            self.madvise(mmap.MADV_REMOVE)


def map_file(fd: int, size: int, start: int = 0) -> mmap.mmap:
    """Map a file, or a part that begins at a multiple of a page, as memory shared with all processes that map it."""
    return mmap.mmap(fd, size, offset=start)
