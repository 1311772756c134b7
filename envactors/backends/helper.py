"""Helper processes, such as the reaper and fork servers: how they are started, watched, and replaced.

Each helper has a thread that starts its process, sleeps until that ends, and starts the next one. The kernel ends some
processes together with the thread that has started them (`envactors.system.processes.end_with_parent`): this thread
lasts as long as the helper.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

# How long a process may take to end once it was told to, in seconds.
_PATIENCE: Final = 1.0
# A process that has lasted this long is replaced at once. After others there is a pause, which doubles, in seconds.
_LASTING: Final = 10.0
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 30.0


class HelperProcess:
    """One process of a helper, which ends when this end of its socket is closed.

    Args:
        process: The process.
        sock: The socket.
    """

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self._process = process
        self.sock = sock

    def __del__(self) -> None:
        if hasattr(self, "sock"):  # else there was no descriptor for it
            self.sock.close()

    def wait(self) -> None:
        """Wait until it has ended, and reap it; called in the thread of its helper."""
        self._process.wait()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def hang_up(self) -> None:
        """Tell it to end."""
        with contextlib.suppress(OSError):  # it has ended
            self.sock.shutdown(socket.SHUT_WR)  # closing is not enough: a forked child may have a copy

    def forget(self) -> None:
        """Close this process's copy of the socket, if it was forked: the helper is its parent's."""
        self._process.returncode = 0
        self.sock.close()


ProcessT = TypeVar("ProcessT", bound=HelperProcess)


class Helper(Generic[ProcessT]):
    """Keeps a process running.

    Args:
        name: The name of its thread.
        start: Starts a process, in that thread, in which all signals are blocked.
    """

    def __init__(self, name: str, start: Callable[[], ProcessT]) -> None:
        self._start = start
        # Guards everything here.
        self._changed = threading.Condition()
        self._running: ProcessT | None = None
        # How many processes were started, or could not be; why the last one could not.
        self._attempts = 0
        self._error: Exception | None = None
        # Whether somebody waits for the next process, and whether there is to be none.
        self._is_wanted = self._is_stopping = False
        self._thread = threading.Thread(target=self._keep_running, name=f"envactors-{name}", daemon=True)
        self._thread.start()

    def _keep_running(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pause = 0.0
        while not self._is_stopping:
            begun, running, error = time.monotonic(), None, None
            try:
                running = self._start()
            except Exception as raised:
                error = raised
            with self._changed:
                self._running, self._error = running, error
                self._attempts += 1
                self._is_wanted = False
                self._changed.notify_all()
                is_stopping = self._is_stopping
            if running is not None:
                if is_stopping:
                    running.hang_up()
                running.wait()
            if time.monotonic() - begun > _LASTING:
                pause = 0.0
            with self._changed:
                self._running = running = None
                self._changed.wait_for(lambda: self._is_wanted or self._is_stopping, pause)
            pause = min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE)

    def current(self, lost: ProcessT | None = None) -> ProcessT:
        """Return the process that runs, which is waited for if it is being started.

        Args:
            lost: A process that does not answer any more; it is ended, and the next one is returned.

        Raises:
            Exception: That of the start.
        """
        with self._changed:
            if lost is not None and self._running is lost:
                lost.kill()
                self._running = None
            attempts = self._attempts
            if self._running is None:
                self._is_wanted = True
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._running is not None or self._attempts > attempts or self._is_stopping)
            if self._running is None:
                raise self._error or ConnectionError("this helper process is not needed any more, or has ended again")
            return self._running

    def hang_up(self) -> None:
        """Tell the process to end, and start no other."""
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
        """Forget the process, in a process that was forked."""
        if self._running is not None:
            self._running.forget()
