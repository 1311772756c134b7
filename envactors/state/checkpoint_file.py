"""Checkpoint files, written atomically: a path always has a complete checkpoint or none."""

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
# Version of the format; a file with another number is refused.
_FORMAT: Final = 3
# Format, length of the payload in bytes, and its checksum.
_HEADER: Final = struct.Struct("<IQI")
# Suffix of files that are being written.
_PARTIAL: Final = ".partial"


def write_file(path: str | os.PathLike[str], payload: bytes | bytearray) -> None:
    """Replace the checkpoint at a path, and keep its permissions. Symbolic links are followed.

    Raises:
        OSError: The file cannot be written; the previous one is unchanged.
    """
    target = Path(path).resolve()
    _remove_partial(target)
    # In the same directory: a file is only replaced atomically within one file system.
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
    """Remove partial files of killed processes; a process that is still writing holds a lock."""
    for entry in target.parent.iterdir():
        if entry.name.startswith(f".{target.name}.") and entry.name.endswith(_PARTIAL):
            with contextlib.suppress(OSError), entry.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                entry.unlink()


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the payload of a checkpoint.

    Raises:
        OSError: The file cannot be read.
        VectorEnvError: The file is not a complete checkpoint, or has another format.
    """
    content = Path(path).read_bytes()
    start = len(_MAGIC) + _HEADER.size
    if not content.startswith(_MAGIC) or len(content) < start:
        raise VectorEnvError(
            f"{os.fspath(path)!r} is not a checkpoint: expected a file that VectorEnv.checkpoint wrote"
        )
    number, length, checksum = _HEADER.unpack_from(content, len(_MAGIC))
    payload = content[start:]
    if number != _FORMAT:
        raise VectorEnvError(
            f"{os.fspath(path)!r} has format {number}: expected {_FORMAT}; read it with the version that wrote it"
        )
    if len(payload) != length or zlib.crc32(payload) != checksum:
        raise VectorEnvError(f"{os.fspath(path)!r} was truncated or changed: expected a complete checkpoint")
    return payload
