"""The env of the session workload. Each session imports this module in a new process, so it imports little."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

_FOREVER = 1_000_000  # seconds


class Ledger:
    """The env: it remembers who has used it, and ends its process on request."""

    def __init__(self) -> None:
        self._users: list[int] = []

    def enter(self, user: int) -> list[int]:
        """Note a user; return those who came before."""
        before = list(self._users)
        self._users.append(user)
        return before

    def echo(self, value: Any) -> Any:
        """Return the value."""
        return value

    def crash(self) -> None:
        """End the process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        """Block in C code that holds the GIL, without using CPU time that other sessions need."""
        ctypes.PyDLL(None).sleep(_FOREVER)
