"""The client's side: finding the programs that can be looked at, and asking them."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from envactors.observe.addresses import find_sockets, is_listening, path_of
from envactors.system.processes import describe_state

# How long a program may take to answer, in seconds, in addition to the wait that the request contains.
PATIENCE = 1.2
_CHUNK = 1 << 16
# The longest answer, in bytes.
_MOST = 1 << 26
_ENDED, _STOPPED, _SILENT = "has ended", "is stopped", "does not answer"


class ProgramError(Exception):
    """A program gives no answer; the text says why, as far as known."""


class NotListeningError(ProgramError):
    """No program listens there: it has ended, or has no actors now."""


def running_programs() -> list[int]:
    """Return the process ids of this user's programs that can be looked at, and remove what killed ones have left.

    Raises:
        OSError: The directory of the sockets is not this user's alone, or cannot be read.
    """
    return [pid for pid, path in sorted(find_sockets().items()) if is_listening(path)]


def has_ended(pid: int) -> bool:
    """Return whether a process has ended."""
    return describe_state(pid) == _ENDED


def ask(pid: int, request: dict[str, Any], patience: float = PATIENCE) -> dict[str, Any]:
    """Send a request to a program and return its answer.

    Args:
        pid: Its process id.
        request: The request; see `envactors.observe.server`.
        patience: How long to wait, in seconds.

    Raises:
        NotListeningError: No program listens there.
        ProgramError: No answer came.
    """
    try:
        return _exchange(str(path_of(pid)), request, patience)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        why = "it has no actors now, belongs to another user, or was started with ENVACTORS_MONITOR=0"
        text = f"process {pid} does not exist" if has_ended(pid) else f"program {pid} cannot be shown: {why}"
        raise NotListeningError(text) from error
    except (OSError, ValueError) as error:
        state = describe_state(pid)
        if state.startswith(_STOPPED):
            state += f": kill -CONT {pid}"
        elif state == _SILENT:
            is_late = isinstance(error, (TimeoutError, BlockingIOError))
            state += ": perhaps C code holds its GIL" if is_late else f": {error}"
        raise ProgramError(f"program {pid} {state}") from error


def _exchange(path: str, request: dict[str, Any], patience: float) -> dict[str, Any]:
    end = time.monotonic() + patience
    data = bytearray()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(patience)
        sock.connect(path)
        sock.sendall(json.dumps(request).encode() + b"\n")
        while len(data) < _MOST:
            sock.settimeout(max(0.001, end - time.monotonic()))
            chunk = sock.recv(_CHUNK)
            if not chunk:
                break
            data += chunk
    if not data:  # the program is busy with other clients, or is closing
        raise ConnectionResetError("it has closed the connection")
    return dict(json.loads(data))
