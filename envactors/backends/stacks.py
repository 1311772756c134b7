"""The stacks of a worker process, which it writes to a file of its own when it gets a signal.

A signal handler in C writes them, so that the worker may be anywhere, also in C code that holds the GIL.
"""

from __future__ import annotations

import contextlib
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
        process: The process; it may be reaped meanwhile.
    """

    def __init__(self, process: Process) -> None:
        self._pid = process.pid
        # A descriptor of the process, and of the file that they come in. The file is not there while the process
        # starts, or if env code has closed it; none is there without free descriptors.
        self._process: Process | None = None
        self._fd: int | None = None
        self._start = 0
        with contextlib.suppress(OSError):
            self._process = Process(process.pid, os.dup(process.fileno()), lambda: None)
        self._ask()

    def _ask(self) -> None:
        if self._process is None:
            return
        self._fd = open_file_of(self._pid, STACKS_FILE)
        if self._fd is not None:
            self._start = os.fstat(self._fd).st_size
            self._process.send_signal(STACKS_SIGNAL)

    def __del__(self) -> None:
        if self._process is not None:
            self._process.reap()
        if self._fd is not None:
            os.close(self._fd)

    def read(self) -> str:
        if self._fd is None:
            return ""
        return os.pread(self._fd, os.fstat(self._fd).st_size - self._start, self._start).decode(errors="replace")

    def wait(self, seconds: float) -> str:
        end, text, unchanged, pid = time.monotonic() + seconds, "", 0.0, self._pid
        while not (text and unchanged >= _SETTLED) and time.monotonic() < end:
            time.sleep(_POLL)
            if self._fd is None:
                self._ask()
            before, text = text, self.read()
            unchanged = unchanged + _POLL if text == before else 0.0
        return text or f"no stacks came within {seconds:g} s: process {pid} {describe_state(pid)}\n"
