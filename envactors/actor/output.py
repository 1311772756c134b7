"""The output of workers: printed line by line under the actor's name; the last lines are stored for errors."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable

from envactors.backends.base import Stream

_KEPT_LINES = 50
# An unfinished line is printed in pieces of about this size, in characters, so that it does not fill the memory.
_LONGEST_LINE = 1 << 16
# How much is read at once, in bytes, and how often in a row: a worker that never stops printing must not occupy the
# reader's thread. Their product is the most that a pipe can hold, unless root has raised that limit.
_CHUNK = 1 << 16
_CHUNKS = 16
# How much may be buffered for a caller's stream that blocks, in characters. Further lines are left out, so that the
# worker never waits for the reader of its output.
_MOST_WAITING = 1 << 24


class Output:
    """One output stream of one worker.

    Args:
        fd: The descriptor to read from; it must not block.
        name: The actor's name, printed before each line.
        stream: The caller's stream that the lines are printed to.
        run: Runs a function in a thread where writing may block.

    Attributes:
        name: The actor's name; may be changed for the lines that are read from now on.
    """

    def __init__(self, fd: int, name: str, stream: Stream, run: Callable[[Callable[[], None]], None]) -> None:
        self.fd = fd
        self.stream = stream
        self.name = name
        self._run = run
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The last line as far as it was read, without its end.
        self._partial = ""
        # How many characters were submitted to `run`, and how many of them were written. Each is counted in one thread.
        self._submitted = self._written = 0
        # How many lines were left out since the last printed one.
        self._left_out = 0

    @property
    def tail(self) -> str:
        """The last lines of the stream, at most fifty."""
        return "\n".join(self._lines)

    def read(self) -> bool:
        """Read some of the output; return False once the stream has ended."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        *lines, self._partial = (self._partial + self._decoder.decode(data)).split("\n")
        if len(self._partial) > _LONGEST_LINE:
            lines.append(self._partial)
            self._partial = ""
        self._print(lines)
        return True

    def finish(self) -> None:
        """Read the rest, also an unfinished line. What other processes write to the stream later is not read."""
        for _ in range(_CHUNKS):
            if not self.read():
                break
        rest = self._partial + self._decoder.decode(b"", final=True)
        self._partial = ""
        self._print([rest] if rest else [], last=True)

    def _print(self, texts: list[str], *, last: bool = False) -> None:
        self._lines.extend(texts)
        if self._submitted - self._written > _MOST_WAITING and not last:
            self._left_out += len(texts)
            return
        if self._left_out:
            texts.insert(0, f"({self._left_out} lines left out: they were not taken in time)")
            self._left_out = 0
        if not texts:
            return
        block = "".join(f"[{self.name}] {text}\n" for text in texts)
        self._submitted += len(block)
        self._run(lambda: self._write(block))

    def _write(self, block: str) -> None:
        stream = getattr(sys, self.stream)
        try:
            # The caller's stream may be closed or full; the actors must not fail because of it.
            with contextlib.suppress(OSError, ValueError):
                if stream is not None:
                    try:
                        stream.write(block)
                    except UnicodeEncodeError:
                        stream.write(block.encode("ascii", "backslashreplace").decode())
                    stream.flush()
        finally:
            self._written += len(block)
