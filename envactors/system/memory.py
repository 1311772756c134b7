"""Memory that processes share and that has no name: nothing of it is left when they are killed."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path


class SharedFile:
    """A file without a path, in memory, to be mapped here and in other processes; mappings outlive it.

    Args:
        name: What debugging tools show.
    """

    def __init__(self, name: str) -> None:
        self._file = os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "r+b", buffering=0)

    def fileno(self) -> int:
        return self._file.fileno()

    def map(self, size: int) -> mmap.mmap:
        """Set its size and map it; its memory is to be reserved before it is used."""
        os.ftruncate(self.fileno(), size)
        return map_file(self.fileno(), size)

    def reserve(self, start: int, size: int) -> None:
        """Reserve the memory of a part.

        Raises:
            OSError: There is not enough memory.
        """
        os.posix_fallocate(self.fileno(), start, size)

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        self.close()


def map_file(fd: int, size: int, start: int = 0) -> mmap.mmap:
    """Map a file, or a part that begins at a multiple of a page, as memory shared with all processes that map it."""
    return mmap.mmap(fd, size, offset=start)


def open_file_of(pid: int, name: str) -> int | None:
    """Return a descriptor of another process's `SharedFile` of this name; None if it has none, or has ended."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if str(path.readlink()) == f"/memfd:{name} (deleted)":
                return os.open(path, os.O_RDONLY)
    return None
