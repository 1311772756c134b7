"""The stacks of a worker process, which a signal makes it write to a file.

A signal handler in C writes them, so they come even from C code that holds the GIL.
"""

from __future__ import annotations

import contextlib
import os
import re
import time

from envactors.process.bootstrap import STACKS_FILE
from envactors.system.memory import SharedFile, open_file_of
from envactors.system.processes import STACKS_SIGNAL, Process, describe_state

# The stacks count as complete once nothing was added for this long, in seconds.
_SETTLED = 0.02
_POLL = 0.004
# The worker writes this many bytes when it is ready for the signal.
_READY = 1
# The first line of a thread's stack.
_HEAD = re.compile(r"^.*\(most recent call first\)", re.MULTILINE)


class ProcessStacks:
    """One request for the stacks of a process, sent by the constructor; see `envactors.backends.base.Stacks`.

    Args:
        process: The process; it may be reaped meanwhile.
        file: The file that it writes them to; None to look for the one that it has made.
    """

    def __init__(self, process: Process, file: SharedFile | None) -> None:
        self._process = process
        self._file = file
        # The descriptor of the file, set by a request. It stays None while the process is not ready, if env code has
        # closed the file, or if all descriptors are in use.
        self._fd: int | None = None
        self._ask()

    def _ask(self) -> None:
        fd = None
        with contextlib.suppress(OSError):
            fd = open_file_of(self._process.pid, STACKS_FILE) if self._file is None else os.dup(self._file.fileno())
        if fd is None:
            return
        if os.fstat(fd).st_size < _READY:
            os.close(fd)
            return
        os.ftruncate(fd, _READY)
        self._fd = fd
        self._process.send_signal(STACKS_SIGNAL)

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def read(self) -> str:
        if self._fd is None:
            return ""
        text = os.pread(self._fd, os.fstat(self._fd).st_size, _READY).decode(errors="replace")
        # An earlier request may have been answered only in part when this one emptied the file.
        head = _HEAD.search(text)
        return text[head.start() :] if head else ""

    def wait(self, seconds: float) -> str:
        end = time.monotonic() + seconds
        text = ""
        unchanged = 0.0
        while not (text and unchanged >= _SETTLED) and time.monotonic() < end:
            time.sleep(_POLL)
            if self._fd is None:
                self._ask()
            before, text = text, self.read()
            unchanged = unchanged + _POLL if text == before else 0.0
        pid = self._process.pid
        return text or f"no stacks came within {seconds:g} s: process {pid} {describe_state(pid)}\n"
