"""The parent's half of the reaper, the process that ends whatever workers leave behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque

from envactors.system.choice import PORTABLE, SYSTEM
from envactors.system.processes import kill_group
from envactors.system.sockets import SEND_FLAGS, prevent_sigpipe
from envactors.worker import reaper

# How long a helper process may take to end, in seconds.
_PATIENCE = 1.0
# A new reaper is told of so many workers that have ended: the old one may have been lost before it searched.
_RECENT = 100


class Reaper:
    """Starts the reaper with the first worker of this process and reports each worker to it. It is thread-safe.

    The kernel, where it can, ends workers with their caller (`end_with_parent`). The processes that they have started
    end neither with the caller nor with the worker: the reaper ends them, and where the kernel cannot, the workers
    too. It is a process of its own so that it survives the caller's SIGKILL, and so that searching all processes of a
    machine delays no thread here. If the reaper itself is lost, the next one continues with the same workers.
    """

    def __init__(self) -> None:
        # Guards everything here.
        self._lock = threading.Lock()
        # How many actors use it.
        self._users = 0
        self._reset()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def _reset(self) -> None:
        # What the marks of this process's workers begin with, such as "9f86d081884c7d65".
        self._id = os.urandom(8).hex()
        self._numbers = itertools.count()
        # worker's number: its process id, which is also its group's
        self._workers: dict[int, int] = {}
        # The numbers of the workers that ended last.
        self._ended: deque[int] = deque(maxlen=_RECENT)
        # The reaper, and the socket to it.
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def _reset_after_fork(self) -> None:
        # The reaper belongs to the parent; only the copy of the descriptor is this process's own.
        if self._running is not None:
            process, sock = self._running
            process.returncode = 0  # it is no child of this process
            sock.close()
        self._lock = threading.Lock()
        self._users = 0
        self._reset()

    def retain(self) -> None:
        """Count an actor that uses the reaper."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Uncount an actor; after the last one, end the reaper."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            if self._ended:
                with contextlib.suppress(OSError):
                    self._ensure_running()
            running = self._running
            self._reset()
        if running is not None:
            end_helper(*running)

    def enlist(self) -> tuple[int, dict[str, str]]:
        """Return the next worker's number, and the environment variables that mark it.

        Raises:
            OSError: The reaper could not be started.
        """
        with self._lock:
            number = next(self._numbers)
            self._ensure_running()
        return number, self.mark(str(number))

    def mark(self, suffix: str) -> dict[str, str]:
        """Return the environment variable that marks a process.

        Its value ends with this process's id and ``suffix``, after the marks of the workers that this process itself is
        in, such as "9f86d081884c7d65/3".
        """
        marks = *os.environ.get(reaper.VARIABLE, "").split(), f"{self._id}/{suffix}"
        return {reaper.VARIABLE: " ".join(marks)}

    def watch(self, number: int, pid: int) -> None:
        """Report a worker that has started; it leads a process group."""
        with self._lock:
            self._workers[number] = pid
            with contextlib.suppress(OSError):  # if the reaper was lost just now, the next one gets all workers
                _report(self._ensure_running(), f"{number} {pid}")

    def dismiss(self, number: int) -> None:
        """Report a worker that has ended and is not reaped yet; the reaper ends whatever it has started."""
        with self._lock:
            pid = self._workers[number]
            if PORTABLE:
                kill_group(pid)  # it is still its own
            try:
                _report(self._ensure_running(), str(number))
                self._ended.append(number)
            except OSError:
                kill_group(pid)  # without a reaper, at least its process group
            del self._workers[number]

    def _ensure_running(self) -> socket.socket:
        """Start the reaper if it does not run, without waiting until it is ready; return the socket to it."""
        if self._running is not None:
            process, sock = self._running
            if process.poll() is None:
                return sock
            sock.close()
            self._running = None
        sock, theirs = socket.socketpair()
        prevent_sigpipe(sock)
        command = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), self._id, SYSTEM]
        null = subprocess.DEVNULL
        # It has a session of its own, and inherits that all signals are blocked.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with theirs:
                stdin = theirs.fileno()
                process = subprocess.Popen(command, stdin=stdin, stdout=null, stderr=null, start_new_session=True)  # noqa: S603
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._running = process, sock
        # Those that have ended without their groups, whose ids may be reused by now.
        for report in (*(f"{number} {pid}" for number, pid in self._workers.items()), *map(str, self._ended)):
            _report(sock, report)
        return sock


def _report(sock: socket.socket, line: str) -> None:
    sock.sendall(line.encode() + b"\n", socket.MSG_DONTWAIT | SEND_FLAGS)


def end_helper(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    """End a helper process that ends, and so closes its end of the socket, once this end of the socket is closed."""
    with sock:
        sock.settimeout(_PATIENCE)
        try:
            sock.shutdown(socket.SHUT_WR)  # closing is not enough: a forked child may have a copy of the descriptor
            while sock.recv(1 << 16):
                pass  # an answer that nobody waits for any more
        except OSError:
            process.kill()
    process.wait()


REAPER = Reaper()
