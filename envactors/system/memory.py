"""Memory that processes share and that has no name: nothing of it is left when they are killed."""

from __future__ import annotations

import mmap
import os


class SharedFile:
    """A file without a path, in memory, to be mapped here and in other processes; mappings outlive it.

    Args:
        name: What debugging tools show.
    """

    def __init__(self, name: str) -> None:
        self._file = os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "r+b", buffering=0)

    def fileno(self) -> int:
        return self._file.fileno()

    def allocate(self, size: int) -> mmap.mmap:
        """Set its size, reserve that much memory, and map it.

        Raises:
            OSError: There is not enough memory.
        """
        os.posix_fallocate(self.fileno(), 0, size)
        return map_file(self.fileno(), size)

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        self.close()


def map_file(fd: int, size: int) -> mmap.mmap:
    """Map a file into memory that is shared with every other process that maps it."""
    return mmap.mmap(fd, size)
