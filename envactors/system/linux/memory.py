"""Files in memory, by memfd."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from envactors.system.linux.memory_limits import find_tightest

# Less than this, in bytes, is reserved without looking how much is left.
_WORTH_A_LOOK = 1 << 20
# The kernel's own records of pages take less than this part of them.
_OVERHEAD = 128


def open_unnamed(name: str) -> IO[bytes]:
    """Return a new file without a path."""
    return os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b", buffering=0)


def fix_size(fd: int, size: int) -> None:
    """Set the size of a file; it can only grow: reading what another process has cut off would end this one."""
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)


def check_room(size: int) -> None:
    """Raise `OSError` unless this machine, and the container that this process is in, have so much memory left."""
    # The kernel refuses what the machine does not have. For more than a container has it ends a process, most likely
    # this one.
    room = find_tightest() if size >= _WORTH_A_LOOK else None
    if room is not None and size + size // _OVERHEAD > room.free:
        raise OSError(f"{room.whose} has {room.limit} bytes, of which {room.used} are used")


def reserve(fd: int, start: int, size: int) -> None:
    """Reserve the memory of a part of a file, which nobody uses yet."""
    check_room(size)
    os.posix_fallocate(fd, start, size)


def open_file_of(pid: int, name: str) -> int | None:
    """Return a descriptor of another process's unnamed file of this name; None if it has none, or has ended."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if str(path.readlink()) == f"/memfd:{name} (deleted)":
                return os.open(path, os.O_RDWR)
    return None


@contextlib.contextmanager
def file_of_text(name: str, text: str) -> Iterator[str]:
    """Return the path of a file with this text, for this process alone: in memory, since a key belongs on no disk."""
    with open_unnamed(name) as file:
        file.write(text.encode())
        yield f"/proc/self/fd/{file.fileno()}"
