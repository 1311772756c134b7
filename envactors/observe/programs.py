"""The sockets through which programs that are monitored are reached, and the terminal's side of them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

# How long a program may take to answer, in seconds, besides what it was asked to wait.
PATIENCE = 1.2
_SUFFIX = ".sock"
_CHUNK = 1 << 16
# The longest answer, in bytes.
_MOST = 1 << 26


class NoAnswerError(Exception):
    """A program that does not answer; its text says why, as far as that is known."""


class NotListeningError(NoAnswerError):
    """No program listens there: it has ended, or stopped its monitor."""


def socket_directory() -> Path:
    """Return the directory of the sockets, which belongs to this user alone.

    Raises:
        PermissionError: It belongs to somebody else, or others may write to it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        directory = Path(runtime) / "envactors"
    else:
        directory = Path(tempfile.gettempdir()) / f"envactors-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            f"{directory} is not a directory of this user alone: remove it, or set XDG_RUNTIME_DIR to another place"
        )
    return directory


def path_of(pid: int) -> Path:
    """Return the path of a program's socket."""
    return socket_directory() / f"{pid}{_SUFFIX}"


def running_programs() -> list[int]:
    """Return the process ids of this user's programs that are monitored."""
    paths = socket_directory().glob(f"*{_SUFFIX}")
    return sorted(int(path.stem) for path in paths if path.stem.isdigit() and is_listening(path))


def pid_of(path: Path) -> int | None:
    """Return the process id of the program that listens there; None if none does, or the system cannot tell."""
    option = getattr(socket, "SO_PEERCRED", None)
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.connect(str(path))
        if option is not None:
            pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
            return pid or None  # 0: it is in another namespace
    return None


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


def ask(path: Path, request: dict[str, Any], patience: float = PATIENCE) -> dict[str, Any]:
    """Send a request to a program and return its answer.

    Args:
        path: Its socket.
        request: What is asked; see `envactors.observe.monitor`.
        patience: How long to wait, in seconds.

    Raises:
        NoAnswerError: None came.
        NotListeningError: No program listens there.
    """
    end = time.monotonic() + patience
    data = bytearray()
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(patience)
            sock.connect(str(path))
            sock.sendall(json.dumps(request).encode() + b"\n")
            while len(data) < _MOST:
                sock.settimeout(max(0.001, end - time.monotonic()))
                chunk = sock.recv(_CHUNK)
                if not chunk:
                    break
                data += chunk
        if not data:
            raise ConnectionResetError("the program has closed it")  # it is busy with others, or was asked nonsense
        answer = json.loads(data)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NotListeningError("nobody listens there") from error
    except (TimeoutError, BlockingIOError) as error:
        raise NoAnswerError(f"no answer within {patience:g} s") from error
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"the connection broke: {error}") from error
    return dict(answer)
