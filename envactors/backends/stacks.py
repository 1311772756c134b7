"""The stacks of a worker process, which it writes to a file of its own when it gets a signal.

A signal handler in C writes them, so that the worker may be anywhere, also in C code that holds the GIL.
"""

from __future__ import annotations

import os
import time

from envactors.backends.base import Stacks
from envactors.system.memory import open_file_of
from envactors.system.processes import STACKS_SIGNAL, Process, describe_state
from envactors.worker.bootstrap import STACKS_FILE

# How long nothing may have come until the stacks are complete, in seconds.
_SETTLED = 0.02
_POLL = 0.004


class ProcessStacks(Stacks):
    """The stacks of one process, which is asked for them here.

    Args:
        process: The process; it is not reaped meanwhile.
    """

    def __init__(self, process: Process) -> None:
        self._pid = process.pid
        self._fd = open_file_of(process.pid, STACKS_FILE)
        if self._fd is not None:  # else env code has closed it, or hides its process
            self._start = os.fstat(self._fd).st_size
            process.send_signal(STACKS_SIGNAL)

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def read(self) -> str:
        if self._fd is None:
            return ""
        return os.pread(self._fd, os.fstat(self._fd).st_size - self._start, self._start).decode(errors="replace")

    def wait(self, seconds: float) -> str:
        end, text, unchanged = time.monotonic() + seconds, "", 0.0
        while not (text and unchanged >= _SETTLED) and time.monotonic() < end:
            time.sleep(_POLL)
            before, text = text, self.read()
            unchanged = unchanged + _POLL if text == before else 0.0
        return text or f"no stacks came within {seconds:g} s: process {self._pid} {describe_state(self._pid)}\n"
