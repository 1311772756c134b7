"""Checkpoint files: there is a whole one at a path, or the one before it, or none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import zlib
from pathlib import Path
from typing import Final

from envactors.errors import VectorEnvError

_MAGIC: Final = b"envactors checkpoint\n"
# What of it a later version may not be able to read.
_FORMAT: Final = 2
# The format, the length of the payload, and its checksum.
_HEADER: Final = struct.Struct("<IQI")
# How the names of files end that are being written.
_PARTIAL: Final = ".partial"


def write_file(path: str | os.PathLike[str], payload: bytes | bytearray) -> None:
    """Write a checkpoint in place of the one at this path, whose permissions it keeps; follow symbolic links.

    Raises:
        OSError: It cannot be written; what was there before still is.
    """
    target = Path(path).resolve()
    _remove_partial(target)
    # Beside it, since only within one file system a file takes another's place at once.
    beside = target.with_name(f".{target.name}.{os.urandom(4).hex()}{_PARTIAL}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(fd, stat.S_IMODE(target.stat().st_mode))
            file.write(_MAGIC + _HEADER.pack(_FORMAT, len(payload), zlib.crc32(payload)))
            file.write(payload)
            file.flush()
            os.fsync(fd)
            beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _remove_partial(target: Path) -> None:
    """Remove what killed processes have left beside a file; those that still write hold locks."""
    for entry in target.parent.iterdir():
        if entry.name.startswith(f".{target.name}.") and entry.name.endswith(_PARTIAL):
            with contextlib.suppress(OSError), entry.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                entry.unlink()


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return what was written to a checkpoint.

    Raises:
        OSError: It cannot be read.
        VectorEnvError: It is no whole checkpoint, or one of a later format.
    """
    content = Path(path).read_bytes()
    start = len(_MAGIC) + _HEADER.size
    if not content.startswith(_MAGIC) or len(content) < start:
        raise VectorEnvError(f"{os.fspath(path)!r} is no checkpoint: expected a file that VectorEnv.checkpoint wrote")
    number, length, checksum = _HEADER.unpack_from(content, len(_MAGIC))
    payload = content[start:]
    if number != _FORMAT:
        raise VectorEnvError(
            f"{os.fspath(path)!r} has format {number}: expected {_FORMAT}; read it with the version that wrote it"
        )
    if len(payload) != length or zlib.crc32(payload) != checksum:
        raise VectorEnvError(f"{os.fspath(path)!r} was cut off or changed: expected a whole checkpoint")
    return payload
