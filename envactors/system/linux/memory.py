"""Files in memory, by memfd."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import IO

from envactors.system.linux.memory_limits import find_tightest

# Smaller reservations, in bytes, are made without checking how much memory is left.
_WORTH_A_LOOK = 1 << 20
# The kernel's records of pages take less than one part in this many.
_OVERHEAD = 128


def open_unnamed(name: str) -> IO[bytes]:
    """Return a new file without a path."""
    return os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b", buffering=0)


def forbid_shrinking(fd: int) -> None:
    """Let a file only grow from now on: reading a truncated part would end this process."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)


def check_room(size: int) -> None:
    """Raise `OSError` unless the machine and the container of this process have this much memory left, in bytes."""
    # The kernel refuses more than the machine has. If it is more than the container has, the kernel kills a process,
    # most likely this one.
    room = find_tightest() if size >= _WORTH_A_LOOK else None
    if room is not None and size + size // _OVERHEAD > room.free:
        raise OSError(f"{room.whose} has {room.limit} bytes, of which {room.used} are used")


def reserve(fd: int, start: int, size: int) -> None:
    """Reserve the memory of a part of a file that is not in use yet."""
    check_room(size)
    os.posix_fallocate(fd, start, size)


@contextlib.contextmanager
def file_of_text(name: str, text: str) -> Iterator[str]:
    """Yield the path of a file with this text, for this process only. It is in memory, since keys belong on no disk."""
    with open_unnamed(name) as file:
        file.write(text.encode())
        yield f"/proc/self/fd/{file.fileno()}"
