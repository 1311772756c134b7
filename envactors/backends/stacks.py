"""The stacks of a worker process, which it writes to a file of its own when it gets a signal.

A signal handler in C writes them, so that the worker may be anywhere, also in C code that holds the GIL.
"""

from __future__ import annotations

import contextlib
import os
import re
import time

from envactors.backends.base import Stacks
from envactors.system.memory import SharedFile, open_file_of
from envactors.system.processes import STACKS_SIGNAL, Process, describe_state
from envactors.worker.bootstrap import STACKS_FILE

# How long nothing may have come until the stacks are complete, in seconds.
_SETTLED = 0.02
_POLL = 0.004
# The file is emptied once it has grown so large, in bytes: whoever asks once a second would fill the memory.
_FULL = 1 << 16
# The first line of a thread's stack.
_HEAD = re.compile(r"^.*\(most recent call first\)", re.MULTILINE)


class ProcessStacks(Stacks):
    """The stacks of one process, which is asked for them here.

    Args:
        process: The process; it may be reaped meanwhile.
        file: The file that they come in; None if the process has made it, and then it is looked for.
    """

    def __init__(self, process: Process, file: SharedFile | None) -> None:
        self._process = process
        self._file = file
        # A descriptor of the file; None while the process is not ready to be asked, if env code has closed the file, or
        # without free descriptors.
        self._fd: int | None = None
        self._start = 0
        self._ask()

    def _ask(self) -> None:
        fd, pid, file = None, self._process.pid, self._file
        with contextlib.suppress(OSError):
            fd = open_file_of(pid, STACKS_FILE) if file is None else os.dup(file.fileno())
        if fd is None:
            return
        self._start = os.fstat(fd).st_size
        if self._start >= _FULL:
            os.ftruncate(fd, 1)
            self._start = 1
        if self._start == 0:  # the process writes a line once it is ready
            os.close(fd)
            return
        self._fd = fd
        self._process.send_signal(STACKS_SIGNAL)

    def __del__(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def read(self) -> str:
        if self._fd is None:
            return ""
        size = max(0, os.fstat(self._fd).st_size - self._start)
        text = os.pread(self._fd, size, self._start).decode(errors="replace")
        head = _HEAD.search(text)  # before it stands what was left to come of the stacks that another thread asked for
        return text[head.start() :] if head else ""

    def wait(self, seconds: float) -> str:
        end, text, unchanged, pid = time.monotonic() + seconds, "", 0.0, self._process.pid
        while not (text and unchanged >= _SETTLED) and time.monotonic() < end:
            time.sleep(_POLL)
            if self._fd is None or os.fstat(self._fd).st_size < self._start:  # another thread has emptied the file
                self.__del__()
                self._ask()
            before, text = text, self.read()
            unchanged = unchanged + _POLL if text == before else 0.0
        return text or f"no stacks came within {seconds:g} s: process {pid} {describe_state(pid)}\n"
