"""Shared memory in temporary files that are unlinked at once."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import IO

_ZEROS = bytes(1 << 20)


def open_unnamed(name: str) -> IO[bytes]:
    """Return a new file without a path."""
    return tempfile.TemporaryFile(buffering=0, prefix=name)


def forbid_shrinking(fd: int) -> None:
    """Do nothing: no portable call keeps another process from shrinking a file."""
    del fd


def check_room(size: int) -> None:
    """Do nothing: no portable call says how much memory is left."""
    del size


def reserve(fd: int, start: int, size: int) -> None:
    """Reserve the space of a part of a file that is not in use yet; touching it without that would end the process."""
    end = start + size
    while start < end:
        start += os.pwrite(fd, _ZEROS[: end - start], start)


@contextlib.contextmanager
def file_of_text(name: str, text: str) -> Iterator[str]:
    """Yield the path of a file with this text, which only this user can read and which is removed at the end."""
    with tempfile.NamedTemporaryFile(prefix=name) as file:
        file.write(text.encode())
        file.flush()
        yield file.name
