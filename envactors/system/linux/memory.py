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

# Smaller reservations, in bytes, are made without checking how much memory is left.
_WORTH_A_LOOK = 1 << 20
# The kernel's records of pages take less than one part in this many.
_OVERHEAD = 128


def open_unnamed(name: str) -> IO[bytes]:
    """Return a new file without a path."""
    return os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b", buffering=0)


def fix_size(fd: int, size: int) -> None:
    """Set the size of a file, which can only grow from now on: reading a truncated part would end this process."""
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)


def map_part(fd: int, size: int, start: int) -> memoryview:
    """Map a part of a file without another descriptor, which `mmap.mmap` keeps before Python 3.13."""
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


def open_file_of(pid: int, name: str) -> int | None:
    """Return a descriptor of the file that another process has opened by `open_unnamed`; None if there is none."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if str(path.readlink()) == f"/memfd:{name} (deleted)":
                return os.open(path, os.O_RDWR)
    return None


@contextlib.contextmanager
def file_of_text(name: str, text: str) -> Iterator[str]:
    """Yield the path of a file with this text, for this process only. It is in memory, since keys belong on no disk."""
    with open_unnamed(name) as file:
        file.write(text.encode())
        yield f"/proc/self/fd/{file.fileno()}"
