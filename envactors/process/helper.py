"""Supervision of helper processes, such as the reaper and fork servers: start, watch, and replace them.

Each helper has a thread that starts its process, sleeps until that ends, and starts the next one. The kernel ends some
processes together with the thread that started them (`envactors.system.processes.end_with_parent`), so the thread lasts
as long as the helper.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

# How long a process may take to end after it was told to, in seconds.
_PATIENCE: Final = 1.0
# How long to wait before a process is replaced, in seconds, so that one that always fails leaves the core to others.
_PAUSE: Final = 0.2
# How many processes may end, one after the other, before the thread that waits for one has seen it.
_MOST_LOST: Final = 10


class HelperProcess:
    """One process of a helper, which ends when this end of its socket is closed.

    Subclasses start the process in their constructor.

    Attributes:
        process: The process.
        sock: The socket.
    """

    process: subprocess.Popen[bytes]
    sock: socket.socket

    def __init__(self) -> None:
        # Closes the sockets of this side with this object; also those of a process that could not be started.
        self._sockets = contextlib.ExitStack()

    def __del__(self) -> None:
        self._sockets.close()

    def wait(self) -> None:
        """Wait until the process has ended, and reap it; called in the thread of its helper."""
        self.process.wait()

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()

    def hang_up(self) -> None:
        """Tell the process to end."""
        with contextlib.suppress(OSError):  # it has ended
            self.sock.shutdown(socket.SHUT_WR)  # closing is not enough: a forked child may have a copy

    def forget(self) -> None:
        """Close the copy of the socket in a forked process, whose parent keeps the helper."""
        self.process.returncode = 0
        self.sock.close()


ProcessT = TypeVar("ProcessT", bound=HelperProcess)


class Helper(Generic[ProcessT]):
    """Keeps a process running.

    Args:
        name: The name of its thread.
        start: Starts a process. The thread that calls it blocks all signals.
    """

    def __init__(self, name: str, start: Callable[[], ProcessT]) -> None:
        self._start = start
        # Guards everything below.
        self._changed = threading.Condition()
        self._running: ProcessT | None = None
        # How many starts were attempted, and the error of the last one.
        self._attempts = 0
        self._error: Exception | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._keep_running, name=f"envactors-{name}", daemon=True)
        self._thread.start()

    def _keep_running(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._is_stopping:
            running: ProcessT | None = None
            error: Exception | None = None
            try:
                running = self._start()
            except Exception as raised:
                error = raised
            with self._changed:
                self._running = running
                self._error = error
                self._attempts += 1
                self._changed.notify_all()
                is_stopping = self._is_stopping
            if running is not None:
                if is_stopping:
                    running.hang_up()
                running.wait()
            with self._changed:
                self._running = running = None
                self._changed.wait_for(lambda: self._is_stopping, _PAUSE)

    def current(self, lost: ProcessT | None = None) -> ProcessT:
        """Return the running process; wait for one that is being started.

        Args:
            lost: A process that no longer answers. It is killed, and the next one is returned.

        Raises:
            ConnectionError: The helper is stopping, or process after process has ended at once.
            Exception: The process could not be started.
        """
        with self._changed:
            if lost is not None and self._running is lost:
                lost.kill()
                self._running = None
            first = self._attempts
            for seen in range(first, first + _MOST_LOST):
                self._changed.wait_for(functools.partial(self._has_news, seen))
                if self._running is not None:
                    return self._running
                if self._is_stopping or self._error is not None:
                    raise self._error or ConnectionError("the helper process has ended")
            raise ConnectionError(f"the helper process has ended {_MOST_LOST} times in a row just after it was started")

    def _has_news(self, seen: int) -> bool:
        """Return whether the process runs, or more starts than ``seen`` were attempted."""
        return self._running is not None or self._attempts > seen or self._is_stopping

    def hang_up(self) -> None:
        """Tell the process to end, and do not replace it."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
            running = self._running
        if running is not None:
            running.hang_up()

    def stop(self) -> None:
        """End the process, and wait until it has ended."""
        self.hang_up()
        self._thread.join(_PATIENCE)
        with self._changed:
            running = self._running
        if running is not None:
            running.kill()
        self._thread.join()

    def forget(self) -> None:
        """Forget the process in a forked process."""
        if self._running is not None:
            self._running.forget()
