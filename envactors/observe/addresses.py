"""The Unix sockets at which programs answer: where they are, and which of them are in use.

The server is in `envactors.observe.server`, the client in `envactors.observe.programs`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

_SUFFIX = ".sock"


def socket_directory() -> Path:
    """Return the directory of the sockets, which belongs to this user alone; create it if it is missing.

    Raises:
        OSError: The directory cannot be created.
        PermissionError: The directory belongs to another user, or others may write to it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        directory = Path(runtime) / "envactors"
    else:
        # Not `tempfile`, whose import would make the first actor of each program slower.
        directory = Path(os.environ.get("TMPDIR") or "/tmp") / f"envactors-{os.getuid()}"  # noqa: S108 # it is checked
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            f"{directory} is not a directory of this user alone: remove it, or set XDG_RUNTIME_DIR to another place"
        )
    return directory


def path_of(pid: int) -> Path:
    """Return the path of a program's socket; for exceptions see `socket_directory`."""
    return socket_directory() / f"{pid}{_SUFFIX}"


def find_sockets() -> dict[int, Path]:
    """Return the sockets of this user's programs by process id, and remove those whose program was killed."""
    found = {}
    for path in sorted(socket_directory().glob(f"*{_SUFFIX}")):
        if not path.stem.isdecimal():
            continue
        # A process of another container may have an id that means nothing here, so the socket is tried too.
        if _has_ended(int(path.stem)) and not is_listening(path):
            path.unlink(missing_ok=True)
        else:
            found[int(path.stem)] = path
    return found


def is_listening(path: Path) -> bool:
    """Return whether a program listens there, whether it answers or not."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
        return True


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False  # it has changed its user
    return False
