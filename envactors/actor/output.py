"""What a worker prints: passed on line by line under the actor's name, the last lines kept for errors."""

from __future__ import annotations

import codecs
import os
import sys
from collections import deque
from collections.abc import Callable

from envactors.backends.base import Stream

_KEPT_LINES = 50
# A line without an end is passed on in pieces of about this size, in bytes, rather than held back for ever.
_LONGEST_LINE = 1 << 16
# How much is read at once, and how often in a row: a worker that never stops printing must not keep the reader from
# everything else. The most that a pipe can hold, unless root has made it larger.
_CHUNK = 1 << 16
_CHUNKS = 16
# How much may wait for a caller's stream that takes nothing, in characters, before lines are left out: a worker never
# waits for whoever reads what it prints.
_MOST_WAITING = 1 << 24


class Output:
    """One stream of one worker.

    Args:
        fd: Where to read; does not block.
        name: The actor's name, put before each line.
        stream: Which of the caller's streams the lines go to.
        run: Runs a function in a thread where writing may block.

    Attributes:
        name: The actor's name; what comes from now on is passed on under it.
    """

    def __init__(self, fd: int, name: str, stream: Stream, run: Callable[[Callable[[], None]], None]) -> None:
        self.fd = fd
        self.stream = stream
        self.name = name
        self._run = run
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._partial = b""
        # Each counted in one thread, in characters; the difference waits.
        self._handed_on = self._written = 0
        self._left_out = 0

    @property
    def tail(self) -> str:
        """The last lines, at most fifty."""
        return "\n".join(self._lines)

    def read(self) -> bool:
        """Takes in some of what is there; False once the stream has ended."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _LONGEST_LINE:
            # Not within a character, where these are UTF-8.
            _, used = codecs.utf_8_decode(self._partial, "replace", False)
            lines.append(self._partial[:used])
            self._partial = self._partial[used:]
        self._pass_on(lines)
        return True

    def finish(self) -> None:
        """Takes in what is left, an unfinished line too; of what others still print into it, nothing more."""
        for _ in range(_CHUNKS):
            if not self.read():
                break
        self._pass_on([self._partial] if self._partial else [], last=True)
        self._partial = b""

    def _pass_on(self, lines: list[bytes], *, last: bool = False) -> None:
        texts = [line.decode(errors="replace") for line in lines]
        self._lines.extend(texts)
        if self._handed_on - self._written > _MOST_WAITING and not last:
            self._left_out += len(texts)
            return
        if self._left_out:
            texts.insert(0, f"({self._left_out} lines left out: they were not taken in time)")
            self._left_out = 0
        if not texts:
            return
        block = "".join(f"[{self.name}] {text}\n" for text in texts)
        self._handed_on += len(block)
        self._run(lambda: self._write(block))

    def _write(self, block: str) -> None:
        try:
            _write(self.stream, block)
        finally:
            self._written += len(block)


def _write(name: Stream, block: str) -> None:
    stream = getattr(sys, name)
    if stream is None:
        return
    try:
        try:
            stream.write(block)
        except UnicodeEncodeError:
            stream.write(block.encode("ascii", "backslashreplace").decode())
        stream.flush()
    except (OSError, ValueError):
        # The caller's stream is closed or full; its loss must not be the actors'.
        return
