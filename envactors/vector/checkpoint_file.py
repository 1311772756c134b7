"""Checkpoint files: there is a whole one at a path, or the one before it, or none."""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Final

from envactors.errors import VectorEnvError

_MAGIC: Final = b"envactors checkpoint\n"
# What of it a later version may not be able to read.
_FORMAT: Final = 1
# The format, the length of the payload, and its checksum.
_HEADER: Final = struct.Struct("<IQI")


def write_file(path: str | os.PathLike[str], payload: bytes | bytearray) -> None:
    """Write a checkpoint in place of the one at this path.

    Raises:
        OSError: It cannot be written; what was there before still is.
    """
    target = Path(path)
    # Beside it, since only within one file system a file takes another's place at once.
    fd, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_MAGIC + _HEADER.pack(_FORMAT, len(payload), zlib.crc32(payload)))
            file.write(payload)
            file.flush()
            os.fsync(fd)
        Path(beside).replace(target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


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
