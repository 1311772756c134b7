"""The client's side: finding the programs that can be looked at, and asking them."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from pathlib import Path
from typing import Any

from envactors.observe.listener import is_listening, sockets

# How long a program may take to answer, in seconds, in addition to the wait that the request contains.
PATIENCE = 1.2
_CHUNK = 1 << 16
# The longest answer, in bytes.
_MOST = 1 << 26


class NoAnswerError(Exception):
    """A program does not answer; the text says why, as far as known."""


class NotListeningError(NoAnswerError):
    """No program listens there: it has ended, or has no actors now."""


def running_programs() -> list[int]:
    """Return the process ids of this user's programs that can be looked at, and remove what killed ones have left."""
    return [pid for pid, path in sorted(sockets().items()) if is_listening(path)]


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


def ask(path: Path, request: dict[str, Any], patience: float = PATIENCE) -> dict[str, Any]:
    """Send a request to a program and return its answer.

    Args:
        path: Its socket.
        request: The request; see `envactors.observe.monitor`.
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
            raise ConnectionResetError(
                "the program has closed it"
            )  # it is busy with other clients, or the request is malformed
        answer = json.loads(data)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NotListeningError("nobody listens there") from error
    except (TimeoutError, BlockingIOError) as error:
        raise NoAnswerError(f"no answer within {patience:g} s") from error
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"the connection broke: {error}") from error
    return dict(answer)
