"""Files in memory, by memfd."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
import weakref
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


def map_part(fd: int, size: int, start: int) -> memoryview:
    """Map a part of a file without a descriptor of its own, which `mmap.mmap` has before Python 3.13."""
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(fd, size, offset=start, trackfd=False))
    import numpy as np  # which has no place in helpers, and is there in workers

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
    # A chain of references keeps it mapped as long as any view of it is in use.
    return np.frombuffer(memoryview(memory), np.uint8).data


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
