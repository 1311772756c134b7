"""Single keys from a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import termios
from types import FrameType

_SPECIAL = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "k": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "j": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
}
# One key: a sequence of a special key, or a character.
_KEY = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)
_BEGUN = re.compile(r"\x1b(\[[0-9;?]*[ -/]*|O)?\Z")
# How long the rest of a special key's sequence may take, in seconds; Escape alone has none.
_PAUSE = 0.05
_CHUNK = 1024
_LFLAG, _CC = 3, 6  # of the terminal's attributes
_TERMINATED = 128 + signal.SIGTERM  # exit status that shells report


class Keyboard:
    """Reads keys as they are pressed; a context manager, after which the terminal is as before.

    Ctrl-C raises KeyboardInterrupt as usual, and SIGTERM raises SystemExit.

    Args:
        fd: A terminal.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._read = ""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Keyboard:
        with contextlib.ExitStack() as stack:
            before = signal.signal(signal.SIGTERM, _terminate)
            stack.callback(signal.signal, signal.SIGTERM, before)
            self._wakes, self._woken = os.pipe()
            os.set_blocking(self._woken, False)
            stack.callback(self._close)
            attributes = termios.tcgetattr(self._fd)
            stack.callback(self._restore, attributes)
            mode = termios.tcgetattr(self._fd)
            mode[_LFLAG] &= ~(termios.ICANON | termios.ECHO)
            # Stopped by Ctrl-Z, it would leave the terminal in this mode.
            mode[_CC] = [*mode[_CC]]
            mode[_CC][termios.VSUSP] = b"\0"
            mode[_CC][termios.VMIN] = 1
            mode[_CC][termios.VTIME] = 0
            termios.tcsetattr(self._fd, termios.TCSANOW, mode)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def wake(self) -> None:
        """Let `read` return at once; any thread may call it, also when it is over."""
        with contextlib.suppress(OSError):  # the pipe is full, so it is woken already, or closed
            os.write(self._woken, b"x")

    def read(self, timeout: float) -> str | None:
        """Return the next key: a character, or a name such as ``"up"``.

        Args:
            timeout: How long to wait, in seconds.

        Returns:
            None if none was pressed in time, or `wake` was called.

        Raises:
            EOFError: The terminal is gone.
        """
        if not self._read:
            ready, _, _ = select.select([self._fd, self._wakes], [], [], timeout)
            if self._wakes in ready:
                os.read(self._wakes, _CHUNK)
            if self._fd not in ready:
                return None
            self._receive()
        key = _KEY.match(self._read)
        assert key is not None
        self._read = self._read[key.end() :]
        return _SPECIAL.get(key[0], key[0])

    def _receive(self) -> None:
        """Read what has come, up to the end of a special key's sequence."""
        while True:
            try:
                data = os.read(self._fd, _CHUNK)
            except OSError as error:
                raise EOFError("the terminal is gone") from error
            if not data:
                raise EOFError("the terminal is gone")
            self._read += data.decode(errors="replace")
            if not _BEGUN.search(self._read) or not select.select([self._fd], [], [], _PAUSE)[0]:
                return

    def _restore(self, attributes: list[int | list[bytes | int]]) -> None:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(self._fd, termios.TCSANOW, attributes)

    def _close(self) -> None:
        wakes = self._wakes
        woken = self._woken
        self._wakes = -1
        self._woken = -1
        os.close(wakes)
        os.close(woken)


def _terminate(_signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(_TERMINATED)
