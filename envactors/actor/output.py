"""What a worker prints: passed on line by line under the actor's name, the last lines kept for errors."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable

from envactors.backends.base import Stream

_KEPT_LINES = 50
# A line without an end is passed on in pieces of this size rather than held back for ever.
_LONGEST_LINE = 1 << 16


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

    @property
    def tail(self) -> str:
        """The last lines, at most fifty."""
        return "\n".join(self._lines)

    def read(self) -> bool:
        """Takes in what is there; False once the stream has ended."""
        while True:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._partial = (self._partial + data).split(b"\n")
            if len(self._partial) > _LONGEST_LINE:
                lines.append(self._partial)
                self._partial = b""
            self._pass_on(lines)

    def finish(self) -> None:
        """Takes in what is left, an unfinished line too."""
        self.read()
        if self._partial:
            self._pass_on([self._partial])
            self._partial = b""

    def _pass_on(self, lines: list[bytes]) -> None:
        texts = [line.decode(errors="replace") for line in lines]
        if not texts:
            return
        self._lines.extend(texts)
        block = "".join(f"[{self.name}] {text}\n" for text in texts)
        self._run(lambda: _write(self.stream, block))


def _write(name: Stream, block: str) -> None:
    stream = getattr(sys, name)
    if stream is None:
        return
    try:
        stream.write(block)
        stream.flush()
    except (OSError, ValueError):
        # The caller's stream is closed or full; its loss must not be the actors'.
        return
