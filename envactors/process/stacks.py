"""The stacks of a worker process, which a signal makes it write to a file of the caller.

A signal handler in C writes them, so they come even from C code that holds the GIL.
"""

from __future__ import annotations

import os
import re
import time

from envactors.system.memory import open_unnamed
from envactors.system.processes import STACKS_SIGNAL, Process, describe_state, is_asleep

# The worker writes this when it is ready for the signal, which would end it before.
READY = b"\n"
# The stacks count as complete once nothing was added for this long, in seconds.
_SETTLED = 0.02
# A request without an answer for this long, in seconds, is made again: a signal that one thread handles while another
# one is still at its end is ignored.
_LOST = 0.25
_POLL = 0.004
# The first line of a thread's stack.
_HEAD = re.compile(r"^.*\(most recent call first\)", re.MULTILINE)


class StacksFile:
    """The file to which a process writes its stacks. It is closed with the last reference."""

    def __init__(self) -> None:
        self._file = open_unnamed("envactors-stacks")

    def __del__(self) -> None:
        self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()


class ProcessStacks:
    """One request for the stacks of a process, sent by the constructor; see `envactors.backends.base.Stacks`.

    Args:
        process: The process; it may be reaped meanwhile.
        file: The file that it writes them to.
        may_interrupt: Whether to signal it while it sleeps in a system call, which may end early then: native code
            often does not expect that.
    """

    def __init__(self, process: Process, file: StacksFile, *, may_interrupt: bool) -> None:
        self._process = process
        self._file = file
        self._may_interrupt = may_interrupt
        self._is_asked = False
        self._ask_if_ready()

    def _ask_if_ready(self) -> None:
        fd = self._file.fileno()
        if (self._may_interrupt or not is_asleep(self._process.pid)) and os.fstat(fd).st_size >= len(READY):
            os.ftruncate(fd, len(READY))
            self._is_asked = True
            self._process.send_signal(STACKS_SIGNAL)

    def read(self) -> str:
        fd = self._file.fileno()
        text = os.pread(fd, os.fstat(fd).st_size, len(READY)).decode(errors="replace")
        # An earlier request may have been answered only in part when this one emptied the file.
        head = _HEAD.search(text)
        return text[head.start() :] if head else ""

    def wait(self, seconds: float) -> str:
        end = time.monotonic() + seconds
        text = ""
        unchanged = 0.0
        while not (text and unchanged >= _SETTLED) and time.monotonic() < end:
            time.sleep(_POLL)
            if not self._is_asked or (not text and unchanged >= _LOST):
                unchanged = 0.0
                self._ask_if_ready()
            before, text = text, self.read()
            unchanged = unchanged + _POLL if text == before else 0.0
        pid = self._process.pid
        if not self._is_asked and is_asleep(pid):
            return f"process {pid} sleeps in a system call; stacks() of its handle may interrupt that\n"
        return text or f"no stacks came within {seconds:g} s: process {pid} {describe_state(pid)}\n"
