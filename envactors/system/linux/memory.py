"""Files in memory, by memfd."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def open_unnamed(name: str) -> IO[bytes]:
    """Return a new file without a path."""
    return os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "r+b", buffering=0)


def reserve(fd: int, start: int, size: int) -> None:
    """Reserve the memory of a part of a file, which nobody uses yet."""
    os.posix_fallocate(fd, start, size)


def open_file_of(pid: int, name: str) -> int | None:
    """Return a descriptor of another process's unnamed file of this name; None if it has none, or has ended."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if str(path.readlink()) == f"/memfd:{name} (deleted)":
                return os.open(path, os.O_RDONLY)
    return None


@contextlib.contextmanager
def file_of_text(name: str, text: str) -> Iterator[str]:
    """Return the path of a file with this text, for this process alone: in memory, since a key belongs on no disk."""
    with open_unnamed(name) as file:
        file.write(text.encode())
        yield f"/proc/self/fd/{file.fileno()}"
