"""The output of a worker: passed on line by line under the actor's name; the last lines are kept for errors."""

from __future__ import annotations

import codecs
import contextlib
import sys
from collections import deque
from typing import Literal

from envactors.runtime import ThreadPool

Stream = Literal["stdout", "stderr"]

_KEPT_LINES = 50
# After a fatal error, which leaves the stacks of all threads. The one that has failed may be the first of many.
_KEPT_LINES_OF_STACKS = 2000
# A longer line is passed on in pieces of about this many characters.
_LONGEST_LINE = 1 << 16
# How many characters may wait for the caller's stream. Further lines are dropped, so that no worker waits for it.
_MOST_WAITING = 1 << 24


class Output:
    """One output stream of one worker.

    Args:
        name: The actor's name, printed before each line.
        stream: The caller's stream that the lines are printed to.
        printer: The thread that prints them.

    Attributes:
        name, stream: As above.
    """

    def __init__(self, name: str, stream: Stream, printer: ThreadPool) -> None:
        self.stream = stream
        self.name = name
        self._printer = printer
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""  # the last line as far as it was read
        # Characters passed to the printer, and characters that it has printed; each is counted in one thread.
        self._submitted = self._printed = 0
        self._dropped = 0  # lines

    @property
    def tail(self) -> str:
        """The last lines: at most fifty, and after a fatal error 2000."""
        return "\n".join(self._lines)

    def add(self, data: bytes) -> None:
        """Pass on the lines that this output completes."""
        *lines, self._partial = (self._partial + self._decoder.decode(data)).split("\n")
        if len(self._partial) > _LONGEST_LINE:
            lines.append(self._partial)
            self._partial = ""
        self._pass_on(lines)

    def finish(self) -> None:
        """Pass on an unfinished line."""
        rest = self._partial + self._decoder.decode(b"", final=True)
        self._partial = ""
        self._pass_on([rest] if rest else [], is_last=True)

    def _pass_on(self, lines: list[str], *, is_last: bool = False) -> None:
        if any("Fatal Python error" in line for line in lines):
            self._lines = deque(self._lines, _KEPT_LINES_OF_STACKS)
        self._lines.extend(lines)
        if self._submitted - self._printed > _MOST_WAITING and not is_last:
            self._dropped += len(lines)
            return
        if self._dropped:
            lines.insert(0, f"({self._dropped} lines left out: this stream did not take them in time)")
            self._dropped = 0
        if lines:
            block = "".join(f"[{self.name}] {line}\n" for line in lines)
            self._submitted += len(block)
            self._printer.submit(lambda: self._print(block))

    def _print(self, block: str) -> None:
        stream = getattr(sys, self.stream)
        try:
            with contextlib.suppress(OSError, ValueError):  # the caller has closed its stream, or nobody reads it
                if stream is not None:
                    try:
                        stream.write(block)
                    except UnicodeEncodeError:
                        stream.write(block.encode("ascii", "backslashreplace").decode())
                    stream.flush()
        finally:
            self._printed += len(block)
